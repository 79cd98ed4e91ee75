# SPDX-License-Identifier: Apache-2.0
"""Loads within the step that computes their request, under vLLM's own schedulers.

The worker's KV records the tokens from which it was computed (``scripted.py``), so a step that runs before its load, or
goes on from undefined blocks, gives itself away.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.scripted import VOID
from tests.engines.vllm.steps import BLOCK, Steps, aborted, attention, states
from tests.sizes import by_size

from kvoffload.connector.short_loads import ShortLoads

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def tokens(first: int, blocks: int, more: int = 1) -> list[int]:
    return list(range(first, first + blocks * BLOCK + more))


def served(steps: Steps, *requests: Any) -> None:
    for _ in range(400):
        if all(request.is_finished() for request in requests):
            break
        steps.step()
    steps.deliver_all()
    for request in requests:
        assert request.is_finished()
        assert VOID not in request.output_token_ids


def store(steps: Steps, *prompts: list[int]) -> None:
    for number, prompt in enumerate(prompts):
        served(steps, steps.add(f"store{number}", prompt, 1))
    steps.drain()
    assert steps.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("groups", [[None], [None, 6], [6]], ids=["full", "full and window", "window"])
def test_a_hit_is_computed_in_the_step_that_loads_it(
    llama: SmallModel, asynchronous: bool, groups: list[int | None]
) -> None:
    steps = Steps(llama.path, asynchronous, 60, groups=[attention(window) for window in groups], slots=60)
    store(steps, tokens(100, 3))
    request = steps.add("again", tokens(100, 3), 4)
    meta = steps.step()
    assert [load.within_step for load in meta.loads] == [True]
    assert request.num_computed_tokens == 3 * BLOCK + 1
    served(steps, request)
    steps.close()


def test_blocks_that_are_computed_beside_the_load_are_stored_also_by_a_request_of_one_token(
    llama: SmallModel, asynchronous: bool
) -> None:
    steps = Steps(llama.path, asynchronous, 60, slots=60)
    prompt = tokens(100, 6)
    store(steps, prompt[: 3 * BLOCK + 1])
    served(steps, steps.add("longer", prompt, 1))
    steps.drain()
    assert steps.stored_blocks(prompt) == list(range(6))
    steps.close()


def test_states_are_loaded_before_the_step_that_goes_on_from_them(llama: SmallModel, asynchronous: bool) -> None:
    """vLLM moves a state before it lets a connector load."""
    steps = Steps(llama.path, asynchronous, 60, groups=[attention(), states()], slots=60, max_tokens_per_step=BLOCK)
    store(steps, tokens(100, 3))
    request = steps.add("again", tokens(100, 3), 4)
    served(steps, request)
    assert [load.within_step for load in steps.loads()] == [False]
    steps.close()


def test_new_blocks_are_zeroed_before_the_load(llama: SmallModel, asynchronous: bool) -> None:
    """vLLM's second runner zeroes new blocks of models with KV of several precisions."""
    groups = [attention(), attention(dtype="float16", block=2 * BLOCK)]
    steps = Steps(llama.path, asynchronous, 60, groups=groups, slots=60, v2_model_runner=True)
    store(steps, tokens(100, 4))
    request = steps.add("again", tokens(100, 4), 4)
    meta = steps.step()
    assert [load.within_step for load in meta.loads] == [True]
    assert steps.worker.num_zeroed > 0
    served(steps, request)
    steps.close()


GROUPS = {
    "full": [{}],
    "full and window": [{}, {"window": 6}],
    "zeroed by vLLM's second runner": [{}, {"dtype": "float16", "block": 2 * BLOCK}],
}


def steps_of(model: str, asynchronous: bool, groups: str, num_gpu_blocks: int = 60, **options: Any) -> Steps:
    specs = [attention(**each) for each in GROUPS[groups]]
    is_v2 = groups.startswith("zeroed")
    return Steps(model, asynchronous, num_gpu_blocks, groups=specs, v2_model_runner=is_v2, **{"slots": 60} | options)


