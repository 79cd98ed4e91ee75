# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers drive the connector, step by step and without a model: the last full block is stored.

With asynchronous scheduling a step is scheduled before the tokens of the one before it are known.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.steps import BLOCK, NUM_GPU_BLOCKS, STOP, Steps, aborted

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def steps(request: pytest.FixtureRequest, llama: SmallModel) -> Iterator[Steps]:
    steps = Steps(llama.path, request.param)
    yield steps
    steps.scheduler.connector.shutdown()


@pytest.mark.parametrize(("prompt", "new_tokens", "blocks"), [(3, 2, 1), (7, 2, 2), (3, 6, 2), (8, 1, 2), (4, 4, 1)])
def test_a_request_that_ends_by_length_has_all_its_full_blocks_stored(
    steps: Steps, prompt: int, new_tokens: int, blocks: int
) -> None:
    request = steps.add("r", list(range(10, 10 + prompt)), new_tokens)
    steps.drain()
    assert sum(len(job.source.block_ids) for job in steps.stores()) == blocks
    assert steps.hit_blocks(list(request.all_token_ids)) == blocks


@pytest.mark.parametrize(("prompt", "stop_at", "blocks"), [(3, 2, 1), (7, 2, 2), (6, 4, 2)])
def test_a_request_that_ends_by_a_stop_token_has_them_too(steps: Steps, prompt: int, stop_at: int, blocks: int) -> None:
    request = steps.add("r", list(range(10, 10 + prompt)), 20, stop_token_ids=[STOP])
    for n in range(1, 20):
        if not steps.scheduler.has_requests():
            break
        steps.step(STOP if n == stop_at else 7)
    steps.drain()
    assert request.num_output_tokens == stop_at
    assert steps.hit_blocks(list(request.all_token_ids)) == blocks


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_an_aborted_request_stores_only_what_was_computed(steps: Steps, num_steps: int) -> None:
    """This happens with a stop string, which the frontend finds."""
    request = steps.add("r", list(range(10, 13)), 20)
    for _ in range(num_steps):
        steps.step()
    computed = request.num_computed_tokens
    steps.scheduler.finish_requests("r", aborted())
    known = request.num_tokens
    steps.drain()
    stored = sum(len(job.source.block_ids) for job in steps.stores())
    assert min(known - 1, computed) // BLOCK <= stored <= min(known, computed) // BLOCK


def test_gpu_blocks_that_are_handed_out_in_the_next_step_are_waited_for(steps: Steps) -> None:
    steps.add("r", list(range(10, 13)), 2)
    while steps.scheduler.requests:
        steps.step()
    # Every GPU block but vLLM's null block is taken by the next request.
    other = steps.add("other", list(range(100, 100 + BLOCK * (NUM_GPU_BLOCKS - 1))), 1)
    meta = steps.step()
    assert other.num_computed_tokens
    (store,) = (job for job in steps.stores() if job.request_id == "r")
    if store in meta.final_stores:
        assert store.job_id in meta.flush_job_ids
    steps.drain()
