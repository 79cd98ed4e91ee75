# SPDX-License-Identifier: Apache-2.0
"""Every metric kvoffload keeps, in one table: its name, kind, labels and help. Values are plain; exporters live
in the engine adapters.

A component counts in plain ints and answers ``get_stats()`` with a ``Stats``: counters since the component was
made (they only grow), gauges as of now. Whoever needs rates subtracts two snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["METRICS", "Kind", "Metric", "Sample", "Stats", "add_stats"]

Sample = tuple[str, ...]
"""A metric's name, then its label values in the order of ``Metric.labels``."""

Stats = dict[Sample, float]
"""Values by sample, for example ``{("tier_hits", "fs"): 12}``."""


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. ``name`` has no prefix: exporters add ``kvoffload_``."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


def _table(rows: Iterable[Metric]) -> dict[str, Metric]:
    table: dict[str, Metric] = {}
    for row in rows:
        if row.name in table:
            raise ValueError(f"metric {row.name!r} is listed twice")
        table[row.name] = row
    return table


_C, _G = Kind.COUNTER, Kind.GAUGE

METRICS: dict[str, Metric] = _table(
    [
        # primary tier
        Metric("primary_blocks", _G, "Places in the primary tier."),
        Metric("primary_blocks_used", _G, "Places that hold a block or are being written."),
        Metric("primary_blocks_pinned", _G, "Places that a transfer reads or writes now."),
        Metric("primary_blocks_stored", _C, "Blocks published in the primary tier."),
        Metric("primary_blocks_evicted", _C, "Blocks that lost their place to others."),
        Metric("primary_stores_refused", _C, "Calls of prepare_store that found no room."),
        Metric("reuse_filtered_blocks", _C, "Blocks not stored because too few requests had asked for them."),
        # connector
        Metric("lookup_tokens", _C, "Prompt tokens that the engine's own prefix cache did not hold."),
        Metric("hit_tokens", _C, "Of those, tokens that offloaded blocks supplied."),
        Metric("lookups_deferred", _C, "Answers 'ask again next step' given to the engine."),
        Metric("load_jobs", _C, "Loads ended, by outcome.", ("outcome",)),
        Metric("store_jobs", _C, "Stores ended, by outcome.", ("outcome",)),
        Metric("load_bytes", _C, "Bytes copied from the primary tier to the device, all ranks."),
        Metric("store_bytes", _C, "Bytes copied from the device to the primary tier, all ranks."),
        Metric("load_seconds", _C, "Seconds of copying to the device, summed over ranks and jobs."),
        Metric("store_seconds", _C, "Seconds of copying from the device, summed over ranks and jobs."),
        Metric("stale_jobs", _C, "Transfers that ended after the reset that made them worthless."),
        Metric("fenced_jobs", _C, "Stores flushed because the engine handed out their GPU blocks again."),
        Metric("jobs_in_flight", _G, "Transfers that have not ended on every rank."),
        Metric("requests_tracked", _G, "Requests the connector holds state for."),
        # secondary tiers
        Metric("tier_blocks", _G, "Blocks known to be in the tier.", ("tier",)),
        Metric("tier_bytes", _G, "Bytes the tier holds.", ("tier",)),
        Metric("tier_healthy", _G, "1 while the tier is used, 0 while it is being probed.", ("tier",)),
        Metric("tier_lookups", _C, "Blocks looked up in the tier, by answer.", ("tier", "answer")),
        Metric("tier_blocks_stored", _C, "Blocks written to the tier.", ("tier",)),
        Metric("tier_blocks_loaded", _C, "Blocks read back from the tier.", ("tier",)),
        Metric("tier_store_failures", _C, "Blocks the tier failed to write.", ("tier",)),
        Metric("tier_load_failures", _C, "Blocks the tier failed to read back.", ("tier",)),
        Metric("tier_corrupt_blocks", _C, "Blocks whose bytes did not verify; each was a miss.", ("tier",)),
        Metric("tier_evicted_blocks", _C, "Blocks removed to keep the tier within its quota.", ("tier",)),
        Metric("tier_dropped_blocks", _C, "Blocks not written because the tier's backlog was full.", ("tier",)),
        Metric("tier_queued_jobs", _G, "Jobs waiting or running in the tier.", ("tier",)),
        Metric("promotions", _C, "Blocks brought up from secondary tiers, by outcome.", ("outcome",)),
        Metric("promotions_refused", _C, "Promotions not begun, by reason.", ("reason",)),
        Metric("lookups_out_of_patience", _C, "Answers that became a miss because the request waited too long."),
        Metric("cascades", _C, "Blocks sent down to secondary tiers, by outcome.", ("outcome",)),
        Metric("cascades_parked", _G, "Request-level blocks waiting to become ready before their cascade."),
    ]
)


def add_stats(parts: Iterable[Stats]) -> Stats:
    """Sums samples over components (several ranks, several tiers)."""
    total: Stats = {}
    for part in parts:
        for sample, value in part.items():
            total[sample] = total.get(sample, 0) + value
    return total
