# SPDX-License-Identifier: Apache-2.0
"""A fleet's figures as rows, JSON and one page; what a fleet costs, and which fleets are worth their price."""

from __future__ import annotations

import html
import importlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.sim import page
from kvoffload.sim.fleet.config import FleetConfig
from kvoffload.sim.fleet.result import FleetResult
from kvoffload.sim.page import COLOURS, check_target, pyplot, write_drawing
from kvoffload.sim.report import SATURATED, format_seconds
from kvoffload.sim.trace import Trace
from kvoffload.units import format_bytes

__all__ = [
    "OUTAGES",
    "FleetPrices",
    "as_json",
    "frontier",
    "handovers",
    "name_of",
    "outage_table",
    "saturation",
    "table",
    "write_page",
]

_OPTIONAL = ("memory", "disk", "shared")
"""Columns that are left out where no fleet has the tier."""
_TIERS = ("device", "host", "disk", "pool", "shared", "?")


@dataclass(frozen=True, slots=True)
class FleetPrices:
    """What a fleet costs in an hour, in any currency. Raises ``ConfigError`` for negative prices."""

    server: float = 10.0
    cpu_per_gib: float = 0.004
    disk_per_gib: float = 0.0001
    shared_per_gib: float = 0.005
    link_per_gbyte_s: float = 0.05
    """Of each server's link to what is shared, by GB/s."""

    def __post_init__(self) -> None:
        if not all(math.isfinite(price) and price >= 0 for price in asdict(self).values()):
            raise ConfigError("Prices must be finite numbers, and not negative.")

    def per_hour(self, config: FleetConfig) -> float:
        gib = config.server.block_bytes / 2**30
        server = self.server + gib * (
            config.server.cpu_blocks * self.cpu_per_gib + config.server.disk_blocks * self.disk_per_gib
        )
        total = config.servers * server
        if config.shared is not None:
            total += gib * config.shared.blocks * self.shared_per_gib
            total += config.servers * config.shared.server_bytes_per_s / 1e9 * self.link_per_gbyte_s
        if config.pool is not None:
            total += gib * config.pool.blocks * self.cpu_per_gib * config.machines
        return total

    def per_million_tokens(self, result: FleetResult) -> float:
        """Of prompts, whether computed or found."""
        return self.per_hour(result.config) * result.duration_s / 3600 / max(result.input_tokens / 1e6, 1e-9)


def table(
    results: Sequence[FleetResult], prices: FleetPrices, is_wide: bool = False
) -> tuple[list[str], list[list[str]]]:
    """The headings and a row for each fleet. Otherwise than ``is_wide`` a terminal of 80 columns holds it."""
    tiers = [tier for tier in _TIERS if any(result.hit_blocks[tier] for result in results)]
    headings = ["servers", "router", "memory", "disk", "shared", "hits %", "p50", "p90", "cost/M"]
    if is_wide:
        headings += [f"{tier} %" for tier in tiers]
        headings += ["p99", "tokens/s", "busiest %", "imbalance", "read", "written", "cost/h"]
    rows = []
    for result in results:
        config, block_bytes = result.config, result.config.server.block_bytes
        row = [
            _servers(config),
            config.router,
            format_bytes(config.server.cpu_blocks * block_bytes) if config.server.cpu_blocks else "-",
            format_bytes(config.server.disk_blocks * block_bytes) if config.server.disk_blocks else "-",
            format_bytes(config.shared.blocks * block_bytes) if config.shared else "-",
            f"{100 * result.hit_rate:.2f}",
            format_seconds(result.ttft_s["p50"]),
            format_seconds(result.ttft_s["p90"]),
            f"{prices.per_million_tokens(result):.4g}",
        ]
        if is_wide:
            row += [f"{100 * result.hit_blocks[tier] / max(result.accesses, 1):.2f}" for tier in tiers]
            row += [
                format_seconds(result.ttft_s["p99"]),
                f"{result.computed_tokens_per_s:,.0f}",
                f"{100 * result.utilisation:.0f}",
                f"{result.imbalance:.2f}",
                format_bytes(_link_bytes(result, "read")),
                format_bytes(_link_bytes(result, "written")),
                f"{prices.per_hour(config):,.2f}",
            ]
        rows.append(row)
    kept = [at for at, name in enumerate(headings) if name not in _OPTIONAL or any(row[at] != "-" for row in rows)]
    return [headings[at] for at in kept], [[row[at] for at in kept] for row in rows]


