# SPDX-License-Identifier: Apache-2.0
"""The figures of runs and of explanations as tables of text, as sentences and as plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from kvoffload.sim.config import Prices
from kvoffload.sim.explain import Explanations, WhatIf, advice_on, where_names
from kvoffload.sim.result import DEVICE, HOST, SATURATED, Result, quantiles
from kvoffload.sim.sweep import Report, knee
from kvoffload.sim.table import Table
from kvoffload.units import counted, format_bytes, format_number

NO_FORECAST = "Use the times to compare configurations, not as a forecast."
"""The caveat of all times that are shown."""


def format_seconds(value: float) -> str:
    """Three digits, of milliseconds below a second."""
    if abs(value) < 1:
        return f"{1000 * value:.3g} ms" if abs(value) >= 1e-4 else "0 ms"
    return f"{format_number(value)} s"


def _size(blocks: int, block_bytes: int) -> str:
    return format_bytes(blocks * block_bytes) if blocks else "-"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / max(whole, 1):.2f}"


def saturation(results: Sequence[Result]) -> str:
    """Return a sentence about runs whose busiest server cannot keep up; empty if all servers keep up."""
    number = sum(result.is_overloaded for result in results)
    if not number:
        return ""
    return (
        f"{number} of {counted(len(results), 'run')} cannot keep up with this trace: a server is busy more than "
        f"{100 * SATURATED:.0f}% of the time, or its queue is long at the end. Hit rates hold; times only say that "
        "there is too little to serve it. A higher --prefill-speed, more servers, or stretch in the file of --fleet "
        "gives a load that can be carried."
    )


# --------------------------------------------------------------------------------------------------------------- runs


def moved_blocks(result: Result, direction: str) -> int:
    """Blocks that were ``read`` from tiers below host memory, or ``written`` to them."""
    return sum(sum(getattr(server, f"{direction}_blocks").values()) for server in result.servers)


def _identity(result: Result) -> dict[str, str]:
    """Return the properties of a run's servers by the heading of their column; ``-`` for a missing tier."""
    config, server = result.config, result.server
    apart = config.prefill_servers
    found = {
        "servers": f"{apart}+{config.servers - apart}" if apart else str(config.servers),
        "router": config.router if config.servers > 1 else "-",
        "policy": server.policy if server.cpu_blocks else "none",
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
            f"{name} ttl": f"{store.ttl_s:g} s" if store and store.ttl_s < math.inf else "-",
        }
    return found


def identities(results: Sequence[Result]) -> tuple[list[dict[str, str]], dict[str, str]]:
    """Return the properties of each run that differ, and its memory in any case; and the properties of all runs."""
    every = [_identity(result) for result in results]
    texts = {name: {each[name] for each in every} for name in every[0]}
    for name in texts:
        if name not in ("servers", "router", "policy", "memory", "disk", "pool", "shared") or texts[name] == {"none"}:
            texts[name].discard("-")  # a detail of a tier that not all runs have
    differ = {name for name, found in texts.items() if len(found) > 1}
    shown = [name for name in every[0] if name in differ or name == "memory"]
    common = {name: min(found) for name, found in texts.items() if name not in shown and found - {"-", "none"}}
    if common.get("servers") == "1":
        del common["servers"]
    return [{name: each[name] for name in shown} for each in every], common


def common_of(results: Sequence[Result]) -> str:
    """Return the common properties of all runs in a line."""
    return ", ".join(f"{name} {text}" for name, text in identities(results)[1].items())


def runs_table(report: Report, prices: Prices) -> Table:
    """Return a row for each run, the server without offloading first. The columns that decide come first.

    *saved* is the mean time to first token that the run saves against the one without offloading. *frontier* marks
    fleets that keep up, and that no other one beats in both cost and time.
    """
    without, best = report.without, frontier(report.results, prices) if report.is_fleet else ()
    runs: list[tuple[Result, float | None]] = list(zip(report.results, report.optimum_rates, strict=True))
    if without is not None:
        runs.insert(0, (without, None))
    tiers = {tier: text for tier, text in TIERS.items() if any(run.hit_blocks[tier] for run, _ in runs)}
    has_lower = bool(tiers.keys() - {DEVICE, HOST})
    rows = []
    for identity, (run, bound) in zip(identities([run for run, _ in runs])[0], runs, strict=True):
        is_gain = without is not None and run is not without
        saved_s = without.ttft_s["mean"] - run.ttft_s["mean"] if without is not None and is_gain else None
        rows.append(
            identity
            | {
                "hits %": f"{100 * run.hit_rate:.2f}",
                "TTFT p50": format_seconds(run.ttft_s["p50"]),
                "p90": format_seconds(run.ttft_s["p90"]),
                "saved": "-" if saved_s is None else format_seconds(saved_s),
                "busy %": f"{100 * run.utilisation:.0f}",
                "frontier": "yes" if run in best else "-",
                "optimum %": "-" if bound is None else f"{100 * bound:.2f}",
                "cost/M": format_number(run.cost_per_million_tokens(prices)) if report.is_fleet else "-",
                **{f"{text} %": _percent(run.hit_blocks[tier], run.accesses) for tier, text in tiers.items()},
                **(_moved(run) if has_lower else {}),
                "p99": format_seconds(run.ttft_s["p99"]),
                **(_handed_over(run) if any(each.handover_s for each, _ in runs) else {}),
                f"{prices.unit}/h": format_number(report.price(run, prices)),
            }
        )
    return Table([*rows[0]], [[*row.values()] for row in rows]).without_empty() if rows else Table([], [])


