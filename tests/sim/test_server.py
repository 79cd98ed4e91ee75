# SPDX-License-Identifier: Apache-2.0
"""One request at a time by hand. ``tests/integration/test_simulator_agrees.py`` compares with a real engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import pytest

from kvoffload.base import OffloadKey, PrepareStoreOutput, ReqContext, get_offload_group_idx
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.sim.device_cache import DeviceCache
from kvoffload.sim.disk import Link, VirtualClock
from kvoffload.sim.server import Hit, Server
from kvoffload.sim.trace import Trace


def server_of(
    trace: Trace,
    cpu_blocks: int,
    gpu_blocks: int = 0,
    state_slots: int = 0,
    manager: CPUOffloadingManager | None = None,
) -> tuple[Server, VirtualClock]:
    """16 tokens of prefill a second (one block), 10 blocks loaded a second."""
    clock = VirtualClock()
    server = Server(
        trace,
        trace.keys(),
        manager or CPUOffloadingManager(cpu_blocks, "lru"),
        clock,
        cpu_blocks=cpu_blocks,
        prefill_tokens_per_s=16.0,
        chunk_tokens=32,
        block_bytes=100,
        load_link=Link(1000.0, 0.0),
        device=DeviceCache(gpu_blocks) if gpu_blocks else None,
        wait=lambda: pytest.fail("host memory alone never defers a lookup"),
        state_slots=state_slots,
    )
    return server, clock


def test_a_prefix_is_served_from_the_highest_tier_that_has_it(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1, 2], [0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3]])
    trace.input_tokens[:] = [48, 64, 48, 64]
    server, _ = server_of(trace, cpu_blocks=20, gpu_blocks=5)
    hits = [server.serve(request) for request in range(4)]
    # Of the last prompt the device has lost blocks 3 and 2. Its last token is computed, so block 3 is never a hit.
    assert hits == [Hit(0, 0), Hit(3, 0), Hit(0, 0), Hit(2, 1)]
    assert server.accesses == 14


def test_all_of_a_hit_is_used_before_the_rest_of_its_prompt_is_stored(trace_of: Callable[..., Trace]) -> None:
    """Its last block would go first for that otherwise."""
    trace = trace_of([[0, 1], [2], [0, 1, 3], [0, 1, 3]])
    trace.input_tokens[:] += 1
    server, _ = server_of(trace, cpu_blocks=3)
    assert [server.serve(request) for request in range(4)] == [Hit(0, 0), Hit(0, 0), Hit(0, 2), Hit(0, 3)]


def test_prefill_and_loads_take_their_time(trace_of: Callable[..., Trace]) -> None:
    trace = trace_of([[0, 1], [0, 1, 2]])
    trace.input_tokens[:] = [32, 48]
    server, clock = server_of(trace, cpu_blocks=10)
    server.serve(0)
    assert clock.now_s == pytest.approx(2.0)
    assert server.serve(1) == Hit(0, 2)
    assert clock.now_s == pytest.approx(2.0 + 0.2 + 1.0)
    assert server.prefill_s == pytest.approx(3.0)


class Watched(CPUOffloadingManager):
    """Sums up the keys it is called with."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, "lru")
        self.touched: Counter[int] = Counter()
        self.stored: Counter[int] = Counter()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.touched += Counter(get_offload_group_idx(key) for key in keys)
        super().touch(keys, req_context)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        self.stored += Counter(get_offload_group_idx(key) for key in keys)
        return super().prepare_store(keys, req_context)


def test_a_state_costs_keys_only_where_it_is_kept(trace_of: Callable[..., Trace]) -> None:
    """A key for each block and slot of it would be tens of times the work of the attention."""
    manager = Watched(1000)
    prompt = list(range(30))
    trace = trace_of([prompt[:10], prompt[:20], prompt])
    server, _ = server_of(trace, 1000, gpu_blocks=5, state_slots=2, manager=manager)
    trace.input_tokens[:] += 1
    assert [server.serve(request).host for request in range(3)] == [0, 10, 20]
    assert manager.stored == {0: 30, 1: 3, 2: 3}
    # At its hit, when it has stored and at its end, a prompt touches states where it or an earlier one ended.
    assert manager.touched[0] >= 10 + 20 + 30
    assert manager.touched[1] == manager.touched[2] <= 3 * (1 + 2 + 3)
