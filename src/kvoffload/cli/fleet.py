# SPDX-License-Identifier: Apache-2.0
"""The options that describe a fleet, for ``simulate`` and ``plan``, and what they print of fleets."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvoffload.cli import machine
from kvoffload.cli.output import progress, write_json
from kvoffload.errors import ConfigError
from kvoffload.sim.driver import SimConfig
from kvoffload.sim.fleet.cluster import simulate_fleet
from kvoffload.sim.fleet.config import Death, FleetConfig, SharedStore
from kvoffload.sim.fleet.plan import make_fleet_plan
from kvoffload.sim.fleet.report import (
    OUTAGES,
    FleetPrices,
    as_json,
    frontier,
    handovers,
    name_of,
    outage_table,
    saturation,
    table,
    write_page,
)
from kvoffload.sim.fleet.result import FleetResult
from kvoffload.sim.fleet.routers import ROUTERS
from kvoffload.sim.plan import Goal
from kvoffload.sim.sweep import run_all
from kvoffload.sim.trace import Trace
from kvoffload.units import parse_bytes, parse_seconds

__all__ = [
    "Copies",
    "Deaths",
    "Events",
    "HourPrices",
    "PerMachine",
    "Pool",
    "PrefillServers",
    "Routers",
    "Servers",
    "Shared",
    "fleet_configs",
    "hour_prices",
    "plan_fleets",
    "server_numbers",
    "server_range",
    "simulate_fleets",
]

Servers = Annotated[
    str | None, typer.Option(help="Servers of a fleet: a list of numbers. To plan: a number, or FROM:TO.")
]
Routers = Annotated[
    str, typer.Option("--router", help=f"Routers to compare: {', '.join(ROUTERS)}, or module:function.")
]
Shared = Annotated[
    list[str] | None,
    typer.Option(
        help="A tier that all servers share: 'SIZE,link=BYTES,store=BYTES,latency=S,ttl=S,away=FROM:TO', or none. "
        "Repeat to compare. link is a server's speed, store the store's."
    ),
]
Pool = Annotated[str | None, typer.Option(help="A tier that the servers of one machine share, written likewise.")]
PerMachine = Annotated[int, typer.Option("--servers-per-machine", min=1, help="Servers of one machine.")]
PrefillServers = Annotated[int, typer.Option(min=0, help="Servers that only prefill; the others then decode.")]
Deaths = Annotated[
    list[str] | None, typer.Option("--death", help="SERVER@FROM:TO, in seconds: a server that is gone for a time.")
]
Events = Annotated[str, typer.Option(help="KV events on their way to a router: 'delay=S,loss=SHARE'.")]
Copies = Annotated[int, typer.Option(min=1, help="As many groups of users as the trace has, at once.")]
HourPrices = Annotated[
    str,
    typer.Option(
        "--hour-prices", help="Prices per hour: 'server=10,cpu=0.004,disk=0.0001,shared=0.005,link=0.05' (GiB, GB/s)."
    ),
]


@contextmanager
def _without_advice() -> Iterator[None]:
    """Advice to operators is of use for machines that exist."""
    log = logging.getLogger("kvoffload.tiering.load_policy")
    log.addFilter(_nothing)
    try:
        yield
    finally:
        log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _settings(text: str, option: str, allowed: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(what stands first without a name, the named ones) of ``"2TiB,link=3GB"``."""
    first, named = "", {}
    for at, part in enumerate(filter(None, map(str.strip, text.split(",")))):
        name, equals, value = part.partition("=")
        if not equals and at == 0:
            first = part
        elif equals and name in allowed:
            named[name] = value
        else:
            raise ConfigError(f"{option}: {part!r} is not one of {', '.join(f'{each}=' for each in allowed)}.")
    return first, named


def _times(text: str, option: str) -> tuple[float, float]:
    begin, colon, end = text.partition(":")
    try:
        if colon and float(begin) < float(end):
            return float(begin), float(end)
    except ValueError:
        pass
    raise ConfigError(f"{option}: {text!r} is not FROM:TO in seconds, such as 600:660.")


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError as exc:
        raise ConfigError(f"{option}: {text!r} is not a number.") from exc


def _store(text: str, option: str, trace: Trace, block_bytes: int) -> SharedStore | None:
    if text == "none":
        return None
    size, named = _settings(text, option, ("link", "store", "latency", "ttl", "away"))
    [blocks] = machine.capacities(size, option, trace, block_bytes)
    changes: dict[str, object] = {}
    for name, target in (("link", "server_bytes_per_s"), ("store", "store_bytes_per_s")):
        if name in named:
            changes[target] = float(parse_bytes(named[name], f"{option} {name}"))
    if "latency" in named:
        changes["latency_s"] = _number(named["latency"], f"{option} latency")
    if "ttl" in named:
        changes["ttl_s"] = parse_seconds(named["ttl"], f"{option} ttl")
    if "away" in named:
        changes["away"] = (_times(named["away"], f"{option} away"),)
    return SharedStore(blocks, **changes)  # type: ignore[arg-type]


def _death(text: str) -> Death:
    server, at, times = text.partition("@")
    if not at or not server.isdecimal():
        raise ConfigError(f"--death: {text!r} is not SERVER@FROM:TO, such as 3@600:900.")
    return Death(int(server), *_times(times, "--death"))


