# SPDX-License-Identifier: Apache-2.0
"""The figures of sweeps and of fleets as tables of text, as sentences and as plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from kvoffload.sim.config import FleetConfig, Prices
from kvoffload.sim.explain import Explanations, WhatIf, advice_on, where_names
from kvoffload.sim.result import Result, quantiles
from kvoffload.sim.sweep import Report, knee
from kvoffload.sim.table import Table
from kvoffload.sim.trace import Trace
from kvoffload.units import counted, format_bytes

NO_FORECAST = "Times compare configurations; they are no forecast."
"""The caveat of all times that are shown."""


def format_seconds(value: float) -> str:
    """Three digits, of milliseconds below a second."""
    if abs(value) < 1:
        return f"{1000 * value:.3g} ms" if abs(value) >= 1e-4 else "0 ms"
    return f"{value:,.0f} s" if abs(value) >= 100 else f"{value:.3g} s"


def _size(blocks: int, block_bytes: int) -> str:
    return format_bytes(blocks * block_bytes) if blocks else "-"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / max(whole, 1):.2f}"


def saturation(results: Sequence[Result]) -> str:
    """What to say of runs whose busiest server cannot keep up; empty if there is none."""
    busy = [result.utilisation for result in results if result.is_overloaded]
    if not busy:
        return ""
    return (
        f"{len(busy)} of {counted(len(results), 'run')} cannot keep up with this trace: a server is busy "
        f"{100 * min(busy):.0f} % of the time or more, and requests queue. Hit rates hold; times only say that "
        "there is too little to serve it. A higher --prefill-speed, more servers, or stretch in the file of --fleet "
        "gives a load that can be carried."
    )


# -------------------------------------------------------------------------------------------------------- one server


def sweep_table(report: Report) -> Table:
    """A row for each run, the one without offloading first. The columns that decide come first.

    *gained* is the mean time to first token that the run saves against the one without offloading.
    """
    runs: list[tuple[Result, float | None]] = list(zip(report.results, report.optimum_rates, strict=True))
    if report.without is not None:
        runs.insert(0, (report.without, None))
    cells = [_cells(report, result, bound) for result, bound in runs]
    return Table([*cells[0]], [[*row.values()] for row in cells]).without_empty()


def _cells(report: Report, result: Result, bound: float | None) -> dict[str, str]:
    without, size = report.without, report.block_bytes
    has_gpu = any(each.gpu_blocks for each in report.results)
    has_disk = any(each.disk_blocks for each in report.results)
    policy = f"{result.policy}, {result.server.cascade_mode}" if result.disk_blocks else result.policy
    return {
        "policy": policy if result.cpu_blocks else "none",
        "memory": _size(result.cpu_blocks, size),
        "disk": _size(result.disk_blocks, size),
        "hits %": f"{100 * result.hit_rate:.2f}",
        "TTFT p50": format_seconds(result.ttft_s["p50"]),
        "gained": format_seconds(without.ttft_s["mean"] - result.ttft_s["mean"])
        if without and result is not without
        else "-",
        "optimum %": f"{100 * bound:.2f}" if bound is not None else "-",
        "busy %": f"{100 * result.utilisation:.0f}",
        "gpu %": _percent(result.gpu_hit_blocks, result.accesses) if has_gpu else "-",
        "cpu %": _percent(result.cpu_hit_blocks, result.accesses) if has_gpu or has_disk else "-",
        "disk %": _percent(result.disk_hit_blocks, result.accesses) if has_disk else "-",
        "declined %": _percent(result.sum_of("declined_blocks"), result.accesses) if has_disk else "-",
        "loaded": format_bytes(result.sum_of("loaded_blocks") * size),
        "stored": format_bytes(result.sum_of("stored_blocks") * size),
        "disk written": format_bytes(moved_blocks(result, "written") * size) if result.disk_blocks else "-",
        "saved prefill": format_seconds(result.saved_prefill_s),
        "p99": format_seconds(result.ttft_s["p99"]),
    }


def moved_blocks(result: Result, direction: str) -> int:
    """Blocks that were ``read`` from tiers below host memory, or ``written`` to them."""
    return sum(sum(getattr(server, f"{direction}_blocks").values()) for server in result.servers)


def figures_of(result: Result) -> dict[str, Any]:
    """The figures of one server as plain values."""
    server, tokens, size = result.server, result.block_tokens, result.server.block_bytes
    by_tier = {"gpu": result.gpu_hit_blocks, "cpu": result.cpu_hit_blocks, "disk": result.disk_hit_blocks}
    same = ("computed_tokens", "preemptions", "cpu_evicted_blocks", "disk_evicted_blocks", "declined_blocks")
    return {
        "policy": server.policy,
        "gpu_blocks": server.gpu_blocks,
        "cpu_blocks": server.cpu_blocks,
        "disk_blocks": server.disk_blocks,
        "cascade": server.cascade_mode,
        "requests": result.requests,
        "accesses": result.accesses,
        "input_tokens": result.input_tokens,
        **{f"{tier}_hit_blocks": blocks for tier, blocks in by_tier.items()},
        **{f"{tier}_hit_tokens": blocks * tokens for tier, blocks in by_tier.items()},
        "loaded_bytes": result.sum_of("loaded_blocks") * size,
        "stored_bytes": result.sum_of("stored_blocks") * size,
        "disk_read_bytes": moved_blocks(result, "read") * size,
        "disk_written_bytes": moved_blocks(result, "written") * size,
        **{name: result.sum_of(name) for name in (*same, "refused_stores", "prefill_s")},
        "saved_prefill_s": result.saved_prefill_s,
        "utilisation": result.utilisation,
        "duration_s": result.duration_s,
        "ttft_s": result.ttft_s,
        "hit_rate": result.hit_rate,
        "token_hit_rate": result.token_hit_rate,
    }


def sweep_as_json(report: Report) -> dict[str, Any]:
    return {
        "trace": report.trace.name,
        "requests": len(report.trace),
        "accesses": report.trace.num_accesses,
        "unique_blocks": report.trace.num_unique,
        "block_tokens": report.trace.block_tokens,
        "block_bytes": report.block_bytes,
        "reachable_hit_rate": report.reachable_rate,
        "without_offloading": None if report.without is None else figures_of(report.without),
        "runs": [
            figures_of(result) | {"optimum_hit_rate": bound}
            for result, bound in zip(report.results, report.optimum_rates, strict=True)
        ],
    }


def curve(report: Report, policy: str) -> list[tuple[Result, float]]:
    """(run, optimum) of one policy by rising host memory; of several disks the largest, of two cascades the better."""
    found: dict[int, tuple[Result, float]] = {}
    for result, bound in zip(report.results, report.optimum_rates, strict=True):
        if result.policy == policy:
            known = found.get(result.cpu_blocks)
            if known is None or (known[0].disk_blocks, known[0].hit_rate) <= (result.disk_blocks, result.hit_rate):
                found[result.cpu_blocks] = result, bound
    return [found[size] for size in sorted(found)]


def best_policy(report: Report) -> str:
    """The policy with the most hits, summed over all runs."""
    names = dict.fromkeys(result.policy for result in report.results)
    return max(names, key=lambda name: sum(result.hit_rate for result in report.results if result.policy == name))


def knee_of(report: Report, policy: str) -> Result:
    """The run at the curve's knee: beyond it more host memory brings less and less."""
    runs = [result for result, _ in curve(report, policy)]
    return runs[knee([run.cpu_blocks for run in runs], [run.hit_rate for run in runs])]


