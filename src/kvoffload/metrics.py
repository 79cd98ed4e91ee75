# SPDX-License-Identifier: Apache-2.0
"""Every metric of kvoffload in one table: its name, kind, labels and help.

A component counts in plain numbers and returns them from ``get_stats()`` as ``Stats``: counters since the component was
made, which only grow, and gauges as of now. For a rate, subtract two snapshots. The engine adapters export them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["METRICS", "Kind", "Metric", "Sample", "Stats", "add_stats"]

Sample = tuple[str, ...]
"""A metric's name, then its label values in the order of ``Metric.labels``."""

Stats = dict[Sample, float]
"""Values by sample, for example ``{("tier_blocks_loaded", "fs"): 12}``."""


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. ``name`` has no prefix; exporters add ``kvoffload_``."""

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
        Metric("primary_blocks", _G, "Slots in the primary tier."),
        Metric("primary_blocks_used", _G, "Slots that hold a block or are being written."),
        Metric("primary_blocks_pinned", _G, "Slots that a transfer is reading or writing now."),
        Metric("primary_blocks_stored", _C, "Blocks published in the primary tier."),
        Metric("primary_blocks_evicted", _C, "Blocks evicted from the primary tier to make room for others."),
        Metric("primary_stores_refused", _C, "Calls of prepare_store refused because there was no room."),
        Metric("reuse_filtered_blocks", _C, "Blocks not stored because too few requests had asked for them so far."),
        # connector
        Metric(
            "lookup_tokens",
            _C,
            "Prompt tokens looked up: not in the engine's own prefix cache, up to the request's limit.",
        ),
        Metric("hit_tokens", _C, "Prompt tokens that offloaded blocks supplied, out of lookup_tokens."),
        Metric("lookups_deferred", _C, "Lookups that asked the engine to come back in the next step."),
        Metric("load_jobs", _C, "Finished loads, by outcome.", ("outcome",)),
        Metric("store_jobs", _C, "Finished stores, by outcome.", ("outcome",)),
        Metric("load_bytes", _C, "Bytes copied from the primary tier to the device, summed over ranks."),
        Metric("store_bytes", _C, "Bytes copied from the device to the primary tier, summed over ranks."),
        Metric("load_seconds", _C, "Seconds spent copying to the device, summed over ranks and jobs."),
        Metric("store_seconds", _C, "Seconds spent copying from the device, summed over ranks and jobs."),
        Metric("stale_jobs", _C, "Transfers that finished after a reset had discarded their blocks."),
        Metric("fenced_jobs", _C, "Transfers waited for because the engine was about to reuse their GPU blocks."),
        Metric("jobs_in_flight", _G, "Transfers that have not finished on every rank."),
        Metric("requests_tracked", _G, "Requests that the connector keeps state for."),
        # secondary tiers
        Metric("tier_blocks", _G, "Blocks known to be in the tier.", ("tier",)),
        Metric("tier_bytes", _G, "Bytes stored in the tier.", ("tier",)),
        Metric(
            "tier_healthy",
            _G,
            "1 while the tier is in use, 0 while its circuit breaker is open.",
            ("tier",),
        ),
        Metric("tier_lookups", _C, "Blocks looked up in the tier, by answer.", ("tier", "answer")),
        Metric("tier_blocks_stored", _C, "Blocks written to the tier.", ("tier",)),
        Metric("tier_blocks_loaded", _C, "Blocks read back from the tier.", ("tier",)),
        Metric("tier_store_failures", _C, "Blocks that the tier failed to write.", ("tier",)),
        Metric("tier_load_failures", _C, "Blocks that the tier failed to read back.", ("tier",)),
        Metric("tier_corrupt_blocks", _C, "Blocks whose checksum did not match; each counted as a miss.", ("tier",)),
        Metric("tier_evicted_blocks", _C, "Blocks evicted to keep the tier within its quota.", ("tier",)),
        Metric("tier_dropped_blocks", _C, "Blocks not written because the tier's backlog was full.", ("tier",)),
        Metric("tier_queued_jobs", _G, "Jobs queued or running in the tier.", ("tier",)),
        Metric("promotions", _C, "Blocks promoted from secondary tiers, by outcome.", ("outcome",)),
        Metric("promotions_refused", _C, "Promotions not started, by reason.", ("reason",)),
        Metric("lookups_out_of_patience", _C, "Lookups that became misses because the request waited too long."),
        Metric("cascades", _C, "Blocks cascaded to secondary tiers, by outcome.", ("outcome",)),
        Metric("cascades_parked", _G, "Blocks of request-level tiers that wait to become ready before their cascade."),
    ]
)


def add_stats(parts: Iterable[Stats]) -> Stats:
    """Sums samples over components, such as ranks or tiers."""
    total: Stats = {}
    for part in parts:
        for sample, value in part.items():
            total[sample] = total.get(sample, 0) + value
    return total
