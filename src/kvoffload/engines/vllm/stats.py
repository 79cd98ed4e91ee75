# SPDX-License-Identifier: Apache-2.0
"""Export kvoffload's metrics in vLLM's log and on its ``/metrics``.

vLLM sends a connector's stats from the engine core to the front end as plain data. This data contains increments of
counters and histograms since the last report, and current values of gauges. Its keys join the sample's name and label
values in one string.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvoffload.logs import RateLimitedLog
from kvoffload.metrics import METRICS, Kind, Stats, initial_series, typical_value

_log = RateLimitedLog(logging.getLogger(__name__))

_SEPARATOR = "\x1f"
_COUNTERS, _GAUGES = "counters", "gauges"


def _kind(name: str) -> Kind:
    return METRICS[name].kind


class StatsReporter:
    """Turns snapshots (counters since start) into reports (counters since the last report)."""

    def __init__(self) -> None:
        self._last: Stats = {}

    def report(self, now: Stats) -> OffloadStats | None:
        """Return the changes since the last report, or ``None`` if there are none. Samples that are not in ``METRICS``
        are left out."""
        changed = {sample: value for sample, value in now.items() if self._last.get(sample) != value}
        changed = {sample: value for sample, value in changed.items() if sample[0] in METRICS}
        if not changed:
            return None
        stats = OffloadStats()
        for sample, value in changed.items():
            if _kind(sample[0]) is Kind.GAUGE:
                stats.gauges[_SEPARATOR.join(sample)] = value
            elif (increment := value - self._last.get(sample, 0)) >= 0:  # Prometheus raises for less
                stats.counters[_SEPARATOR.join(sample)] = increment
        self._last |= now  # a sample may be missing once, and its counter must not start again from zero
        return stats


class OffloadStats(KVConnectorStats):  # type: ignore[misc]
    """Increments of counters and histograms, and values of gauges, which vLLM sends, adds up and logs."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data if data else {_COUNTERS: {}, _GAUGES: {}})

    @property
    def counters(self) -> dict[str, float]:
        counters: dict[str, float] = self.data[_COUNTERS]
        return counters

    @property
    def gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = self.data[_GAUGES]
        return gauges

    def reset(self) -> None:
        self.data: dict[str, Any] = {_COUNTERS: {}, _GAUGES: {}}

    def is_empty(self) -> bool:
        return not (self.counters or self.gauges)

    def aggregate(self, other: OffloadStats) -> OffloadStats:
        """Add ``other``, which is the later report."""
        for name, value in other.counters.items():
            self.counters[name] = self.counters.get(name, 0) + value
        self.gauges.update(other.gauges)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for the line in vLLM's log: hit rate, bytes moved, blocks in use."""
        asked, hit = self.counters.get("lookup_tokens", 0), self.counters.get("hit_tokens", 0)
        line: dict[str, int | float] = {}
        if asked:
            line["offload hit rate (%)"] = round(100 * hit / asked, 1)
        for direction in ("load", "store"):
            num_bytes = self.counters.get(f"{direction}_bytes", 0)
            seconds = self.counters.get(f"{direction}_seconds", 0)
            if num_bytes:
                line[f"{direction} (MB)"] = round(num_bytes / 1e6, 1)
            if num_bytes and seconds:
                line[f"{direction} (GB/s)"] = round(num_bytes / seconds / 1e9, 2)
        for name, gauge in self.gauges.items():
            if name in ("primary_blocks", "primary_blocks_used"):
                line[name.replace("_", " ")] = gauge
        return line


_registered: list[Any] = []
"""The series of this process's latest engine. A name can be registered once, and vLLM may be started again."""


def _unregister_earlier_series() -> None:
    from prometheus_client import REGISTRY

    while _registered:
        try:
            REGISTRY.unregister(_registered.pop())
        except KeyError:
            pass  # unregistered already, or registered elsewhere (Ray)


class OffloadPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus series per row of ``kvoffload.metrics.METRICS``, named ``kvoffload_<name>``, with vLLM's own
    labels before the metric's labels. ``begin`` creates the series that are known from the start."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister_earlier_series()
        self._series: dict[str, Any] = {}
        for metric in METRICS.values():
            arguments = {
                "name": f"kvoffload_{metric.name}",
                "documentation": metric.help,
                "labelnames": [*labelnames, *metric.labels],
            }
            if metric.kind is Kind.COUNTER:
                self._series[metric.name] = self._counter_cls(**arguments)
            elif metric.kind is Kind.HISTOGRAM:
                self._series[metric.name] = self._histogram_cls(buckets=metric.buckets, **arguments)
            else:
                self._series[metric.name] = self._gauge_cls(multiprocess_mode="mostrecent", **arguments)
            _registered.append(self._series[metric.name])

    def begin(self, tiers: Sequence[str]) -> None:
        """Create all series whose labels are known before the first report, including the series of ``tiers``."""
        for engine_idx in self.per_engine_labelvalues:
            for metric, values in initial_series(tiers):
                series = self._labelled(metric.name, values, engine_idx)
                if metric.kind is Kind.GAUGE:
                    series.set(metric.initial)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report. It never raises, because an exception would end all requests in vLLM's front end. It leaves out
        samples that Prometheus rejects, such as a falling counter of a foreign tier, and samples that this process does
        not know, because its engine may have been started from a newer kvoffload."""
        stats = OffloadStats(transfer_stats_data)
        for text, value in (*stats.counters.items(), *stats.gauges.items()):
            try:
                self._observe(text.split(_SEPARATOR), value, stats.counters, engine_idx)
            except Exception:  # noqa: BLE001 - see above
                _log.exception(f"A sample of {text.split(_SEPARATOR)[0]} was not counted.")

    def _observe(self, sample: list[str], value: float, counters: Mapping[str, float], engine_idx: int) -> None:
        name, *labels = sample
        kind = _kind(name)
        if kind is Kind.COUNTER:
            self._labelled(name, labels, engine_idx).inc(value)
        elif kind is Kind.GAUGE:
            self._labelled(name, labels, engine_idx).set(value)
        elif labels[-2] == "count":
            *labels, _, bound = labels
            total = counters.get(_SEPARATOR.join([name, *labels, "sum", bound]), 0.0)
            series = self._labelled(name, labels, engine_idx)
            # A series accepts only single observations. For each bucket, only their sum and number are known.
            for _ in range(int(value)):
                series.observe(typical_value(METRICS[name], bound, value, total))

    def _labelled(self, name: str, labels: Sequence[str], engine_idx: int) -> Any:
        return self._series[name].labels(*self.per_engine_labelvalues[engine_idx], *labels)
