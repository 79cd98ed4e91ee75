# SPDX-License-Identifier: Apache-2.0
"""Test the explanations of a recorded run: causes are injected one by one, each is named correctly, and the tokens add
up."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeRequest
from tests.integration.served_tiers import BLOCK_TOKENS, PAGE_BYTES, ServedTiers, prompt
from tests.tiering.rig import quiesce
from tests.tiering.stores.disk.rig import upkeep_of

from kvoffload.base import ReqContext, make_offload_key
from kvoffload.connector.observer import DEVICE
from kvoffload.sim.explain import read_explanations
from kvoffload.sim.trace_files import load_trace
from kvoffload.testing import FakeTier, GatedStore, ManualClock
from kvoffload.tiering.base import SecondaryTierManager
from kvoffload.tiering.load_policy import BlockWorth
from kvoffload.tiering.options import build_tier
from kvoffload.tiering.plans import Plan
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.tier import StoreTier, TierLimits

BLOCKS = 8
WHOLE = BLOCKS * BLOCK_TOKENS
OTHERS = 3
"""Prompts that together are more than host memory."""

Explanation = dict[str, dict[str, float]]


class Recorded:
    """Serves prompts of 8 blocks, with nothing left on the device between two of them, and records a trace."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.path = root / "trace.jsonl"
        options = {"num_blocks": 16, "make_tier": None, "record_trace": str(self.path)} | options
        self.served = ServedTiers(root, **options)
        self._ids = itertools.count()

    def ask(self, first_token: int, **of_request: Any) -> None:
        """Serve a request from its arrival to its end."""
        engine = self.served.engine
        engine.preempt_all()
        request = FakeRequest(f"r{next(self._ids)}", prompt(first_token, BLOCKS), 1, BLOCK_TOKENS)
        for name, value in of_request.items():
            setattr(request, name, value)
        engine.connector.on_new_request(request)
        engine.waiting.append(request)
        self.served.finish(request)
        self.served.drain()

    def fill(self) -> None:
        for other in range(OTHERS):
            self.ask(100 + other)

    def last(self) -> Explanation:
        """Return the explanation of the last request, after a check of all sums."""
        self.served.close()
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        for line in lines:
            each = line["story"]
            assert sum(each["found"].values()) + sum(each["missed"].values()) == line["input_length"]
        total = read_explanations(self.path)
        assert total.tokens == sum(line["input_length"] for line in lines)
        assert sum(total.found.values()) + sum(total.missed.values()) == total.tokens
        assert total.explained == len(total.trace) == len(lines) == len(load_trace(self.path))
        explanation: Explanation = lines[-1]["story"]
        return explanation


MakeRecorded = Callable[..., Recorded]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRecorded]:
    made: list[Recorded] = []

    def recorded(**options: Any) -> Recorded:
        made.append(Recorded(tmp_path, **options))
        return made[-1]

    yield recorded
    for each in made:
        each.served.close()


def files_tier(root: Path, **options: Any) -> Callable[..., SecondaryTierManager]:
    """Return a factory of a tier of plain files called ``fs``."""
    values = {"type": "fs", "path": str(root / "blocks"), "max_bytes": "unlimited", "exclusive": True} | options
    return lambda view, lost: build_tier(values, view, lost=lost)


def test_blocks_that_nobody_had_stored_are_new(make: MakeRecorded) -> None:
    recorded = make()
    recorded.ask(1)
    assert recorded.last()["missed"] == {"new": WHOLE, "tail": 1}


def test_hits_by_where_they_were(make: MakeRecorded, tmp_path: Path) -> None:
    recorded = make(make_tier=files_tier(tmp_path))
    recorded.ask(1)
    recorded.ask(1)
    recorded.fill()
    recorded.ask(1)
    explanation = recorded.last()
    assert explanation["found"] == {DEVICE: 0, "fs": WHOLE}
    assert explanation["missed"] == {"tail": 1}
    assert explanation["waited_s"]["tiers"] > 0
    assert explanation["waited_s"]["load"] > 0
    assert read_explanations(recorded.path).found["CPU"] == WHOLE


