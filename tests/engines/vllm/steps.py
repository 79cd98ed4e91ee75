# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers drive the connector, step by step and without a model."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.harness import CONNECTOR, hash_block_size

from kvoffload.base import TransferResult
from kvoffload.connector import ConnectorMeta, TransferJob, WorkerReport

BLOCK = 4
PAGE_BYTES = 2 * BLOCK * 2 * 8 * 4
NUM_GPU_BLOCKS = 8
STOP = 499


class Steps:
    """One of vLLM's schedulers with ``KVOffloadConnector``. A worker that needs no time stands behind it."""

    def __init__(self, model: str, asynchronous: bool, num_gpu_blocks: int = NUM_GPU_BLOCKS, **options: Any) -> None:
        """``options`` of the connector, instead of 1 MiB of host memory."""
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
            kv_transfer_config={**CONNECTOR, "kv_connector_extra_config": options or {"cpu_bytes_to_use": "1MiB"}},
        ).create_engine_config()
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = num_gpu_blocks
        # vLLM's CPU platform turns both to its own taste.
        config.parallel_config.distributed_executor_backend = "uni"
        config.scheduler_config.async_scheduling = asynchronous
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.float32)
        size = num_gpu_blocks * PAGE_BYTES
        kv_cache_config = KVCacheConfig(
            num_blocks=num_gpu_blocks,
            kv_cache_tensors=[
                KVCacheTensor(size=size, layers=["layer"], layer_stride=size, block_stride=PAGE_BYTES),
            ],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            kv_cache_layout="LBHNC",
            **hash_block_size(BLOCK),
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
        self.scheduler.finish_requests("again", aborted())
        assert found is not None
        return int(found) // BLOCK


def aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
