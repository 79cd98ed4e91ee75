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
from kvoffload.sim.plan import Goal, Plan, num_rejected
from kvoffload.sim.report import format_seconds, knee_of
from kvoffload.sim.result import Result
from kvoffload.sim.table import Table
from kvoffload.sim.trace import HOUR_S, Trace
from kvoffload.units import counted, exact_size, format_bytes, format_number

WIDTH, MOST_LINES = 80, 25
_MANY_PROMPTS = 0.5
"""The least share of an overloaded server's busy time at which its prompts are the reason."""
_FEW_REQUESTS = 100
"""Fewer requests than these say little about the hits and sizes of real traffic."""
_IN_MILLISECONDS = 100
"""Requests per second that a trace for one server seldom has, unless somebody took its seconds for milliseconds."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The facts that an operator needs first."""

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
        answer, body = wrap(self.answer, WIDTH), ["", *self.rows.lines()]
        if self.load:
            body += ["", *wrap(self.load, WIDTH)]
        if self.settings:
            body += ["", "offload.yaml:", *(f"  {line}" for line in self.settings)]
        room = MOST_LINES - len(answer) - len(body)
        warned: list[str] = []
        for at, warning in enumerate(self.warnings):
            text = wrap(f"Warning: {warning}", WIDTH, subsequent_indent="  ")
            left_out = len(self.warnings) - at - 1
            if len(warned) + len(text) + (left_out > 0) > room:
                warned.append(f"{counted(left_out + 1, 'more warning')}: see --verbose.")
                break
            warned += text
        return [*answer, *warned, *body]

    def as_json(self) -> dict[str, Any]:
        rows = [dict(zip(self.rows.headings, row, strict=True)) for row in self.rows.rows]
        return {
            "answer": self.answer,
            "rows": rows,
            "load": self.load,
            "warnings": list(self.warnings),
            "offload_yaml": list(self.settings),
        }


# ------------------------------------------------------------------------------------------------------------- answers


def verdict_of(plan: Plan, prices: Prices, warnings: Sequence[str] = ()) -> Verdict:
    """Return the verdict of a plan for a server or for a fleet. ``warnings``: facts about the machine that are not
    known."""
    trace = plan.report.trace
    rejected = num_rejected(trace, plan.best.server)
    more: list[str] = []
    if rejected == len(trace) > 0:
        answer, load = _rejection(plan), ""
    elif plan.report.is_fleet:
        is_hopeless = all(each.is_overloaded for each in plan.report.results)
        more = ["no fleet within the limits keeps up with this load: allow more servers."] * is_hopeless
        answer, load = _fleet_answer(plan, prices), ""
    else:
        more = [*_load_warnings(plan)]
        answer, load = _answer(plan, prices), _load(plan)
    if (requests := len(trace)) < _FEW_REQUESTS:
        more.append(f"the trace has only {counted(requests, 'request')}: record an hour of traffic before you buy.")
    if trace.requests_per_s == math.inf:
        more.append("all requests arrive at once, so times show how long they need together: give a --rate.")
    # Without a choice of sizes, no price decided anything.
    if plan.report.results and prices == Prices(currency=prices.currency):
        warnings = [*warnings, "the prices are placeholders: set your own with prices in the file of --fleet."]
    return Verdict(answer, _rows(plan, prices), load, (*more, *warnings), _settings(plan.chosen))


def _rejection(plan: Plan) -> str:
    pool = plan.best.server.gpu_blocks * plan.report.trace.block_tokens
    return (
        f"Buy nothing: an engine rejects every request, because each has more tokens than the GPU's cache of {pool:,}. "
        "Check --gpu-kv-tokens, or use a GPU with more memory."
    )


def _reached(result: Result, goal: Goal) -> str:
    return f"{100 * result.hit_rate:.1f}% hits, {goal.quantile} {format_seconds(result.ttft_s[goal.quantile])}"


def sizes_of(config: SimConfig) -> str:
    """Host memory and disk in words."""
    disk = f" and {format_bytes(config.disk_bytes)} of disk" if config.disk_blocks else ""
    return f"{format_bytes(config.cpu_bytes)} of host memory{disk}"


