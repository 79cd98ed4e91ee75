# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers drive the connector with models and ranks that the CPU platform cannot run: latent attention,
which all ranks hold; decode context parallelism, where a block has the tokens of all ranks of a context group; and
groups outside of the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.steps import BLOCK, Steps, aborted, attention, chunked, latent, replayed_window, ring
from tests.sizes import by_size

from kvoffload.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

Make = Callable[[str, bool], Steps]


def latent_on_two_ranks(model: str, asynchronous: bool) -> Steps:
    steps = Steps(model, asynchronous, 16, slots=8, groups=(latent(),), replicas=2)
    assert steps.manager is not None
    assert steps.manager.get_stats()["primary_blocks",] == 8, "the KV is kept once"
    return steps


def context_ranks(model: str, asynchronous: bool) -> Steps:
    return Steps(model, asynchronous, 16, slots=8, context_ranks=2)


def with_ring(model: str, asynchronous: bool) -> Steps:
    return Steps(model, asynchronous, 16, slots=8, groups=(attention(), ring()))


def with_replayed_window(model: str, asynchronous: bool) -> Steps:
    try:
        groups = attention(), replayed_window(6)
    except TypeError:
        pytest.skip("this version replays no windows")
    return Steps(model, asynchronous, 24, slots=8, groups=groups)


@pytest.fixture(params=[latent_on_two_ranks, context_ranks, with_ring, with_replayed_window])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def steps(request: pytest.FixtureRequest, make: Make, llama: SmallModel) -> Iterator[Steps]:
    steps = make(llama.path, request.param)
    yield steps
    steps.scheduler.connector.shutdown()


def test_full_blocks_are_stored_and_found(steps: Steps) -> None:
    size = steps.block_tokens[0]
    request = steps.add("r", list(range(10, 10 + 3 * BLOCK)), 6)
    steps.drain()
    tokens = list(request.all_token_ids)
    full = (len(tokens) - 1) // size
    assert full >= 2
    assert sum(len(job.source.block_ids) for job in steps.stores()) == full

    assert steps.scheduler.reset_prefix_cache()
    again = steps.add("again", tokens, 2 * size)
    steps.drain()  # which checks the tokens of each position
    (load,) = steps.loads()
    assert len(load.destination.block_ids) == full
    assert again.num_output_tokens == 2 * size


def test_a_failed_load_is_computed_again(steps: Steps) -> None:
    request = steps.add("r", list(range(10, 10 + 3 * BLOCK)), 6)
    steps.drain()
    assert steps.scheduler.reset_prefix_cache()
    steps.failing.add("again")
    again = steps.add("again", list(request.all_token_ids), 4)
    steps.drain()
    assert steps.loads()
    assert again.num_output_tokens == 4


def test_many_requests_take_each_others_blocks(steps: Steps) -> None:
    """There are few GPU blocks. A block that one request frees is immediately used by another, also for its ring."""
    for wave in range(2):
        for n in range(6):
            steps.add(f"r{n} of {wave}", list(range(10 + n % 3, 10 + n % 3 + 3 * BLOCK)), 2 * BLOCK)
        steps.drain()
        assert steps.scheduler.reset_prefix_cache()
    assert steps.loads()
    assert {event.group_idx for event in steps.events if getattr(event, "medium", None) == "CPU"} == {0}


def test_a_second_connector_of_one_engine_is_refused(llama: SmallModel) -> None:
    """A ``MultiConnector`` gives all of its connectors one name, so ranks could find the memory of either one."""
    steps = Steps(llama.path, False)
    first, scheduler = steps.scheduler.connector, steps.scheduler
    with pytest.raises(ConfigError, match="name KVOffloadConnector once"):
        type(first)(scheduler.vllm_config, first.role, scheduler.kv_cache_config)
    first.shutdown()
    type(first)(scheduler.vllm_config, first.role, scheduler.kv_cache_config).shutdown()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("chunk", [BLOCK, 2 * BLOCK, 5 * BLOCK, 6])