def _servers(config: FleetConfig) -> str:
    apart = config.prefill_servers
    return f"{apart}+{config.servers - apart}" if apart else str(config.servers)


def _link_bytes(result: FleetResult, direction: str) -> int:
    """Bytes that crossed the servers' links to what is shared."""
    sides = [server.read_bytes if direction == "read" else server.written_bytes for server in result.servers]
    return sum(side.get(tier, 0) for side in sides for tier in ("shared", "pool"))


def name_of(config: FleetConfig) -> str:
    """Of a fleet among others."""
    sizes = [
        (blocks, where)
        for blocks, where in (
            (config.server.cpu_blocks, "of memory"),
            (config.server.disk_blocks, "of disk"),
            (config.pool.blocks if config.pool else 0, "of pool"),
            (config.shared.blocks if config.shared else 0, "of shared tier"),
        )
        if blocks
    ]
    parts = [f"{format_bytes(blocks * config.server.block_bytes)} {where}" for blocks, where in sizes]
    return ", ".join([f"{_servers(config)} servers", config.router, *parts])


OUTAGES = "Outages: before / meanwhile / after"
"""The title of the table of outages."""


def outage_table(results: Sequence[FleetResult]) -> tuple[list[str], list[list[str]]]:
    """The headings and a row for each outage of each fleet, under the title ``OUTAGES``."""

    def course(figures: Sequence[float | None], factor: float) -> str:
        return " / ".join("-" if figure is None else f"{factor * figure:.1f}" for figure in figures)

    return ["fleet", "away", "hits %", "p90, seconds", "as before"], [
        [
            name_of(result.config),
            outage.what,
            course(outage.hit_rates, 100),
            course(outage.ttft_p90_s, 1),
            "-" if outage.recovery_s is None else f"+{format_seconds(outage.recovery_s)}",
        ]
        for result in results
        for outage in result.outages
    ]


def handovers(results: Sequence[FleetResult]) -> list[str]:
    """What to say of fleets that prefill apart."""
    return [
        f"{name_of(result.config)}: a decoding server finds {100 * result.handed_over:.1f} % of the blocks and "
        f"computes those that have not arrived. That takes {format_seconds(result.handover_s['p50'])} (p50), "
        f"{format_seconds(result.handover_s['p99'])} (p99) after the first token."
        for result in results
        if result.handover_s
    ]


def saturation(results: Sequence[FleetResult]) -> str:
    """What to say of fleets whose busiest server cannot keep up; empty if there is none."""
    busy = [result for result in results if result.utilisation > SATURATED]
    if not busy:
        return ""
    return (
        f"{len(busy)} of the fleets cannot keep up: their busiest server works {100 * SATURATED:.0f} % of the time "
        "or more, and requests queue. Their times only say that there are too few servers; --stretch gives a lighter "
        "load."
    )


def frontier(results: Sequence[FleetResult], prices: FleetPrices, quantile: str = "p90") -> list[FleetResult]:
    """Fleets of which no cheaper one has its first token sooner, by price."""
    best: list[FleetResult] = []
    for result in sorted(results, key=lambda each: (prices.per_million_tokens(each), each.ttft_s[quantile])):
        if not best or result.ttft_s[quantile] < best[-1].ttft_s[quantile]:
            best.append(result)
    return best


