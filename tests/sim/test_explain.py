# SPDX-License-Identifier: Apache-2.0
"""Test the sums over stories, and the questions to the simulator."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sizes import by_size

from kvoffload.errors import ConfigError
from kvoffload.miss import Miss
from kvoffload.sim.config import SimConfig
from kvoffload.sim.explain import (
    Machine,
    MachineTier,
    advice_on,
    ask_what_if,
    base_config,
    read_explanations,
    recommendation,
    what_ifs,
)
from kvoffload.sim.page import draw_explanation
from kvoffload.sim.report import explanation_tables
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import NO_SESSION, Trace, TraceError

MACHINE = Machine(block_bytes=1 << 20, cpu_bytes=300 << 20, policy="lru")


def line(at_ms: float, found: dict[str, int], missed: dict[str, int], **more: Any) -> dict[str, Any]:
    story = {
        "found": found,
        "missed": missed,
        **{name: more.pop(name) for name in ("lost_s", "waited_s", "weighed") if name in more},
    }
    total = sum(found.values()) + sum(missed.values())
    return {
        "timestamp": at_ms,
        "input_length": total,
        "output_length": 1,
        "block_tokens": 16,
        "hash_ids": list(range(total // 16)),
        "story": story,
        **more,
    }


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_tokens_causes_and_times_add_up(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        line(0, {"device": 0}, {"new": 95, "tail": 5}, machine={"block_bytes": 7, "cpu_bytes": 70, "policy": "lru"}),
        line(1000, {"device": 50, "CPU": 30}, {"evicted CPU": 20}, lost_s={"evicted CPU": 10}, waited_s={"queue": 1}),
        line(4000, {"device": 0}, {"evicted CPU": 60, "tail": 4}, lost_s={"evicted CPU": 30}, waited_s={"queue": 3}),
        {name: value for name, value in line(5000, {}, {"new": 16}).items() if name != "story"},
    )
    stories = read_explanations(path)
    assert (len(stories.trace), stories.explained, stories.tokens) == (4, 3, 264)
    assert stories.found == {"device": 50, "CPU": 30}
    assert list(stories.missed.items()) == [("new", 95), ("evicted CPU", 80), ("tail", 9)]
    assert stories.avoidable == 80
    assert stories.lost_s == {"evicted CPU": (20 * 10 + 60 * 30) / 80}
    assert stories.waits_s == {"queue": [1, 3]}
    assert sum(sum(tokens.values()) for _, tokens in stories.course) == 264
    ends = [(end_s, tokens) for end_s, tokens in stories.course if tokens]
    assert [tokens for _, tokens in ends] == [
        {"device": 0, "computed": 100},
        {"device": 50, "CPU": 30, "computed": 20},
        {"device": 0, "computed": 64},
    ]
    interval_s = stories.course[0][0]
    for (end_s, _), at_s in zip(ends, (0.0, 1.0, 4.0), strict=True):
        assert end_s - interval_s <= at_s <= end_s
    assert stories.machine == Machine(7, 70, "lru")


def test_hinted_requests_and_the_others(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        line(0, {"device": 60}, {"new": 36}, next_use="soon"),
        line(1, {"device": 0}, {"new": 32}, next_use="never"),
        line(2, {"device": 8}, {"new": 24}),
    )
    assert read_explanations(path).hints_text == (
        "Clients gave hints with 2 requests (never 1, soon 1). Of their tokens 46.9% were found, and of the others' "
        "25.0%."
    )
    assert read_explanations(write(path, line(2, {"device": 8}, {"new": 24}))).hints_text == ""


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "contains no explanations"),
        (', "story": {"found": {"a": 4}, "missed": {"new": 4}}', "line 1: its explanation does not cover the tokens"),
        (', "story": 7', "line 1: this is not a line that record_trace"),
    ],
)
def test_files_that_cannot_be_explained(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]{text}}}\n')
    with pytest.raises(TraceError, match=what):
        read_explanations(path)


def test_the_machine_of_the_trace_and_what_overrides_it() -> None:
    tiers = (MachineTier("disk", 1 << 29), MachineTier("memory", 1 << 29))
    machine = Machine(1 << 20, 300 << 20, "arc", 2, tiers=tiers)
    config = base_config(machine, footprint_blocks=700, prefill_tokens_per_s=1000)
    assert (config.cpu_blocks, config.disk_blocks, config.policy, config.store_threshold) == (300, 1024, "arc", 2)
    other = base_config(machine, disk_bytes=0, gpu_blocks=5, footprint_blocks=700, prefill_tokens_per_s=1000)
    assert (other.cpu_blocks, other.disk_blocks, other.gpu_blocks) == (300, 0, 5)
    with pytest.raises(ConfigError, match="use the whole file"):
        base_config(None, footprint_blocks=700, prefill_tokens_per_s=1000)
    unknown = base_config(Machine(1, 10, "of a plug-in"), footprint_blocks=700, prefill_tokens_per_s=1000)
    assert unknown.policy in ("lru", "arc", "density")


def test_changes_are_those_that_are_not_there_already() -> None:
    base = base_config(MACHINE, footprint_blocks=700, prefill_tokens_per_s=1000)
    changes = dict(what_ifs(base))
    assert changes["as it was"] == base
    assert changes["twice the host memory"].cpu_blocks == 600
    assert changes["a disk of 10x the memory"].disk_blocks == 3000
    assert {"policy arc", "policy density", "store_threshold 2"} < changes.keys()
    assert not {"policy lru", "store_threshold 1", "twice the disk"} & changes.keys()


def test_a_tier_without_a_bound_is_a_disk_for_the_whole_trace() -> None:
    machine = Machine(1 << 20, 600 << 20, "lru", tiers=(MachineTier("memory", 5 << 20), MachineTier("disk")))
    base = base_config(machine, footprint_blocks=700, prefill_tokens_per_s=1000)
    # As in serving: a disk without a bound is written on store, however small the trace is beside host memory.
    assert (base.disk_blocks, base.cascade_mode) == (700, "on_store")
    changes = dict(what_ifs(base, has_unbounded_disk=machine.has_unbounded_tier))
    assert changes["as it was, unbounded disk"] == base
    assert {config.disk_blocks for config in changes.values()} == {700}
    smaller = base_config(machine, disk_bytes=50 << 20, footprint_blocks=700, prefill_tokens_per_s=1000)
    assert (smaller.disk_blocks, smaller.cascade_mode) == (50, "on_evict")


@pytest.mark.parametrize("kind", ["redis", "mooncake"])
def test_a_tier_whose_servers_evict_has_a_size_that_must_be_given(kind: str) -> None:
    machine = Machine(1 << 20, 600 << 20, "lru", tiers=(MachineTier("memory", 5 << 20), MachineTier(kind)))
    with pytest.raises(ConfigError, match=f"'{kind}' tier; give --disk"):
        base_config(machine, footprint_blocks=700, prefill_tokens_per_s=1000)
    given = base_config(machine, disk_bytes=50 << 20, footprint_blocks=700, prefill_tokens_per_s=1000)
    assert given.disk_blocks == 50
    elsewhere = Machine(1 << 20, 600 << 20, "lru", tiers=(MachineTier("of a plug-in"), MachineTier(None)))
    assert base_config(elsewhere, footprint_blocks=700, prefill_tokens_per_s=1000).disk_blocks == 700


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        (["on_evict"], "on_evict"),
        (["on_store"], "on_store"),
        (["on_evict", "on_store"], "on_store"),
        ([None, "on_evict"], None),
        ([None], None),
        ([], None),
    ],
)
def test_the_disk_is_written_when_the_tiers_were(modes: list[Any], expected: str | None) -> None:
    tiers = tuple(MachineTier("disk", 1 << 30, mode) for mode in modes)
    machine = Machine(1 << 20, 300 << 20, "lru", tiers=tiers)
    config = base_config(machine, footprint_blocks=700, prefill_tokens_per_s=1000)
    assert config.cascade == expected
    assert base_config(machine, disk_bytes=0, footprint_blocks=7, prefill_tokens_per_s=1000).cascade is None


def test_the_simulator_orders_the_changes_by_what_they_save() -> None:
    trace = synthesize("chat", by_size(80, 150), 1)
    changes = what_ifs(base_config(MACHINE, footprint_blocks=700, prefill_tokens_per_s=1000))
    as_it_was, *others = ask_what_if(trace, changes, processes=1)
    assert as_it_was.more_tokens == 0
    assert [each.more_tokens for each in others] == sorted((each.more_tokens for each in others), reverse=True)
    by_name = {each.change: each for each in others}
    most = by_name["four times the host memory"]
    assert most.more_tokens > 0
    tokens = trace.block_tokens
    assert as_it_was.result.hit_blocks.total() == as_it_was.result.hit_blocks["host"]
    assert most.more_tokens == tokens * (most.result.hit_blocks.total() - as_it_was.result.hit_blocks["host"])
    assert most.saved_s == most.more_tokens / 1000


def test_a_change_that_makes_first_tokens_later_is_not_recommended() -> None:
    """Documents in turn, of 16 blocks of 1 GiB and 512 tokens. A block takes 26 ms to compute, and 43 ms to load at the
    usual speed of host memory."""
    requests, blocks = 24, 16
    trace = Trace(
        name="documents",
        block_tokens=512,
        times_s=10.0 * np.arange(requests),
        input_tokens=np.full(requests, 512 * blocks + 1),
        output_tokens=np.ones(requests, dtype=np.int64),
        sessions=np.full(requests, NO_SESSION),
        offsets=blocks * np.arange(requests + 1),
        ids=np.tile(np.arange(4 * blocks, dtype=np.int32), requests // 4),
    )
    slow = SimConfig(cpu_blocks=20, block_bytes=1 << 30, policy="lru")
    for server, is_recommended in ((slow, False), (replace(slow, load_bytes_per_s=100e9), True)):
        asked = ask_what_if(trace, what_ifs(server), processes=1)
        assert asked[1].more_tokens > 0.5 * trace.total_input_tokens
        said = recommendation(asked, trace.total_input_tokens)
        assert said.startswith("Set cpu_bytes_to_use: 80GiB" if is_recommended else "Change nothing: "), said


def test_the_cheapest_of_nearly_equal_changes_is_recommended() -> None:
    """Forty documents of 4 blocks in turn: host memory has room for ten of them, and a disk for twenty more."""
    requests, blocks = 200, 4
    ids = np.array([[4 * (at % 40) + block for block in range(blocks)] for at in range(requests)], dtype=np.int32)
    trace = Trace(
        name="documents",
        block_tokens=1000,
        times_s=np.arange(requests, dtype=np.float64),
        input_tokens=np.full(requests, 4001),
        output_tokens=np.ones(requests, dtype=np.int64),
        sessions=np.full(requests, NO_SESSION),
        offsets=blocks * np.arange(requests + 1),
        ids=ids.reshape(-1),
    )
    server = SimConfig(40, 1 << 20, disk_blocks=80, policy="lru", prefill_tokens_per_s=20_000.0)
    asked = ask_what_if(trace, what_ifs(server), processes=1)
    found = {each.change: each.more_tokens for each in asked}
    assert found["four times the host memory"] == found["twice the disk"] > 0.5 * trace.total_input_tokens
    assert "(twice the disk)" in recommendation(asked, trace.total_input_tokens)


def test_what_tiers_were_weighed_against_is_told_by_medians(tmp_path: Path) -> None:
    def weighed(expected_s: float, redis_s: float) -> list[dict[str, Any]]:
        return [
            {"tier": "disk", "blocks": 2, "expected_s": expected_s, "others_s": {"redis": redis_s}, "computing_s": 1}
        ]

    path = write(
        tmp_path / "t.jsonl",
        line(0, {"disk": 32}, {"tail": 1}, weighed=weighed(0.012, 0.04)),
        line(1, {"disk": 32}, {"tail": 1}, weighed=weighed(0.014, 0.02)),
        line(2, {"disk": 32}, {"tail": 1}, weighed=weighed(0.002, 0.05)),
        line(3, {"CPU": 32}, {"tail": 1}),
    )
    table = explanation_tables(read_explanations(path), [])["Why from there"]
    assert table.rows == [["disk", "3", "12 ms", "redis 40 ms, computing 1 s"]]


def test_every_cause_has_its_advice() -> None:
    assert all(advice_on(str(miss)) for miss in Miss)
    assert advice_on("evicted disk") == Miss.EVICTED.advice
    assert advice_on("of another version") == ""


def test_every_cause_is_injected_into_an_engine() -> None:
    """The golden tests cover all causes, one by one, except ``unknown``, which is not a cause."""
    tests = Path(__file__).parents[1]
    golden = [tests / "integration/test_explanations.py", tests / "engines/reference/test_explanations.py"]
    words = set(re.findall(r'"([a-z_ ]+)', "".join(path.read_text().replace("\n", " ") for path in golden)))
    words |= {word.split(" ")[0] for word in words}
    assert {str(miss) for miss in Miss} - words == {"unknown"}


def test_the_page_needs_nothing_else_and_escapes_names(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        line(
            0,
            {"device": 0, "<b>": 10},
            {"new": 80, "evicted <b>": 10},
            lost_s={"evicted <b>": 4000},
            waited_s={"load": 1},
        ),
        line(200_000, {"device": 30}, {"tail": 2}),
    )
    stories = read_explanations(path)
    trace = synthesize("chat", 40, 1)
    asked = ask_what_if(
        trace, what_ifs(base_config(MACHINE, footprint_blocks=700, prefill_tokens_per_s=1000)), processes=1
    )
    page = draw_explanation("<trace>", stories, asked, 1000, is_page=True).decode()
    assert "<b>evicted" not in page
    assert "evicted &lt;b&gt;" in page
    assert "&lt;trace&gt;" in page
    assert not re.search(r'(?:src|href)="(?!#)', re.sub(r'xlink:href="#', "", page)), "nothing is loaded"
    assert "<script" not in page
    assert page.count("<svg") == 1
    assert draw_explanation("trace", stories, asked, 1000, is_page=False).startswith(b"\x89PNG")
