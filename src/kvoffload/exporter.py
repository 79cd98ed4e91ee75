# SPDX-License-Identifier: Apache-2.0
"""kvoffload's metrics as a Prometheus endpoint, for engines without their own. Needs ``prometheus-client``.

vLLM exports them through its own ``/metrics`` (``engines/vllm/stats.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvoffload.errors import ConfigError, MissingExtraError, reason_of
from kvoffload.metrics import METRICS, Kind, Metric, Stats, buckets_of, initial_series


class PrometheusExporter:
    """A Prometheus exporter of the latest stats: a collector for ``prometheus_client``, and a small server::

        exporter = PrometheusExporter(tiers=["disk"])
        close = exporter.serve(9400)
        ...
        exporter.publish(engine.get_stats())     # now and then, on the engine's thread
        ...
        close()

    ``publish`` only stores a reference, so the engine pays only for ``get_stats``. Threads that answer scrapes read
    only the latest stats. All series that are known from the start are exported from the start, including the series of
    ``tiers`` (a list of names). ``labels`` precede each metric's own. Raises ``MissingExtraError`` without
    ``prometheus-client``.
    """

    def __init__(self, tiers: Sequence[str] = (), labels: Mapping[str, str] | None = None) -> None:
        self._client = _prometheus_client()
        self._labels = dict(labels or {})
        self._known = [(metric, values) for metric, values in initial_series(tiers)]
        self._stats: Stats = {}

    def __repr__(self) -> str:
        return f"PrometheusExporter({len(self._stats)} samples)"

    def publish(self, stats: Stats) -> None:
        """Make later scrapes show ``stats``. The caller must not change it afterwards."""
        self._stats = stats

    def collect(self) -> Iterator[Any]:
        """Yield one family per metric, in the form that ``prometheus_client`` registries need. Any thread may call
        this."""
        core = importlib.import_module("prometheus_client.core")
        by_metric: dict[str, dict[tuple[str, ...], dict[tuple[str, ...], float]]] = {name: {} for name in METRICS}
        for metric, values in self._known:
            by_metric[metric.name][values] = {} if metric.kind is Kind.HISTOGRAM else {(): metric.initial}
        for (name, *rest), value in self._stats.items():
            if name in METRICS:
                num_labels = len(METRICS[name].labels)
                series = by_metric[name].setdefault(tuple(rest[:num_labels]), {})
                series[tuple(rest[num_labels:])] = value
        families = {
            Kind.COUNTER: core.CounterMetricFamily,
            Kind.GAUGE: core.GaugeMetricFamily,
            Kind.HISTOGRAM: core.HistogramMetricFamily,
        }
        for metric in METRICS.values():
            family = families[metric.kind](
                f"kvoffload_{metric.name}", metric.help, labels=[*self._labels, *metric.labels]
            )
            for values, samples in by_metric[metric.name].items():
                labels = [*self._labels.values(), *values]
                if metric.kind is Kind.HISTOGRAM:
                    family.add_metric(labels, *_cumulative(metric, samples))
                else:
                    family.add_metric(labels, samples[()])
            yield family

    def describe(self) -> list[Any]:
        """Return no names, so that registries do not collect on registration."""
        return []

    def serve(self, port: int, address: str = "127.0.0.1") -> Callable[[], None]:
        """Serve ``/metrics`` from a daemon thread, and return a function that stops it. Raises ``ConfigError`` if the
        address cannot be used."""
        registry = self._client.CollectorRegistry()
        registry.register(self)
        self._client.ProcessCollector(registry=registry)  # its start time distinguishes one process from the next
        try:
            server, thread = self._client.start_http_server(port, address, registry)
        except (OSError, OverflowError) as exc:  # the latter: not a valid port number
            raise ConfigError(f"Metrics cannot be served at {address}:{port}: {reason_of(exc)}.") from exc

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close


def _cumulative(metric: Metric, samples: Mapping[tuple[str, ...], float]) -> tuple[list[tuple[str, float]], float]:
    """Return a histogram in Prometheus' form: the number of observations up to each bucket's bound, and the sum of all
    values."""
    count = 0.0
    buckets = []
    for bound in buckets_of(metric):
        count += samples.get(("count", bound), 0)
        buckets.append((bound, count))
    return buckets, sum(value for (part, _), value in samples.items() if part == "sum")


def _prometheus_client() -> Any:
    try:
        return importlib.import_module("prometheus_client")
    except ImportError as exc:
        raise MissingExtraError("Metrics need kvoffload's extra 'metrics': pip install prometheus-client.") from exc
