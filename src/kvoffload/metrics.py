# SPDX-License-Identifier: Apache-2.0
"""Every metric of kvoffload in one table: its name, kind, labels, buckets and help.

A component counts in plain numbers and returns them from ``get_stats()`` as ``Stats``. Counters and histograms count
from the component's creation and only grow; gauges show the current state. For a rate, subtract two snapshots. The
engine adapters and ``kvoffload.exporter`` export them.
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
"""The value of the label ``tier`` for host memory, in metrics that also count it."""


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_JOB_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Bucket bounds for single copies and calls of a store."""
_WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bucket bounds for the time that a request waits."""
_AGE_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
"""Bucket bounds for the age of a block."""
_RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0, 10.0)
_BLOCKS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)

OUTCOMES = ("ok", "failed")
GROUP_KINDS = ("full_attention", "sliding_window", "local_chunk", "single_state")
DIRECTIONS = ("read", "write")
NEXT_USES = ("soon", "later", "never", "unknown")
IGNORED_HINTS = ("unknown", "malformed")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. ``name`` does not include the prefix ``kvoffload_``, which exporters add."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    """The possible values of each label, so that their series exist from the start. For the label ``tier``, the
    configured tiers follow them. A label without known values gets its first series when something is counted."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, in ascending order. One more bucket follows, without a bound."""
    initial: float = 0
    """The value of a gauge before the first report."""

    def fits(self, sample: Sample) -> bool:
        """Return whether ``sample`` belongs to this metric."""
        extra = 2 if self.kind is Kind.HISTOGRAM else 0
        if sample[0] != self.name or len(sample) != 1 + len(self.labels) + extra:
            return False
        return not extra or (sample[-2] in ("count", "sum") and sample[-1] in buckets_of(self))