def as_json(trace: Trace, results: Sequence[FleetResult], prices: FleetPrices) -> dict[str, Any]:
    """All figures in plain values."""
    return {
        "trace": trace.name,
        "requests": len(trace),
        "block_tokens": trace.block_tokens,
        "prices": asdict(prices),
        "fleets": [
            asdict(result)
            | {
                "accesses": result.accesses,
                "hit_rate": result.hit_rate,
                "handed_over": result.handed_over,
                "hit_blocks": dict(result.hit_blocks),
                "computed_tokens_per_s": result.computed_tokens_per_s,
                "utilisation": result.utilisation,
                "imbalance": result.imbalance,
                "cost_per_hour": prices.per_hour(result.config),
                "cost_per_million_tokens": prices.per_million_tokens(result),
            }
            for result in results
        ],
    }


def write_page(trace: Trace, results: Sequence[FleetResult], prices: FleetPrices, path: Path) -> None:
    """Draws first tokens against cost to ``path``, a PNG or a self-contained page with the tables. Writes the whole
    file or nothing. Raises as ``check_target`` does."""
    check_target(path)
    write_drawing(_draw(trace, results, prices), path, lambda svg: _page(trace, results, prices, svg))


def _draw(trace: Trace, results: Sequence[FleetResult], prices: FleetPrices) -> Any:
    figure, axes = pyplot().subplots(figsize=(9, 5.4), layout="constrained")
    for colour, router in zip(COLOURS * 3, dict.fromkeys(result.config.router for result in results), strict=False):
        of = [result for result in results if result.config.router == router]
        for is_shared, marker in ((True, "o"), (False, "x")):
            some = [result for result in of if (result.config.shared is not None) is is_shared]
            if some:
                axes.scatter(
                    [prices.per_million_tokens(result) for result in some],
                    [result.ttft_s["p90"] for result in some],
                    color=colour,
                    marker=marker,
                    label=f"{router}, {'shared tier' if is_shared else 'no shared tier'}",
                )
        for result in of:
            at = prices.per_million_tokens(result), result.ttft_s["p90"]
            axes.annotate(str(result.config.servers), at, xytext=(4, 4), textcoords="offset points", fontsize=8)
    best = frontier(results, prices)
    axes.plot(
        [prices.per_million_tokens(result) for result in best],
        [result.ttft_s["p90"] for result in best],
        color="#495057",
        linewidth=1,
        drawstyle="steps-post",
        label="frontier",
    )
    ticker = importlib.import_module("matplotlib.ticker")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
    axes.set_xlabel("cost of a million prompt tokens")
    axes.set_ylabel("first token, p90")
    axes.set_title(f"{trace.name}: {len(trace):,} requests; numbers are servers", loc="left", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _page(trace: Trace, results: Sequence[FleetResult], prices: FleetPrices, svg: str) -> str:
    parts = [svg, page.table(*table(results, prices, is_wide=True))]
    parts += [f"<p>{html.escape(text)}</p>" for text in handovers(results)]
    headings, outages = outage_table(results)
    if outages:
        parts += [f"<h2>{OUTAGES}</h2>", page.table(headings, outages)]
    parts.append("<h2>Servers</h2>")
    for result in results:
        tiers = [tier for tier in _TIERS if any(server.hit_blocks.get(tier) for server in result.servers)]
        shares = [
            [
                str(number),
                f"{server.requests:,}",
                *(
                    f"{100 * blocks / max(server.accesses, 1):.2f}"
                    for blocks in (sum(server.hit_blocks.values()), *(server.hit_blocks.get(tier, 0) for tier in tiers))
                ),
                f"{100 * server.busy_s / max(result.duration_s, 1e-9):.0f}",
            ]
            for number, server in enumerate(result.servers)
        ]
        headings = ["server", "requests", "hits %", *(f"{tier} %" for tier in tiers), "busy %"]
        title = html.escape(name_of(result.config))
        parts.append(f"<details><summary>{title}</summary>{page.table(headings, shares)}</details>")
    return page.page(trace.name, *parts)
