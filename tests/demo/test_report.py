# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from kvoffload.config import parse_config
from kvoffload.demo.comparison import Comparison, Difference, Verdict, WayResult
from kvoffload.demo.report import disk_tokens, latency_table, setting_lines, tokens_table, verdict_lines
from kvoffload.demo.workload import ChatWorkload, Turn
from kvoffload.engines.reference import EngineOptions

CHAT = ChatWorkload(conversations=1, turns=2, system_tokens=0, message_tokens=40, reply_tokens=10, users=1)


def way(name: str, seconds: float, disk_hits: int = 0) -> WayResult:
    turns = tuple(Turn(0, number, (1,), (0.5,), (3.0,), 100, 20, 30, seconds) for number in range(2))
    stats = {("tier_hit_tokens", "fs"): float(disk_hits), ("tier_hit_tokens", "CPU"): 9.0} if disk_hits else {}
    return WayResult(name, turns, 1.5, 100, 0, stats)


def comparison_of(*results: WayResult) -> Comparison:
    return Comparison(CHAT, EngineOptions(), results, Verdict((), 0.5, 1e-6))


def test_tables_name_the_ways_the_speed_up_and_the_disk_only_where_it_was_read() -> None:
    ways = way("no cache", 0.4), way("device cache", 0.2), way("offloading", 0.1)
    latencies = latency_table(comparison_of(*ways))
    assert latencies.headings == ["turn", "no cache", "device cache", "offloading", "vs device"]
    assert [(row[0], row[-1]) for row in latencies.rows] == [("1", "2.0x"), ("2", "2.0x"), ("all", "2.0x")]
    assert "disk" not in tokens_table(comparison_of(*ways)).headings
    table = tokens_table(comparison_of(*ways[:2], way("offloading", 0.1, disk_hits=20)))
    assert [row[table.headings.index("disk")] for row in table.rows] == ["0.0%", "0.0%", "10.0%"]
    assert "Identical: all 3 ways" in verdict_lines(Verdict((), 0.5, 1e-6), 3)[0]


def test_what_was_not_recomputed_are_the_hits_of_all_tiers() -> None:
    ways = way("no cache", 0.4), way("device cache", 0.2), way("offloading", 0.1, disk_hits=20)
    *_, row = tokens_table(comparison_of(*ways)).rows
    assert row == ["offloading", "20.0%", "20.0%", "10.0%", "100", "100", "1.5 s"]


def test_tokens_from_disk_are_at_most_the_hits() -> None:
    assert disk_tokens(way("a", 0.1, disk_hits=32)) == 32
    assert disk_tokens(way("a", 0.1, disk_hits=99)) == 60


def test_a_difference_is_named_with_what_it_can_mean() -> None:
    difference = Difference("offloading", 0, 1, 4, 0.5)
    sharp = verdict_lines(Verdict((difference,), 0.5, 1e-6), 3)
    assert "offloading: conversation 1, turn 2, token 5, won by 0.5" in sharp[1]
    assert "a block was wrong" in sharp[-1]
    assert "Rounding may have caused this" in verdict_lines(Verdict((difference,), 0.5, None), 3)[-1]
    assert "Rounding could have flipped it" in verdict_lines(Verdict((), 1e-6, 1e-6), 3)[-1]


def test_the_setting_says_how_much_fits_where() -> None:
    config = parse_config({"cpu_bytes_to_use": "1MiB", "eviction_policy": "lru"})
    lines = setting_lines("a model", "cpu", CHAT, EngineOptions(num_blocks=5, block_tokens=10), config)
    assert lines[1].endswith("1 at a time; 100 tokens in the end")
    assert "room for 50 tokens, 50% of them" in lines[2]
    assert "1 MiB of host memory, policy lru" in lines[3]
