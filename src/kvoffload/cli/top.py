# SPDX-License-Identifier: Apache-2.0
"""``kvoffload top``: the activity of a running server's tiers."""

from __future__ import annotations

import base64
import http.client
import importlib
import json
import math
import operator
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvoffload.cli.output import positive
from kvoffload.errors import ConfigError, MissingExtraError, reason_of
from kvoffload.metrics import HOST, JOIN, METRICS, Kind
from kvoffload.proxies import through_proxy
from kvoffload.units import format_bytes, printable

_TIMEOUT_S = 10.0
_MOST_BYTES = 64 << 20
_CLOCK_S = 2.0
"""Accepted difference between clocks of one server: start times are exact, but dates of answers are whole seconds."""
# Engines of one server share a tier, or each has one of the same size: the fullest counts.
_JOIN = JOIN | {"tier_blocks": max, "tier_bytes": max}
"""How to join the values of several engines. The values of all other metrics are added."""
Series = dict[tuple[str, ...], float]
"""Values by the values of kvoffload's own labels, in the order of ``METRICS``, and for histograms also by bucket."""


def top(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Address of the server, for example http://localhost:8000. Reads its /metrics."
        ),
    ],
    interval: Annotated[
        float, typer.Option(max=86_400, metavar="SECONDS", help="Seconds between two refreshes.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval, then exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each refresh as one line of JSON instead.")] = False,
) -> None:
    """Watch the tiers of a running server.

    Shows hit rates, bandwidth, used space, queues, health, and waiting requests.
    """
    positive(interval, "--interval")
    address = metrics_url(url)
    url = without_credentials(address)
    scrape = partial(_scrape, address)
    last = scrape()
    if not last.engines:
        raise ConfigError(
            f"{url} shows no metrics of kvoffload{through_proxy(url)}; check that this server uses kvoffload."
        )
    processes = {last.started_s: last}
    console = Console()
    with ExitStack() as stack:
        show: Callable[[Any], object] = console.print
        if console.is_terminal and not (once or as_json):
            screen = stack.enter_context(Live(console=console, auto_refresh=False))
            show = partial(screen.update, refresh=True)
        try:
            while True:
                time.sleep(interval)
                try:
                    now = scrape()
                    view = compare(_before(url, now, last, processes), now)
                except ConfigError as exc:
                    if once:
                        raise
                    if as_json:
                        print(exc, file=sys.stderr)
                    else:
                        show(Text(str(exc), style="red"))
                    continue
                last = now
                if as_json:
                    print(json.dumps(asdict(view)), flush=True)
                else:
                    show(draw(view))
                if once:
                    return
        except KeyboardInterrupt:
            return


def _before(url: str, now: Snapshot, last: Snapshot, processes: dict[float | None, Snapshot]) -> Snapshot:
    """Return the snapshot to compare ``now`` with: the last one of the same process, or an empty one of a process that
    replaced the last. ``processes`` contains the last snapshots by start time; ``now`` is added. Raises ``ConfigError``
    if another server answered, for example behind a load balancer."""
    before, processes[now.started_s] = processes.get(now.started_s), now
    if before is not None:
        return before
    if now.started_s is None or last.started_s is None or now.started_s >= last.server_unix_s - _CLOCK_S:
        return Snapshot(last.at_s, last.unix_s, {}, started_s=now.started_s)  # the process was restarted
    raise ConfigError(
        f"Several servers answer at {url}, so their figures cannot be compared: watch one by its own address."
    )


