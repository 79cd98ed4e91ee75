# SPDX-License-Identifier: Apache-2.0
"""``kvoffload top``: the activity of a running server's tiers."""

from __future__ import annotations

import http.client
import importlib
import json
import math
import operator
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated
from urllib.parse import urlsplit

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
# Engines of one server share a tier, or each has one of the same size: the fullest counts.
_JOIN = JOIN | {"tier_blocks": max, "tier_bytes": max}
"""Functions that join the values of several engines. The values of all other metrics are added."""
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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """kvoffload's values at one time, joined over the engines of a server."""

    at_s: float
    values: dict[tuple[str, ...], float]
    """Values by metric, and by the values of its labels in the order of ``METRICS``."""

    def total(self, name: str, *labels: str) -> float:
        """Return the sum of the values of a metric whose labels begin with ``labels``."""
        wanted = (name, *labels)
        return sum(value for key, value in self.values.items() if key[: len(wanted)] == wanted)


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
    off: tuple[str, ...] = ()
    """The directions (reading, writing) that are off for this tier, each with its last reason."""


@dataclass(frozen=True, slots=True)
class View:
    """The activity between two snapshots, and the current state."""

    seconds: float
    hit_rate: float | None
    hit_rate_total: float | None
    lookup_tokens_per_s: float
    requests: float
    requests_waiting: float
    promotions_in_flight: float
    problems: dict[str, float]
    """Rare events that happened in this interval, and the tiers that are off."""
    tiers: tuple[TierView, ...]


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
    if "@" in url:
        raise ConfigError("top does not log in; give the address of the server without a user and password.")
    url = url if "//" in url else f"http://{url}"
    try:
        is_address = urlsplit(url).port != 0
    except ValueError:  # an incomplete IPv6 address, or an invalid port
        is_address = False
    if not is_address or not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is not the address of a server; write it as http://localhost:8000.")
    last = scrape(url)
    if not last.values:
        raise ConfigError(
            f"{url} shows no metrics of kvoffload{through_proxy(url)}; check that this server uses kvoffload."
        )
    console = Console()
    with ExitStack() as stack:
        screen = None
        if console.is_terminal and not (once or as_json):
            screen = stack.enter_context(Live(console=console, auto_refresh=False))
        try:
            while True:
                time.sleep(interval)
                try:
                    now = scrape(url)
                except ConfigError as exc:
                    if once:
                        raise
                    print(exc, file=sys.stderr)
                    continue
                view, last = compare(last, now), now
                if as_json:
                    print(json.dumps(asdict(view)), flush=True)
                elif screen is not None:
                    screen.update(draw(view), refresh=True)
                else:
                    console.print(draw(view))
                if once:
                    return
        except KeyboardInterrupt:
            return


def scrape(url: str) -> Snapshot:
    """Return the values of the server at ``url``. Raises ``ConfigError`` if they cannot be read."""
    try:
        path = "" if urlsplit(url).path.strip("/") else "/metrics"
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=_TIMEOUT_S) as response:
            text = response.read().decode()
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise ConfigError(
            f"{url} cannot be read{through_proxy(url)}: {printable(_cause(exc))}; check the address, and that the "
            "server is running."
        ) from exc
    return parse(text, time.monotonic())


def _cause(error: BaseException) -> str:
    inner = error.reason if type(error) is urllib.error.URLError else error
    return reason_of(inner) if isinstance(inner, BaseException) else inner


def parse(text: str, at_s: float) -> Snapshot:
    """Return the snapshot in ``text``, which is in Prometheus' exposition format. Raises ``ConfigError`` for other
    text."""
    try:
        parser = importlib.import_module("prometheus_client.parser")
    except ImportError as exc:
        raise MissingExtraError("kvoffload top needs kvoffload's extra 'cli': pip install prometheus-client.") from exc
    values: dict[tuple[str, ...], float] = {}
    try:
        for family in parser.text_string_to_metric_families(text):
            name = family.name.removeprefix("kvoffload_").removesuffix("_total")
            metric = METRICS.get(name)
            if not family.name.startswith("kvoffload_") or metric is None or metric.kind is Kind.HISTOGRAM:
                continue
            join: Callable[[float, float], float] = _JOIN.get(name, operator.add)
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    key = (name, *(printable(sample.labels.get(label, "")) for label in metric.labels))
                    values[key] = join(values[key], sample.value) if key in values else sample.value
    except (ValueError, KeyError, IndexError) as exc:
        raise ConfigError(
            f"The server's answer is not a page of metrics: {printable(str(exc))}; give the address of the server."
        ) from exc
    return Snapshot(at_s, values)


