# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers and a worker in the order of its V2 model runner, whose stores run only when they are flushed.

No model: the "KV" of a position is the list of tokens that it was computed from. The runner zeroes a new block before
it flushes, so a store that still reads the block would publish zeroes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.scripted import EarlyWriter
from tests.engines.vllm.steps import Steps, aborted, attention, states

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

NUM_GPU_BLOCKS = 18
KINDS = ["precisions", "window", "states"]
SCHEDULING = [False, True]


@pytest.fixture(params=[(kind, each) for kind in KINDS for each in SCHEDULING], ids=str)
def steps(request: pytest.FixtureRequest, llama: SmallModel, falcon: SmallModel) -> Iterator[Steps]:
    kind, asynchronous = request.param
    steps = make_steps(falcon if kind == "states" else llama, asynchronous, kind)
    yield steps
    steps.close()


def make_steps(model: SmallModel, asynchronous: bool, kind: str, **options: Any) -> Steps:
    second = {
        "precisions": lambda: attention(dtype="float16"),
        "window": lambda: attention(window=6, dtype="float16"),
        "states": states,
    }[kind]
    return Steps(
        model.path,
        asynchronous,
        NUM_GPU_BLOCKS,
        groups=[attention(), second()],
        slots=400,
        max_tokens_per_step=16,
        v2_model_runner=True,
        **options,
    )


def held_alone(steps: Steps) -> set[int]:
    """GPU blocks that only stores keep from being free."""
    return set(steps.scheduler.connector.scheduler._held.blocks_without_request())