def metrics_url(url: str) -> str:
    """Return the address of the metrics of the server at ``url``. Raises ``ConfigError`` if it is not an HTTP
    address."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an incomplete IPv6 address, or an invalid port
        is_address = False
    if not is_address:
        raise ConfigError(
            f"{without_credentials(url)!r} is not the address of a server; write it as http://localhost:8000."
        )
    path = parts.path if parts.path.strip("/") else "/metrics"
    return parts._replace(path=path).geturl()


def without_credentials(url: str) -> str:
    """Return ``url`` for messages, without the user and password that it may contain."""
    return printable(re.sub(r"^([a-zA-Z]*:?//)?[^/]*@", r"\1", url))


def _scrape(address: str) -> Snapshot:
    url, parts = without_credentials(address), urlsplit(address)
    try:
        request = urllib.request.Request(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
        if parts.username is not None:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            # Not sent to another server that this one redirects to.
            request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(credentials).decode()}")
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            text, date = _content(response).decode(), response.headers["Date"]
    except (OSError, ValueError) as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        what = reason_of(reason) if isinstance(reason, BaseException) else reason
        raise ConfigError(
            f"{url} cannot be read{through_proxy(url)}: {what}; check the address, and that the server is running."
        ) from exc
    except http.client.HTTPException as exc:
        raise ConfigError(
            f"{url} cannot be read{through_proxy(url)}: the answer is not complete HTTP ({exc!r})."
        ) from exc
    unix_s = time.time()
    try:
        server_unix_s = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        server_unix_s = unix_s
    return replace(parse(text, time.monotonic(), unix_s), server_unix_s=server_unix_s)


def _content(response: http.client.HTTPResponse) -> bytes:
    """Return the whole answer. Raises ``ValueError`` if it is too long or takes too long."""
    content, end_s = bytearray(), time.monotonic() + _TIMEOUT_S
    while part := response.read1(1 << 16):
        content += part
        if len(content) > _MOST_BYTES:
            raise ValueError(f"the answer is longer than {format_bytes(_MOST_BYTES)}")
        if time.monotonic() > end_s:
            raise ValueError(f"the answer takes longer than {_TIMEOUT_S:.0f} seconds")
    if response.length:
        raise http.client.IncompleteRead(bytes(content), response.length)
    return bytes(content)


# --------------------------------------------------------------------------------------------------------- the figures


Engine = tuple[tuple[str, str], ...]
"""The labels of a sample that are not kvoffload's own, such as ``engine``. Counters are compared for each of them."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """kvoffload's series at one time."""

    at_s: float
    unix_s: float
    engines: dict[Engine, dict[str, Series]]
    """Values of each engine of the server."""
    started_s: float | None = None
    """Start time of the server's process (``process_start_time_seconds``); ``None`` if the page does not contain it."""
    server_unix_s: float = 0.0
    """The time by the server's clock."""

    def series(self, name: str) -> Series:
        """Return the values of all engines, joined according to ``_JOIN``."""
        join: Callable[[float, float], float] = _JOIN.get(name, operator.add)
        found: Series = {}
        for series in self.engines.values():
            for key, value in series.get(name, {}).items():
                found[key] = join(found[key], value) if key in found else value
        return found

    def total(self, name: str, *labels: str) -> float:
        """Return the sum of the series of a metric whose labels begin with ``labels``."""
        return _sum(self.series(name), labels)


def _sum(series: Series, labels: tuple[str, ...]) -> float:
    return sum(value for key, value in series.items() if key[: len(labels)] == labels)


def parse(text: str, at_s: float, unix_s: float) -> Snapshot:
    """Return the snapshot in ``text``, which is in Prometheus' exposition format. Raises ``ConfigError`` for other
    text."""
    try:
        parser = importlib.import_module("prometheus_client.parser")
    except ImportError as exc:
        raise MissingExtraError("kvoffload top needs kvoffload's extra 'cli': pip install prometheus-client.") from exc
    engines: dict[Engine, dict[str, Series]] = {}
    started_s: float | None = None
    try:
        for family in parser.text_string_to_metric_families(text):
            if family.name == "process_start_time_seconds":
                started_s = max((sample.value for sample in family.samples), default=None)
            name = family.name.removeprefix("kvoffload_").removesuffix("_total")
            if not family.name.startswith("kvoffload_") or name not in METRICS:
                continue
            metric = METRICS[name]
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                key = tuple(printable(sample.labels.get(label, "")) for label in metric.labels)
                if metric.kind is Kind.HISTOGRAM:
                    if not sample.name.endswith("_bucket"):
                        continue
                    key = (*key, sample.labels["le"])
                own = {*metric.labels, "le"}
                engine = tuple(sorted((label, value) for label, value in sample.labels.items() if label not in own))
                of_engine = engines.setdefault(engine, {}).setdefault(name, {})
                of_engine[key] = of_engine.get(key, 0) + sample.value
    except (ValueError, KeyError, IndexError) as exc:
        raise ConfigError(
            f"The server's answer is not a page of metrics: {printable(str(exc))}; give the address of its /metrics."
        ) from exc
    return Snapshot(at_s, unix_s, engines, started_s, unix_s)


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier in one interval. Unknown values are ``None``."""

    name: str
    hit_rate: float | None
    """Share of the prompt tokens that the GPU's own cache did not contain."""
    hit_rate_total: float | None
    """The same since the start."""
    read_bytes_per_s: float
    """Bytes read from the tier; for host memory, bytes loaded to the GPU."""
    write_bytes_per_s: float
    fill: float | None
    """Share of its capacity that is in use."""
    used: float
    """Blocks of host memory, or bytes of the tiers below."""
    queued_blocks: float
    trips: float
    """Number of times that circuit breakers opened since the start."""
    off: tuple[str, ...] = ()
    """The directions (reading, writing) that are off for this tier, each with its last reason."""


