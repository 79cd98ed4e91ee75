# SPDX-License-Identifier: Apache-2.0
"""vLLM's own schedulers drive the connector, step by step and without a model."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from tests.engines.vllm.harness import CONNECTOR
from tests.engines.vllm.scripted import SCRIPTED, EarlyWriter, FirstStage, ScriptedManager, ScriptedSpec, Worker

from kvoffload.base import TransferResult, make_offload_key
from kvoffload.connector import ConnectorMeta, TransferJob, WorkerReport
from kvoffload.engines.vllm.layout import fails_by_block

BLOCK = 4
PAGE_BYTES = 2 * BLOCK * 2 * 8 * 4
NUM_GPU_BLOCKS = 8
STOP = 499


def attention(window: int | None = None, block: int = BLOCK, dtype: str = "float32") -> Any:
    """Return a KV group of vLLM: full attention, or a sliding window."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    # Groups share one pool of GPU blocks, so their blocks have the same number of bytes.
    shape: dict[str, Any] = {"block_size": block, "num_kv_heads": 2 * BLOCK // block or 1}
    shape["dtype"] = getattr(torch, dtype)
    shape["head_size"] = PAGE_BYTES // (2 * block * shape["num_kv_heads"] * shape["dtype"].itemsize)
    return FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)


def chunked(size: int) -> Any:
    """A KV group of vLLM: attention within chunks of ``size`` tokens."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    full = attention()
    shape = {name: getattr(full, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
    return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=size)


def first_read(spec: Any, position: int) -> int:
    """The first position that attention at ``position`` reads, by the definition of the kinds."""
    if (size := getattr(spec, "attention_chunk_size", None)) is not None:
        return int(position - position % size)
    if (window := getattr(spec, "sliding_window", None)) is not None:
        return int(max(0, position - window + 1))
    return 0


def latent() -> Any:
    """Return a KV group of vLLM: latent attention, the same on all ranks."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    head_size = PAGE_BYTES // (BLOCK * torch.float32.itemsize)
    return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=head_size, dtype=torch.float32)


def ring() -> Any:
    """Return a KV group of vLLM: one block for each request, which is not in the prefix cache."""
    import torch
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    shape = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    return CircularBufferSpec(**shape)


