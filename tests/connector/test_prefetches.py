# SPDX-License-Identifier: Apache-2.0
"""Prefetches on an engine that really computes, over a tier that is slow, full of others' reads, or fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engines.reference.zoo import tiny_model

from kvoffload.config import parse_config
from kvoffload.connector.prefetches import MOST_OPEN
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
        self.gate, self.store = _OPENED[-1]

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

    def prefetches(self) -> tuple[float, ...]:
        return tuple(self.stat("prefetches", outcome) for outcome in ("found", "missed", "dropped"))


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
        each.gate.open_gate()
        each.engine.shutdown()
    STORES.unregister("gated")
    _OPENED.clear()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
def test_the_request_finds_in_host_memory_what_was_prefetched(make: MakeServed, family: str) -> None:
    served = make(family=family)
    first = served.below(1)
    loaded = served.stat("tier_blocks_loaded", "gated")
    served.engine.prefetch(served.prompt(1))
    served.engine.drain()
    assert served.prefetches() == (1, 0, 0)
    promoted = served.stat("tier_blocks_loaded", "gated")
    assert promoted > loaded
    again = served.serve(1)
    assert again.output_token_ids == first.output_token_ids
    assert again.external_hit_tokens == BLOCKS * BT
    assert served.stat("tier_blocks_loaded", "gated") == promoted, "nothing was left to promote"


def test_nobody_waits_for_a_slow_prefetch_but_who_needs_its_blocks(make: MakeServed) -> None:
    served = make()
    served.below(1)
    served.gate.close_gate("read_into")
    served.engine.prefetch(served.prompt(1))
    served.until(lambda: served.stat("promotions_in_flight"))
    other = served.add(50, num_blocks=2)
    served.until(lambda: other.is_done)
    asked = served.add(1)
    served.until(lambda: served.stat("requests_waiting"))
    served.gate.open_gate()
    served.until(lambda: asked.is_done)
    assert asked.external_hit_tokens == BLOCKS * BT
    assert served.stat("tier_blocks_loaded", "gated") == BLOCKS, "read once"
    served.engine.drain()
    assert served.prefetches() == (1, 0, 0)


def test_a_prefetch_reads_nothing_while_others_wait_for_reads(make: MakeServed) -> None:
    served = make()
    served.serve(1, num_blocks=4)
    served.below(2, num_blocks=4)
    served.gate.close_gate("read_into")
    asked = served.add(1, num_blocks=4)
    served.until(lambda: served.stat("promotions_in_flight") == 4)
    served.engine.prefetch(served.prompt(2, num_blocks=4))
    for _ in range(20):
        served.engine.step()
    assert served.stat("promotions_in_flight") == 4
    assert served.prefetches() == (0, 0, 0)
    served.gate.open_gate()
    served.until(lambda: asked.is_done)
    served.engine.drain()
    assert served.prefetches() == (1, 0, 0)
    assert served.stat("tier_blocks_loaded", "gated") == 8


def test_a_prefetch_that_gives_way_for_too_long_is_dropped(make: MakeServed) -> None:
    served = make(max_wait_s=2.0)
    for first_token in (1, 3):
        served.serve(first_token, num_blocks=4)
    served.below(2, num_blocks=4)
    served.gate.close_gate("read_into")
    asked = [served.add(1, num_blocks=4)]
    served.until(lambda: served.stat("promotions_in_flight") == 4)
    served.engine.prefetch(served.prompt(2, num_blocks=4))
    served.engine.step()
    time.sleep(1.0)  # so that the next request's time limit is longer than the prefetch
    asked.append(served.add(3, num_blocks=4))
    served.until(lambda: served.prefetches() == (0, 1, 0), nap_s=0.05)
    served.until(lambda: all(request.is_done for request in asked), nap_s=0.05)
    served.gate.open_gate()
    served.engine.drain()
    assert served.stat("tier_blocks_loaded", "gated") == 8


def test_a_prefetch_takes_no_more_room_than_a_request_that_waits(make: MakeServed) -> None:
    served = make()
    served.below(1, num_blocks=2 * SLOTS)
    served.engine.prefetch(served.prompt(1, num_blocks=2 * SLOTS))
    served.engine.drain()
    assert served.prefetches() == (1, 0, 0)
    assert 0 < served.stat("tier_blocks_loaded", "gated") < SLOTS
    assert served.stat("promotions_refused", "promotion_share") == 1
    assert served.stat("claimed_blocks") == 0, "and gives it back"


def test_without_a_slot_nothing_is_promoted(make: MakeServed) -> None:
    served = make()
    served.below(1)
    manager = served.engine._connector._manager.inner
    keys = [block.key for block in manager.primary_tier.slots._slots if block.key is not None]
    manager.primary_tier.slots.pin(keys)
    served.engine.prefetch(served.prompt(1))
    served.engine.drain()
    assert served.prefetches() == (0, 1, 0)
    assert served.stat("promotions_refused", "no_room") == 1
    manager.primary_tier.slots.unpin(keys)


def test_what_cannot_be_read_is_computed(make: MakeServed) -> None:
    served = make()
    first = served.below(1)
    served.store.broken["read_into"] = OSError(5, "broken")
    served.engine.prefetch(served.prompt(1))
    served.engine.drain()
    assert served.prefetches() == (0, 1, 0)
    again = served.serve(1)
    assert (again.output_token_ids, again.external_hit_tokens) == (first.output_token_ids, 0)


def test_a_flagged_request_is_not_weighed_against_computing(make: MakeServed) -> None:
    tiers = [{"type": "gated", "cascade": "on_store", "read_bytes_per_s": 1}]
    served = make(load_policy="cost", prefill_tokens_per_s=1e9, secondary_tiers=tiers)
    first = served.below(1)
    assert served.serve(1).external_hit_tokens == 0
    served.below(2)
    ahead = served.serve(1, prefetch=True)
    assert ahead.external_hit_tokens == BLOCKS * BT
    assert served.serve(1).output_token_ids == ahead.output_token_ids == first.output_token_ids


def test_only_so_many_are_open(make: MakeServed) -> None:
    served = make()
    served.below(1)
    served.gate.close_gate("read_into")
    for _ in range(MOST_OPEN + 4):
        served.engine.prefetch(served.prompt(1))
    assert served.prefetches() == (0, 0, 4)
    served.engine.step()
    served.gate.open_gate()
    served.engine.reset_cache()
    assert served.prefetches() == (0, 0, MOST_OPEN + 4)
    served.engine.drain()
