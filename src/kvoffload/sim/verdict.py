# SPDX-License-Identifier: Apache-2.0
"""The answer of a plan: one sentence, four rows, the load that a server carries, warnings, and lines of configuration.

The same verdict is printed, and is part of JSON, pages and pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from kvoffload.sim.config import Prices, SimConfig
from kvoffload.sim.plan import FleetPlan, Goal, Plan
from kvoffload.sim.report import format_seconds
from kvoffload.sim.result import Result
from kvoffload.sim.sweep import knee
from kvoffload.sim.table import Table
from kvoffload.sim.trace import Trace
from kvoffload.units import counted, exact_size, format_bytes

WIDTH, MOST_LINES = 80, 25


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an operator needs to know first."""

    answer: str
    rows: Table
    load: str
    """How many requests per second a server carries, today and with tiers; empty if that was not computed."""
    warnings: tuple[str, ...]
    """The most important one first."""
    settings: tuple[str, ...]
    """Lines to paste into offload.yaml; empty if there is nothing to set."""

    def lines(self) -> list[str]:
        """As text: at most ``MOST_LINES`` lines of ``WIDTH`` columns."""
        body = [*wrap(self.answer, WIDTH), "", *_text_of(self.rows)]
        if self.load:
            body += ["", *wrap(self.load, WIDTH)]
        if self.settings:
            body += ["", "offload.yaml:", *(f"  {line}" for line in self.settings)]
        room = MOST_LINES - len(body)
        warned: list[str] = []
        for at, warning in enumerate(self.warnings):
            text = wrap(f"Warning: {warning}", WIDTH, subsequent_indent="  ")
            left_out = len(self.warnings) - at - 1
            if len(warned) + len(text) + (left_out > 0) > room:
                warned.append(f"{counted(left_out + 1, 'more warning')}: see --verbose.")
                break
            warned += text
        return [*body[: len(wrap(self.answer, WIDTH))], *warned, *body[len(wrap(self.answer, WIDTH)) :]]

    def as_json(self) -> dict[str, Any]:
        rows = [dict(zip(self.rows.headings, row, strict=True)) for row in self.rows.rows]
        return {
            "answer": self.answer,
            "rows": rows,
            "load": self.load,
            "warnings": list(self.warnings),
            "offload_yaml": list(self.settings),
        }