def compare(before: Snapshot, after: Snapshot) -> View:
    """Return the figures for the time between two snapshots. If a counter falls, the server was restarted, and the
    whole new value counts, as in Prometheus."""
    seconds = max(after.at_s - before.at_s, 1e-9)

    def grown(name: str, *labels: str) -> float:
        old, new = before.total(name, *labels), after.total(name, *labels)
        return new - old if new >= old else new

    looked_up, total = grown("lookup_tokens"), after.total("lookup_tokens")

    def shares(*metric: str) -> tuple[float | None, float | None]:
        """Return the shares of the looked up tokens in this interval and since the start."""
        now, ever = grown(*metric), after.total(*metric)
        return min(now / looked_up, 1.0) if looked_up else None, ever / total if total else None

    def view(name: str, read: float, written: float, used: float, room: float, queued: float) -> TierView:
        return TierView(
            "host memory" if name == HOST else name,
            *shares("tier_hit_tokens", name),
            read / seconds,
            written / seconds,
            used / room if room and math.isfinite(room) else None,
            used,
            queued,
            tuple(
                f"{word} off{_reason(after, name, direction)}"
                for direction, word in (("read", "reading"), ("write", "writing"))
                if after.total("tier_breaker_open", name, direction)
            ),
        )

    used, blocks = after.total("primary_blocks_used"), after.total("primary_blocks")
    tiers = [view(HOST, grown("load_bytes"), grown("store_bytes"), used, blocks, after.total("jobs_in_flight"))]
    for name in dict.fromkeys(key[1] for key in after.values if key[0] == "tier_healthy"):
        read, written = (grown("tier_io_bytes", name, direction) for direction in ("read", "write"))
        used, quota = after.total("tier_bytes", name), after.total("tier_quota_bytes", name)
        tiers.append(view(name, read, written, used, quota, after.total("tier_queued_blocks", name)))
    problems = {"tiers off": float(sum(bool(tier.off) for tier in tiers)), "disks out": after.total("tier_disk_out")}
    problems |= {name: grown(*sample) for name, sample in _PROBLEMS.items()}
    return View(
        seconds,
        *shares("hit_tokens"),
        looked_up / seconds,
        after.total("requests_tracked"),
        after.total("requests_waiting"),
        after.total("promotions_in_flight"),
        {name: value for name, value in problems.items() if value},
        tuple(tiers),
    )


def _reason(now: Snapshot, tier: str, direction: str) -> str:
    """Return the reason why a circuit breaker opened last."""
    place = ("tier_breaker_last_trip_timestamp_seconds", tier, direction)
    return max(((at_s, f", {key[3]}") for key, at_s in now.values.items() if key[:3] == place), default=(0, ""))[1]


def draw(now: View) -> Group:
    """Return ``now`` as a table and sentences."""
    head = Text(
        f"hits {_percent(now.hit_rate)} ({_percent(now.hit_rate_total)} since the start) of "
        f"{now.lookup_tokens_per_s:,.0f} tokens/s, {now.requests:,.0f} requests, {now.requests_waiting:,.0f} waiting, "
        f"{now.promotions_in_flight:,.0f} blocks being read"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("tier", "hits", "total", "read/s", "written/s", "used", "queued"):
        table.add_column(heading, justify="left" if heading == "tier" else "right", no_wrap=heading != "tier")
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
    off = [Text(f"{tier.name}: {'; '.join(tier.off)}", style="red") for tier in now.tiers if tier.off]
    problems = ", ".join(f"{name} {value:,.0f}" for name, value in now.problems.items())
    return Group(head, table, *off, Text(f"problems: {problems or 'none'}", style="yellow" if problems else ""))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