def only_the_first_load_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first load runs within its step. Later requests wait for theirs."""
    asked: list[int] = []
    monkeypatch.setattr(ShortLoads, "fits", lambda self, *_: self._is_on and not asked and not asked.append(1))


@pytest.mark.parametrize("groups", GROUPS)
def test_a_step_that_ran_on_a_failed_load_is_undone(llama: SmallModel, asynchronous: bool, groups: str) -> None:
    """This includes requests that share the blocks, in the same step or the next, and all blocks that were computed
    from them."""
    steps = steps_of(llama.path, asynchronous, groups)
    prompt = tokens(100, 4)
    store(steps, prompt)
    other = steps.add("other", tokens(300, 2), 12)
    for _ in range(3):
        steps.step()
    steps.failing.add("again")
    again = steps.add("again", [*prompt, *tokens(200, 2)], 6)
    shares = [steps.add(f"shares{n}", [*prompt, *tokens(200, 1 + n)], 4) for n in range(2)]
    meta = steps.step()
    assert [load.within_step for load in meta.loads] == [True]
    late = steps.add("late", [*prompt, *tokens(200, 2), 9], 4)
    served(steps, again, other, late, *shares)
    steps.drain()
    assert steps.stored_blocks([*prompt, *tokens(200, 2)])[:4] == [0, 1, 2, 3], "what was stored is right"
    later = steps.add("later", [*prompt, 7], 2)
    served(steps, later)
    assert not any(load.within_step for load in steps.loads()[1:]), "it is not tried again"
    steps.close()


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_request_that_waits_for_its_own_load_behind_undefined_blocks_starts_again(
    llama: SmallModel, asynchronous: bool, groups: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It found the blocks of the failed load in vLLM's prefix cache, in the same step or the next. vLLM's reset
    preempts only requests that run."""
    steps = steps_of(llama.path, asynchronous, groups, 120)
    long = tokens(100, 11)
    store(steps, long)
    other = steps.add("other", tokens(700, 2), 12)
    for _ in range(3):
        steps.step()
    only_the_first_load_fits(monkeypatch)
    steps.failing.add("again")
    again = steps.add("again", [*long[: 4 * BLOCK], 7], 4)
    for _ in range(num_steps):
        steps.step()
    waits = steps.add("waits", [*long, 9], 4)
    steps.step()
    served(steps, again, other, waits)
    assert [load.within_step for load in steps.loads()][:2] == [True, False]
    steps.drain()
    steps.stored_blocks(long)
    steps.close()