def test_evicted_from_host_memory_and_when(make: MakeRecorded) -> None:
    clock = ManualClock()
    recorded = make(clock=clock)
    recorded.ask(1)
    recorded.fill()
    clock.advance(50)
    recorded.ask(1)
    explanation = recorded.last()
    assert explanation["missed"] == {"evicted CPU": WHOLE, "tail": 1}
    assert "evicted CPU" in explanation["lost_s"]


def test_what_lies_behind_a_missing_block_has_its_cause(make: MakeRecorded) -> None:
    recorded = make()
    recorded.ask(1)
    recorded.fill()
    recorded.ask(1)  # all of it is here again
    recorded.ask(2)
    # The least recent blocks are the first prompt's, its tail first: three of them are evicted, and return one by one.
    recorded.served.manager.primary_tier.slots.touch(keys_of(1)[-3:])
    context = ReqContext("other")
    recorded.served.manager.on_new_request(context)
    taken = [make_offload_key(f"other {n}".encode(), 0) for n in range(2)]
    assert recorded.served.manager.prepare_store(taken, context) is not None
    recorded.served.manager.complete_store(taken, context)
    held = recorded.served.manager.where(keys_of(1), context)
    first_missing = held.index(False)
    assert any(held[first_missing:]), "the case that is to be tested"
    recorded.ask(1)
    explanation = recorded.last()
    assert explanation["found"] == {"device": 0, "CPU": first_missing * BLOCK_TOKENS}
    assert explanation["missed"] == {"evicted CPU": (BLOCKS - first_missing) * BLOCK_TOKENS, "tail": 1}


def keys_of(first_token: int) -> list[Any]:
    request = FakeRequest("keys", prompt(first_token, BLOCKS), 1, BLOCK_TOKENS)
    return [make_offload_key(each, 0) for each in request.block_hashes]


def test_filtered(make: MakeRecorded) -> None:
    recorded = make(store_threshold=2)
    recorded.ask(1)
    recorded.ask(1)
    assert recorded.last()["missed"] == {"filtered": WHOLE, "tail": 1}


def test_refused_for_want_of_room(make: MakeRecorded) -> None:
    recorded = make()
    manager, context = recorded.served.manager, ReqContext("writes for ever")
    manager.on_new_request(context)
    slow = [make_offload_key(f"slow {n}".encode(), 0) for n in range(16)]
    assert manager.prepare_store(slow, context) is not None
    recorded.ask(1)
    recorded.ask(1)
    explanation = recorded.last()
    assert explanation["missed"] == {"refused": WHOLE, "tail": 1}


def test_limits_of_requests(make: MakeRecorded) -> None:
    recorded = make()
    recorded.ask(1, kv_transfer_params={"max_offload_tokens": 2 * BLOCK_TOKENS})
    recorded.ask(1, kv_transfer_params={"max_load_tokens": BLOCK_TOKENS})
    explanation = recorded.last()
    assert explanation["found"] == {"device": 0, "CPU": BLOCK_TOKENS}
    assert explanation["missed"] == {"load limit": WHOLE - BLOCK_TOKENS, "tail": 1}


def test_what_a_request_did_not_want_stored(make: MakeRecorded) -> None:
    recorded = make()
    recorded.ask(1, kv_transfer_params={"max_offload_tokens": 2 * BLOCK_TOKENS})
    recorded.ask(1)
    explanation = recorded.last()
    assert explanation["found"] == {"device": 0, "CPU": 2 * BLOCK_TOKENS}
    assert explanation["missed"] == {"request limit": WHOLE - 2 * BLOCK_TOKENS, "tail": 1}


def test_generated_tokens_that_were_left_out(make: MakeRecorded) -> None:
    recorded = make(offload_prompt_only=True)
    first = FakeRequest("first", prompt(1, BLOCKS), 3 * BLOCK_TOKENS, BLOCK_TOKENS)
    engine = recorded.served.engine
    engine.connector.on_new_request(first)
    engine.waiting.append(first)
    recorded.served.finish(first)
    recorded.served.drain()
    engine.preempt_all()
    again = engine.add("again", first.tokens, 1)
    recorded.served.finish(again)
    recorded.served.drain()
    explanation = recorded.last()
    assert explanation["found"] == {"device": 0, "CPU": WHOLE}
    assert explanation["missed"]["prompt only"] >= BLOCK_TOKENS
    assert set(explanation["missed"]) == {"prompt only", "tail"} | ({"new"} & set(explanation["missed"]))