# ------------------------------------------------------------------------------------------------------------- fleets

_TIERS = ("device", "host", "disk", "pool", "shared")


def _identity(config: FleetConfig) -> dict[str, str]:
    """What a fleet is, by the heading of its column; ``-`` for nothing."""
    server, apart = config.server, config.prefill_servers
    found = {
        "servers": f"{apart}+{config.servers - apart}" if apart else str(config.servers),
        "router": config.router,
        "policy": server.policy,
        "memory": _size(server.cpu_blocks, server.block_bytes),
        "disk": _size(server.disk_blocks, server.block_bytes),
        "cascade": server.cascade_mode if server.disk_blocks else "-",
    }
    for name, store in (("pool", config.pool), ("shared", config.shared)):
        found |= {
            name: _size(store.blocks, server.block_bytes) if store else "-",
            f"{name} link": f"{store.server_bytes_per_s / 1e9:g} GB/s" if store else "-",
            f"{name} store": f"{store.store_bytes_per_s / 1e9:g} GB/s" if store else "-",
            f"{name} latency": format_seconds(store.latency_s) if store else "-",
            f"{name} ttl": "-" if not store else f"{store.ttl_s:g} s" if store.ttl_s < math.inf else "endless",
            f"{name} away": "; ".join(f"{begin:g}-{end:g} s" for begin, end in store.away) or "never" if store else "-",
        }
    return found