def replayed_window(window: int) -> Any:
    """Return a KV group of vLLM: a window that is not in the prefix cache and is computed again after each hit."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    return SlidingWindowMLASpec(**shape, sliding_window=window, bounded_replay=True)


def states() -> Any:
    """Return a KV group of vLLM: recurrent states."""
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(
        block_size=BLOCK,
        shapes=((2, 3),),
        dtypes=(torch.float32,),
        page_size_padded=PAGE_BYTES,
        mamba_cache_mode="align",
        mamba_type=MambaAttentionBackendEnum.MAMBA2,
    )


class Steps:
    """One of vLLM's schedulers with ``KVOffloadConnector`` and a worker that takes no time."""

    def __init__(
        self,
        model: str,
        asynchronous: bool,
        num_gpu_blocks: int = NUM_GPU_BLOCKS,
        *,
        groups: Sequence[Any] = (),
        speculative_config: dict[str, Any] | None = None,
        slots: int | None = None,
        max_tokens_per_step: int = 64,
        v2_model_runner: bool = False,
        context_ranks: int = 1,
        replicas: int = 1,
        stages: int = 1,
        **options: Any,
    ) -> None:
        """``groups`` of ``attention()``; one of full attention by default. ``slots``: a ``ScriptedManager`` of so many
        blocks (``manager``). ``v2_model_runner``: which vLLM's CPU platform lacks, so that its worker is an
        ``EarlyWriter``. ``context_ranks``: of decode context parallelism, and ``replicas``, ranks that hold the same;
        all of them report a transfer. ``stages``: two for a pipeline over a layer each, whose last stage also has a
        drafter's layer. ``options`` of the connector, instead of 1 MiB of host memory."""
        from vllm.config import KVEventsConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
        from vllm.v1.structured_output import StructuredOutputManager

        groups = groups or (attention(),)
        factor = options.get("block_size", BLOCK) // BLOCK
        if slots is not None:
            num_bytes = slots * PAGE_BYTES * context_ranks * stages**2 * factor
            options = SCRIPTED | {"cpu_bytes_to_use": num_bytes} | options
        config = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            max_num_batched_tokens=max_tokens_per_step,
            speculative_config=speculative_config,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            kv_transfer_config={**CONNECTOR, "kv_connector_extra_config": options or {"cpu_bytes_to_use": "1MiB"}},
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_gpu_blocks
        # vLLM's CPU platform turns these to its own taste.
        config.cache_config.block_size = BLOCK
        of_stage = context_ranks * replicas
        config.parallel_config.distributed_executor_backend = "uni" if of_stage * stages == 1 else "mp"
        config.parallel_config.tensor_parallel_size = of_stage
        config.parallel_config.pipeline_parallel_size = stages
        config.parallel_config.world_size = of_stage * stages
        config.parallel_config.decode_context_parallel_size = context_ranks
        config.scheduler_config.async_scheduling = asynchronous
        config.scheduler_config.enable_chunked_prefill = True
        scheduler_class = AsyncScheduler if asynchronous else Scheduler
        self.block_tokens = [spec.block_size * context_ranks for spec in groups]
        hash_tokens = min(self.block_tokens)
        size = num_gpu_blocks * PAGE_BYTES
        names = [f"layer{group}" for group in range(len(groups))]
        kv_cache_config = KVCacheConfig(
            num_blocks=num_gpu_blocks,
            kv_cache_tensors=[KVCacheTensor(size=size, layers=names, layer_stride=size, block_stride=PAGE_BYTES)],
            kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in zip(names, groups, strict=True)],
            kv_cache_layout="LBHNC",
            hash_block_size=hash_tokens,
        )
        # vLLM's configuration rejects it without Triton, and reads the variable at each use.
        with patch.dict(os.environ, VLLM_USE_V2_MODEL_RUNNER=str(int(v2_model_runner))):
            assert config.use_v2_model_runner is v2_model_runner
            self.scheduler = scheduler_class(
                vllm_config=config,
                kv_cache_config=kv_cache_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=max(self.block_tokens),
                hash_block_size=hash_tokens,
                log_stats=True,
            )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(hash_tokens, hash_fn)
        self._in_flight: list[Any] = []
        self._depth = 1 if asynchronous else 0
        speculative = config.speculative_config
        self._num_drafts = speculative.num_speculative_tokens if speculative else 0
        self.lookahead_tokens = int(speculative is not None and speculative.use_eagle())
        self._state_groups = [index for index, spec in enumerate(groups) if hasattr(spec, "mamba_cache_mode")]
        worker = EarlyWriter if v2_model_runner else Worker
        left_out = [index for index, spec in enumerate(groups) if not spec.prefix_cacheable]
        self.worker = worker(self.block_tokens, self.lookahead_tokens, self._state_groups, left_out)
        self.workers = [*(FirstStage(self.block_tokens, 0) for _ in range(stages - 1)), *[self.worker] * of_stage]
        """By rank."""
        for each in self.workers:
            each.factor = factor
            each.reads = {
                group: functools.partial(first_read, spec)
                for group, spec in enumerate(groups)
                if group not in (*self._state_groups, *left_out)
            }
            each.steps_under_way = self._depth
        self.manager: ScriptedManager | None = ScriptedSpec.latest if slots is not None else None
        self.metas: list[ConnectorMeta] = []
        """The messages to the workers, by step."""
        self.events: list[Any] = []
        """The KV events that vLLM would publish."""
        self.scheduler.kv_event_publisher.publish = lambda batch: self.events.extend(batch.events)
        self.failing = self.worker.failing

    def add(self, request_id: str, tokens: list[int], new_tokens: int, **sampling: Any) -> Any:
        request = self.request(request_id, tokens, new_tokens, **sampling)
        self.scheduler.add_request(request)
        return request

    def request(self, request_id: str, tokens: list[int], new_tokens: int, **sampling: Any) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        parameters = SamplingParams(max_tokens=new_tokens, temperature=0, **sampling)
        return Request(request_id, tokens, parameters, None, block_hasher=self._hasher)

    def step(self, token: int = 7, accept: int = 0) -> ConnectorMeta:
        """Schedules a step and computes it, then hands back the tokens and transfers of the step that is due.

        ``accept``: at most so many drafts of each request are accepted.
        """
        output = self.scheduler.schedule()
        meta: ConnectorMeta = output.kv_connector_metadata.meta
        self.metas.append(meta)
        by_worker = {
            worker: worker.execute(output, self.scheduler.requests, token, accept)
            for worker in dict.fromkeys(self.workers)
        }
        ended = {worker: worker.take_ended() for worker in by_worker}
        jobs = [(rank, job) for rank, worker in enumerate(self.workers) for job in ended[worker]]
        awaited = [job for job in meta.loads if job.within_step]
        undefined = {job.job_id for job in awaited if job.source is None or job.request_id in self.failing}
        self._in_flight.append((output, by_worker[self.worker], jobs, frozenset(undefined)))
        self.check()
        while len(self._in_flight) > self._depth:
            self.deliver()
        return meta

    def deliver(self) -> None:
        from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

        from kvoffload.engines.vllm.connector import StepReport

        output, sampled, jobs, undefined = self._in_flight.pop(0)
        meta = output.kv_connector_metadata.meta
        ids = list(output.num_scheduled_tokens)
        loads = [job for job in meta.loads if not job.within_step]
        broken = [job for job in loads if job.request_id in self.failing]
        lost = {job.request_id for job in meta.loads if job.source is None}
        report = WorkerReport(
            tuple(
                (rank, TransferResult(job.job_id, job.request_id not in self.failing | lost, seconds=1e-6))
                for rank, job in jobs
            ),
            undefined,
        )
        # As the adapter's worker reports them.
        failures: dict[str, Any] = {"failed_recving": {job.request_id for job in broken}}
        if fails_by_block(self.scheduler.kv_cache_config):
            failures = {"invalid_block_ids": {int(each) for job in broken for each in job.destination.block_ids}}
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: n for n, request_id in enumerate(ids)},
                sampled_token_ids=[sampled[request_id] for request_id in ids],
                kv_connector_output=KVConnectorOutput(
                    finished_recving={job.request_id for job in loads} or None,
                    **failures,
                    kv_connector_worker_meta=StepReport(report),
                ),
            ),
        )
        if self._num_drafts and not self._depth:
            # The next step's drafts; with asynchronous scheduling only the worker knows them.
            drafts = [[STOP] * self._num_drafts for _ in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def check(self) -> None:
        side = self.scheduler.connector.scheduler
        side.core.check_invariants()
        if side._held is not None:
            side._held.check_invariants()

    def deliver_all(self) -> None:
        while self._in_flight:
            self.deliver()

    def drain(self, accept: int = 0) -> None:
        for _ in range(80):
            if self.scheduler.has_requests():
                self.step(accept=accept)
            elif self._in_flight:
                self.deliver()
            else:
                return
        raise AssertionError("the scheduler does not come to rest")

    def stores(self) -> list[TransferJob]:
        return [job for meta in self.metas for job in (*meta.stores, *meta.final_stores)]

    def loads(self) -> list[TransferJob]:
        return [job for meta in self.metas for job in meta.loads]

    def hit_blocks(self, tokens: list[int]) -> int:
        """Blocks that another request with these tokens would load, if the device had none."""
        request = self.add("again", [*tokens, 1], 1)
        found, _ = self.scheduler.connector.get_num_new_matched_tokens(request, 0)
        self.scheduler.finish_requests("again", aborted())
        assert found is not None
        return int(found) // BLOCK

    def stored_blocks(self, tokens: list[int], group: int = 0) -> list[int]:
        """Which blocks of these tokens are offloaded. Their content is right, or this raises."""
        assert self.manager is not None
        request = self.request("judge", [*tokens, 1], 1)
        size = self.block_tokens[group]
        per_block = size // min(self.block_tokens)
        epoch = self.scheduler.connector.scheduler.core._epochs.current
        found = []
        for block in range(len(tokens) // size):
            block_hash = epoch.mask(request.block_hashes[(block + 1) * per_block - 1])
            key = make_offload_key(block_hash, group)
            state = self.manager.slots.get(key)
            if state is None:
                continue
            found.append(block)
            for stage in self.workers[:-1] if self.workers[0] is not self.worker else ():
                contents = [tuple(tokens[: block * size + offset + 1]) for offset in range(size)]
                assert stage.slots[state.block_id] == contents, f"block {block} of the first stage"
            if group in self._state_groups:
                content, end = self.worker.slots[state.block_id][0], (block + 1) * size
                assert content == tuple(tokens[:end]), f"the state at {end} tokens: {content}"
                continue
            for offset, content in enumerate(self.worker.slots[state.block_id]):
                position = block * size + offset
                # Some token followed the block's last token, in another request.
                end = position + 1 + (self.lookahead_tokens if offset + 1 < size else 0)
                assert content[:end] == tuple(tokens[:end]), f"block {block} of group {group} at {position}: {content}"
                assert len(content) == position + 1 + self.lookahead_tokens
        return found

    def close(self) -> None:
        self.scheduler.connector.shutdown()


def aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