def test_requests_that_read_no_cache(make: MakeRecorded) -> None:
    recorded = make()
    recorded.ask(1)
    recorded.ask(1, skip_reading_prefix_cache=True)
    assert recorded.last()["missed"] == {"not read": WHOLE, "tail": 1}


def test_a_reset(make: MakeRecorded) -> None:
    recorded = make()
    recorded.ask(1)
    recorded.served.engine.connector.reset_cache()
    recorded.ask(1)
    assert recorded.last()["missed"] == {"reset": WHOLE, "tail": 1}


def test_failed_stores_and_loads(make: MakeRecorded) -> None:
    recorded = make()
    handler = recorded.served.handlers[0]
    run, fails = handler.run, {"yes": True}
    handler.run = lambda job_id, success=True: run(job_id, success and not fails["yes"])  # type: ignore[method-assign]
    recorded.ask(1)
    recorded.ask(1)
    fails["yes"] = False
    recorded.ask(2)
    fails["yes"] = True
    recorded.ask(2)
    explanation = recorded.last()
    assert explanation["missed"] == {"load failed": WHOLE, "tail": 1}
    explanations = read_explanations(recorded.path)
    assert explanations.missed["store failed"] == WHOLE


def test_evicted_from_a_tier(make: MakeRecorded) -> None:
    recorded = make(
        make_tier=lambda view, lost: StoreTier(view, "small", MemoryStore(PAGE_BYTES, 24 * PAGE_BYTES), lost=lost)
    )
    recorded.ask(1)
    for other in range(2 * OTHERS):
        recorded.ask(100 + other)
    recorded.ask(1)
    assert recorded.last()["missed"] == {"evicted small": WHOLE, "tail": 1}


@pytest.mark.parametrize(("damage", "cause"), [("deleted", "removed fs"), ("flipped", "corrupt fs")])
def test_blocks_that_others_removed_or_damaged(make: MakeRecorded, tmp_path: Path, damage: str, cause: str) -> None:
    recorded = make(make_tier=files_tier(tmp_path))
    recorded.ask(1)
    recorded.fill()
    recorded.served.drain()
    files = [path for path in (tmp_path / "blocks").rglob("*") if path.is_file() and path.stat().st_size > PAGE_BYTES]
    assert len(files) == (1 + OTHERS) * BLOCKS
    for path in files:
        if damage == "deleted":
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    recorded.ask(1)
    assert recorded.last()["missed"] == {cause: WHOLE, "tail": 1}


@pytest.mark.parametrize("removed", ["slabs", "directory"])
def test_slabs_that_others_removed(make: MakeRecorded, tmp_path: Path, removed: str) -> None:
    """An idle tier notices it by itself, and the explanation of the very next request includes it."""
    recorded = make(make_tier="disk")
    recorded.ask(1)
    recorded.fill()
    (tier,) = recorded.served.tiers
    blocks = tmp_path / "blocks"
    with upkeep_of(tier._store).lock:
        if removed == "directory":
            shutil.rmtree(blocks)
            blocks.mkdir()
        else:
            for path in [*blocks.rglob("*.slab"), *blocks.rglob("*.table")]:
                path.unlink()
    tier._store.refresh()
    recorded.ask(1)
    assert recorded.last()["missed"] == {"removed disk": WHOLE, "tail": 1}


def test_corruption_that_a_probe_found_is_no_cause_of_later_deletions(make: MakeRecorded, tmp_path: Path) -> None:
    recorded = make(make_tier=files_tier(tmp_path))
    recorded.ask(2)
    (tier,) = recorded.served.tiers

    def files() -> list[Path]:
        found = (tmp_path / "blocks").rglob("*")
        return [path for path in found if path.is_file() and path.stat().st_size > PAGE_BYTES]

    for path in files():
        path.write_bytes(bytes(path.stat().st_size))
    for _ in range(BLOCKS):
        tier._submit_probe()
        quiesce(tier)
    assert tier.get_stats()["tier_corrupt_blocks", "fs"] == BLOCKS
    recorded.ask(1)
    recorded.fill()
    for path in files():
        path.unlink()
    recorded.ask(1)
    assert recorded.last()["missed"] == {"removed fs": WHOLE, "tail": 1}


