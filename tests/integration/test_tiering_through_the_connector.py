# SPDX-License-Identifier: Apache-2.0
"""Law 7 and request-level offloading through the connector and an engine with real bytes: waiting always ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.fakes.engine import FakeEngine, FakeRequest, Status
from tests.tiering.rig import Memory

from kvoffload.base import OffloadPolicy
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.testing.clock import ManualClock
from kvoffload.testing.fake_tier import FakeTier
from kvoffload.tiering import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

BLOCK_TOKENS = 4
PAGE_BYTES = 16


class Setup:
    """An engine of ``num_gpu_blocks``, ``num_slots`` slots below it and one tier below those; I/O takes a step."""

    def __init__(
        self,
        num_slots: int = 64,
        num_gpu_blocks: int = 100,
        cache_policy: str = "lru",
        policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL,
        kinds: Sequence[GroupKind] = (GroupKind.FULL_ATTENTION,),
    ) -> None:
        memory = Memory(num_slots)
        self.clock = ManualClock()
        self.tier = FakeTier(memory.create_kv_memoryview(), policy=policy)
        primary = CPUPrimaryTierOffloadingManager(num_slots, memory, cache_policy, enable_events=True)
        self.manager = TieringOffloadingManager(primary, [self.tier], clock=self.clock)
        groups = tuple(KVGroupLayout(kind, BLOCK_TOKENS, PAGE_BYTES) for kind in kinds)
        self.engine = FakeEngine(
            self.manager,
            EngineLayout(groups, BLOCK_TOKENS, "test"),
            OffloadingConfig(cpu_bytes_to_use=num_slots * PAGE_BYTES),
            num_gpu_blocks=num_gpu_blocks,
            num_slots=num_slots,
            keeps_all_states=False,
        )
        self.tier.primary_kv_view = memoryview(self.engine.slots[0])
        self.num_requests = 0

    def ask(self, first_token: int, num_blocks: int) -> FakeRequest:
        """Serve a request with a prompt of ``num_blocks`` full blocks and one more token."""
        self.num_requests += 1
        tokens = [first_token] + [n % 11 for n in range(num_blocks * BLOCK_TOKENS)]
        return self.engine.add(f"r{self.num_requests}", tokens, max_new_tokens=1)

    def step(self) -> None:
        self.engine.step()
        self.tier.finish()
        for handler in self.engine.handlers:
            for job_id in handler.pending:
                handler.run(job_id)
        self.engine.check()
        self.manager.check_invariants()

    def finish(self, *requests: FakeRequest, max_steps: int) -> None:
        for _ in range(max_steps):
            if all(request.status is Status.FINISHED for request in requests):
                return
            self.step()
        raise AssertionError(f"not finished in {max_steps} steps: {[(r.request_id, r.status) for r in requests]}")

    def drain(self) -> None:
        for _ in range(20):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")


@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
@pytest.mark.parametrize("num_blocks", [64, 65, 80])
def test_a_prefix_longer_than_the_primary_tier_is_a_partial_hit_with_the_right_bytes(
    cache_policy: str, num_blocks: int
) -> None:
    setup = Setup(cache_policy=cache_policy)
    setup.finish(setup.ask(1, num_blocks), max_steps=60)
    setup.finish(setup.ask(2, 95), max_steps=60)  # pushes the first prompt off the device
    setup.drain()
    assert len(setup.tier.blocks) > num_blocks
    before = setup.engine.computed_total
    again = setup.ask(1, num_blocks)
    setup.finish(again, max_steps=num_blocks // 4 + 8)
    computed = setup.engine.computed_total - before
    assert num_blocks * BLOCK_TOKENS - computed >= 47 * BLOCK_TOKENS, "three quarters of the primary tier were hits"
    setup.drain()


@pytest.mark.parametrize("cache_policy", ["lru", "arc"])
def test_many_requests_with_different_prefixes_below_all_finish(cache_policy: str) -> None:
    setup = Setup(cache_policy=cache_policy)
    for first_token in range(8):
        setup.finish(setup.ask(first_token, 20), max_steps=40)
    setup.finish(setup.ask(50, 95), max_steps=60)  # pushes them off the device, and most of them out of host memory
    setup.drain()
    before = setup.engine.connector.get_stats()["hit_tokens",]
    requests = [setup.ask(first_token, 20) for first_token in range(8)]
    setup.finish(*requests, max_steps=60)
    setup.drain()
    assert setup.engine.connector.get_stats()["hit_tokens",] - before >= 40 * BLOCK_TOKENS


def test_attention_behind_the_last_state_is_not_promoted() -> None:
    setup = Setup(num_gpu_blocks=190, kinds=(GroupKind.FULL_ATTENTION, GroupKind.SINGLE_STATE))
    setup.finish(setup.ask(1, 12), max_steps=40)
    setup.finish(setup.ask(1, 20), max_steps=40)  # states after 12 and 20 blocks
    setup.finish(setup.ask(2, 90), max_steps=60)  # pushes them out of host memory
    setup.drain()
    setup.engine.pool.forget_all()
    before = setup.manager.get_stats()
    again = setup.ask(1, 18)
    setup.finish(again, max_steps=20)
    after = setup.manager.get_stats()
    assert setup.engine.connector.get_stats()["hit_tokens",] == 12 * BLOCK_TOKENS
    assert after["promotions", "ok"] - before["promotions", "ok"] == 12 + 1
    setup.drain()


def test_a_hung_tier_costs_a_wait_and_no_more() -> None:
    setup = Setup(num_slots=32, num_gpu_blocks=60)
    setup.finish(setup.ask(1, 20), max_steps=40)
    setup.finish(setup.ask(2, 50), max_steps=40)
    setup.drain()
    again = setup.ask(1, 20)
    for _ in range(5):
        setup.engine.step()  # the tier's jobs never end
    assert again.status is Status.WAITING
    setup.clock.advance(10.0)
    for _ in range(12):
        setup.engine.step()
        for handler in setup.engine.handlers:
            for job_id in handler.pending:
                handler.run(job_id)
    assert again.status is Status.FINISHED
    setup.drain()


def test_a_request_level_tier_gets_every_block_of_a_request_that_hit() -> None:
    setup = Setup(policy=OffloadPolicy.REQUEST_LEVEL)
    setup.finish(setup.ask(1, 20), max_steps=40)
    setup.drain()
    setup.tier.log.clear()
    second = setup.ask(1, 20)
    setup.finish(second, max_steps=40)
    setup.drain()
    names = [call.name for call in setup.tier.log if call.req_id == second.request_id and call.name != "touch"]
    offered = {
        key for call in setup.tier.calls("submit_store") if call.req_id == second.request_id for key in call.keys
    }
    assert len(offered) >= 20
    assert names[0] == "on_new_request"
    assert names[-1] == "on_request_finished"
    assert names.count("on_request_finished") == 1