def test_a_step_is_undone_even_if_its_report_cannot_be_used(
    llama: SmallModel, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvoffload.engines.vllm.connector import _SchedulerSide

    take_output = _SchedulerSide._take_output

    def take_and_raise(self: Any, invalid_block_ids: Any, report: Any) -> None:
        must_raise = report is not None and not report.is_taken and report.report.undefined_loads
        take_output(self, invalid_block_ids, report)
        if must_raise:
            raise RuntimeError("on purpose")

    monkeypatch.setattr(_SchedulerSide, "_take_output", take_and_raise)
    steps = steps_of(llama.path, asynchronous, "full")
    prompt = tokens(100, 4)
    store(steps, prompt)
    steps.failing.add("again")
    again = steps.add("again", [*prompt, *tokens(200, 2)], 6)
    meta = steps.step()
    assert [load.within_step for load in meta.loads] == [True]
    served(steps, again)
    steps.close()


def test_a_request_that_starts_again_finds_room_for_its_second_load(
    llama: SmallModel, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reserved the blocks that it needed for its first load, and so had too few for the second one, for ever."""
    steps = Steps(llama.path, asynchronous, 20, slots=60)
    long = tokens(100, 11)
    store(steps, long)
    other = steps.add("other", tokens(300, 1), 6)
    for _ in range(3):
        steps.step()
    only_the_first_load_fits(monkeypatch)
    steps.failing.add("again")
    again, waits = steps.add("again", [*long[: 4 * BLOCK], 7], 4), steps.add("waits", [*long, 9], 4)
    steps.step()
    served(steps, again, other, waits)
    assert [load.within_step for load in steps.loads()][:2] == [True, False]
    steps.close()


def test_a_failed_load_of_a_request_that_was_aborted_meanwhile_leaves_nothing_to_find(
    llama: SmallModel, asynchronous: bool
) -> None:
    steps = Steps(llama.path, asynchronous, 60, slots=60)
    prompt = tokens(100, 4)
    store(steps, prompt)
    steps.failing.add("again")
    steps.add("again", prompt, 6)
    steps._depth += 1
    steps.step()
    steps.scheduler.finish_requests("again", aborted())
    steps._depth -= 1
    steps.deliver_all()
    served(steps, steps.add("later", prompt, 4))
    steps.close()


def test_lost_blocks_are_computed(llama: SmallModel, asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload.errors import TransferError

    steps = Steps(llama.path, asynchronous, 60, slots=60)
    prompt = tokens(100, 4)
    store(steps, prompt)

    def vanished(*_: object) -> Any:
        raise TransferError("they were evicted meanwhile")

    assert steps.manager is not None
    monkeypatch.setattr(steps.manager, "prepare_load", vanished)
    request = steps.add("again", prompt, 4)
    meta = steps.step()
    assert [(load.within_step, load.source) for load in meta.loads] == [(True, None)]
    served(steps, request)
    steps.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_one_rank_fails_is_undone_on_all(llama: SmallModel, asynchronous: bool, replicas: int) -> None:
    steps = Steps(llama.path, asynchronous, 60, slots=60, context_ranks=2 // replicas, replicas=replicas)
    prompt = tokens(100, 8)
    store(steps, prompt)
    steps.failing.add("again")
    request = steps.add("again", prompt, 4)
    assert [load.within_step for load in steps.step().loads] == [True]
    served(steps, request)
    steps.close()


def crowds(seed: int) -> Iterator[tuple[str, random.Random]]:
    chance = random.Random(seed)
    for number in range(40):
        yield f"r{number}", chance


@pytest.mark.parametrize("seed", by_size(range(1), range(10)))
@pytest.mark.parametrize("groups", GROUPS)
def test_crowds_with_failures_aborts_preemptions_and_resets(
    llama: SmallModel, asynchronous: bool, groups: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few GPU blocks. Loads within steps go on after a failure, which a real engine does not risk."""
    monkeypatch.setattr(ShortLoads, "failed", lambda self: None)
    num_gpu_blocks = 14 * len(GROUPS[groups])
    steps = steps_of(llama.path, asynchronous, groups, num_gpu_blocks, slots=120, max_tokens_per_step=24)
    live: dict[str, Any] = {}
    done: list[Any] = []
    for request_id, chance in crowds(seed):
        blocks, stem = chance.randrange(1, 7), 100 * chance.randrange(1, 4)
        if chance.random() < 0.15:
            steps.failing.add(request_id)
        live[request_id] = steps.add(request_id, tokens(stem, blocks), chance.randrange(1, 9))
        for _ in range(chance.randrange(4)):
            steps.step()
        if chance.random() < 0.2:
            steps.scheduler.finish_requests(gone := chance.choice(list(live)), aborted())
            live.pop(gone)
        if chance.random() < 0.2:
            steps.scheduler.reset_prefix_cache(reset_running_requests=False)
        done += [live.pop(each) for each in list(live) if live[each].is_finished()]
    for _ in range(400):
        if not steps.scheduler.has_requests():
            break
        steps.step()
    steps.deliver_all()
    for request in (*done, *live.values()):
        assert request.is_finished()
        assert VOID not in request.output_token_ids
    for stem in (100, 200, 300):
        steps.stored_blocks(tokens(stem, 6))
    assert any(load.within_step for load in steps.loads())
    steps.close()
