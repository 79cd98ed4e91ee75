# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers drive the connector with models and ranks that the CPU platform cannot run: latent attention,
which all ranks hold; decode context parallelism, where a block has the tokens of all ranks of a context group; and
groups outside of the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.steps import BLOCK, Steps, attention, latent, replayed_window, ring

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
