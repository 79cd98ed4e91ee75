# SPDX-License-Identifier: Apache-2.0
"""Every metric of kvoffload in one table: its name, kind, labels, buckets and help.

A component counts in plain numbers and returns them from ``get_stats()`` as ``Stats``: counters and histograms since
the component was made, which only grow, and gauges as of now. For a rate, subtract two snapshots. The engine adapters
and ``kvoffload.exporter`` export them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from math import inf, nextafter
from numbers import Integral, Real

from kvoffload.miss import REFUSALS

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


def _counter(name: str, help: str, **labels: tuple[str, ...] | None) -> Metric:
    """A row. ``labels``: by name the values as in ``Metric.values``, ``None`` if they are not known."""
    values = [known for known in labels.values() if known is not None]
    return Metric(name, Kind.COUNTER, help, tuple(labels), tuple(values))


def _gauge(name: str, help: str, initial: float = 0, **labels: tuple[str, ...] | None) -> Metric:
    return replace(_counter(name, help, **labels), kind=Kind.GAUGE, initial=initial)


def _histogram(name: str, buckets: tuple[float, ...], help: str, **labels: tuple[str, ...] | None) -> Metric:
    return replace(_counter(name, help, **labels), kind=Kind.HISTOGRAM, buckets=buckets)


def _by_name(rows: Sequence[Metric]) -> dict[str, Metric]:
    table = {row.name: row for row in rows}
    if len(table) < len(rows):
        raise ValueError("a metric is listed twice")
    return table


METRICS = _by_name(
    (
        # primary tier
        _gauge("primary_blocks", "Slots in the primary tier."),
        _gauge("primary_blocks_used", "Slots that hold a block or are being written."),
        _gauge("primary_blocks_pinned", "Slots that a transfer is reading or writing now."),
        _gauge("primary_blocks_being_read", "Slots that a load or a cascade is reading now."),
        _gauge("primary_blocks_being_written", "Slots that a store or a promotion is writing now."),
        _counter("primary_blocks_stored", "Blocks published in the primary tier."),
        _counter("primary_blocks_evicted", "Blocks evicted from the primary tier to make room."),
        _counter("primary_stores_refused", "Calls of prepare_store refused for lack of room."),
        _counter("reuse_filtered_blocks", "Blocks not stored as too few requests had asked for them."),
        _histogram("primary_allocation_blocks", _BLOCKS, "Slots taken at once, by a store or by promotions."),
        _histogram(
            "primary_eviction_age_seconds",
            _AGE_SECONDS,
            "Age of the first block of each eviction, since it was stored.",
        ),
        _histogram(
            "primary_reuse_age_seconds",
            _AGE_SECONDS,
            "Age of the first block of each load to the device, since it was stored.",
        ),
        # connector
        _counter("lookup_tokens", "Prompt tokens looked up: those that the engine's own prefix cache lacks."),
        _counter(
            "hit_tokens", "Of the lookup_tokens, those to be loaded from offloaded blocks, loads that fail included."
        ),
        _counter(
            "tier_hit_tokens",
            "The hit_tokens by the tier that had a block when its request arrived; host memory is CPU.",
            tier=(HOST,),
        ),
        _counter("lookups_deferred", "Lookups that had no answer yet in their step."),
        _counter("load_jobs", "Finished loads, by outcome.", outcome=OUTCOMES),
        _counter("store_jobs", "Finished stores, by outcome.", outcome=OUTCOMES),
        _counter("load_blocks", "Blocks loaded to the device, by kind of KV group.", kind=GROUP_KINDS),
        _counter("store_blocks", "Blocks stored from the device, by kind of KV group.", kind=GROUP_KINDS),
        _counter("load_bytes", "Bytes copied from the primary tier to the device, summed over ranks."),
        _counter("store_bytes", "Bytes copied from the device to the primary tier, summed over ranks."),
        _counter("load_seconds", "Seconds spent copying to the device, summed over ranks and jobs."),
        _counter("store_seconds", "Seconds spent copying from the device, summed over ranks and jobs."),
        _histogram(
            "load_job_seconds", _JOB_SECONDS, "Seconds of one load's copy to the device, as the mean of its ranks."
        ),
        _histogram(
            "store_job_seconds", _JOB_SECONDS, "Seconds of one store's copy from the device, as the mean of its ranks."
        ),
        _histogram("lookup_wait_seconds", _WAIT_SECONDS, "Seconds that a request's lookups had no answer."),
        _counter(
            "cache_resets",
            "Resets, by the epoch that they began: the engine's own, that of a weights_version, or the old one, kept.",
            epoch=("own", "named", "kept"),
        ),
        _counter("requests_by_hint", "Requests, by what their clients said of the next use.", next_use=NEXT_USES),
        _counter(
            "hints_ignored",
            "Hints that say nothing of the next use (unknown) or make no sense (malformed).",
            reason=IGNORED_HINTS,
        ),
        _counter(
            "lookup_tokens_by_hint", "The lookup_tokens, by whether the client gave a hint.", hinted=("yes", "no")
        ),
        _counter("hit_tokens_by_hint", "The hit_tokens, by whether the client gave a hint.", hinted=("yes", "no")),
        _gauge(
            "hint_score",
            "How much better recent uses were foreseen with hints than without. Below 3, hints change no eviction.",
        ),
        _gauge("hints_in_use", "1 while evictions follow hints."),
        _counter(
            "prefetches",
            "Calls of `prefetch`, by outcome: some of the prefix was found, none was, or too many were open.",
            outcome=PREFETCH_OUTCOMES,
        ),
        _counter("stale_jobs", "Transfers that ended after a reset."),
        _counter("fenced_jobs", "Transfers waited for, as the engine was about to reuse their GPU blocks."),
        _gauge("jobs_in_flight", "Transfers that have not finished on every rank."),
        _gauge("requests_tracked", "Requests that the connector keeps state for."),
        _gauge("requests_waiting", "Requests whose last lookup had no answer yet."),
        # secondary tiers
        _gauge("tier_blocks", "Blocks known to be in the tier.", tier=()),
        _gauge("tier_bytes", "Bytes of the blocks in the tier, as far as this process knows.", tier=()),
        _gauge("tier_quota_bytes", "Bytes that the tier may hold; +Inf if no bound is known.", tier=(), initial=inf),
        _gauge(
            "tier_free_bytes", "What is left of tier_quota_bytes, or of the disk if that is less.", tier=(), initial=inf
        ),
        _gauge("tier_healthy", "0 while one of the tier's circuit breakers is open, else 1.", tier=(), initial=1),
        _gauge(
            "tier_breaker_open",
            "1 while the tier's circuit breaker for reading or for writing is open.",
            tier=(),
            direction=DIRECTIONS,
        ),
        _counter(
            "tier_breaker_trips", "How often the tier's circuit breaker has opened.", tier=(), direction=DIRECTIONS
        ),
        _gauge(
            "tier_breaker_last_trip_timestamp_seconds",
            "Unix time at which the circuit breaker was last opened, or kept open by a probe, for this reason: an "
            "errno, the name of an exception, or hang.",
            tier=None,
            direction=None,
            reason=None,
        ),
        _counter(
            "tier_lookups", "Blocks looked up in the tier, by answer.", tier=(), answer=("hit", "miss", "pending")
        ),
        _counter("tier_blocks_stored", "Blocks written to the tier.", tier=()),
        _counter("tier_blocks_loaded", "Blocks read back from the tier.", tier=()),
        _counter("tier_io_bytes", "Bytes of blocks read from or written to the tier.", tier=(), direction=DIRECTIONS),
        _counter(
            "tier_io_seconds",
            "Seconds that the tier's calls took to read or write blocks, summed over its threads.",
            tier=(),
            direction=DIRECTIONS,
        ),
        _histogram(
            "tier_batch_seconds",
            _JOB_SECONDS,
            "Seconds of one call that reads or writes a batch of blocks.",
            tier=(),
            direction=DIRECTIONS,
        ),
        _counter("tier_store_failures", "Blocks that the tier failed to write.", tier=()),
        _counter("tier_load_failures", "Blocks that the tier failed to read back.", tier=()),
        _counter("tier_corrupt_blocks", "Blocks whose checksum did not match; each counted as a miss.", tier=()),
        _gauge(
            "tier_other_keys",
            "Seal or encryption keys that this server lacks, and under which others keep blocks of its namespace.",
            tier=(),
        ),
        _gauge("tier_disk_bytes", "Bytes of the blocks on one disk of several.", tier=None, disk=None),
        _gauge(
            "tier_disk_out",
            "1 while one disk of several fails or hangs, or after it did not open.",
            tier=None,
            disk=None,
        ),
        _counter(
            "tier_disk_failures", "Calls that failed on one disk of several, or found it hanging.", tier=None, disk=None
        ),
        _counter("tier_evicted_blocks", "Blocks evicted to keep the tier within its quota.", tier=()),
        _counter("tier_dropped_blocks", "Blocks not written: too many waited, or writes were off.", tier=()),
        _gauge("tier_queued_jobs", "Jobs queued or running in the tier.", tier=()),
        _gauge(
            "tier_queued_blocks",
            "Blocks queued or being worked on in the tier. The queue store is its backlog of writes.",
            tier=(),
            queue=("lookup", "load", "store"),
        ),
        _counter(
            "tier_declined_blocks",
            "Blocks found in the tier and not loaded, by reason. Host memory is CPU.",
            tier=(HOST,),
            reason=("slow", "busy", "late", "unmeasured"),
        ),
        _gauge("tier_too_slow", "1 if a block takes twice as long to load as to compute.", tier=()),
        _gauge("tier_read_bytes_per_second", "Estimate of the speed at which the tier is read.", tier=()),
        _gauge("tier_read_latency_seconds", "Estimate of the seconds until the tier's first byte.", tier=()),
        _gauge("tier_answer_seconds", "Estimate of the seconds until the tier says what it has.", tier=()),
        _gauge("tier_read_queue_bytes", "Bytes of promotions that are queued or being read.", tier=()),
        _gauge("prefill_tokens_per_second", "Estimate of the speed at which the engine computes prompts."),
        _histogram("promotion_wait_ratio", _RATIOS, "A wait for lower tiers, as a multiple of what was expected."),
        _counter("promotions", "Blocks promoted from secondary tiers, by outcome.", outcome=OUTCOMES),
        _counter(
            "promotions_refused",
            "Blocks not promoted, by reason, once for each request.",
            reason=tuple(miss.label for miss in REFUSALS),
        ),
        _gauge("promotions_in_flight", "Blocks that are being promoted."),
        _histogram("promotion_wait_seconds", _WAIT_SECONDS, "Seconds of a request's wait for lower tiers."),
        _counter("plans_made_again", "New plans for requests that wait: an answer had come, or a tier was late."),
        _counter(
            "waits_ended_early", "Waits that took what had come, as the rest would have been later than computing."
        ),
        _gauge("claimed_blocks", "Blocks that waiting requests protect from eviction."),
        _counter("lookups_out_of_patience", "Requests that gave up blocks because they had waited too long."),
        _counter(
            "cascades",
            "Blocks offered to lower tiers, by outcome; ``dropped``: never tried.",
            outcome=(*OUTCOMES, "dropped"),
        ),
        _gauge("cascades_parked", "Blocks of request-level tiers that wait to become ready before their cascade."),
    )
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
