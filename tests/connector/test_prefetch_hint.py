# SPDX-License-Identifier: Apache-2.0
"""Requests that only prepare others, on an engine that really computes, over a tier that is slow, busy, or fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engines.reference.zoo import tiny_model

from kvoffload.config import parse_config
from kvoffload.engines.reference import Engine, EngineOptions, Request, SamplingParams
from kvoffload.testing import FaultyStore, GatedStore
from kvoffload.tiering.options import STORES, MemoryOptions
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.memory import MemoryStore

BT = 4
SLOTS = 16
BLOCKS = 6
_OPENED: list[tuple[GatedStore, FaultyStore]] = []


class GatedOptions(MemoryOptions, frozen=True, kw_only=True):
    """``{"type": "gated"}``: memory whose reads can be delayed, and can fail."""

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        gated = GatedStore(MemoryStore(block_bytes))
        _OPENED.append((gated, FaultyStore(gated)))
        return _OPENED[-1][1]


class Served:
    """An engine with 16 slots of host memory above a tier that keeps every stored block."""

    def __init__(self, family: str = "llama", **config: Any) -> None:
        options = EngineOptions(num_blocks=64, block_tokens=BT)
        model = tiny_model(family)
        with Engine(model, options) as bare:
            slot_bytes = bare.layout.block_bytes(1)
        values = {
            "cpu_bytes_to_use": SLOTS * slot_bytes,
            "eviction_policy": "lru",
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "gated", "cascade": "on_store"}],
            "load_policy": "always",
            "max_wait_s": 120.0,
        }
        self.engine = Engine(model, options, parse_config({**values, **config}))
        self.gate, self.store = _OPENED[-1] if _OPENED else (None, None)

    def prompt(self, first_token: int, num_blocks: int = BLOCKS) -> list[int]:
        return [first_token, *(n % 11 for n in range(num_blocks * BT))]

    def add(self, first_token: int, num_blocks: int = BLOCKS, **own: Any) -> Request:
        self.engine.reset_cache(device=True, offloaded=False)
        params = {"kvoffload": own} if own else None
        prompt = self.prompt(first_token, num_blocks)
        return self.engine.add_request(prompt, SamplingParams(max_tokens=3), kv_transfer_params=params)

    def serve(self, first_token: int, num_blocks: int = BLOCKS, **own: Any) -> Request:
        request = self.add(first_token, num_blocks, **own)
        self.until(lambda: request.is_done)
        self.engine.drain()
        return request

    def below(self, first_token: int, num_blocks: int = BLOCKS) -> Request:
        """Make a request whose blocks are in the tier, but not in host memory."""
        request = self.serve(first_token, num_blocks)
        self.serve(100)
        self.serve(101, num_blocks=SLOTS - 1)
        return request

    def until(self, condition: Callable[[], object], nap_s: float = 0.001) -> None:
        """Steps. The naps let the tier's threads run; nothing depends on them."""
        deadline_s = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline_s
            self.engine.step()
            self.engine.check_invariants()
            time.sleep(nap_s)

    def stat(self, *sample: str) -> float:
        return self.engine.get_stats().get(sample, 0)

    @property
    def num_read(self) -> float:
        return self.stat("tier_blocks_loaded", "gated")


MakeServed = Callable[..., Served]


@pytest.fixture
def make() -> Iterator[MakeServed]:
    STORES.register("gated", GatedOptions)
    made: list[Served] = []

    def served(**options: Any) -> Served:
        made.append(Served(**options))
        return made[-1]

    yield served
    for each in made:
        if each.gate is not None:
            each.gate.open_gate()
        each.engine.shutdown()
    STORES.unregister("gated")
    _OPENED.clear()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
def test_blocks_are_read_although_computing_is_faster(make: MakeServed, family: str) -> None:
    tiers = [{"type": "gated", "cascade": "on_store", "read_bytes_per_s": 1}]
    served = make(family=family, load_policy="cost", prefill_tokens_per_s=1e9, secondary_tiers=tiers)
    first = served.below(1)
    assert served.serve(1).external_hit_tokens == 0
    served.below(2)
    before = served.num_read
    ahead = served.serve(1, prefetch=True)
    assert ahead.external_hit_tokens == BLOCKS * BT
    read = served.num_read
    assert read > before
    again = served.serve(1)
    assert again.external_hit_tokens == BLOCKS * BT
    assert served.num_read == read, "nothing was left to read"
    assert again.output_token_ids == ahead.output_token_ids == first.output_token_ids


def test_nobody_waits_for_a_slow_read_but_who_needs_its_blocks(make: MakeServed) -> None:
    served = make()
    served.below(1)
    served.gate.close_gate("read_into")
    ahead = served.add(1, prefetch=True)
    served.until(lambda: served.stat("promotions_in_flight"))
    other = served.add(50, num_blocks=2)
    served.until(lambda: other.is_done)
    asked = served.add(1)
    served.until(lambda: served.stat("requests_waiting") == 2)
    served.gate.open_gate()
    served.until(lambda: asked.is_done and ahead.is_done)
    for request in (asked, ahead):
        assert request.device_hit_tokens + request.external_hit_tokens == BLOCKS * BT
    assert served.num_read == BLOCKS, "read once"


def test_no_more_room_is_taken_than_by_a_request_that_waits(make: MakeServed) -> None:
    served = make()
    served.below(1, num_blocks=2 * SLOTS)
    before = served.num_read
    served.serve(1, num_blocks=2 * SLOTS, prefetch=True)
    assert 0 < served.num_read - before < SLOTS
    assert served.stat("claimed_blocks") == 0, "the claims have ended"


def test_what_cannot_be_read_is_computed(make: MakeServed) -> None:
    served = make()
    first = served.below(1)
    served.store.broken["read_into"] = OSError(5, "broken")
    ahead = served.serve(1, prefetch=True)
    assert (ahead.output_token_ids, ahead.external_hit_tokens) == (first.output_token_ids, 0)


def test_a_read_that_hangs_costs_no_more_than_the_time_budgets(make: MakeServed) -> None:
    """Once for the reads before the turn, and once after it."""
    served = make(max_wait_s=0.5)
    first = served.below(1)
    served.gate.close_gate("read_into")
    ahead = served.add(1, prefetch=True)
    served.until(lambda: ahead.is_done, nap_s=0.05)
    assert (ahead.output_token_ids, ahead.external_hit_tokens) == (first.output_token_ids, 0)


def test_an_abort_ends_the_claims(make: MakeServed) -> None:
    served = make()
    served.below(1)
    served.gate.close_gate("read_into")
    ahead = served.add(1, prefetch=True)
    served.until(lambda: served.stat("promotions_in_flight"))
    served.engine.abort(ahead.request_id)
    served.gate.open_gate()
    served.engine.drain()
    assert served.stat("claimed_blocks") == served.stat("requests_tracked") == 0


def test_without_tiers_the_hint_changes_nothing(make: MakeServed) -> None:
    served = make(spec_name="CPUOffloadingSpec", secondary_tiers=[])
    request = served.add(1, prefetch=True)
    served.engine.step()
    assert request.output_token_ids, "it is computed at once"
