# SPDX-License-Identifier: Apache-2.0
"""A manager that follows a test's script, and a worker whose device records the tokens from which each position was
computed.

Both work behind vLLM's real schedulers in ``steps.py``. No model is needed: the "KV" of a position is the list of
tokens on which it depends, so that a block with a wrong, rejected or missing position is detected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

from tests.connector.rig import SpyManager

from kvoffload.base import GPULoadStoreSpec, OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.connector import TransferJob
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.spec import CPUOffloadingSpec

SCRIPTED = {"spec_name": "ScriptedSpec", "spec_module_path": "tests.engines.vllm.scripted"}


class ScriptedManager(SpyManager):
    """Host memory that refuses stores while the test says so, and records the calls."""

    def __init__(self, num_blocks: int, eviction_policy: str) -> None:
        super().__init__(num_blocks, eviction_policy=eviction_policy)
        self.refuses = False
        self.looked_up: list[OffloadKey] = []

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, ends: Collection[OffloadKey] | None = None
    ) -> list[bool | None]:
        answers = super().lookup_prefix(keys, req_context, ends)
        self.looked_up += keys[: len(answers)]
        return answers

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        output: PrepareStoreOutput | None
        if self.refuses:
            self.offered.append(list(keys))
            return None
        output = super().prepare_store(keys, req_context)
        return output


class ScriptedSpec(CPUOffloadingSpec):
    latest: ClassVar[ScriptedManager]

    def _make_manager(self) -> OffloadingManager:
        ScriptedSpec.latest = ScriptedManager(self.num_blocks, self.config.eviction_policy)
        return ScriptedSpec.latest


Content = tuple[int, ...]
"""The tokens up to a position, and the later tokens on which its KV depends."""
GARBAGE: Content = (-1,)
ZEROES: Content = (0,)
VOID = 498
"""The token of a step that computed with undefined blocks."""
PROMOTED: Content = ()
"""In slots that a lower tier has filled. These are not checked."""


class Worker:
    """A worker that executes the decisions of vLLM's scheduler, at once and in the order of vLLM's V1 model runner.

    ``tokens`` and ``computed`` are the truth, which an asynchronous scheduler learns a step later.
    """

    def __init__(
        self,
        block_tokens: Sequence[int],
        lookahead_tokens: int,
        state_groups: Collection[int] = (),
        left_out: Collection[int] = (),
    ) -> None:
        """``left_out``: groups that are not offloaded. They come after all others."""
        self._block_tokens = block_tokens
        self.factor = 1
        """GPU blocks per slot, except for states."""
        self._state_groups = state_groups
        self._left_out = left_out
        self._lookahead = lookahead_tokens
        self.tokens: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._device: dict[tuple[int, int], Content] = {}
        """The contents by GPU block and position in it. All groups share one pool of GPU blocks, as in vLLM."""
        self.slots: dict[int, list[Content]] = {}
        self._ended: list[TransferJob] = []
        self.reads: dict[int, Callable[[int], int]] = {}
        """By group of attention, the first position that is read at a position."""
        self.failing: set[str] = set()
        """Requests whose transfers fail from now on."""
        self.void: set[str] = set()
        """Requests that computed with a block of a load that failed within the step, and were not started since."""
        self.steps_under_way = 0
        """Those that vLLM may schedule before it knows of the failure."""
        self._void_steps = 0

    def take_ended(self) -> list[TransferJob]:
        """Return the transfers that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def execute(self, output: Any, requests: dict[str, Any], token: int, accept: int) -> dict[str, list[int]]:
        """One step of vLLM's ``SchedulerOutput``: at most ``accept`` of each request's drafts are accepted, which are
        all ``token``. Returns the sampled tokens of requests whose prompt is computed."""
        meta = output.kv_connector_metadata.meta
        self._begin_step(output, requests)
        self._void_steps -= 1
        for load in meta.loads:
            if load.within_step:
                self._load(load, load.source is None or load.request_id in self.failing)
        sampled = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            sampled[request_id] = self._compute(request_id, num_tokens, drafts, token, accept)
        for load in meta.loads:
            if not load.within_step and load.source is not None:
                self._load(load)
        self._ended += meta.loads
        self._store(meta.stores)
        return sampled

    def _load(self, load: TransferJob, fails_within_step: bool = False) -> None:
        if fails_within_step:
            self._void_steps = 1 + self.steps_under_way
            for block_id in load.destination.block_ids:
                self._device.update({(int(block_id), offset): GARBAGE for offset in range(max(self._block_tokens))})
            return
        slots, gpu_blocks = iter(load.source.block_ids), iter(load.destination.block_ids)
        groups = zip(load.destination.group_sizes, load.destination.block_indices, strict=True)
        for group, (size, first) in enumerate(groups):
            factor, tokens = self._factor(group), self._block_tokens[group]
            slot = -1
            for index in range(int(first), int(first) + size):
                if index == first or index % factor == 0:
                    slot = int(next(slots))
                block_id, at = int(next(gpu_blocks)), index % factor * tokens
                for offset in range(tokens):
                    content = self.slots[slot][at + offset : at + offset + 1] if slot in self.slots else [PROMOTED]
                    self._device[block_id, offset] = content[0] if content else GARBAGE
        assert next(slots, None) is None
        assert next(gpu_blocks, None) is None

    def _factor(self, group: int) -> int:
        return 1 if group in self._state_groups else self.factor

    def _begin_step(self, output: Any, requests: dict[str, Any]) -> None:
        self._store(output.kv_connector_metadata.meta.final_stores)
        self._take_tables(output, requests)
        self._move_states(output)

    def _store(self, jobs: Iterable[TransferJob]) -> None:
        for job in jobs:
            self._run(job)

    def _move_states(self, output: Any) -> None:
        """Move each state to the block in which this step ends."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            first = self._computed[request_id]
            for group in self._state_groups if first else ():
                table, size = self._tables[request_id][group], self._block_tokens[group]
                before, now = table[(first - 1) // size], table[(first + num_tokens - 1) // size]
                state = self._device.get((before, 0), GARBAGE)
                assert state in (PROMOTED, tuple(self.tokens[request_id][:first])), (
                    f"{request_id} goes on from {first} tokens with the state of {state}"
                )
                self._device[now, 0] = state

    def _take_tables(self, output: Any, requests: dict[str, Any]) -> None:
        for new in output.scheduled_new_reqs:
            self._start(requests[new.req_id], new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._start(requests[request_id], ids, computed)
            else:
                for table, more in zip(self._tables[request_id], ids or (), strict=False):
                    table.extend(more)

    def _start(self, request: Any, block_ids: Sequence[Sequence[int]], computed: int) -> None:
        self.tokens[request.request_id] = list(request.all_token_ids)
        self._tables[request.request_id] = [list(ids) for ids in block_ids]
        self._computed[request.request_id] = computed
        self.void.discard(request.request_id)

    def _compute(self, request_id: str, num_tokens: int, drafts: int, token: int, accept: int) -> list[int]:
        known, first = self.tokens[request_id], self._computed[request_id]
        self._check_context(request_id, first)
        sampled: list[int] = []
        if first + num_tokens - drafts >= len(known):
            sampled = [VOID if request_id in self.void else token] * (min(drafts, accept) + 1)
            known += sampled
        good = min(first + num_tokens, len(known) - 1) if sampled else first + num_tokens
        if request_id in self.void:
            good = first
        for position in range(first, first + num_tokens):
            content = tuple(known[: position + 1 + self._lookahead]) if position < good else GARBAGE
            for group, table in enumerate(self._tables[request_id]):
                if group in self._left_out:  # a ring has one block
                    self._device[table[min(position // self._block_tokens[group], len(table) - 1)], 0] = GARBAGE
                if group in self._state_groups or group in self._left_out:
                    continue
                block, offset = divmod(position, self._block_tokens[group])
                self._device[table[block], offset] = content
        for group in self._state_groups:
            last = (first + num_tokens - 1) // self._block_tokens[group]
            self._device[self._tables[request_id][group][last], 0] = tuple(known[:good])
        self._computed[request_id] = first + num_tokens if request_id in self.void else good
        return sampled

    def _check_context(self, request_id: str, computed: int) -> None:
        """Check the positions that attention reads: the whole prefix of full attention, a part of it in windows."""
        known = self.tokens[request_id]
        for group, first_read in self.reads.items():
            table = self._tables[request_id][group]
            for position in range(first_read(computed), computed):
                block, offset = divmod(position, self._block_tokens[group])
                content = self._device.get((table[block], offset))
                if content == GARBAGE and self._void_steps > 0:
                    self.void.add(request_id)
                if request_id in self.void and self._void_steps > 0:
                    return
                assert content in (PROMOTED, tuple(known[: position + 1 + self._lookahead])), (
                    f"{request_id} goes on from {computed} tokens, and position {position} was computed from {content}"
                )

    def _run(self, job: TransferJob) -> None:
        assert isinstance(job.source, GPULoadStoreSpec)
        assert isinstance(job.destination, CPULoadStoreSpec)
        ids = iter(int(block_id) for block_id in job.source.block_ids)
        slots = iter(int(slot) for slot in job.destination.block_ids)
        for group, size in enumerate(job.source.group_sizes):
            factor = self._factor(group)
            for _ in range(size // factor):
                blocks = [next(ids) for _ in range(factor)]
                self.slots[next(slots)] = [
                    self._device.get((block_id, offset), GARBAGE)
                    for block_id in blocks
                    for offset in range(self._block_tokens[group])
                ]
        self._ended.append(job)


class EarlyWriter(Worker):
    """Works in the order of vLLM's V2 model runner: it zeroes new blocks and moves states, and only then lets the
    connector flush. Its stores run when they are flushed, and never else."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.waiting: dict[int, TransferJob] = {}
        """Stores that were started and have not run."""
        self.num_zeroed = 0

    def _begin_step(self, output: Any, requests: dict[str, Any]) -> None:
        self._take_tables(output, requests)
        for block_id in output.new_block_ids_to_zero or ():
            self.num_zeroed += 1
            for offset in range(max(self._block_tokens)):
                self._device[block_id, offset] = ZEROES
        self._move_states(output)
        meta = output.kv_connector_metadata.meta
        self._store(meta.final_stores)
        for job_id in sorted(meta.flush_job_ids & self.waiting.keys()):  # loads have run at once
            self._run(self.waiting.pop(job_id))

    def _store(self, jobs: Iterable[TransferJob]) -> None:
        self.waiting |= {job.job_id: job for job in jobs}


class FirstStage(Worker):
    """A stage of a pipeline before the one with the drafter. If there are drafts, vLLM's V1 model runner does not tell
    its connector that the forward pass has begun, so stores begin with the next step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._late: list[TransferJob] = []

    def execute(self, output: Any, *args: Any) -> dict[str, list[int]]:
        late, self._late = self._late, []
        super()._store(late)
        return super().execute(output, *args)

    def _store(self, jobs: Iterable[TransferJob]) -> None:
        self._late += jobs

    def _begin_step(self, output: Any, requests: dict[str, Any]) -> None:
        super()._store(output.kv_connector_metadata.meta.final_stores)
        self._take_tables(output, requests)