def _identities(results: Sequence[Result]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """What distinguishes each fleet from the others, servers and routers at least; and what all are."""
    every = [_identity(result.config) for result in results]
    common: dict[str, str] = {}
    for name in every[0].keys() - {"servers", "router"}:
        texts = {each[name] for each in every}
        if name not in ("policy", "memory", "disk", "pool", "shared") and len(texts) > 1:
            texts -= {"-"}  # a detail of what not all fleets have
        if len(texts) == 1:
            (common[name],) = texts
    common = {name: common[name] for name in every[0] if name in common}
    return [{name: text for name, text in each.items() if name not in common} for each in every], common


def names_of(results: Sequence[Result]) -> list[str]:
    """A name for each fleet, among the others."""
    found = []
    for each in _identities(results)[0]:
        servers, router = each.pop("servers"), each.pop("router")
        parts = [f"{name} {text}" for name, text in each.items() if text != "-"]
        found.append(", ".join([f"{servers} server{'' if servers == '1' else 's'}", router, *parts]))
    return found


def common_of(results: Sequence[Result]) -> str:
    """What all fleets have, in a line."""
    usual = ("-", "never", "endless")
    return ", ".join(f"{name} {text}" for name, text in _identities(results)[1].items() if text not in usual)


def fleet_table(results: Sequence[Result], prices: Prices) -> Table:
    """A row for each fleet. The columns that decide come first."""
    tiers = [tier for tier in _TIERS if any(result.hit_blocks[tier] for result in results)]
    rows = []
    for identity, result in zip(_identities(results)[0], results, strict=True):
        row = identity | {
            "hits %": f"{100 * result.hit_rate:.2f}",
            "p50": format_seconds(result.ttft_s["p50"]),
            "p90": format_seconds(result.ttft_s["p90"]),
            "cost/M": f"{result.cost_per_million_tokens(prices):.3g}",
        }
        row |= {f"{tier} %": _percent(result.hit_blocks[tier], result.accesses) for tier in tiers}
        row |= {
            "p99": format_seconds(result.ttft_s["p99"]),
            "tokens/s": f"{result.computed_tokens_per_s:,.0f}",
            "busiest %": f"{100 * result.utilisation:.0f}",
            "imbalance": f"{result.imbalance:.2f}",
            "read": _link_bytes(result, "read"),
            "written": _link_bytes(result, "written"),
            "cost/h": f"{prices.of_fleet(result.config):,.2f}",
        }
        rows.append(row)
    return Table([*rows[0]], [[*row.values()] for row in rows]).without_empty()


def _link_bytes(result: Result, direction: str) -> str:
    """Bytes that crossed the servers' links to what is shared."""
    if result.config.shared is None and result.config.pool is None:
        return "-"
    sides = [getattr(server, f"{direction}_blocks") for server in result.servers]
    return format_bytes(
        result.server.block_bytes * sum(side.get(tier, 0) for side in sides for tier in ("shared", "pool"))
    )


def outage_table(results: Sequence[Result]) -> Table | None:
    """A row for each outage of each fleet; ``None`` without outages."""

    def course(figures: Sequence[float | None], shown: Callable[[float], str]) -> str:
        return " / ".join("-" if figure is None else shown(figure) for figure in figures)

    rows = [
        [
            name,
            outage.what,
            course(outage.hit_rates, lambda rate: f"{100 * rate:.1f}"),
            course(outage.ttft_p90_s, format_seconds),
            "-" if outage.recovery_s is None else format_seconds(outage.recovery_s),
        ]
        for name, result in zip(names_of(results), results, strict=True)
        for outage in result.outages
    ]
    return Table(["fleet", "away", "hits %", "p90", "recovered after"], rows) if rows else None


def server_table(result: Result) -> Table:
    tiers = [tier for tier in _TIERS if any(server.hit_blocks.get(tier) for server in result.servers)]
    rows = [
        [
            str(number),
            f"{server.requests:,}",
            _percent(sum(server.hit_blocks.values()), server.accesses),
            *(_percent(server.hit_blocks.get(tier, 0), server.accesses) for tier in tiers),
            f"{100 * server.busy_s / max(result.duration_s, 1e-9):.0f}",
        ]
        for number, server in enumerate(result.servers)
    ]
    return Table(["server", "requests", "hits %", *(f"{tier} %" for tier in tiers), "busy %"], rows)


def handovers(results: Sequence[Result]) -> list[str]:
    """What to say of fleets that prefill apart."""
    return [
        f"{name}: a decoding server finds {100 * result.handed_over:.1f} % of the blocks and computes those that have "
        f"not arrived. That takes {format_seconds(result.handover_s['p50'])} (p50), "
        f"{format_seconds(result.handover_s['p99'])} (p99) after the first token."
        for name, result in zip(names_of(results), results, strict=True)
        if result.handover_s
    ]


def frontier(results: Sequence[Result], prices: Prices) -> list[Result]:
    """Of the fleets that keep up, those of which no cheaper one has its first token (p90) sooner, by price."""
    best: list[Result] = []
    keeping_up = [result for result in results if not result.is_overloaded]
    for result in sorted(keeping_up, key=lambda each: (each.cost_per_million_tokens(prices), each.ttft_s["p90"])):
        if not best or result.ttft_s["p90"] < best[-1].ttft_s["p90"]:
            best.append(result)
    return best


def fleets_as_json(trace: Trace, results: Sequence[Result], prices: Prices) -> dict[str, Any]:
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
                "cost_per_hour": prices.of_fleet(result.config),
                "cost_per_million_tokens": result.cost_per_million_tokens(prices),
            }
            for result in results
        ],
    }