class Histogram:
    """A count and a sum of observations by bucket. For one thread; an observation costs a bisection and two additions.

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
        """Return two samples for each bucket that is not empty."""
        stats: Stats = {}
        for count, total, (count_sample, sum_sample) in zip(self._counts, self._sums, self._samples):
            if count:
                stats[count_sample] = count
                stats[sum_sample] = total
        return stats


def _counter(name: str, help: str, **labels: tuple[str, ...] | None) -> Metric:
    """Return a row. ``labels`` maps each label to its values as in ``Metric.values``, or to ``None`` if they are not
    known."""
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
        _gauge("primary_blocks", "Number of slots in host memory."),
        _gauge("primary_blocks_used", "Number of slots in host memory that contain a block or are being written."),
        _gauge("primary_blocks_pinned", "Number of slots that a transfer is reading or writing."),
        _gauge("primary_blocks_being_read", "Number of slots that a load, or a write to a tier, is reading."),
        _gauge("primary_blocks_being_written", "Number of slots that a store, or a read from a tier, is writing."),
        _counter("primary_blocks_stored", "Number of blocks stored in host memory."),
        _counter("primary_blocks_evicted", "Number of blocks evicted from host memory to make room."),
        _counter("primary_stores_refused", "Number of stores rejected because host memory had no room."),
        _counter("reuse_filtered_blocks", "Number of blocks not stored because too few requests had asked for them."),
        _histogram(
            "primary_allocation_blocks",
            _BLOCKS,
            "Number of slots that one store, or one batch of reads from tiers, allocated.",
        ),
        _histogram(
            "primary_eviction_age_seconds",
            _AGE_SECONDS,
            "Seconds since the first block of each eviction was stored.",
        ),
        _histogram(
            "primary_reuse_age_seconds",
            _AGE_SECONDS,
            "Seconds since the first block of each load to the GPU was stored.",
        ),
        # connector
        _counter(
            "lookup_tokens", "Number of prompt tokens looked up: tokens that are not in the engine's own prefix cache."
        ),
        _counter("hit_tokens", "Number of lookup_tokens found in offloaded blocks, including loads that fail."),
        _counter(
            "tier_hit_tokens",
            "Number of hit_tokens by the tier that contained the block when its request arrived. CPU is host memory.",
            tier=(HOST,),
        ),
        _counter("lookups_deferred", "Number of lookups without an answer in their step."),
        _counter("load_jobs", "Number of finished loads, by outcome.", outcome=OUTCOMES),
        _counter("store_jobs", "Number of finished stores, by outcome.", outcome=OUTCOMES),
        _counter("load_blocks", "Number of blocks loaded to the GPU, by kind of KV group.", kind=GROUP_KINDS),
        _counter("store_blocks", "Number of blocks stored from the GPU, by kind of KV group.", kind=GROUP_KINDS),
        _counter("load_bytes", "Number of bytes copied from host memory to the GPU, summed over ranks."),
        _counter("store_bytes", "Number of bytes copied from the GPU to host memory, summed over ranks."),
        _counter("load_seconds", "Seconds spent copying to the GPU, summed over ranks and jobs."),
        _counter("store_seconds", "Seconds spent copying from the GPU, summed over ranks and jobs."),
        _histogram(
            "load_job_seconds", _JOB_SECONDS, "Seconds spent copying one load to the GPU, as the mean of its ranks."
        ),
        _histogram(
            "store_job_seconds", _JOB_SECONDS, "Seconds spent copying one store from the GPU, as the mean of its ranks."
        ),
        _histogram("lookup_wait_seconds", _WAIT_SECONDS, "Seconds that a request waited for an answer to its lookups."),
        _counter(
            "cache_resets",
            "Number of resets, by the epoch that they started: the engine's own, that of a weights_version, or "
            "the kept old one.",
            epoch=("own", "named", "kept"),
        ),
        _counter(
            "requests_by_hint", "Number of requests, by the client's hint about the next use.", next_use=NEXT_USES
        ),
        _counter(
            "hints_ignored",
            "Number of hints ignored: unknown hints say nothing about the next use, malformed ones cannot be read.",
            reason=IGNORED_HINTS,
        ),
        _counter(
            "lookup_tokens_by_hint", "Number of lookup_tokens, by whether the client gave a hint.", hinted=("yes", "no")
        ),
        _counter(
            "hit_tokens_by_hint", "Number of hit_tokens, by whether the client gave a hint.", hinted=("yes", "no")
        ),
        _gauge(
            "hint_score",
            "How much better hints predicted recent uses than no hints. Below 3, hints change no eviction.",
        ),
        _gauge("hints_in_use", "1 if evictions follow hints, else 0."),
        _counter("stale_jobs", "Number of transfers that ended after a reset."),
        _counter("fenced_jobs", "Number of transfers that the engine waited for before it reused their GPU blocks."),
        _gauge("jobs_in_flight", "Number of transfers that have not finished on every rank."),
        _gauge("requests_tracked", "Number of requests that the connector tracks."),
        _gauge("requests_waiting", "Number of requests whose last lookup has no answer yet."),
        # secondary tiers
        _gauge("tier_blocks", "Number of blocks known to be in the tier.", tier=()),
        _gauge("tier_bytes", "Number of bytes of the blocks that this process knows to be in the tier.", tier=()),
        _gauge(
            "tier_quota_bytes",
            "Number of bytes that the tier may store; +Inf if there is no known limit.",
            tier=(),
            initial=inf,
        ),
        _gauge(
            "tier_free_bytes",
            "Number of bytes left of tier_quota_bytes, or of the disk if it has less space.",
            tier=(),
            initial=inf,
        ),
        _gauge("tier_healthy", "0 if one of the tier's circuit breakers is open, else 1.", tier=(), initial=1),
        _gauge(
            "tier_breaker_open",
            "1 if the tier's circuit breaker for reading or writing is open.",
            tier=(),
            direction=DIRECTIONS,
        ),
        _counter(
            "tier_breaker_trips",
            "Number of times that the tier's circuit breaker opened.",
            tier=(),
            direction=DIRECTIONS,
        ),
        _gauge(
            "tier_breaker_last_trip_timestamp_seconds",
            "Unix time when the circuit breaker last opened, or stayed open after a probe, for this reason: an "
            "errno, the name of an exception, or hang.",
            tier=None,
            direction=None,
            reason=None,
        ),
        _counter(
            "tier_lookups",
            "Number of blocks looked up in the tier, by answer.",
            tier=(),
            answer=("hit", "miss", "pending"),
        ),
        _counter("tier_blocks_stored", "Number of blocks written to the tier.", tier=()),
        _counter("tier_blocks_loaded", "Number of blocks read from the tier.", tier=()),
        _counter(
            "tier_io_bytes",
            "Number of bytes of blocks read from or written to the tier.",
            tier=(),
            direction=DIRECTIONS,
        ),
        _counter(
            "tier_io_seconds",
            "Seconds spent reading or writing blocks in the tier, summed over its threads.",
            tier=(),
            direction=DIRECTIONS,
        ),
        _histogram(
            "tier_batch_seconds",
            _JOB_SECONDS,
            "Seconds spent in one call that reads or writes a batch of blocks.",
            tier=(),
            direction=DIRECTIONS,
        ),
        _counter("tier_store_failures", "Number of blocks that the tier failed to write.", tier=()),
        _counter("tier_load_failures", "Number of blocks that the tier failed to read.", tier=()),
        _counter("tier_corrupt_blocks", "Number of blocks whose checksum did not match. Each is a miss.", tier=()),
        _gauge("tier_disk_bytes", "Number of bytes of the blocks on one of several disks.", tier=None, disk=None),
        _gauge(
            "tier_disk_out",
            "1 if one of several disks fails or hangs, or did not open.",
            tier=None,
            disk=None,
        ),
        _counter(
            "tier_disk_failures",
            "Number of calls that failed on one of several disks, or found it hanging.",
            tier=None,
            disk=None,
        ),
        _counter("tier_evicted_blocks", "Number of blocks evicted to keep the tier within its quota.", tier=()),
        _counter(
            "tier_dropped_blocks", "Number of blocks not written because too many waited, or writing was off.", tier=()
        ),
        _gauge("tier_queued_jobs", "Number of jobs queued or running in the tier.", tier=()),
        _gauge(
            "tier_queued_blocks",
            "Number of blocks queued or in progress in the tier. The queue named store is its backlog of writes.",
            tier=(),
            queue=("lookup", "load", "store"),
        ),
        _counter(
            "tier_declined_blocks",
            "Number of blocks found in the tier but not loaded, by reason. CPU is host memory.",
            tier=(HOST,),
            reason=("slow", "busy", "late", "unmeasured"),
        ),
        _gauge("tier_too_slow", "1 if loading a block takes at least twice as long as computing it.", tier=()),
        _gauge("tier_read_bytes_per_second", "Estimated bytes per second of reads from the tier.", tier=()),
        _gauge("tier_read_latency_seconds", "Estimated seconds until the first byte of a read arrives.", tier=()),
        _gauge("tier_answer_seconds", "Estimated seconds until the tier answers a lookup.", tier=()),
        _gauge("tier_read_queue_bytes", "Number of bytes of reads that are queued or in progress.", tier=()),
        _gauge("prefill_tokens_per_second", "Estimated prompt tokens that the engine computes per second."),
        _histogram("promotion_wait_ratio", _RATIOS, "Ratio of a wait for tiers to the expected time."),
        _counter("promotions", "Number of blocks read from tiers into host memory, by outcome.", outcome=OUTCOMES),
        _counter(
            "promotions_refused",
            "Number of blocks not read from tiers, by reason, once for each request.",
            reason=tuple(miss.label for miss in REFUSALS),
        ),
        _gauge("promotions_in_flight", "Number of blocks being read from tiers."),
        _histogram("promotion_wait_seconds", _WAIT_SECONDS, "Seconds that a request waited for tiers."),
        _counter(
            "plans_made_again",
            "Number of new plans for waiting requests, because an answer arrived or a tier was late.",
        ),
        _counter(
            "waits_ended_early",
            "Number of waits that ended early because the remaining blocks would arrive later than computing them.",
        ),
        _gauge("claimed_blocks", "Number of blocks that waiting requests protect from eviction."),
        _counter(
            "lookups_out_of_patience", "Number of requests that gave up blocks because they reached their time limit."
        ),
        _counter(
            "cascades",
            "Number of blocks offered to tiers, by outcome. Dropped blocks were never tried.",
            outcome=(*OUTCOMES, "dropped"),
        ),
        _gauge(
            "cascades_parked", "Number of blocks for request-level tiers that wait until they are ready to be written."
        ),
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
"""How to join the values of parts that use the same tiers. The values of all other metrics are added."""


def add_stats(parts: Iterable[Stats]) -> Stats:
    """Join the samples of components, such as ranks or tiers, by the function in ``JOIN`` or else as a sum."""
    total: Stats = {}
    for part in parts:
        for sample, value in part.items():
            known = total.get(sample, 0)
            join = JOIN.get(sample[0]) if sample in total else None
            total[sample] = join(known, value) if join else known + value
    return total


def checked_stats(found: Mapping[object, object]) -> Stats:
    """Return the valid samples of ``found``, which foreign code made: text for each of the metric's labels, and a
    number."""
    stats: Stats = {}
    for sample, value in found.items():
        if isinstance(sample, tuple) and sample and all(isinstance(word, str) for word in sample):
            metric = METRICS.get(sample[0])
            if isinstance(value, Real) and (metric is None or metric.fits(sample)):
                stats[sample] = int(value) if isinstance(value, Integral) else float(value)
    return stats


def initial_series(tiers: Sequence[str] = ()) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Return the series that exist from the start, including those of ``tiers``: each metric with its label values."""
    for metric in METRICS.values():
        if len(metric.values) == len(metric.labels):
            known = [
                (*values, *tiers) if label == "tier" else values
                for label, values in zip(metric.labels, metric.values, strict=True)
            ]
            for labels in product(*known):
                yield metric, labels


def buckets_of(metric: Metric) -> list[str]:
    """Return the upper bounds of a histogram's buckets as Prometheus writes them."""
    return [*map(str, metric.buckets), "+Inf"]


def typical_value(metric: Metric, bound: str, count: float, total: float) -> float:
    """Return the mean of a bucket's observations, kept within the bucket's bounds despite rounding.

    To observe it ``count`` times gives the same histogram again.
    """
    at = bisect_left(metric.buckets, float(bound))
    upper = metric.buckets[at] if at < len(metric.buckets) else inf
    lower = metric.buckets[at - 1] if at else -inf
    return min(max(total / count, nextafter(lower, inf)), upper)
