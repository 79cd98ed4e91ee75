# SPDX-License-Identifier: Apache-2.0
"""Every metric of kvoffload in one table: its name, kind, labels, buckets and help.

A component counts in plain numbers and returns them from ``get_stats()`` as ``Stats``: counters and histograms since
the component was made, which only grow, and gauges as of now. For a rate, subtract two snapshots. The engine adapters
and ``kvoffload.exporter`` export them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from math import inf, nextafter
from numbers import Integral, Real

from kvoffload.miss import REFUSALS

__all__ = [
    "HOST",
    "IGNORED_HINTS",
    "JOIN",
    "METRICS",
    "NEXT_USES",
    "PREFETCH_OUTCOMES",
    "Histogram",
    "Kind",
    "Metric",
    "Sample",
    "Stats",
    "add_stats",
    "buckets_of",
    "checked_stats",
    "initial_series",
    "typical_value",
]

Sample = tuple[str, ...]
"""A metric's name, then its label values in the order of ``Metric.labels``. Histograms have two samples for each bucket
that is not empty: the same, then ``"count"`` or ``"sum"``, then the bucket's upper bound as text."""

Stats = dict[Sample, float]
"""Values by sample, for example ``{("tier_blocks_loaded", "fs"): 12}``."""

HOST = "CPU"
"""The label ``tier`` of host memory, where a metric counts it too."""


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_JOB_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Single copies and calls of a store."""
_WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""What a request waits."""
_AGE_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
"""How old a block is."""
_RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 10.0)
_BLOCKS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)

OUTCOMES = ("ok", "failed")
GROUP_KINDS = ("full_attention", "sliding_window", "single_state")
DIRECTIONS = ("read", "write")
NEXT_USES = ("soon", "later", "never", "unknown")
PREFETCH_OUTCOMES = ("found", "missed", "dropped")
IGNORED_HINTS = ("unknown", "malformed")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. ``name`` has no prefix; exporters add ``kvoffload_``."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    """The values that each label can have, so that their series exist from the start. Of the label ``tier`` they come
    before the configured tiers. A label without known values has no series before it is counted."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, rising. One more bucket has no bound."""
    initial: float = 0
    """The value of a gauge before the first report."""

    def fits(self, sample: Sample) -> bool:
        """Whether ``sample`` is one of this metric's."""
        extra = 2 if self.kind is Kind.HISTOGRAM else 0
        if sample[0] != self.name or len(sample) != 1 + len(self.labels) + extra:
            return False
        return not extra or (sample[-2] in ("count", "sum") and sample[-1] in buckets_of(self))


class Histogram:
    """Counts observations by bucket, and adds them up. One thread; an observation costs a bisection and two additions.

    ``labels`` are the values of the metric's labels.
    """

    __slots__ = ("_bounds", "_counts", "_samples", "_sums")

    def __init__(self, name: str, *labels: str) -> None:
        metric = METRICS[name]
        assert metric.kind is Kind.HISTOGRAM
        assert len(labels) == len(metric.labels)
        self._bounds = metric.buckets
        self._counts = [0] * (len(self._bounds) + 1)
        self._sums = [0.0] * (len(self._bounds) + 1)
        self._samples = [
            ((name, *labels, "count", bound), (name, *labels, "sum", bound)) for bound in buckets_of(metric)
        ]

    def __repr__(self) -> str:
        return f"Histogram({self._samples[0][0][:-2]}, {sum(self._counts)} observations)"

    def observe(self, value: float) -> None:
        at = bisect_left(self._bounds, value)
        self._counts[at] += 1
        self._sums[at] += value

    def stats(self) -> Stats:
        """Two samples for each bucket that is not empty."""
        stats: Stats = {}
        for count, total, (count_sample, sum_sample) in zip(self._counts, self._sums, self._samples):
            if count:
                stats[count_sample] = count
                stats[sum_sample] = total
        return stats


def _table(rows: Iterable[Metric]) -> dict[str, Metric]:
    table: dict[str, Metric] = {}
    for row in rows:
        if row.name in table:
            raise ValueError(f"metric {row.name!r} is listed twice")
        table[row.name] = row
    return table


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_TIER: tuple[str, ...] = ("tier",)
_TIER_DISK = ("tier", "disk")
_TIER_DIRECTION = ("tier", "direction")
_BY_DIRECTION = ((), DIRECTIONS)

