# SPDX-License-Identifier: Apache-2.0
"""Write the demo's figures as tables and sentences, at most 100 columns wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.config import OffloadingConfig
from kvoffload.metrics import HOST
from kvoffload.sim.table import Table
from kvoffload.units import format_bytes

if TYPE_CHECKING:
    from kvoffload.demo.comparison import Comparison, Latency, Verdict, WayResult
    from kvoffload.demo.workload import ChatWorkload
    from kvoffload.engines.reference import EngineOptions

_MOST_DIFFERENCES = 5


def setting_lines(
    model_name: str, device: str, workload: ChatWorkload, options: EngineOptions, config: OffloadingConfig
) -> list[str]:
    total = workload.conversations * workload.longest_tokens
    pool = options.num_blocks * options.block_tokens
    chat = f"{workload.conversations} conversations x {workload.turns} turns, {workload.users} at a time"
    if workload.document_tokens:
        chat += f", each about {workload.document_tokens:,} tokens"
    below = f"{format_bytes(config.cpu_bytes)} of host memory, policy {config.eviction_policy}"
    if config.secondary_tiers:
        tier = config.secondary_tiers[0]
        below += f"; {format_bytes(tier['max_bytes'])} of disk, {tier['path']}"
    return [
        f"{model_name} on {device}",
        f"  chat        {chat}; {total:,} tokens in the end",
        f"  device      room for {pool:,} tokens, {100 * pool // total}% of them",
        f"  offloading  {below}",
    ]


def latency_table(comparison: Comparison) -> Table:
    """Return a table with a row per turn and a column per way.

    The last column is the speed-up of offloading over the device's own cache.
    """
    rows = []
    turns: list[int | None] = [*range(comparison.workload.turns), None]
    for turn in turns:
        latencies = [result.latency(turn) for result in comparison.results]
        gain = latencies[1].median_s / latencies[2].median_s
        rows.append(["all" if turn is None else str(turn + 1), *map(_latency, latencies), f"{gain:.1f}x"])
    return Table(["turn", *(result.name for result in comparison.results), "vs device"], rows)


def _latency(latency: Latency) -> str:
    return f"{1e3 * latency.median_s:,.0f} ({1e3 * latency.p95_s:,.0f})"


def tokens_table(comparison: Comparison) -> Table:
    """Return a table of the sources of each way's prompt tokens, and of the time that each way took."""
    rows = []
    for result in comparison.results:
        prompt, disk = result.prompt_tokens, disk_tokens(result)
        hits = result.device_hit_tokens, result.external_hit_tokens - disk, disk
        cached = result.device_hit_tokens + result.external_hit_tokens
        shares = (f"{100 * hit / prompt:.1f}%" for hit in hits)
        rows.append([result.name, *shares, f"{cached:,}", f"{prompt - cached:,}", f"{result.wall_s:.1f} s"])
    table = Table(["way", "device", "host memory", "disk", "not recomputed", "computed", "took"], rows)
    return table if any(map(disk_tokens, comparison.results)) else table.without(["disk"])._replace(left_out=())


def disk_tokens(result: WayResult) -> int:
    """Return the number of hit tokens that were in a tier below host memory when their request arrived."""
    below = (hits for (name, *labels), hits in result.stats.items() if name == "tier_hit_tokens" and labels != [HOST])
    return min(result.external_hit_tokens, int(sum(below)))


def verdict_lines(verdict: Verdict, ways: int) -> list[str]:
    """Return lines that say whether the tokens are the same, and whether rounding alone could explain a difference."""
    facts = f"  The closest choice was won by {verdict.smallest_margin:.1g}"
    if verdict.largest_rounding is not None:
        facts += f"; between ways that agree, logits differ by at most {verdict.largest_rounding:.1g}"
    facts += "."
    if verdict.identical:
        worth = (
            "Only a wrong block could have changed a token." if verdict.is_sharp else "Rounding could have flipped it."
        )
        return [f"Identical: all {ways} ways generated the same tokens.", facts, f"  {worth}"]
    first = [
        f"  {each.way}: conversation {each.conversation + 1}, turn {each.turn + 1}, token {each.token + 1}, "
        f"won by {each.margin:.1g}"
        for each in verdict.differences[:_MOST_DIFFERENCES]
    ]
    worth = (
        "Rounding cannot cause this, so a block was wrong." if verdict.is_sharp else "Rounding may have caused this."
    )
    count = len(verdict.differences)
    return [f"Different tokens in {count} conversations. The first differences:", *first, facts, f"  {worth}"]