def test_a_tier_that_is_off(make: MakeRecorded, tmp_path: Path) -> None:
    recorded = make(make_tier=files_tier(tmp_path))
    recorded.ask(1)
    recorded.fill()
    (tier,) = recorded.served.tiers
    tier._reads.record_failure("test", "The test says so.", is_grave=True)
    recorded.ask(1)
    assert recorded.last()["missed"] == {"tier off": WHOLE, "tail": 1}


def test_a_tier_that_the_request_leaves_out(make: MakeRecorded, tmp_path: Path) -> None:
    recorded = make(make_tier=files_tier(tmp_path))
    recorded.ask(1)
    recorded.fill()
    recorded.ask(1, kv_transfer_params={"kv_load_tiers": [{"locality": "REMOTE", "medium": "CPU"}]})
    assert recorded.last()["missed"] == {"tier left out": WHOLE, "tail": 1}


def test_declined_by_cost(make: MakeRecorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worth = BlockWorth(PAGE_BYTES, (BLOCK_TOKENS,))
    recorded = make(make_tier=files_tier(tmp_path), block_worth=worth)
    recorded.ask(1)
    recorded.fill()
    planner = recorded.served.manager._planner
    monkeypatch.setattr(planner, "plan", lambda *_: Plan(0))
    monkeypatch.setattr(planner, "weighs", lambda key: True)
    recorded.ask(1)
    explanation = recorded.last()
    assert explanation["found"] == {"device": 0}
    assert explanation["missed"] == {"declined by cost": WHOLE, "tail": 1}


def test_a_tier_that_answers_too_late(make: MakeRecorded, monkeypatch: pytest.MonkeyPatch) -> None:
    worth = BlockWorth(PAGE_BYTES, (BLOCK_TOKENS,), 1e9)
    recorded = make(make_tier=lambda view, lost: FakeTier(view, at_once=True), block_worth=worth)
    recorded.ask(1)
    recorded.fill()
    (tier,) = recorded.served.manager.secondary_tiers
    monkeypatch.setattr(tier, "lookup", lambda key, context: None)
    recorded.served.manager._planner.link(0).answers._seconds.append(1.0)
    recorded.ask(1)
    assert recorded.last()["missed"] == {"slow answer": WHOLE, "tail": 1}


def test_out_of_patience(make: MakeRecorded) -> None:
    clock = ManualClock()
    gate = GatedStore(MemoryStore(PAGE_BYTES))
    limits = TierLimits(threads=1, timeout_s=1e6, drain_timeout_s=30)
    recorded = make(clock=clock, make_tier=lambda view, lost: StoreTier(view, "slow", gate, limits, clock=clock))
    recorded.ask(1)
    recorded.fill()
    gate.close_gate("read_into")

    def wait() -> None:
        recorded.served.step()
        gate.wait_for_arrivals(1)
        clock.advance(121)

    engine = recorded.served.engine
    engine.preempt_all()
    request = engine.add("impatient", prompt(1, BLOCKS), 1)
    wait()
    recorded.served.finish(request)
    gate.open_gate()
    recorded.served.drain()
    assert recorded.last()["missed"] == {"out of patience": WHOLE, "tail": 1}


def test_prompts_that_claim_too_much_of_host_memory(make: MakeRecorded, tmp_path: Path) -> None:
    recorded = make(make_tier=files_tier(tmp_path), promotion_share=0.25)
    recorded.ask(1)
    recorded.fill()
    recorded.ask(1)
    explanation = recorded.last()
    assert explanation["found"] == {"device": 0, "fs": 4 * BLOCK_TOKENS}
    assert explanation["missed"] == {"promotion_share": WHOLE - 4 * BLOCK_TOKENS, "tail": 1}
