# SPDX-License-Identifier: Apache-2.0
"""Test which blocks are looked up, offered, stored and announced while vLLM's own schedulers drive the connector step
by step.

There is no model, and the manager follows a script.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.steps import BLOCK, PAGE_BYTES, Steps, aborted, attention

from kvoffload.base import TransferResult
from kvoffload.connector import WorkerReport
from kvoffload.engines.vllm.announcements import Place

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"]),
]


def tokens(first: int, blocks: int, more: int = 1) -> list[int]:
    return list(range(first, first + blocks * BLOCK + more))


def run(steps: Steps, request: Any) -> list[int]:
    """To its end. Returns the blocks that are offloaded of it."""
    while not request.is_finished():
        steps.step()
    steps.drain()
    return steps.stored_blocks(list(request.all_token_ids))


def test_a_refused_store_is_offered_again(llama: SmallModel, asynchronous: bool) -> None:
    steps = Steps(llama.path, asynchronous, 40, slots=40)
    manager = steps.manager
    # In the next step with room, although no other block fills.
    manager.refuses = True
    request = steps.add("next", tokens(100, 3), 30)
    steps.step()
    assert manager.offered == [manager.offered[0], *[manager.offered[0][:1]] * (len(manager.offered) - 1)]
    offers = len(manager.offered)
    steps.step()
    assert len(manager.offered) == offers + 1, "a full tier costs one call a step"
    assert steps.stores() == []
    manager.refuses = False
    meta = steps.step()
    assert [len(job.source.block_ids) for job in meta.stores][:1] == [1]
    assert sum(len(job.source.block_ids) for job in meta.stores) == 3
    assert request.num_output_tokens < BLOCK
    steps.scheduler.finish_requests("next", aborted())
    steps.drain()

    # Stores at its end, if no earlier step had room.
    manager.refuses = True
    ends = steps.add("end", tokens(200, 3), 2)
    while ends.num_output_tokens < 1:
        steps.step()
    manager.refuses = False
    steps.scheduler.finish_requests("end", aborted())
    assert sum(len(job.source.block_ids) for job in steps.step().final_stores) == 3
    steps.drain()
    assert steps.stored_blocks(tokens(200, 3)) == [0, 1, 2]
    steps.close()


def test_of_a_window_only_what_a_hit_can_need_is_stored(llama: SmallModel, asynchronous: bool) -> None:
    groups = [attention(block=4 * BLOCK), attention(window=2 * BLOCK)]
    steps = Steps(llama.path, asynchronous, 60, groups=groups, slots=60)
    prompt = tokens(100, 8)
    assert run(steps, steps.add("r", prompt, 1)) == [0, 1]
    # Full attention in blocks of 16 tokens: a hit ends at 16 or 32, and needs the 8 tokens before.
    assert steps.stored_blocks(prompt, group=1) == [2, 3, 6, 7]
    assert sum(len(keys) for keys in steps.manager.offered) == 6
    assert steps.scheduler.reset_prefix_cache()
    run(steps, steps.add("again", prompt, 1))
    (load,) = steps.loads()
    assert load.destination.group_sizes == (2, 2)
    steps.close()


def test_blocks_that_left_a_refused_window_are_not_stored_once_others_have_them(
    llama: SmallModel, asynchronous: bool
) -> None:
    groups = [attention(), attention(window=6)]
    steps = Steps(llama.path, asynchronous, 11, groups=groups, slots=400, max_tokens_per_step=4 * BLOCK)
    steps.scheduler.scheduler_reserve_full_isl = False  # as --no-scheduler-reserve-full-isl
    steps.manager.refuses = True
    request = steps.add("refused", tokens(200, 8, more=0), 4)
    steps.step()
    steps.add("victim", [1, 2, 3], 4)
    steps.step()
    steps.add("other", [4, 5, 6], 4)
    steps.manager.refuses = False
    for _ in range(8):  # without the reservation, some that are too long for the memory never end
        steps.step()
    steps.scheduler.finish_requests("refused", aborted())
    steps.drain()
    assert bool(steps.stored_blocks(list(request.all_token_ids), group=1)) == asynchronous
    steps.close()


def test_limits_of_a_request(llama: SmallModel, asynchronous: bool) -> None:
    steps = Steps(llama.path, asynchronous, 60, slots=60)
    manager = steps.manager

    def add(name: str, prompt: list[int], **sampling: Any) -> Any:
        return steps.add(name, prompt, 2, **sampling)

    def limit(**params: Any) -> dict[str, Any]:
        return {"extra_args": {"kv_transfer_params": params}}

    # Stores.
    for number, (most, stored) in enumerate([(0, []), (BLOCK - 1, []), (2 * BLOCK, [0, 1]), (100, [0, 1, 2, 3])]):
        assert run(steps, add(f"offload {most}", tokens(50 * number, 4), **limit(max_offload_tokens=most))) == stored
    assert run(steps, add("bad", tokens(400, 4), **limit(max_offload_tokens=-1, max_load_tokens="all"))) == [0, 1, 2, 3]

    # Loads.
    prompt = tokens(150, 4)
    for most, blocks in [(0, 0), (BLOCK - 1, 0), (2 * BLOCK + 1, 2), (100, 4)]:
        assert steps.scheduler.reset_prefix_cache()
        manager.looked_up.clear()
        before = len(steps.loads())
        run(steps, add(f"load {most}", prompt, **limit(max_load_tokens=most)))
        assert sum(len(job.destination.block_ids) for job in steps.loads()[before:]) == blocks
        assert len(set(manager.looked_up)) == blocks, "nothing beyond the limit is asked for"

    # A request that does not read vLLM's prefix cache does not read offloaded blocks, but its blocks are stored.
    assert steps.scheduler.reset_prefix_cache()
    manager.looked_up.clear()
    counted = steps.scheduler.connector.scheduler.core.get_stats()[("lookup_tokens",)]
    before = len(steps.loads())
    assert run(steps, add("skip", prompt, skip_reading_prefix_cache=True)) == [0, 1, 2, 3]
    assert run(steps, add("skip new", tokens(450, 2), skip_reading_prefix_cache=True)) == [0, 1]
    assert steps.loads()[before:] == manager.looked_up == []
    assert steps.scheduler.connector.scheduler.core.get_stats()[("lookup_tokens",)] == counted
    steps.close()


def test_a_request_that_is_preempted_and_admitted_in_one_step_goes_on(llama: SmallModel, asynchronous: bool) -> None:
    """This happens to all requests with ``reset_prefix_cache(reset_running_requests=True)``."""
    steps = Steps(llama.path, asynchronous, 60, slots=60)
    requests = [steps.add(f"r{n}", tokens(100 * n, 3), 30) for n in range(3)]
    for count in range(4):
        for _ in range(2 + count):
            steps.step()
        while len(steps.scheduler.running) < 3:
            steps.step()  # vLLM does not reset while a load is in flight
            assert len(steps.metas) < 40, "a request waits for ever"
        steps.deliver_all()  # nor while a step is
        resets = steps.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=count == 2)
        assert resets
    loaded = {job.request_id for job in steps.loads()}
    assert loaded == {"r0", "r1", "r2"}
    while not all(request.is_finished() for request in requests):
        steps.step()
        assert len(steps.metas) < 80, "a request waits for ever"
    steps.drain()
    for request in requests:
        assert request.num_output_tokens == 30
        # The worker has checked the position from which each request continued.
        assert steps.stored_blocks(list(request.all_token_ids)) == list(range((request.num_tokens - 1) // BLOCK))
    steps.close()


@pytest.mark.parametrize("window", [None, 6], ids=["full", "window"])
def test_a_failed_load_is_recomputed(llama: SmallModel, asynchronous: bool, window: int | None) -> None:
    """For a window's load, vLLM has nothing before the window's first block."""
    steps = Steps(llama.path, asynchronous, 60, groups=[attention(window)], slots=60)
    prompt = tokens(100, 3)
    run(steps, steps.add("first", prompt, 1))
    assert steps.scheduler.reset_prefix_cache()
    steps.failing.add("second")
    assert run(steps, steps.add("second", prompt, 6)) == [0, 1, 2]
    assert len(steps.loads()) == 1
    steps.close()


def test_stores_beside_a_failed_load_of_another_connector_are_misses(llama: SmallModel, asynchronous: bool) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    from kvoffload.engines.vllm.connector import StepReport

    steps = Steps(llama.path, asynchronous, 60, slots=60)
    steps.add("r", tokens(100, 3), 1)
    stores = steps.scheduler.schedule().kv_connector_metadata.meta.stores
    report = StepReport(WorkerReport(tuple((0, TransferResult(job.job_id, True)) for job in stores)))
    output = KVConnectorOutput(invalid_block_ids={1}, kv_connector_worker_meta=report)
    steps.scheduler.connector.update_connector_output(output)
    assert sum(len(job.source.block_ids) for job in stores) == 3
    assert steps.stored_blocks(tokens(100, 3)) == []
    steps.close()


def test_a_failed_load_is_not_followed_by_another(llama: SmallModel, asynchronous: bool) -> None:
    """vLLM reserves blocks for the remaining tokens of a request with a failed load, also against its next load.

    If the two do not fit together, the request and all requests behind it would wait forever.
    """
    steps = Steps(llama.path, asynchronous, 30, groups=[attention(), attention(window=60)], slots=200)
    prompt = tokens(100, 7, more=0)
    for request_id, ids in (("all", [*prompt, 1]), ("most", [*prompt[: 5 * BLOCK], 2])):
        assert steps.scheduler.reset_prefix_cache()
        run(steps, steps.add(request_id, ids, 1))
    steps.failing.add("failed")
    failed = steps.add("failed", [*prompt, *[3] * 9], 4)  # the device has five blocks of it, host memory two more
    steps.add("large", list(range(200, 224)), 26)  # there is no room until it ends, and it uses those five
    while not failed.is_finished():
        steps.step()
        assert len(steps.metas) < 150, "it waits for ever"
    assert [job.request_id for job in steps.loads()].count("failed") == 1
    steps.drain()
    steps.close()


def test_events_tell_all_about_promoted_blocks(llama: SmallModel, asynchronous: bool, tmp_path: Path) -> None:
    from vllm.distributed.kv_events import BlockStored

    tier = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 20 * PAGE_BYTES,
        "self_describing_kv_events": True,
        "secondary_tiers": [{"type": "fs", "path": str(tmp_path), "max_bytes": "unlimited"}],
        "load_policy": "always",
        "max_wait_s": 300.0,
        "weights_version": "one",  # the files are younger than this process
    }
    prompt = tokens(100, 3)

    def announced(steps: Steps) -> dict[tuple[int, ...], Any]:
        stored = [event for event in steps.events if isinstance(event, BlockStored) and event.medium == "CPU"]
        return {tuple(event.token_ids): event for event in stored}

    first = Steps(llama.path, asynchronous, 40, **tier)
    first.add("first", prompt, 1)
    while first.scheduler.has_requests():  # until the tier has everything
        first.step()
        time.sleep(0.001)
    stored = announced(first)
    first.close()

    second = Steps(llama.path, asynchronous, 40, **tier)
    request = second.add("second", prompt, 5)
    while request.num_computed_tokens < 3 * BLOCK:  # its load may end within the step
        assert second.scheduler.requests
        second.step()
        time.sleep(0.001)
    from kvoffload.engines.vllm.connector import hit_source

    sources = second.scheduler.connector.get_external_cache_hit_sources(request, 3 * BLOCK)
    assert sources == {hit_source(Place("STORAGE", "LOCAL")): 3 * BLOCK}
    assert second.scheduler.connector.get_external_cache_hit_sources(request, 0) == {}
    seen = announced(second)  # all of them came up before it was admitted
    while second.scheduler.has_requests():  # until the tier has everything
        second.step()
        time.sleep(0.001)
    blocks = [tuple(prompt[n * BLOCK : (n + 1) * BLOCK]) for n in range(3)]
    assert list(stored) == blocks
    assert sorted(seen) == sorted(blocks), "in whichever order the tier's threads have read them"
    for before, block in zip([None, *blocks], blocks, strict=False):
        event = seen[block]
        assert event.block_size == BLOCK
        assert event.block_hashes == stored[block].block_hashes
        assert event.parent_block_hash == (seen[before].block_hashes[-1] if before else None)
        assert event.extra_keys == stored[block].extra_keys
    second.close()
