# SPDX-License-Identifier: Apache-2.0
"""Test an engine over two nodes, with a directory on each: tokens equal those without tiers, whatever fails on a
node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engines.reference.zoo import random_prompts, tiny_model
from tests.integration.two_nodes import TwoNodeEngine

from kvoffload.engines.reference import Engine, EngineOptions, SamplingParams

OPTIONS = EngineOptions(num_blocks=24, block_tokens=4, max_batch_tokens=48, max_requests=4)
PROMPTS = random_prompts(8, 40, 48, seed=7)
TOKENS = SamplingParams(max_tokens=3)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def right(model: Any) -> list[list[int]]:
    with Engine(model, EngineOptions(num_blocks=512, block_tokens=4, prefix_caching=False)) as engine:
        return engine.generate(PROMPTS, TOKENS)


Start = Callable[..., Any]


@pytest.fixture
def start(model: Any, tmp_path: Path) -> Start:
    """Starts an engine whose host memory is far smaller than all prompts. ``tier``: more options of the tier."""

    @contextmanager
    def start(tier: dict[str, Any] | None = None, **more: Any) -> Iterator[TwoNodeEngine]:
        common = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": "48KiB", "load_policy": "always"}
        common |= {"max_wait_s": 60.0} | more
        each = [{"type": "fs", "path": str(tmp_path / str(node)), "max_bytes": "64MiB"} for node in range(2)]
        options = [common | {"secondary_tiers": [one | (tier or {})]} for one in each]
        engine = TwoNodeEngine(model, OPTIONS, options)
        try:
            yield engine
        finally:
            engine.shutdown()

    return start


def ask(engine: TwoNodeEngine, count: int = len(PROMPTS)) -> list[list[int]]:
    """Serve each prompt alone, with an empty device cache."""
    answers = []
    for prompt in PROMPTS[:count]:
        answers += engine.generate([prompt], TOKENS)
        engine.drain()
        engine.check_invariants()
        engine.reset_cache(offloaded=False)
    return answers


def stat(engine: TwoNodeEngine, name: str) -> float:
    return sum(value for (each, *_), value in engine.get_stats().items() if each == name)


def step_until(engine: TwoNodeEngine, is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < deadline
        engine.step()
        time.sleep(0.01)


def test_flipped_bytes_on_one_node_are_a_miss_that_names_it(
    start: Start, right: list[list[int]], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    with start(record_trace=str(trace)) as engine:
        assert ask(engine) == right
        assert ask(engine, 2) == right[:2]
        assert stat(engine, "tier_blocks_loaded") > 0, "both nodes have their parts"
        assert stat(engine, "tier_load_failures") == 0
        for path in (tmp_path / "1").rglob("*"):
            if path.is_file() and path.stat().st_size >= engine.agents[1].spec.block_bytes:
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
        assert ask(engine)[2:] == right[2:]
        assert stat(engine, "tier_corrupt_blocks") > 0
    stories = [json.loads(line)["story"] for line in trace.read_text().splitlines()]
    causes = {cause for story in stories for cause in story["missed"]}
    assert "corrupt fs on node 1" in causes
    assert not any("node 0" in cause for cause in causes)


@pytest.mark.long
def test_hits_outlive_the_engine_and_need_both_nodes(start: Start, right: list[list[int]], tmp_path: Path) -> None:
    with start() as engine:
        assert ask(engine) == right
        stored = stat(engine, "tier_blocks_stored")
        assert stored > stat(engine, "primary_blocks")
    files = [len([path for path in (tmp_path / str(node)).rglob("*") if path.is_file()]) for node in range(2)]
    assert min(files) >= stored
    with start() as engine:
        assert ask(engine) == right
        assert stat(engine, "tier_blocks_loaded") >= stored - len(PROMPTS)  # all but last tokens
    # A part of another node is not taken for one's own.
    for old, new in (("0", "2"), ("1", "0"), ("2", "1")):
        (tmp_path / old).rename(tmp_path / new)
    with start() as engine:
        assert ask(engine, 2) == right[:2]
        assert stat(engine, "tier_blocks_loaded") == 0


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_an_agent_that_is_gone_turns_the_tier_off_until_it_is_back(
    start: Start, right: list[list[int]], node: int, fault: str
) -> None:
    with start({"timeout_s": 1.0}, max_wait_s=0.2) as engine:
        assert ask(engine) == right
        agent = engine.agents[node]
        (agent.kill if fault == "killed" else agent.freeze)()
        assert ask(engine) == right
        assert stat(engine, "promotions_in_flight") > 0, "their slots are reserved: the agent might still write"
        assert stat(engine, "tier_healthy") == 0
        if fault == "killed":
            agent.start()
            agent.wait_until_it_runs()
        else:
            agent.thaw()
        step_until(engine, lambda: engine.get_stats()["tier_breaker_open", "fs", "read"] == 0)
        step_until(engine, lambda: stat(engine, "promotions_in_flight") == 0)  # the probe may have been answered first
        loaded = stat(engine, "tier_blocks_loaded")
        assert ask(engine) == right
        assert stat(engine, "tier_blocks_loaded") > loaded


@pytest.mark.long
def test_a_disk_on_which_nothing_can_be_written(start: Start, right: list[list[int]]) -> None:
    with start() as engine:
        engine.agents[1].kill()
        engine.agents[1].start(most_bytes=100)
        engine.agents[1].wait_until_it_runs()
        assert ask(engine) == right
        assert ask(engine) == right
        assert stat(engine, "tier_blocks_loaded") == 0
        assert stat(engine, "tier_store_failures") > 0
        assert stat(engine, "primary_blocks_pinned") == 0


@pytest.mark.long
def test_a_reset_while_parts_are_on_their_way(start: Start, right: list[list[int]]) -> None:
    with start() as engine:
        assert ask(engine) == right
        for _ in range(20):
            requests = [engine.add_request(prompt, TOKENS) for prompt in PROMPTS[:3]]
            for _ in range(3):
                engine.step()
            engine.reset_cache()
            for request in requests:
                engine.abort(request.request_id)
        engine.drain()
        engine.check_invariants()
        assert stat(engine, "primary_blocks_pinned") == 0
        assert ask(engine) == right