def _answer(plan: Plan, prices: Prices) -> str:
    goal, chosen, without = plan.goal, plan.chosen, plan.without
    now = _reached(without, goal).replace(", ", " and ")
    if chosen is without:
        what = "the GPU's own cache" if chosen.server.gpu_blocks else "computing every prompt"
        return f"Buy nothing: {what} reaches the goal, with {_reached(chosen, goal)}."
    if chosen is not None:
        return (
            f"Buy {sizes_of(chosen.server)}, {prices.show(plan.price(prices))} an hour: {_reached(chosen, goal)}, "
            f"instead of {now} today."
        )
    results = plan.report.results
    gpu = f"the GPU's own cache of {format_bytes(without.server.gpu_bytes)}"
    has_room = without.server.gpu_blocks >= plan.report.trace.num_unique
    if not results and not has_room:
        return f"Buy nothing within these limits: less host memory than {gpu} holds little else."
    if all(each.is_overloaded for each in (without, *results)):
        return f"Nothing to buy for one server: it cannot keep up with this load, with any tier. {_way_out(plan)}"
    if not results:
        return f"Buy nothing: {gpu} has room for all blocks of this trace, so tiers find no more. Today: {now}."
    is_harmful = any(goal.is_met(each) and not plan.is_harmless(each) for each in results)
    if is_harmful and plan.best is without:
        return f"Buy nothing: {_why_slower(plan)}. Today: {now}."
    everything = f"a cache that keeps everything hits {100 * plan.report.reachable_rate:.1f}%"
    said = "Nothing within the limits reaches the goal" + " without making first tokens later" * is_harmful
    if goal.hit_rate is not None and plan.report.reachable_rate < goal.hit_rate:
        said = f"Nothing reaches the goal: {everything}"
    elif plan.best is without:
        said += f"; {everything}"
    if plan.best is without:
        return f"{said}. Today: {now}."
    return f"{said}. The closest is {sizes_of(plan.best.server)}: {_reached(plan.best, goal)}. Today: {now}."


def _why_slower(plan: Plan) -> str:
    server, tokens = plan.without.server, plan.report.trace.block_tokens
    load_s = server.block_bytes / server.load_bytes_per_s
    compute_s = tokens / server.prefill_tokens_per_s
    if load_s >= compute_s:
        return (
            f"loading is slower than computing (a block of {tokens} tokens takes {format_seconds(load_s)} to load from "
            f"host memory and {format_seconds(compute_s)} to compute)"
        )
    return "with each size that reaches the goal first tokens come later than without tiers"


def _busiest_requests_per_s(trace: Trace) -> float:
    return len(trace.busiest_hour()) / HOUR_S if trace.is_long else trace.requests_per_s


def _way_out(plan: Plan) -> str:
    """Return how many servers carry this load, today and with the tiers that help most, or what else to change."""
    load = _busiest_requests_per_s(plan.report.trace)
    found = [each for each in plan.capacities if each.requests_per_s and load < math.inf]
    if not found and plan.goal.ttft_s is not None:
        return "No load is low enough for this goal: check --prefill-speed, or give a longer --ttft."
    if not found:
        return "Plan for a lower --rate."
    numbers = [max(math.ceil(load / each.requests_per_s), 2) for each in found]
    text = f"Use {counted(numbers[0], 'server')} {found[0].what}"
    best = min(range(len(found)), key=lambda at: numbers[at])
    if numbers[best] < numbers[0]:
        text += f", or {numbers[best]} with {sizes_of(found[best].config)} each"
    return text + ". Or plan for a lower --rate."


def _fleet_answer(plan: Plan, prices: Prices) -> str:
    """Return the number of servers, and the parts that they do not need."""
    reached = plan.chosen or plan.best
    said = f"{_reached(reached, plan.goal)}, {prices.show(prices.of_fleet(reached.config))} an hour."
    if plan.chosen is None:
        return f"No fleet within the limits reaches the goal. {said}"
    config, results = plan.chosen.config, plan.report.results
    parts = [counted(config.servers, "server")]
    if plan.may_share:
        parts.append("a shared tier" if config.shared is not None else "no shared tier")
    larger = [each.server.cpu_blocks for each in results if each.config.servers > config.servers]
    if larger and config.server.cpu_blocks > min(larger):
        parts.append("fewer servers with more memory")
    return f"{', '.join(parts)}. {said}"


def _rows(plan: Plan, prices: Prices) -> Table:
    """Return the rows for a server: today, the goal, the knee of the curve, and the most that the sizes bring. Of
    fleets: the choice, and the next cheaper ones."""
    goal, results = plan.goal, plan.report.results
    named: list[tuple[str, Result]] = []
    if plan.report.is_fleet:
        reached = plan.chosen or plan.best
        price = prices.of_fleet(reached.config)
        cheaper = sorted(results, key=lambda each: prices.of_fleet(each.config))
        named = [("goal" if plan.chosen else "closest", reached)]
        named += [("cheaper", each) for each in cheaper if prices.of_fleet(each.config) < price][-2:]
    else:
        named = [("today", plan.without)]
        if plan.chosen is not None and plan.chosen is not plan.without:
            named.append(("goal", plan.chosen))
        without_disk = [each for each in results if not each.server.disk_blocks]
        if len(without_disk) > 2:
            named.append(("knee", knee_of(without_disk)))
        if results:
            harmless = [each for each in results if plan.is_harmless(each)]
            named.append(("ceiling", max(harmless or results, key=goal.reached)))
    cells = []
    for name, run in named:
        server = run.server
        cells.append(
            {
                "row": name,
                "servers": str(run.config.servers) if plan.report.is_fleet else "-",
                "memory": format_bytes(server.cpu_bytes) if server.cpu_blocks else "none",
                "disk": format_bytes(server.disk_bytes) if server.disk_blocks else "-",
                "shared": "yes" if run.config.shared is not None else "-",
                "hits %": f"{100 * run.hit_rate:.1f}",
                **{name: format_seconds(run.ttft_s[name]) for name in dict.fromkeys(("p50", goal.quantile))},
                "busy %": f"{100 * run.utilisation:.0f}",
                f"{prices.unit}/h": format_number(plan.report.price(run, prices)),
                "note": "overloaded" if run.is_overloaded else "-" if plan.is_harmless(run) else "slower",
            }
        )
    return Table([*cells[0]], [[*row.values()] for row in cells]).without_empty()