def hour_prices(text: str) -> FleetPrices:
    names = dict(
        zip(("server", "cpu", "disk", "shared", "link"), (each.name for each in fields(FleetPrices)), strict=True)
    )
    _, named = _settings(text, "--hour-prices", tuple(names))
    return FleetPrices(**{names[name]: _number(value, "--hour-prices") for name, value in named.items()})


def server_numbers(text: str) -> list[int]:
    """The fleets to simulate."""
    found = re.fullmatch(r"\s*\d+(?:\s*,\s*\d+)*\s*", text)
    numbers = [int(part) for part in text.split(",")] if found else []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--servers is a list of numbers such as 4,8, not {text!r}.")
    return numbers


def server_range(text: str) -> tuple[int, int]:
    """The smallest and the largest fleet that a plan may name."""
    found = re.fullmatch(r"\s*(\d+)(?::(\d+))?\s*", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"--servers is a number, or a range such as 1:64, not {text!r}.")
    return least, most


def fleet_configs(
    trace: Trace,
    servers: Sequence[SimConfig],
    routers: str,
    shared: Sequence[str] | None,
    pool: str | None,
    per_machine: int,
    prefill_servers: int,
    deaths: Sequence[str] | None,
    events: str,
    numbers: Sequence[int],
) -> list[FleetConfig]:
    """Every combination, one after the other."""
    block_bytes = servers[0].block_bytes
    _, named = _settings(events, "--events", ("delay", "loss"))
    stores = [_store(text, "--shared", trace, block_bytes) for text in shared or ["none"]]
    pooled = None if pool is None else _store(pool, "--pool", trace, block_bytes)
    outages = tuple(map(_death, deaths or ()))
    delay_s, loss = (_number(named.get(name, "0"), f"--events {name}") for name in ("delay", "loss"))
    names = [name for name in map(str.strip, routers.split(",")) if name]
    if not names:
        raise ConfigError("--router needs at least one router.")
    found = [
        FleetConfig(
            server,
            number,
            router,
            store if server.cpu_blocks else None,
            pooled,
            per_machine,
            prefill_servers,
            outages,
            delay_s,
            loss,
        )
        for number in numbers
        for router in names
        for store in stores
        for server in servers
    ]
    return [*dict.fromkeys(found)]  # servers without host memory have no shared tier


def simulate_fleets(
    trace: Trace,
    configs: Sequence[FleetConfig],
    prices: FleetPrices,
    processes: int | None,
    is_wide: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Replays the trace on every fleet, and prints, writes and draws the figures."""
    trace = trace.whole_blocks()
    results: list[FleetResult | None] = [None] * len(configs)
    if len(configs) == 1:
        step = max(len(trace) // 100, 1)
        with _without_advice(), progress({trace.name: len(trace) // step}, "parts") as advance:
            done = 0

            def count(_: int) -> None:
                nonlocal done
                done += 1
                if done % step == 0:
                    advance(trace.name)

            results = [simulate_fleet(trace, configs[0], progress=count)]
    else:
        with _without_advice(), progress({trace.name: len(configs)}, "fleets") as advance:
            for at, result in run_all(simulate_fleet, trace, configs, processes):
                results[at] = result
                advance(trace.name)
    done_results = [result for result in results if result is not None]
    _print(trace, done_results, prices, is_wide)
    write_json(as_json(trace, done_results, prices), json_file)
    if plot is not None:
        write_page(trace, done_results, prices, plot)


def _print(trace: Trace, results: Sequence[FleetResult], prices: FleetPrices, is_wide: bool) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=220)
    _draw(console, f"{trace.name}: {len(trace):,} requests", *table(results, prices, is_wide))
    headings, outages = outage_table(results)
    if outages:
        _draw(console, OUTAGES, headings, outages)
    for text in handovers(results):
        console.print(text, highlight=False)
    if said := saturation(results):
        console.print(said, highlight=False)
    if len(results) > 2:
        best = "; ".join(name_of(each.config) for each in frontier(results, prices))
        console.print(f"Frontier of cost and first token: {best}.", highlight=False)


def _draw(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    drawn = Table(title=title, title_justify="left")
    for at, heading in enumerate(headings):
        drawn.add_column(heading, justify="left" if at < 2 else "right", no_wrap=at > 1)
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


def plan_fleets(
    trace: Trace,
    configs: Sequence[FleetConfig],
    goal: Goal,
    prices: FleetPrices,
    ends: tuple[int, int],
    processes: int | None,
    is_wide: bool,
    json_file: Path | None,
    plot: Path | None,
) -> bool:
    """Prints the cheapest fleet that meets the goal. Whether there is one."""
    trace = trace.whole_blocks()
    with _without_advice(), progress({trace.name: None}, "fleets") as advance:
        made = make_fleet_plan(trace, configs, goal, prices, *ends, processes, lambda _: advance(trace.name))
    _print(trace, made.results, prices, is_wide)
    reached = made.chosen or made.best
    figures = f"{100 * reached.hit_rate:.1f} % hits, {goal.quantile} {reached.ttft_s[goal.quantile]:.3g} s"
    console = Console()
    console.print(f"{made.advice} {figures}, {prices.per_hour(reached.config):,.2f} an hour.", highlight=False)
    write_json({"advice": made.advice, **as_json(trace, made.results, prices)}, json_file)
    if plot is not None:
        write_page(trace, made.results, prices, plot)
    return made.chosen is not None