def _text_of(table: Table) -> list[str]:
    widths = [max(map(len, column)) for column in zip(table.headings, *table.rows, strict=True)]
    lines = []
    for line in (table.headings, *table.rows):
        cells = [
            cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(zip(line, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


# ---------------------------------------------------------------------------------------------------------- one server


def verdict_of(plan: Plan, trace: Trace, prices: Prices, warnings: Sequence[str] = ()) -> Verdict:
    """The verdict of a plan for one server. ``warnings``: what is not known of the machine."""
    return Verdict(
        _answer(plan, trace, prices),
        _rows(plan, prices),
        _load(plan),
        (*_load_warnings(plan, trace), *warnings),
        _settings(plan.chosen),
    )


def _reached(result: Result, goal: Goal) -> str:
    return f"{100 * result.hit_rate:.1f} % hits, {goal.quantile} {format_seconds(result.ttft_s[goal.quantile])}"


def sizes_of(config: SimConfig) -> str:
    """Host memory and disk in words."""
    text = f"{format_bytes(config.cpu_blocks * config.block_bytes)} of host memory"
    if config.disk_blocks:
        text += f" and {format_bytes(config.disk_blocks * config.block_bytes)} of disk"
    return text


def _answer(plan: Plan, trace: Trace, prices: Prices) -> str:
    goal, chosen, without = plan.goal, plan.chosen, plan.without
    now = f"{100 * without.hit_rate:.1f} % hits and {goal.quantile} {format_seconds(without.ttft_s[goal.quantile])}"
    if chosen is without:
        what = "the GPU's own cache" if chosen.gpu_blocks else "computing every prompt"
        return f"Buy nothing: {what} reaches the goal, with {_reached(chosen, goal)}."
    if chosen is not None:
        return (
            f"Buy {sizes_of(chosen.server)}, {prices.show(plan.price)} an hour: {_reached(chosen, goal)}, "
            f"instead of {now} today."
        )
    if not plan.report.results:
        least = format_bytes(without.gpu_blocks * without.server.block_bytes)
        return (
            f"Buy nothing within these limits: less host memory than the GPU's own cache of {least} holds little else."
        )
    if all(each.is_overloaded for each in (without, *plan.report.results)):
        return (
            "Nothing to buy for one server: it cannot keep up with this load, with any tier. "
            f"{_servers_needed(plan, trace)}Or plan for a lower --rate."
        )
    harmful = [each for each in plan.report.results if not plan.is_harmless(each) and goal.is_met(each)]
    if harmful and plan.best is without:
        return f"Buy nothing: {_why_slower(without.server, trace)}. Today: {now}."
    said = (
        "Nothing within the limits reaches the goal without making first tokens later."
        if harmful
        else ("Nothing within the limits reaches the goal.")
    )
    if plan.best is not without:
        best = plan.best.server
        return f"{said} The closest is {sizes_of(best)}: {_reached(plan.best, goal)}. Today: {now}."
    return f"{said} A cache that keeps everything hits {100 * plan.report.reachable_rate:.1f} %. Today: {now}."


def _why_slower(server: SimConfig, trace: Trace) -> str:
    load_s = server.block_bytes / server.load_bytes_per_s
    compute_s = trace.block_tokens / server.prefill_tokens_per_s
    if load_s >= compute_s:
        return (
            f"loading is slower than computing (a block of {trace.block_tokens} tokens takes {format_seconds(load_s)} "
            f"to load from host memory and {format_seconds(compute_s)} to compute)"
        )
    return "with each size that reaches the goal first tokens come later than without tiers"


def _servers_needed(plan: Plan, trace: Trace) -> str:
    """How many servers carry this load, today and with the tiers that help most."""
    found = [each for each in plan.capacities if each.requests_per_s and trace.requests_per_s < math.inf]
    if not found:
        return ""
    numbers = [max(math.ceil(trace.requests_per_s / each.requests_per_s), 2) for each in found]
    text = f"Use {counted(numbers[0], 'server')} {found[0].what}"
    best = min(range(len(found)), key=lambda at: numbers[at])
    if numbers[best] < numbers[0]:
        text += f", or {numbers[best]} with {sizes_of(found[best].config)} each"
    return text + ". "


def _rows(plan: Plan, prices: Prices) -> Table:
    """Today, the goal, the knee of the curve, and the most that the sizes bring."""
    goal = plan.goal
    named: list[tuple[str, Result]] = [("today", plan.without)]
    if plan.chosen is not None and plan.chosen is not plan.without:
        named.append(("goal", plan.chosen))
    curve = sorted((each for each in plan.report.results if not each.disk_blocks), key=lambda each: each.cpu_blocks)
    if len(curve) > 2:
        named.append(("knee", curve[knee([run.cpu_blocks for run in curve], [run.hit_rate for run in curve])]))
    if plan.report.results:
        harmless = [each for each in plan.report.results if plan.is_harmless(each)]
        named.append(("ceiling", max(harmless or plan.report.results, key=goal.reached)))
    quantiles = dict.fromkeys(("p50", goal.quantile))
    headings = [
        "row",
        "memory",
        "disk",
        "hits %",
        *quantiles,
        "busy %",
        f"{prices.unit}/h",
        "note",
    ]
    rows = []
    for name, run in named:
        size = run.server.block_bytes
        note = "overloaded" if run.is_overloaded else "" if plan.is_harmless(run) else "slower"
        rows.append(
            [
                name,
                format_bytes(run.cpu_blocks * size) if run.cpu_blocks else "none",
                format_bytes(run.disk_blocks * size) if run.disk_blocks else "-",
                f"{100 * run.hit_rate:.1f}",
                *(format_seconds(run.ttft_s[quantile]) for quantile in quantiles),
                f"{100 * run.utilisation:.0f}",
                f"{prices.of_tiers(run.cpu_blocks, run.disk_blocks, size):,.3g}",
                note,
            ]
        )
    table = Table(headings, rows)
    return table if any(row[-1] for row in rows) else table.without(["note"])._replace(left_out=())


def _load(plan: Plan) -> str:
    """How much more one server carries, and so how many servers that saves."""
    found = [each for each in plan.capacities if each.requests_per_s]
    goal = plan.goal
    limit = f"{goal.quantile} of {format_seconds(goal.ttft_s)}" if goal.ttft_s is not None else "a load of 90 %"
    if not plan.capacities:
        return ""
    if not found:
        return f"At no load does a server stay within {limit}."
    parts = [f"{each.requests_per_s:.3g} requests/s {each.what}" for each in found]
    text = f"Within {limit} a server carries {', '.join(parts)}."
    today, best = plan.capacities[0], max(found, key=lambda each: each.requests_per_s)
    if today.requests_per_s and best.requests_per_s > 1.05 * today.requests_per_s:
        left = math.ceil(100 * today.requests_per_s / best.requests_per_s)
        text += f" {best.what[0].upper()}{best.what[1:]} {left} servers do the work of 100."
    elif today.requests_per_s and len(plan.capacities) > 1:
        text += " So tiers save no servers."
    return text


def _load_warnings(plan: Plan, trace: Trace) -> Iterator[str]:
    without = plan.without
    if without.is_overloaded:
        yield (
            f"one server cannot keep up with this load without tiers: it is busy {100 * without.utilisation:.0f} % of "
            "the time, so its times only show that it is too slow. Check --prefill-speed, or give a lower --rate."
        )
    pool = without.gpu_blocks * trace.block_tokens
    too_long = int((trace.input_tokens + trace.output_tokens > pool).sum()) if pool else 0
    if too_long:
        yield (
            f"{counted(too_long, 'request')} of {len(trace):,} have more tokens than the GPU's cache of {pool:,}. A "
            "real engine rejects these; here each has the whole cache for itself."
        )
    if without.sum_of("preemptions") > len(trace) / 20:
        yield (
            f"the GPU's cache is too small for the requests that run at once: {without.sum_of('preemptions'):,} "
            "preemptions. Lower max_num_seqs, or use a GPU with more memory."
        )


def _settings(chosen: Result | None) -> tuple[str, ...]:
    if chosen is None or not chosen.cpu_blocks:
        return ()
    server = chosen.server
    lines = [f"cpu_bytes_to_use: {exact_size(server.cpu_blocks * server.block_bytes)}"]
    if server.disk_blocks:
        size = exact_size(server.disk_blocks * server.block_bytes)
        lines += ["secondary_tiers:", f"- {{type: disk, path: /on/a/local/disk, max_bytes: {size}}}"]
    return tuple(lines)


# -------------------------------------------------------------------------------------------------------------- fleets


def fleet_verdict_of(plan: FleetPlan, prices: Prices, warnings: Sequence[str] = ()) -> Verdict:
    """The verdict of a plan for a fleet: the choice beside the cheapest of other numbers of servers."""
    reached = plan.chosen or plan.best
    said = f"{_reached(reached, plan.goal)}, {prices.show(prices.of_fleet(reached.config))} an hour"
    names: list[tuple[str, Result]] = [("goal" if plan.chosen else "closest", reached)]
    others = sorted(
        (each for each in plan.results if each is not reached), key=lambda each: prices.of_fleet(each.config)
    )
    names += [("cheaper", each) for each in others if prices.of_fleet(each.config) < prices.of_fleet(reached.config)][
        -2:
    ]
    quantile = plan.goal.quantile
    rows = [
        [
            name,
            str(run.config.servers),
            format_bytes(run.cpu_blocks * run.server.block_bytes) if run.cpu_blocks else "none",
            format_bytes(run.disk_blocks * run.server.block_bytes) if run.disk_blocks else "-",
            "yes" if run.config.shared is not None else "-",
            f"{100 * run.hit_rate:.1f}",
            format_seconds(run.ttft_s[quantile]),
            f"{100 * run.utilisation:.0f}",
            f"{prices.of_fleet(run.config):,.2f}",
        ]
        for name, run in names
    ]
    headings = [
        "row",
        "servers",
        "memory",
        "disk",
        "shared",
        "hits %",
        f"TTFT {quantile}",
        "busy %",
        f"{prices.unit}/h",
    ]
    overloaded = all(each.is_overloaded for each in plan.results)
    more = ("no fleet within the limits keeps up with this load: allow more servers.",) if overloaded else ()
    return Verdict(f"{plan.advice} {said}.", Table(headings, rows), "", (*more, *warnings), _settings(plan.chosen))