@dataclass(frozen=True, slots=True)
class View:
    """The activity between two snapshots, and the current state."""

    seconds: float
    hit_rate: float | None
    """Share, in this interval, of the prompt tokens that the GPU's own cache did not contain."""
    hit_rate_total: float | None
    """The same since the start."""
    lookup_tokens_per_s: float
    requests: float
    requests_waiting: float
    promotions_in_flight: float
    claimed_blocks: float
    pinned_blocks: float
    waits_s: dict[str, float | None] = field(default_factory=dict)
    """Median and 90th percentile of the waits that ended, for lookups and for lower tiers."""
    problems: dict[str, float] = field(default_factory=dict)
    """Rare events that happened in this interval, and the tiers that are off."""
    tiers: tuple[TierView, ...] = ()


_PROBLEMS = {
    "stores rejected": ("primary_stores_refused",),
    "failed loads": ("load_jobs", "failed"),
    "failed reads": ("promotions", "failed"),
    "reads rejected": ("promotions_refused",),
    "time limits reached": ("lookups_out_of_patience",),
    "dropped writes": ("cascades", "dropped"),
    "failed writes": ("tier_store_failures",),
    "disk failures": ("tier_disk_failures",),
    "corrupt blocks": ("tier_corrupt_blocks",),
}


def compare(before: Snapshot, after: Snapshot) -> View:
    """Return the figures for the time between two snapshots of one process."""
    seconds = max(after.at_s - before.at_s, 1e-9)
    bases = {engine: _base(engine, before, after) for engine in after.engines}

    def grown(name: str, *labels: str) -> float:
        return sum(
            max(_sum(series.get(name, {}), labels) - _sum(bases[engine].get(name, {}), labels), 0)
            for engine, series in after.engines.items()
        )

    looked_up = grown("lookup_tokens")

    def share(value: float) -> float | None:
        return min(value / looked_up, 1.0) if looked_up else None

    waits: dict[str, float | None] = {}
    for label, name in (("lookups", "lookup_wait_seconds"), ("lower tiers", "promotion_wait_seconds")):
        for percent in (50, 90):
            buckets = {bound: grown(name, bound) for (bound,) in after.series(name)}
            waits[f"{label} p{percent}"] = quantile(buckets, percent / 100)
    total = after.total("lookup_tokens")

    def view(name: str, read: float, written: float, used: float, room: float, queued: float) -> TierView:
        return TierView(
            "host memory" if name == HOST else name,
            share(grown("tier_hit_tokens", name)),
            after.total("tier_hit_tokens", name) / total if total else None,
            read / seconds,
            written / seconds,
            used / room if room and math.isfinite(room) else None,
            used,
            queued,
            after.total("tier_breaker_trips", name),
            tuple(_off(after, name)),
        )

    stored, loaded = grown("store_bytes"), grown("load_bytes")
    used, blocks = after.total("primary_blocks_used"), after.total("primary_blocks")
    tiers = [view(HOST, loaded, stored, used, blocks, after.total("jobs_in_flight"))]
    for (name,) in after.series("tier_healthy"):
        read, written = (grown("tier_io_bytes", name, direction) for direction in ("read", "write"))
        used, quota = after.total("tier_bytes", name), after.total("tier_quota_bytes", name)
        tiers.append(view(name, read, written, used, quota, after.total("tier_queued_blocks", name)))
    problems = {"tiers off": float(sum(bool(tier.off) for tier in tiers)), "disks out": after.total("tier_disk_out")}
    problems |= {name: grown(*sample) for name, sample in _PROBLEMS.items()}
    return View(
        seconds=seconds,
        hit_rate=share(grown("hit_tokens")),
        hit_rate_total=after.total("hit_tokens") / total if total else None,
        lookup_tokens_per_s=looked_up / seconds,
        requests=after.total("requests_tracked"),
        requests_waiting=after.total("requests_waiting"),
        promotions_in_flight=after.total("promotions_in_flight"),
        claimed_blocks=after.total("claimed_blocks"),
        pinned_blocks=after.total("primary_blocks_pinned"),
        waits_s=waits,
        problems={name: value for name, value in problems.items() if value},
        tiers=tuple(tiers),
    )