def _handed_over(run: Result) -> dict[str, str]:
    """Return the share of the blocks that decoding servers find, and how long after the first token they have all."""
    times = {f"handed over {name}": format_seconds(run.handover_s[name]) for name in ("p50", "p99")}
    return {"handed over %": f"{100 * run.handed_over:.1f}", **times}


def _moved(run: Result) -> dict[str, str]:
    size = run.server.block_bytes
    return {
        "declined %": _percent(run.sum_of("declined_blocks"), run.accesses),
        "read": format_bytes(moved_blocks(run, "read") * size),
        "written": format_bytes(moved_blocks(run, "written") * size),
    }


TIERS = {DEVICE: "gpu", HOST: "cpu", "disk": "disk", "pool": "pool", "shared": "shared"}
"""The words for tiers in tables and JSON."""


def figures_of(result: Result) -> dict[str, Any]:
    """Return the figures of one run as plain values."""
    server, tokens, size = result.server, result.block_tokens, result.server.block_bytes
    by_tier = {"gpu": result.hit_blocks[DEVICE], "cpu": result.hit_blocks[HOST], "disk": result.disk_hit_blocks}
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
        "utilisation": result.utilisation,
        "duration_s": result.duration_s,
        "ttft_s": result.ttft_s,
        "hit_rate": result.hit_rate,
        "token_hit_rate": result.token_hit_rate,
    }


def _fleet_figures(result: Result, prices: Prices) -> dict[str, Any]:
    """Return the figures that only fleets have."""
    return {
        "config": asdict(result.config),
        "servers": [asdict(server) for server in result.servers],
        "hit_blocks": dict(result.hit_blocks),
        "handed_over": result.handed_over,
        "handover_s": result.handover_s,
        "cost_per_hour": prices.of_fleet(result.config),
        "cost_per_million_tokens": result.cost_per_million_tokens(prices),
    }


def report_as_json(report: Report, prices: Prices) -> dict[str, Any]:
    """Return all figures of a report as plain values."""
    return {
        "trace": report.trace.name,
        "requests": len(report.trace),
        "accesses": report.trace.num_accesses,
        "unique_blocks": report.trace.num_unique,
        "block_tokens": report.trace.block_tokens,
        "block_bytes": (report.without or report.results[0]).server.block_bytes,
        "reachable_hit_rate": report.reachable_rate,
        "prices": asdict(prices),
        "without_offloading": None if report.without is None else figures_of(report.without),
        "runs": [
            figures_of(result)
            | {"optimum_hit_rate": bound}
            | (_fleet_figures(result, prices) if report.is_fleet else {})
            for result, bound in zip(report.results, report.optimum_rates, strict=True)
        ],
    }


def best_policy(report: Report) -> str:
    """Return the policy with the most hits, summed over all runs."""
    hits: Counter[str] = Counter()
    for result in report.results:
        hits[result.server.policy] += result.hit_blocks.total()
    return max(hits, key=hits.__getitem__)


def knee_of(results: Sequence[Result]) -> Result:
    """Return the run at the knee of the hit rate, beyond which more host memory helps little. Of runs with the same
    host memory, the one with the largest disk counts, and of these the best one."""
    curve: dict[int, Result] = {}
    for result in sorted(results, key=lambda run: (run.server.cpu_blocks, run.server.disk_blocks, run.hit_rate)):
        curve[result.server.cpu_blocks] = result
    return [*curve.values()][knee([*curve], [run.hit_rate for run in curve.values()])]


def frontier(results: Sequence[Result], prices: Prices) -> list[Result]:
    """Return the runs that keep up, without runs that are dearer and slower (p90) than another one, by price."""
    best: list[Result] = []
    keeping_up = [result for result in results if not result.is_overloaded]
    for result in sorted(keeping_up, key=lambda each: (each.cost_per_million_tokens(prices), each.ttft_s["p90"])):
        if not best or result.ttft_s["p90"] < best[-1].ttft_s["p90"]:
            best.append(result)
    return best


# ------------------------------------------------------------------------------------------------------- explanations


def explanation_tables(summary: Explanations, asked: Sequence[WhatIf]) -> dict[str, Table]:
    """Return the tables of an explained trace, by their titles."""

    def share(tokens: int) -> str:
        return f"{100 * tokens / summary.tokens:.1f}%"

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
        "Why the rest was computed": Table(["cause", "tokens", "share", "lost before", "meaning"], causes),
        "Changes that would have saved most (simulated, at first with empty tiers)": Table(
            ["change", "found", "more", "saves", "memory + disk, policy"],
            [_what_if(each, summary.tokens) for each in asked],
        ),
        "Waits of requests": Table(["for", "requests", "p50", "p90", "longest"], waits),
    }


def _beaten(tier: str, by_place: Mapping[str, Sequence[float]]) -> str:
    """Return the median expected time of each other place, the best first."""
    others = sorted((median(seconds), place) for place, seconds in by_place.items() if place != tier)
    return ", ".join(f"{place} {format_seconds(seconds)}" for seconds, place in others) or "-"


def _what_if(asked: WhatIf, tokens: int) -> list[str]:
    config = asked.config
    sizes = _size(config.cpu_blocks, config.block_bytes)
    if config.disk_blocks:
        sizes += f" + {_size(config.disk_blocks, config.block_bytes)}"
    more = f"{100 * asked.more_tokens / max(tokens, 1):+.1f}%" if asked.more_tokens else "-"
    return [
        asked.change,
        f"{100 * asked.result.token_hit_rate:.1f}%",
        more,
        format_seconds(asked.saved_s) if asked.more_tokens else "-",
        f"{sizes}, {config.policy}",
    ]