def num_free(steps: Steps) -> int:
    return int(steps.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def waiting_stores(steps: Steps) -> int:
    assert isinstance(steps.worker, EarlyWriter)
    return len(steps.worker.waiting)


def until_ended(steps: Steps, *requests: Any) -> None:
    for _ in range(80):
        if all(request.is_finished() for request in requests):
            return
        steps.step()
    raise AssertionError("the requests do not end")


def traffic(steps: Steps, seed: int, count: int = 30) -> list[list[int]]:
    """Requests that share prefixes, more than fit, and some aborted. Returns the tokens of each."""
    chance = random.Random(seed)
    live: list[Any] = []
    for number in range(count):
        prompt = [100 + chance.randrange(3)] + [200 + n for n in range(chance.randrange(3, 20))]
        prompt[-1] = chance.randrange(300, 303)
        live.append(steps.add(f"r{number}", prompt, chance.randrange(1, 8)))
        for _ in range(chance.randrange(4)):
            steps.step(token=chance.randrange(400, 402))
        if chance.random() < 0.15 and not live[-1].is_finished():
            steps.scheduler.finish_requests(live[-1].request_id, aborted())
    steps.drain()
    return [list(request.all_token_ids) for request in live]


def test_what_is_stored_is_what_was_computed(steps: Steps) -> None:
    for seed in range(4):
        tokens = traffic(steps, seed)
        assert sum(len(steps.stored_blocks(each, group)) for each in tokens for group in range(2)) > 100
        assert num_free(steps) == NUM_GPU_BLOCKS - 1
        assert steps.scheduler.reset_prefix_cache()
    assert isinstance(steps.worker, EarlyWriter)
    assert steps.worker.num_zeroed > 100
    assert len(steps.loads()) > 10


@pytest.mark.parametrize("holds", [True, False])
def test_without_holds_zeroes_would_be_published(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    monkeypatch.setattr("kvoffload.engines.vllm.connector.are_written_early", lambda *_: holds)
    steps = make_steps(llama, False, "precisions")
    first = steps.add("first", list(range(100, 124)), 1)
    until_ended(steps, first)
    until_ended(steps, steps.add("second", list(range(200, 224)), 1))
    if holds:
        assert steps.stored_blocks(list(first.all_token_ids)) == [0, 1, 2, 3, 4, 5]
    else:
        with pytest.raises(AssertionError, match=r"block \d of group 0 at \d+: \(0,\)$"):
            steps.stored_blocks(list(first.all_token_ids))
    steps.close()


def test_a_request_waits_one_step_for_held_blocks(steps: Steps) -> None:
    """No store ends by itself. The pool is full of held blocks, and vLLM finds no other for the next request."""
    for number in range(4):
        request = steps.add(f"r{number}", [number + 1, *range(100, 123)], 1)
        for _ in range(5):
            steps.step()
            if steps.worker.tokens.get(request.request_id):
                break
        else:
            raise AssertionError("the request is not admitted")
        until_ended(steps, request)
        assert waiting_stores(steps)
        assert held_alone(steps)


def test_what_ends_while_others_run_is_not_waited_for(steps: Steps) -> None:
    """A running request continues in each step, and the next one is admitted as soon as enough held blocks are free."""
    running = steps.add("running", [1, 2, 3], 24)
    ended = steps.add("ended", list(range(100, 116)), 1)
    until_ended(steps, ended)
    assert held_alone(steps)
    waiting = steps.add("waiting", list(range(200, 220)), 1)
    generated = []
    while not waiting.is_finished():
        steps.step()
        generated.append(running.num_output_tokens)
    assert len(generated) < 10
    assert not running.is_finished()
    assert generated == list(range(generated[0], generated[0] + len(generated)))
    steps.drain()


def test_a_running_request_that_finds_no_block_preempts_one_other(steps: Steps) -> None:
    """The blocks of the preempted request are held for one step more. vLLM waits for them, and preempts no third."""
    requests = [steps.add(f"r{number}", [number + 1, *range(100, 107)], 20) for number in range(3)]
    preempted = []
    while not all(request.is_finished() for request in requests):
        before = sum(request.num_preemptions for request in requests)
        steps.step()
        preempted.append(sum(request.num_preemptions for request in requests) - before)
    assert sum(preempted) > 0
    assert max(preempted) == 1
    steps.drain()
    assert num_free(steps) == NUM_GPU_BLOCKS - 1
    for request in requests:
        assert steps.stored_blocks(list(request.all_token_ids))


@pytest.mark.parametrize("is_running", [False, True])
def test_vllm_forgets_its_prefix_cache_while_blocks_are_held(steps: Steps, is_running: bool) -> None:
    first = steps.add("first", list(range(100, 124)), 5 if is_running else 1)
    until_ended(steps, *[] if is_running else [first])
    while not waiting_stores(steps):
        steps.step()
    steps.deliver_all()  # before, vLLM itself has steps that may write to the blocks
    free = num_free(steps)
    if is_running:
        assert not steps.scheduler.reset_prefix_cache(), "blocks of requests still count"
        assert num_free(steps) == free
    assert steps.scheduler.reset_prefix_cache(reset_running_requests=is_running)
    assert held_alone(steps)
    assert num_free(steps) == NUM_GPU_BLOCKS - 1 - len(held_alone(steps))
    probe = steps.request("probe", list(range(100, 124)), 1)
    assert steps.scheduler.kv_cache_manager.get_computed_blocks(probe)[1] == 0

    # The stores go on reading, and the blocks are still not given to others.
    until_ended(steps, steps.add("second", list(range(200, 224)), 1), first)
    steps.drain()
    assert steps.stored_blocks(list(first.all_token_ids))
    assert num_free(steps) == NUM_GPU_BLOCKS - 1


def test_a_failed_store_releases_its_blocks(steps: Steps) -> None:
    steps.failing.add("first")
    until_ended(steps, steps.add("first", list(range(100, 124)), 1))
    assert held_alone(steps)
    steps.drain()
    assert num_free(steps) == NUM_GPU_BLOCKS - 1


def test_nothing_is_held_where_the_flush_is_in_time(llama: SmallModel) -> None:
    steps = Steps(llama.path, False, NUM_GPU_BLOCKS, groups=[attention(), attention(dtype="float16")], slots=400)
    request = steps.add("r", list(range(100, 108)), 1)
    until_ended(steps, request)
    assert num_free(steps) == NUM_GPU_BLOCKS - 1
    assert len(steps.stored_blocks(list(request.all_token_ids))) == 2
    steps.close()