# ------------------------------------------------------------------------------------------------------- explanations


def explanation_tables(summary: Explanations, asked: Sequence[WhatIf]) -> dict[str, Table]:
    """The tables of an explained trace, by their titles."""

    def share(tokens: int) -> str:
        return f"{100 * tokens / summary.tokens:.1f} %"

    where = [(word, summary.found[key]) for key, word in where_names(summary.found)]
    where.append(("computed", sum(summary.missed.values())))
    causes = [
        [
            cause,
            f"{tokens:,}",
            share(tokens),
            format_seconds(summary.lost_s[cause]) if cause in summary.lost_s else "-",
            advice_on(cause),
        ]
        for cause, tokens in summary.missed.items()
    ]
    waits = [
        [phase, f"{len(seconds):,}", *(format_seconds(found[name]) for name in ("p50", "p90", "max"))]
        for phase, seconds in sorted(summary.waits_s.items(), key=lambda item: -sum(item[1]))
        for found in [quantiles(seconds)]
    ]
    sources = [
        [tier, f"{len(by_place[tier]):,}", format_seconds(median(by_place[tier])), _beaten(tier, by_place)]
        for tier, by_place in sorted(summary.weighed_s.items())
    ]
    why_there = {"Why from there": Table(["from", "requests", "expected", "would have taken"], sources)}
    return {
        "Where the tokens came from": Table(
            ["where", "tokens", "share"], [[word, f"{tokens:,}", share(tokens)] for word, tokens in where]
        ),
        **(why_there if sources else {}),
        "Why the rest was computed": Table(["cause", "tokens", "share", "lost before", "what it means"], causes),
        "What would have saved most, by the simulator, which begins with empty tiers": Table(
            ["change", "found", "more", "saves", "memory + disk, policy"],
            [_what_if(each, summary.tokens) for each in asked],
        ),
        "What requests waited for": Table(["for", "requests", "p50", "p90", "longest"], waits),
    }


def _beaten(tier: str, by_place: Mapping[str, Sequence[float]]) -> str:
    """What was expected of the other places, by their medians. The next best comes first."""
    others = sorted((median(seconds), place) for place, seconds in by_place.items() if place != tier)
    return ", ".join(f"{place} {format_seconds(seconds)}" for seconds, place in others) or "-"


def _what_if(asked: WhatIf, tokens: int) -> list[str]:
    config = asked.config
    sizes = _size(config.cpu_blocks, config.block_bytes)
    if config.disk_blocks:
        sizes += f" + {_size(config.disk_blocks, config.block_bytes)}"
    more = f"{100 * asked.more_tokens / max(tokens, 1):+.1f} %" if asked.more_tokens else "-"
    return [
        asked.change,
        f"{100 * asked.result.token_hit_rate:.1f} %",
        more,
        format_seconds(asked.saved_s) if asked.more_tokens else "-",
        f"{sizes}, {config.policy}",
    ]