def _base(engine: Engine, before: Snapshot, after: Snapshot) -> Mapping[str, Series]:
    """Return the values to compare an engine's counters with: an earlier snapshot, or nothing after a restart of the
    engine. If the page does not contain the start time of its process, another server may have answered; then nothing
    counts as growth."""
    known, now = before.engines.get(engine, {}), after.engines[engine]
    if _sum(now.get("lookup_tokens", {}), ()) >= _sum(known.get("lookup_tokens", {}), ()):
        return known
    return now if after.started_s is None else {}


def _off(now: Snapshot, tier: str) -> Iterable[str]:
    """Return the directions that are off for ``tier``, each with its reason and the time since when."""
    for direction, word in (("read", "reading"), ("write", "writing")):
        if now.total("tier_breaker_open", tier, direction):
            trips = now.series("tier_breaker_last_trip_timestamp_seconds")
            own = [(at_s, reason) for (name, way, reason), at_s in trips.items() if (name, way) == (tier, direction)]
            if own:
                at_s, reason = max(own)
                yield f"{word} off, {reason} for {max(now.unix_s - at_s, 0):.0f} s"
            else:
                yield f"{word} off"


def quantile(cumulative: Mapping[str, float], share: float) -> float | None:
    """Return a quantile from a histogram's buckets by upper bound, interpolated linearly as in Prometheus. Beyond the
    last bound, it is that bound; ``None`` without observations."""
    buckets = sorted((float(bound), count) for bound, count in cumulative.items())
    if not buckets or buckets[-1][1] <= 0:
        return None
    wanted = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for upper, count in buckets:
        if count >= wanted:
            if math.isinf(upper):
                return lower
            return lower + (upper - lower) * (wanted - below) / (count - below) if count > below else upper
        lower, below = upper, count
    return lower


# --------------------------------------------------------------------------------------------------------- the picture


def draw(now: View) -> Group:
    """Return ``now`` as a table and sentences."""
    head = Text.assemble(
        ("hits ", "dim"),
        (_percent(now.hit_rate), "bold"),
        (f" ({_percent(now.hit_rate_total)} since the start)  of ", "dim"),
        f"{now.lookup_tokens_per_s:,.0f} tokens/s",
        ("   requests ", "dim"),
        f"{now.requests:,.0f}, {now.requests_waiting:,.0f} waiting",
        ("   being read ", "dim"),
        f"{now.promotions_in_flight:,.0f} blocks",
        ("   claimed, pinned ", "dim"),
        f"{now.claimed_blocks:,.0f}, {now.pinned_blocks:,.0f} blocks",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("tier", "hits", "in all", "read/s", "written/s", "used", "queued"):
        table.add_column(heading, justify="left" if heading == "tier" else "right", no_wrap=heading != "tier")
    health = []
    for at, tier in enumerate(now.tiers):
        used = f"{tier.used:,.0f} blocks" if at == 0 else format_bytes(tier.used)
        if tier.fill is not None:
            used = f"{tier.fill:.1%}" if at == 0 else f"{used}, {tier.fill:.0%}"
        table.add_row(
            Text(tier.name),  # not a str, whose brackets would be markup
            _percent(tier.hit_rate),
            _percent(tier.hit_rate_total),
            format_bytes(tier.read_bytes_per_s),
            format_bytes(tier.write_bytes_per_s),
            used,
            f"{tier.queued_blocks:,.0f}",
        )
        if tier.off:
            health.append(Text(f"{tier.name}: {'; '.join(tier.off)}", style="red"))
        elif tier.trips:
            health.append(Text(f"{tier.name}: ok ({tier.trips:,.0f} trips so far)", style="green"))
    waits = ", ".join(f"{name} {_seconds(value)}" for name, value in now.waits_s.items() if value is not None)
    problems = ", ".join(f"{name} {value:,.0f}" for name, value in now.problems.items())
    return Group(
        head,
        table,
        *health,
        Text.assemble(("waits: ", "dim"), waits or "none"),
        Text.assemble(("problems: ", "dim"), (problems or "none", "yellow" if problems else "")),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1 else f"{1000 * value:.3g} ms"