def _load(plan: Plan) -> str:
    """Return how much more one server carries, and so how many servers that saves."""
    found = [each for each in plan.capacities if each.requests_per_s]
    goal = plan.goal
    rate = plan.report.trace.requests_per_s
    limit = "Within a load of 90%" if rate < math.inf else "With all requests at once"
    if goal.ttft_s is not None:
        limit = f"Within {goal.quantile} of {format_seconds(goal.ttft_s)}"
    if not plan.capacities:
        return ""
    if not found:
        return f"{limit} a server carries no load at all: prompts take longer, or arrive together."
    today, others = plan.capacities[0], [each for each in found if each.what != "today"]
    parts = [f"{format_number(each.requests_per_s)} with {sizes_of(each.config)}" for each in others]
    text = ""
    if rate < math.inf:
        busiest = _busiest_requests_per_s(plan.report.trace)
        in_it = f", and {format_number(busiest)} in its busiest hour" if busiest > rate else ""
        text = f"The trace has {format_number(rate)} requests/s{in_it}. "
    text += f"{limit} a server carries {format_number(today.requests_per_s)} requests/s today"
    text += f", {', '.join(parts)}." if parts else "."
    bought = [each for each in others if plan.chosen is not None and each.config == plan.chosen.server] or others
    best = max(bought, key=lambda each: each.requests_per_s, default=today)
    if today.requests_per_s and best.requests_per_s > 1.05 * today.requests_per_s:
        left = math.ceil(100 * today.requests_per_s / best.requests_per_s)
        text += f" With {sizes_of(best.config)} each, {left} servers do the work of 100."
    elif today.requests_per_s and others:
        text += " So tiers save no servers."
    return text


def _load_warnings(plan: Plan) -> Iterator[str]:
    without, trace = plan.without, plan.report.trace
    if without.is_overloaded:
        of_which = "its busiest hour" if trace.is_long else "the time"
        prompts = without.sum_of("prefill_s") / max(without.sum_of("busy_s"), 1e-9)
        remedy = "Check --prefill-speed, or give a lower --rate."
        if prompts < _MANY_PROMPTS:
            remedy = (
                f"Prompts take {100 * prompts:.0f}% of that. In the rest, requests wait because others decode answers "
                "or fill the GPU's cache."
            )
        yield (
            f"one server cannot keep up with this load without tiers: it is busy {100 * without.utilisation:.0f}% of "
            f"{of_which}, so its times only show that it is too slow. {remedy}"
        )
        if _IN_MILLISECONDS < trace.requests_per_s < math.inf:
            yield (
                f"the trace has {trace.requests_per_s:,.0f} requests/s. If its times are in seconds instead of "
                "milliseconds, set stretch: 1000 in the file of --fleet."
            )
    if rejected := num_rejected(trace, without.server):
        pool = without.server.gpu_blocks * trace.block_tokens
        yield (
            f"{counted(rejected, 'request')} of {len(trace):,} have more tokens than the GPU's cache of {pool:,}. A "
            "real engine rejects these; here each has the whole cache for itself."
        )
    if without.sum_of("preemptions") > len(trace) / 20:
        yield (
            f"the GPU's cache is too small for the requests that run at once: {without.sum_of('preemptions'):,} "
            "preemptions. Lower max_num_seqs, or use a GPU with more memory."
        )


def _settings(chosen: Result | None) -> tuple[str, ...]:
    if chosen is None or not chosen.server.cpu_blocks:
        return ()
    server = chosen.server
    lines = [f"cpu_bytes_to_use: {exact_size(server.cpu_bytes)}"]
    if server.disk_blocks:
        size = exact_size(server.disk_bytes)
        lines += ["secondary_tiers:", f"- {{type: disk, path: /on/a/local/disk, max_bytes: {size}}}"]
    return tuple(lines)