METRICS: dict[str, Metric] = _table(
    [
        # primary tier
        Metric("primary_blocks", _G, "Slots in the primary tier."),
        Metric("primary_blocks_used", _G, "Slots that hold a block or are being written."),
        Metric("primary_blocks_pinned", _G, "Slots that a transfer is reading or writing now."),
        Metric("primary_blocks_being_read", _G, "Slots that a load or a cascade is reading now."),
        Metric("primary_blocks_being_written", _G, "Slots that a store or a promotion is writing now."),
        Metric("primary_blocks_stored", _C, "Blocks published in the primary tier."),
        Metric("primary_blocks_evicted", _C, "Blocks evicted from the primary tier to make room."),
        Metric("primary_stores_refused", _C, "Calls of prepare_store refused for lack of room."),
        Metric("reuse_filtered_blocks", _C, "Blocks not stored as too few requests had asked for them."),
        Metric(
            "primary_allocation_blocks",
            _H,
            "Slots taken at once, by a store or by promotions.",
            buckets=_BLOCKS,
        ),
        Metric(
            "primary_eviction_age_seconds",
            _H,
            "Age of the first block of each eviction, since it was stored.",
            buckets=_AGE_SECONDS,
        ),
        Metric(
            "primary_reuse_age_seconds",
            _H,
            "Age of the first block of each load to the device, since it was stored.",
            buckets=_AGE_SECONDS,
        ),
        # connector
        Metric(
            "lookup_tokens",
            _C,
            "Prompt tokens looked up: those that the engine's own prefix cache lacks.",
        ),
        Metric(
            "hit_tokens",
            _C,
            "Of the lookup_tokens, those to be loaded from offloaded blocks, loads that fail included.",
        ),
        Metric(
            "tier_hit_tokens",
            _C,
            "The hit_tokens by the tier that had a block when its request arrived; host memory is CPU.",
            _TIER,
            ((HOST,),),
        ),
        Metric("lookups_deferred", _C, "Lookups that had no answer yet in their step."),
        Metric("load_jobs", _C, "Finished loads, by outcome.", ("outcome",), (OUTCOMES,)),
        Metric("store_jobs", _C, "Finished stores, by outcome.", ("outcome",), (OUTCOMES,)),
        Metric("load_blocks", _C, "Blocks loaded to the device, by kind of KV group.", ("kind",), (GROUP_KINDS,)),
        Metric("store_blocks", _C, "Blocks stored from the device, by kind of KV group.", ("kind",), (GROUP_KINDS,)),
        Metric("load_bytes", _C, "Bytes copied from the primary tier to the device, summed over ranks."),
        Metric("store_bytes", _C, "Bytes copied from the device to the primary tier, summed over ranks."),
        Metric("load_seconds", _C, "Seconds spent copying to the device, summed over ranks and jobs."),
        Metric("store_seconds", _C, "Seconds spent copying from the device, summed over ranks and jobs."),
        Metric(
            "load_job_seconds",
            _H,
            "Seconds of one load's copy to the device, as the mean of its ranks.",
            buckets=_JOB_SECONDS,
        ),
        Metric(
            "store_job_seconds",
            _H,
            "Seconds of one store's copy from the device, as the mean of its ranks.",
            buckets=_JOB_SECONDS,
        ),
        Metric(
            "lookup_wait_seconds",
            _H,
            "Seconds that a request's lookups had no answer.",
            buckets=_WAIT_SECONDS,
        ),
        Metric(
            "cache_resets",
            _C,
            "Resets, by the epoch that they began: the engine's own, that of a weights_version, or the old one, kept.",
            ("epoch",),
            (("own", "named", "kept"),),
        ),
        Metric(
            "requests_by_hint",
            _C,
            "Requests, by what their clients said of the next use.",
            ("next_use",),
            (NEXT_USES,),
        ),
        Metric(
            "hints_ignored",
            _C,
            "Hints that say nothing of the next use (unknown) or make no sense (malformed).",
            ("reason",),
            (IGNORED_HINTS,),
        ),
        Metric(
            "lookup_tokens_by_hint",
            _C,
            "The lookup_tokens, by whether the client gave a hint.",
            ("hinted",),
            (("yes", "no"),),
        ),
        Metric(
            "hit_tokens_by_hint",
            _C,
            "The hit_tokens, by whether the client gave a hint.",
            ("hinted",),
            (("yes", "no"),),
        ),
        Metric(
            "hint_score",
            _G,
            "How much better recent uses were foreseen with hints than without. Below 3, hints change no eviction.",
        ),
        Metric("hints_in_use", _G, "1 while evictions follow hints."),
        Metric(
            "prefetches",
            _C,
            "Prefetches, by outcome: some of the prefix was found, none was, or too many prefetches were open.",
            ("outcome",),
            (PREFETCH_OUTCOMES,),
        ),
        Metric("stale_jobs", _C, "Transfers that ended after a reset."),
        Metric("fenced_jobs", _C, "Transfers waited for, as the engine was about to reuse their GPU blocks."),
        Metric("jobs_in_flight", _G, "Transfers that have not finished on every rank."),
        Metric("requests_tracked", _G, "Requests that the connector keeps state for."),
        Metric("requests_waiting", _G, "Requests whose last lookup had no answer yet."),
        # secondary tiers
        Metric("tier_blocks", _G, "Blocks known to be in the tier.", _TIER, ((),)),
        Metric("tier_bytes", _G, "Bytes of the blocks in the tier, as far as this process knows.", _TIER, ((),)),
        Metric(
            "tier_quota_bytes",
            _G,
            "Bytes that the tier may hold; +Inf if no bound is known.",
            _TIER,
            ((),),
            initial=inf,
        ),
        Metric(
            "tier_free_bytes",
            _G,
            "What is left of tier_quota_bytes, or of the disk if that is less.",
            _TIER,
            ((),),
            initial=inf,
        ),
        Metric(
            "tier_healthy",
            _G,
            "0 while one of the tier's circuit breakers is open, else 1.",
            _TIER,
            ((),),
            initial=1,
        ),
        Metric(
            "tier_breaker_open",
            _G,
            "1 while the tier's circuit breaker for reading or for writing is open.",
            _TIER_DIRECTION,
            _BY_DIRECTION,
        ),
        Metric(
            "tier_breaker_trips",
            _C,
            "How often the tier's circuit breaker has opened.",
            _TIER_DIRECTION,
            _BY_DIRECTION,
        ),
        Metric(
            "tier_breaker_last_trip_timestamp_seconds",
            _G,
            "Unix time at which the circuit breaker was last opened, or kept open by a probe, for this reason: an "
            "errno, the name of an exception, or hang.",
            ("tier", "direction", "reason"),
        ),
        Metric(
            "tier_lookups",
            _C,
            "Blocks looked up in the tier, by answer.",
            ("tier", "answer"),
            ((), ("hit", "miss", "pending")),
        ),
        Metric("tier_blocks_stored", _C, "Blocks written to the tier.", _TIER, ((),)),
        Metric("tier_blocks_loaded", _C, "Blocks read back from the tier.", _TIER, ((),)),
        Metric(
            "tier_io_bytes", _C, "Bytes of blocks read from or written to the tier.", _TIER_DIRECTION, _BY_DIRECTION
        ),
        Metric(
            "tier_io_seconds",
            _C,
            "Seconds that the tier's calls took to read or write blocks, summed over its threads.",
            _TIER_DIRECTION,
            _BY_DIRECTION,
        ),
        Metric(
            "tier_batch_seconds",
            _H,
            "Seconds of one call that reads or writes a batch of blocks.",
            _TIER_DIRECTION,
            _BY_DIRECTION,
            buckets=_JOB_SECONDS,
        ),
        Metric("tier_store_failures", _C, "Blocks that the tier failed to write.", _TIER, ((),)),
        Metric("tier_load_failures", _C, "Blocks that the tier failed to read back.", _TIER, ((),)),
        Metric("tier_corrupt_blocks", _C, "Blocks whose checksum did not match; each counted as a miss.", _TIER, ((),)),
        Metric(
            "tier_other_keys",
            _G,
            "Seal or encryption keys that this server lacks, and under which others keep blocks of its namespace.",
            _TIER,
            ((),),
        ),
        Metric("tier_disk_bytes", _G, "Bytes of the blocks on one disk of several.", _TIER_DISK),
        Metric(
            "tier_disk_out",
            _G,
            "1 while one disk of several fails or hangs, or after it did not open.",
            _TIER_DISK,
        ),
        Metric("tier_disk_failures", _C, "Calls that failed on one disk of several, or found it hanging.", _TIER_DISK),
        Metric("tier_evicted_blocks", _C, "Blocks evicted to keep the tier within its quota.", _TIER, ((),)),
        Metric("tier_dropped_blocks", _C, "Blocks not written: too many waited, or writes were off.", _TIER, ((),)),
        Metric("tier_queued_jobs", _G, "Jobs queued or running in the tier.", _TIER, ((),)),
        Metric(
            "tier_queued_blocks",
            _G,
            "Blocks queued or being worked on in the tier. The queue store is its backlog of writes.",
            ("tier", "queue"),
            ((), ("lookup", "load", "store")),
        ),
        Metric(
            "tier_declined_blocks",
            _C,
            "Blocks found in the tier and not loaded, by reason. Host memory is CPU.",
            ("tier", "reason"),
            ((HOST,), ("slow", "busy", "late", "unmeasured")),
        ),
        Metric("tier_too_slow", _G, "1 if a block takes twice as long to load as to compute.", _TIER, ((),)),
        Metric("tier_read_bytes_per_second", _G, "Estimate of the speed at which the tier is read.", _TIER, ((),)),
        Metric("tier_read_latency_seconds", _G, "Estimate of the seconds until the tier's first byte.", _TIER, ((),)),
        Metric("tier_answer_seconds", _G, "Estimate of the seconds until the tier says what it has.", _TIER, ((),)),
        Metric("tier_read_queue_bytes", _G, "Bytes of promotions that are queued or being read.", _TIER, ((),)),
        Metric("prefill_tokens_per_second", _G, "Estimate of the speed at which the engine computes prompts."),
        Metric(
            "promotion_wait_ratio",
            _H,
            "A wait for lower tiers, as a multiple of what was expected.",
            buckets=_RATIOS,
        ),
        Metric("promotions", _C, "Blocks promoted from secondary tiers, by outcome.", ("outcome",), (OUTCOMES,)),
        Metric(
            "promotions_refused",
            _C,
            "Blocks not promoted, by reason, once for each request.",
            ("reason",),
            (tuple(miss.label for miss in REFUSALS),),
        ),
        Metric("promotions_in_flight", _G, "Blocks that are being promoted."),
        Metric(
            "promotion_wait_seconds",
            _H,
            "Seconds of a request's wait for lower tiers.",
            buckets=_WAIT_SECONDS,
        ),
        Metric("plans_made_again", _C, "New plans for requests that wait: an answer had come, or a tier was late."),
        Metric(
            "waits_ended_early", _C, "Waits that took what had come, as the rest would have been later than computing."
        ),
        Metric("claimed_blocks", _G, "Blocks that waiting requests protect from eviction."),
        Metric("lookups_out_of_patience", _C, "Requests that gave up blocks because they had waited too long."),
        Metric(
            "cascades",
            _C,
            "Blocks cascaded to secondary tiers, by outcome.",
            ("outcome",),
            ((*OUTCOMES, "dropped"),),
        ),
        Metric("cascades_parked", _G, "Blocks of request-level tiers that wait to become ready before their cascade."),
    ]
)