def test_a_hit_of_chunks_is_as_long_as_in_vllms_own_prefix_cache(
    llama: SmallModel, asynchronous: bool, chunk: int
) -> None:
    """Full attention beside attention within chunks (Llama 4): for prompts of every length."""
    steps = Steps(llama.path, asynchronous, num_gpu_blocks=200, groups=[attention(), chunked(chunk)], slots=200)
    tokens = list(range(100, 148))
    steps.add("first", tokens, 1)
    steps.drain()
    manager = steps.scheduler.kv_cache_manager
    own = {}
    for length in range(1, len(tokens)):
        for prompt in (tokens[:length], tokens[:length] + [9] * 9):
            own[tuple(prompt)] = manager.get_computed_blocks(steps.request("probe", prompt, 1))[1]
    assert steps.scheduler.reset_prefix_cache()
    assert max(own.values()) == 11 * BLOCK
    for prompt, hit in own.items():
        request = steps.add("again", list(prompt), 1)
        found = steps.scheduler.connector.get_num_new_matched_tokens(request, 0)[0]
        assert found == hit, len(prompt)
        steps.scheduler.finish_requests("again", aborted())
    steps.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("chunk", [BLOCK, 3 * BLOCK, 6])
def test_what_chunks_read_after_a_load_is_right(llama: SmallModel, asynchronous: bool, chunk: int) -> None:
    """There are few GPU blocks, and prompts fork at every block."""
    steps = Steps(llama.path, asynchronous, 24, groups=[attention(), chunked(chunk)], slots=64)
    chance = random.Random(chunk)
    base = list(range(10, 10 + 8 * BLOCK))
    for wave in range(8):
        for number in range(4):
            cut = chance.randrange(len(base))
            steps.add(f"{wave} {number}", [*base[:cut], *[400 + number] * (1 + chance.randrange(6))], 2 * BLOCK)
        steps.drain()  # which checks what each position was computed from
        assert steps.scheduler.reset_prefix_cache()
    assert len(steps.loads()) > 10
    steps.close()


@pytest.mark.parametrize("seed", range(by_size(6, 100)))
def test_whatever_the_groups_and_blocks_tokens_are_computed_from_the_right_ones(llama: SmallModel, seed: int) -> None:
    """Windows and chunks of several sizes, blocks of up to three GPU blocks, little memory, aborts and failures."""
    chance = random.Random(seed)
    kinds = [
        lambda: chunked(chance.choice([1, 2, 3, 5]) * BLOCK),  # vLLM's own hits are wrong for other chunks
        lambda: attention(chance.choice([3, 5, 9, 14])),
    ]
    groups = [attention(), *(chance.choice(kinds)() for _ in range(chance.randrange(1, 4)))]
    steps = Steps(
        llama.path,
        chance.random() < 0.5,
        chance.choice([18, 22, 60]) * len(groups),
        groups=groups,
        slots=chance.choice([6, 12, 40]) * len(groups),
        max_tokens_per_step=chance.choice([7, 16, 64]),
        block_size=chance.choice([1, 1, 2, 3]) * BLOCK,
    )
    scheduler = steps.scheduler
    for wave in range(12):
        for number in range(chance.randrange(1, 5)):
            name, cut, base = f"{wave} {number}", chance.randrange(1, 40), chance.choice([100, 200])
            steps.add(name, [*range(base, base + cut), *[400] * chance.randrange(7)], chance.choice([1, 3, 9]))
            if chance.random() < 0.15:
                steps.failing.add(name)
        for _ in range(chance.randrange(12)):
            if scheduler.has_requests():
                steps.step()  # which checks what each position was computed from
            if chance.random() < 0.08 and scheduler.requests:
                scheduler.finish_requests(chance.choice(sorted(scheduler.requests)), aborted())
        if chance.random() < 0.6:
            steps.drain()
            assert scheduler.reset_prefix_cache()
    steps.drain()
    assert steps.loads()
    steps.close()


def test_ranks_that_do_not_join_the_schedulers_memory_are_rejected(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an executor that starts ranks on another node, or in containers of their own."""
    from kvoffload.engines.vllm import connector

    monkeypatch.setattr(connector, "_JOIN_TIMEOUT_S", 0.01)
    with pytest.raises(ConfigError, match=r"do not share the memory .*1 of 3 processes"):
        Steps(llama.path, False, replicas=2)
