# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers drive the connector, step by step and without a model: the last full block is stored.

With asynchronous scheduling a step is scheduled before the tokens of the one before it are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.engines.vllm.harness import CONNECTOR
from tests.engines.vllm.models import SmallModel

from kvoffload.base import TransferResult
from kvoffload.connector import ConnectorMeta, TransferJob, WorkerReport

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK = 4
PAGE_BYTES = 2 * BLOCK * 2 * 8 * 4
NUM_GPU_BLOCKS = 8
STOP = 499


class Steps:
    """One of vLLM's schedulers with ``KVOffloadConnector``. A worker that needs no time stands behind it."""

    def __init__(self, model: str, asynchronous: bool) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
        from vllm.v1.structured_output import StructuredOutputManager

        config = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_batched_tokens=64,
            kv_transfer_config={**CONNECTOR, "kv_connector_extra_config": {"cpu_bytes_to_use": "1MiB"}},
        ).create_engine_config()
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = NUM_GPU_BLOCKS
        # vLLM's CPU platform turns both to its own taste.
        config.parallel_config.distributed_executor_backend = "uni"
        config.scheduler_config.async_scheduling = asynchronous
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
        size = NUM_GPU_BLOCKS * PAGE_BYTES
        kv_cache_config = KVCacheConfig(
            num_blocks=NUM_GPU_BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(size=size, layers=["layer"], layer_stride=size, block_stride=PAGE_BYTES),
            ],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            kv_cache_layout="LBHNC",
            hash_block_size=BLOCK,
        )
        self.scheduler = scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK, hash_fn)
        self._in_flight: list[Any] = []
        self._depth = 1 if asynchronous else 0
        self.metas: list[ConnectorMeta] = []
        """What the workers were sent, by step."""

    def add(self, request_id: str, tokens: list[int], new_tokens: int, **sampling: Any) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        parameters = SamplingParams(max_tokens=new_tokens, temperature=0, **sampling)
        request = Request(request_id, tokens, parameters, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def step(self, token: int = 7) -> ConnectorMeta:
        """Schedules a step, then hands back the tokens and transfers of the step that is due."""
        output = self.scheduler.schedule()
        self.metas.append(output.kv_connector_metadata.meta)
        self._in_flight.append((output, token))
        while len(self._in_flight) > self._depth:
            self.deliver()
        return self.metas[-1]

    def deliver(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        from kvoffload.engines.vllm.connector import StepReport

        output, token = self._in_flight.pop(0)
        meta = output.kv_connector_metadata.meta
        ended = [job.job_id for job in (*meta.loads, *meta.stores, *meta.final_stores)]
        report = WorkerReport(tuple((0, TransferResult(job_id, True)) for job_id in ended))
        ids = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: n for n, request_id in enumerate(ids)},
                sampled_token_ids=[[token] for _ in ids],
                kv_connector_output=KVConnectorOutput(
                    finished_recving={job.request_id for job in meta.loads} or None,
                    kv_connector_worker_meta=StepReport(report),
                ),
            ),
        )

    def drain(self) -> None:
        for _ in range(50):
            if self.scheduler.has_requests():
                self.step()
            elif self._in_flight:
                self.deliver()
            else:
                return
        raise AssertionError("the scheduler does not come to rest")

    def stores(self) -> list[TransferJob]:
        return [job for meta in self.metas for job in (*meta.stores, *meta.final_stores)]

    def hit_blocks(self, tokens: list[int]) -> int:
        """Blocks that another request with these tokens would load, if the device had none."""
        request = self.add("again", [*tokens, 1], 1)
        found, _ = self.scheduler.connector.get_num_new_matched_tokens(request, 0)
        self.scheduler.finish_requests("again", _aborted())
        assert found is not None
        return int(found) // BLOCK


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


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
    """As with a stop string, which the frontend finds."""
    request = steps.add("r", list(range(10, 13)), 20)
    for _ in range(num_steps):
        steps.step()
    computed = request.num_computed_tokens
    steps.scheduler.finish_requests("r", _aborted())
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