JOIN: dict[str, Callable[[float, float], float]] = {
    "tier_healthy": min,
    "tier_breaker_open": max,
    "tier_disk_out": max,
    "tier_breaker_last_trip_timestamp_seconds": max,
    "tier_quota_bytes": min,
    "tier_free_bytes": min,
}
"""How the values of parts that use the same tiers become one. Those of all other metrics are added."""


def add_stats(parts: Iterable[Stats]) -> Stats:
    """Puts together the samples of components, such as ranks or tiers: the sum, or what ``JOIN`` says."""
    total: Stats = {}
    for part in parts:
        for sample, value in part.items():
            known = total.get(sample, 0)
            join = JOIN.get(sample[0]) if sample in total else None
            total[sample] = join(known, value) if join else known + value
    return total


def checked_stats(found: Mapping[object, object]) -> Stats:
    """The samples of ``found``, which is foreign, that can be told: with words for labels, as many as the metric has,
    and a number."""
    stats: Stats = {}
    for sample, value in found.items():
        if isinstance(sample, tuple) and sample and all(isinstance(word, str) for word in sample):
            metric = METRICS.get(sample[0])
            if isinstance(value, Real) and (metric is None or metric.fits(sample)):
                stats[sample] = int(value) if isinstance(value, Integral) else float(value)
    return stats


def initial_series(tiers: Sequence[str] = ()) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """The series that exist from the start, below host memory for ``tiers``: each metric with its label values."""
    for metric in METRICS.values():
        if len(metric.values) == len(metric.labels):
            known = [
                (*values, *tiers) if label == "tier" else values
                for label, values in zip(metric.labels, metric.values, strict=True)
            ]
            for labels in product(*known):
                yield metric, labels


def buckets_of(metric: Metric) -> list[str]:
    """The upper bounds of a histogram's buckets as Prometheus writes them."""
    return [*map(str, metric.buckets), "+Inf"]


def typical_value(metric: Metric, bound: str, count: float, total: float) -> float:
    """The mean of a bucket's observations, which lies in the bucket even where rounding says otherwise.

    To observe it ``count`` times gives the same histogram again.
    """
    at = buckets_of(metric).index(bound)
    upper = metric.buckets[at] if at < len(metric.buckets) else inf
    lower = metric.buckets[at - 1] if at else -inf
    return min(max(total / count, nextafter(lower, inf)), upper)
