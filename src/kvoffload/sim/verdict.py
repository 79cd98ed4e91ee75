# SPDX-License-Identifier: Apache-2.0
"""The answer of a plan: sentences, a few rows, the load that a server carries, warnings, and lines of configuration.

The same verdict is printed, and is part of JSON, pages and pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np

from kvoffload.sim.config import Prices, SimConfig
from kvoffload.sim.plan import Goal, Plan, Row, num_rejected
from kvoffload.sim.report import format_seconds
from kvoffload.sim.result import SATURATED, Result
from kvoffload.sim.table import Table
from kvoffload.sim.trace import Trace
from kvoffload.units import counted, exact_size, format_bytes, format_number

WIDTH, MOST_LINES = 80, 25
_MANY_PROMPTS = 0.5
"""The least share of an overloaded server's busy time at which its prompts are the reason."""
_LONG_WAIT = 3
"""If a time to first token is so many times as long as the longest prompt takes alone, most of it is waiting."""
_FEW_REQUESTS = 100
"""Fewer requests than these say little about the hits and sizes of real traffic."""
_MEANINGS = {
    "knee": "knee: beyond it, more host memory helps little.",
    "ceiling": "ceiling: the best size tried.",
}
"""Explanations of the names of rows."""
_UNCERTAIN = 1.1
"""Two highest loads whose ratio is below this count as equal, because each of them is accurate to 5%."""
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
        answer, body = _wrapped(self.answer), ["", *self.rows.lines()]
        meanings = [text for name, text in _MEANINGS.items() if any(row[0] == name for row in self.rows.rows)]
        body += _wrapped(" ".join(meanings))
        if self.load:
            body += ["", *_wrapped(self.load)]
        body += ["", "offload.yaml:" if self.settings else "offload.yaml: nothing to set"]
        body += [f"  {line}" for line in self.settings]
        room = MOST_LINES - len(answer) - len(body)
        warned: list[str] = []
        for at, warning in enumerate(self.warnings):
            text = _wrapped(f"Warning: {warning}", indent="  ")
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


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Return the lines of a paragraph. An option such as ``--max-disk`` stays whole."""
    return wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


# ------------------------------------------------------------------------------------------------------------- answers


def verdict_of(plan: Plan, prices: Prices, guesses: Sequence[str] = (), warnings: Sequence[str] = ()) -> Verdict:
    """Return the verdict of a plan for a server or for a fleet. ``guesses``: facts of the machine that are not known.
    ``warnings``: sentences about the trace."""
    trace = plan.report.trace
    rejected = num_rejected(trace, plan.best.server)
    first: list[str] = []
    more: list[str] = []
    settings: tuple[str, ...] = ()
    if rejected == len(trace) > 0:
        answer, load = _rejection(plan), ""
    elif plan.report.is_fleet:
        more = ["no fleet within the limits keeps up with this load: allow more servers."] * plan.is_hopeless
        answer, load = _fleet_answer(plan, prices), ""
        settings = _settings(plan.chosen.server) if plan.chosen is not None else ()
    else:
        more = [*_load_warnings(plan)]
        way_out = _way_out(plan, prices) if plan.is_hopeless else []
        answer, load = _answer(plan, prices, way_out), _load(plan, prices)
        advised = way_out[-1].run if way_out else plan.chosen or plan.best
        settings = _settings(advised.server)
        # More servers bring first tokens in time, and no other hits.
        is_reached = plan.goal.is_reached(advised) or (bool(way_out) and plan.goal.ttft_s is not None)
        if settings and not is_reached:
            settings = ("# This misses the goal.", *settings)
        if rejected:
            first.append(
                f"{counted(rejected, 'request')} of {len(trace):,} have more tokens than the GPU's cache "
                "(--gpu-kv-tokens). A real engine rejects these; here each has the whole cache for itself."
            )
    if (requests := len(trace)) < _FEW_REQUESTS:
        more.append(f"the trace has only {counted(requests, 'request')}: record an hour of traffic before you buy.")
    if trace.requests_per_s == math.inf:
        more.append("all requests arrive at once, so times show how long they need together: give a --rate.")
    # Without a choice of sizes, no price decided anything.
    if plan.report.results and prices == Prices(currency=prices.currency):
        guesses = [*guesses, "prices (prices in the file of --fleet)"]
    guessed = [f"these are guesses: {', '.join(guesses)}."] if guesses else []
    return Verdict(answer, _table(plan, prices), load, (*first, *guessed, *more, *warnings), settings)


def _rejection(plan: Plan) -> str:
    pool = plan.best.server.gpu_blocks * plan.report.trace.block_tokens
    return (
        f"Buy nothing: an engine rejects every request, because each has more tokens than the GPU's cache of {pool:,}. "
        "Check --gpu-kv-tokens, or use a GPU with more memory."
    )


def _reached(result: Result, goal: Goal) -> str:
    hits, ttft_s = f"{100 * result.hit_rate:.1f}%", result.ttft_s[goal.quantile]
    soon = format_seconds(ttft_s)
    # A figure that misses the goal must not look like the goal.
    if goal.hit_rate is not None and result.hit_rate < goal.hit_rate and hits == f"{100 * goal.hit_rate:.1f}%":
        hits = f"just under {hits}"
    if goal.ttft_s is not None and ttft_s > goal.ttft_s and soon == format_seconds(goal.ttft_s):
        soon = f"just over {soon}"
    return f"{hits} hits, TTFT {goal.quantile} {soon}"


def sizes_of(config: SimConfig) -> str:
    """Host memory and disk in words."""
    disk = f" and {format_bytes(config.disk_bytes)} of disk" if config.disk_blocks else ""
    return f"{format_bytes(config.cpu_bytes)} of host memory{disk}"


def _answer(plan: Plan, prices: Prices, way_out: Sequence[Row]) -> str:
    goal, chosen, without = plan.goal, plan.chosen, plan.without
    has_cache = without.server.gpu_blocks > 0
    today = "today" if has_cache else "without any cache"
    now = _reached(without, goal).replace(", ", " and ")
    if chosen is without:
        what = "the GPU's own cache" if has_cache else "computing every prompt"
        return f"Buy nothing: {what} reaches the goal, with {_reached(chosen, goal)}."
    if chosen is not None:
        tokens = chosen.server.cpu_blocks * plan.report.trace.block_tokens
        # A GPU with a larger cache would reach the goal alone, or need more host memory.
        unless = "" if has_cache else f", unless the GPU's own cache has {tokens:,} tokens or more"
        return (
            f"Buy {sizes_of(chosen.server)}, {prices.show(plan.price(prices))} an hour{unless}: "
            f"{_reached(chosen, goal)}, instead of {now} {today}."
        )
    now = f"{today.capitalize()}: {now}."
    results = plan.report.results
    gpu = f"the GPU's own cache of {format_bytes(without.server.gpu_bytes)}"
    has_room = without.server.gpu_blocks >= plan.report.trace.num_unique
    if not results and not has_room:
        return f"Buy nothing within these limits: less host memory than {gpu} holds little else."
    if plan.is_hopeless:
        return _too_much(plan, way_out)
    if not results:
        return f"Buy nothing: {gpu} has room for all blocks of this trace, so tiers find no more. {now}"
    is_harmful = any(goal.is_met(each) and not plan.is_harmless(each) for each in results)
    if is_harmful and plan.best is without:
        return f"Buy nothing: {_why_slower(plan)}. {now}"
    everything = f"a cache that keeps everything hits {100 * plan.report.reachable_rate:.1f}% of this trace"
    said = "Nothing within the limits reaches the goal" + " without making first tokens later" * is_harmful
    if goal.hit_rate is not None and plan.report.reachable_rate < goal.hit_rate:
        said = f"Nothing reaches the goal: {everything}"
    elif plan.best is without:
        said += f"; {everything}"
    if plan.best is without:
        return f"{said}. {now}"
    price = prices.show(prices.of_tiers(plan.best.server))
    closest = f"{sizes_of(plan.best.server)}, {price} an hour: {_reached(plan.best, goal)}"
    return f"{said}. Of the sizes that come closest, the cheapest is {closest}. {now}"


def _too_much(plan: Plan, way_out: Sequence[Row]) -> str:
    """Return the number of servers that carry this load, without tiers and with them, or another remedy."""
    trace = plan.report.trace
    choices = []
    for row in way_out:
        with_tiers = f"with {sizes_of(row.run.server)} each" if row.run.server.cpu_blocks else "without tiers"
        hits = f" ({100 * row.run.hit_rate:.1f}% hits)" if plan.goal.hit_rate is not None else ""
        choices.append(f"{counted(_num_servers(trace, row), 'server')} {with_tiers}{hits}")
    said = "One server is too slow for this load, with each size that was tried."
    if choices:
        return f"{said} Use {', or '.join(choices)}. Routing changes hits: plan the fleet (servers in --fleet's file)."
    if trace.requests_per_s == math.inf:
        return f"{said} Plan for a --rate."
    return f"{said} No load is low enough for one server: {_why_none(plan)}."


def _why_none(plan: Plan) -> str:
    """Return why a server carries no load at all, and the remedy."""
    goal, trace, server = plan.goal, plan.report.trace, plan.without.server
    if goal.ttft_s is None:
        return "the search found none; give another --rate"
    prompt = int(np.percentile(trace.input_tokens, float(goal.quantile.removeprefix("p"))))
    together = int(np.unique(trace.times_s, return_counts=True)[1].max())
    if together == 1 or server.seconds_alone(prompt) > goal.ttft_s:
        return "prompts take longer; check --prefill-speed, or give a longer --ttft"
    return f"up to {together} requests arrive at the same time; spread them if times are rounded, or plan a fleet"


def _num_servers(trace: Trace, row: Row) -> int:
    """Return how many servers of this kind carry the load of the trace together, and 0 if that is not known."""
    load = trace.busiest_requests_per_s
    return max(math.ceil(load / row.requests_per_s), 1) if row.requests_per_s and load < math.inf else 0


def _way_out(plan: Plan, prices: Prices) -> list[Row]:
    """Return the rows whose servers carry a load that is too much for one: without tiers, and the cheapest ones with
    tiers. The latter only if they cost less together, or reach a goal that servers without tiers do not."""
    trace, hit_rate = plan.report.trace, plan.goal.hit_rate or 0.0

    def cost(row: Row) -> float:
        return _num_servers(trace, row) * (prices.server + prices.of_tiers(row.run.server))

    found = [row for row in plan.rows if _num_servers(trace, row)]
    alone = [row for row in found if not row.run.server.cpu_blocks]
    others = [row for row in found if row.run.server.cpu_blocks]
    reaching = [row for row in others if row.run.hit_rate >= hit_rate]
    is_goal = hit_rate > 0 and bool(reaching) and plan.without.hit_rate < hit_rate
    best = sorted(reaching or others, key=cost)[:1]
    return alone + [row for row in best if is_goal or not alone or cost(row) < cost(alone[0])]


def _why_slower(plan: Plan) -> str:
    server, tokens = plan.without.server, plan.report.trace.block_tokens
    load_s = server.block_bytes / server.load_bytes_per_s
    compute_s = tokens / server.prefill_tokens_per_s
    if load_s >= compute_s:
        return (
            f"loading is slower than computing (a block of {tokens} tokens takes {format_seconds(load_s)} to load at "
            f"{server.load_bytes_per_s / 1e9:g} GB/s, load_speed in the file of --fleet, and "
            f"{format_seconds(compute_s)} to compute; above {server.block_bytes / compute_s / 1e9:.3g} GB/s, loading "
            "is faster)"
        )
    return "with each size that reaches the goal first tokens come later than without tiers"


def _saving(plan: Plan, prices: Prices) -> str:
    """Return a sentence about the servers that tiers save in a large fleet. It names the row to buy, and the row that
    costs least for the same load or, if all cost more than they save, pays above the lowest price of a server."""
    today, *others = plan.rows
    found = [(row, row.requests_per_s) for row in others if row.requests_per_s]
    if not today.requests_per_s or not others:
        return ""
    # How many of them do the work of 100 servers without tiers.
    more = [(row, math.ceil(100 * today.requests_per_s / load)) for row, load in found]
    more = [(row, left) for row, left in more if left * _UNCERTAIN < 100]
    useful = [(row, left) for row, left in more if plan.goal.is_no_later(row.run, plan.without)]
    if not useful:
        return "Tiers save servers, but make first tokens later." if more else "Tiers save few servers, if any."

    def cost(row: Row, left: int) -> float:
        return left * (prices.server + prices.of_tiers(row.run.server))

    def worth(row: Row, left: int) -> float:
        return left * prices.of_tiers(row.run.server) / (100 - left)

    best = min(useful, key=lambda each: (cost(*each), each[1]))
    if cost(*best) > 100 * prices.server:
        best = min(useful, key=lambda each: worth(*each))
    bought = [each for each in useful if each[0].run is plan.chosen]
    named = [*bought, *([best] if best not in bought else [])]
    alone = "without tiers" if plan.without.server.gpu_blocks else "without any cache"
    said = [f"{left} servers as in row {row.name}" for row, left in named]
    pays = " or ".join(f"{prices.show(worth(*each))}{f' ({each[0].name})' * (len(named) > 1)}" for each in named)
    text = f"In a large fleet, {' or '.join(said)} do the work of 100 {alone}"
    if not any(worth(*each) for each in named):
        return f"{text}."
    return f"{text}; that pays if a server costs more than {pays} an hour."


def _fleet_answer(plan: Plan, prices: Prices) -> str:
    """Return the number of servers, and the parts that they do not need."""
    reached = plan.chosen or plan.best
    said = f"{_reached(reached, plan.goal)}, {prices.show(prices.of_fleet(reached.config))} an hour."
    if plan.chosen is None:
        number = counted(reached.config.servers, "server")
        return f"No fleet within the limits reaches the goal. The cheapest of the closest ones has {number}: {said}"
    config, results = plan.chosen.config, plan.report.results
    parts = [counted(config.servers, "server")]
    if plan.may_share:
        parts.append("a shared tier" if config.shared is not None else "no shared tier")
    larger = [each.server.cpu_blocks for each in results if each.config.servers > config.servers]
    if larger and config.server.cpu_blocks > min(larger):
        parts.append("fewer servers with more memory")
    return f"{', '.join(parts)}. {said}"


def _table(plan: Plan, prices: Prices) -> Table:
    goal, cells = plan.goal, []
    for row in plan.rows:
        run, server = row.run, row.run.server
        is_fleet, number = plan.report.is_fleet, _num_servers(plan.report.trace, row)
        load = "-" if row.requests_per_s is None else format_number(row.requests_per_s)
        cells.append(
            {
                "row": row.name,
                "memory": format_bytes(server.cpu_bytes) if server.cpu_blocks else "none",
                "disk": format_bytes(server.disk_bytes) if server.disk_blocks else "-",
                "shared": "yes" if run.config.shared is not None else "-",
                "hits": f"{100 * run.hit_rate:.1f}%",
                f"TTFT {goal.quantile}": format_seconds(run.ttft_s[goal.quantile]),
                f"{prices.unit}/h": format_number(plan.report.price(run, prices)),
                "req/s": load,
                "servers": str(run.config.servers if is_fleet else number or "-"),
                "note": "overload" if run.is_overloaded else "-" if plan.is_harmless(run) else "slower",
            }
        )
    return Table([*cells[0]], [[*row.values()] for row in cells]).without_empty() if cells else Table([], [])


def _load(plan: Plan, prices: Prices) -> str:
    """Return sentences that explain the loads in the rows and say how many servers tiers save."""
    loads = [row.requests_per_s for row in plan.rows if row.requests_per_s is not None]
    if not loads:
        return ""
    goal, trace = plan.goal, plan.report.trace
    rate, busiest = trace.requests_per_s, trace.busiest_requests_per_s
    limit = "at most 90% busy, and done with its queue soon after the last request"
    if goal.ttft_s is not None:
        limit = f"with a TTFT {goal.quantile} of {format_seconds(goal.ttft_s)}"
    elif rate == math.inf:
        limit = "with all requests at once"
    text = ""
    if rate < math.inf:
        in_it = f", and {format_number(busiest)} in its busiest hour" if busiest > rate else ""
        text = f"The trace has {format_number(rate)} requests/s{in_it}. "
    text += f"req/s: the most that a server handles, {limit}"
    text += "; servers: how many this load needs." if any(loads) and rate < math.inf else "."
    if not any(loads):
        return f"{text} No load is low enough for one server: {_why_none(plan)}."
    text = f"{text} {_saving(plan, prices)}".rstrip()
    if len(plan.rows) > 1 and not any(row.run.server.disk_blocks for row in plan.rows):
        text += " No disk was tried: give --max-disk."
    return text


def _load_warnings(plan: Plan) -> Iterator[str]:
    without, trace = plan.without, plan.report.trace
    prompts = without.sum_of("prefill_s") / max(without.sum_of("busy_s"), 1e-9)
    rest = "In the rest, requests wait because others decode answers or fill the GPU's cache."
    shares = f"Prompts take {100 * prompts:.0f}% of its busy time. {rest * (prompts < _MANY_PROMPTS)}".rstrip()
    quantile, alone_s = plan.goal.quantile, without.longest_prompt_s
    if without.is_overloaded:
        why = f"it is busy {100 * without.utilisation:.0f}% of {'its busiest hour' if trace.is_long else 'the time'}"
        if without.utilisation <= SATURATED:
            late_s = without.answering_s - without.arriving_s
            why = f"its queue takes {format_seconds(late_s)} to empty after the last request"
        yield f"one server cannot keep up with this load without tiers: {why}. {shares}"
        if _IN_MILLISECONDS < trace.requests_per_s < math.inf:
            yield (
                f"the trace has {trace.requests_per_s:,.0f} requests/s. If its times are in seconds instead of "
                "milliseconds, set stretch: 1000 in the file of --fleet."
            )
    elif trace.requests_per_s < math.inf and without.ttft_s[quantile] > _LONG_WAIT * alone_s:
        yield (
            f"requests wait for each other on the server without tiers: its longest prompt alone takes "
            f"{format_seconds(alone_s)}. {shares}"
        )
    if without.sum_of("preemptions") > len(trace) / 20:
        yield (
            f"the GPU's cache is too small for the requests that run at once: {without.sum_of('preemptions'):,} "
            "preemptions. Lower max_num_seqs, or use a GPU with more memory."
        )


def _settings(server: SimConfig) -> tuple[str, ...]:
    if not server.cpu_blocks:
        return ()
    lines = [f"cpu_bytes_to_use: {exact_size(server.cpu_bytes)}"]
    if server.disk_blocks:
        size = exact_size(server.disk_bytes)
        lines += ["secondary_tiers:", f"- {{type: disk, path: /on/a/local/disk, max_bytes: {size}}}"]
    return tuple(lines)
