# SPDX-License-Identifier: Apache-2.0
"""A manager that does what a test says, and a worker whose device holds what each position was computed from.

Both stand behind vLLM's real schedulers in ``steps.py``. No model is needed: the "KV" of a position is the tokens that
it depends on, so that a block with a wrong, rejected or missing position gives itself away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from tests.connector.rig import SpyManager

from kvoffload.base import OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.connector import ConnectorMeta
from kvoffload.cpu.spec import CPUOffloadingSpec

SCRIPTED = {"spec_name": "ScriptedSpec", "spec_module_path": "tests.engines.vllm.scripted"}


class ScriptedManager(SpyManager):
    """The primary tier, which refuses stores while it is told to, and remembers what it was asked."""

    def __init__(self, num_blocks: int, eviction_policy: str) -> None:
        super().__init__(num_blocks, eviction_policy=eviction_policy)
        self.refuses = False
        self.looked_up: list[OffloadKey] = []

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        answers = super().lookup_prefix(keys, req_context)
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
"""The tokens up to a position, and those behind it that its KV depends on."""
GARBAGE: Content = (-1,)
PROMOTED: Content = ()
"""In slots that a lower tier has filled. These are not checked."""


class Worker:
    """Runs what vLLM's scheduler decides, at once. ``tokens`` and ``computed`` are the truth, which an asynchronous
    scheduler learns a step later."""

    def __init__(self, block_tokens: Sequence[int], lookahead_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._lookahead = lookahead_tokens
        self.tokens: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._device: dict[tuple[int, int], Content] = {}
        """By GPU block and position in it; all groups share one pool of GPU blocks, as in vLLM."""
        self.slots: dict[int, list[Content]] = {}

    def execute(self, output: Any, requests: dict[str, Any], token: int, accept: int) -> dict[str, list[int]]:
        """One step of vLLM's ``SchedulerOutput``: at most ``accept`` of each request's drafts are accepted, which are
        all ``token``. Returns the sampled tokens of requests whose prompt is computed."""
        meta = output.kv_connector_metadata.meta
        self._store(meta, final=True)
        self._take_tables(output, requests)
        sampled = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            sampled[request_id] = self._compute(request_id, num_tokens, drafts, token, accept)
        for load in meta.loads:
            for slot, block_id in zip(load.source.block_ids, load.destination.block_ids, strict=True):
                for offset in range(max(self._block_tokens)):
                    content = self.slots[int(slot)][offset : offset + 1] if int(slot) in self.slots else [PROMOTED]
                    self._device[int(block_id), offset] = content[0] if content else GARBAGE
        self._store(meta, final=False)
        return sampled

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

    def _compute(self, request_id: str, num_tokens: int, drafts: int, token: int, accept: int) -> list[int]:
        known, first = self.tokens[request_id], self._computed[request_id]
        self._check_context(request_id, first)
        sampled: list[int] = []
        if first + num_tokens - drafts >= len(known):
            sampled = [token] * (min(drafts, accept) + 1)
            known += sampled
        good = min(first + num_tokens, len(known) - 1) if sampled else first + num_tokens
        for position in range(first, first + num_tokens):
            content = tuple(known[: position + 1 + self._lookahead]) if position < good else GARBAGE
            for group, table in enumerate(self._tables[request_id]):
                block, offset = divmod(position, self._block_tokens[group])
                self._device[table[block], offset] = content
        self._computed[request_id] = good
        return sampled

    def _check_context(self, request_id: str, computed: int) -> None:
        """What attention reads: the whole prefix of full attention. Windows are checked by what is stored of them."""
        known, table = self.tokens[request_id], self._tables[request_id][0]
        for position in range(computed):
            block, offset = divmod(position, self._block_tokens[0])
            content = self._device.get((table[block], offset))
            assert content in (PROMOTED, tuple(known[: position + 1 + self._lookahead])), (
                f"{request_id} goes on from {computed} tokens, and position {position} was computed from {content}"
            )

    def _store(self, meta: ConnectorMeta, final: bool) -> None:
        for job in meta.final_stores if final else meta.stores:
            ids = iter(int(block_id) for block_id in job.source.block_ids)
            slots = iter(int(slot) for slot in job.destination.block_ids)
            for group, size in enumerate(job.source.group_sizes):
                for _ in range(size):
                    block_id = next(ids)
                    self.slots[next(slots)] = [
                        self._device.get((block_id, offset), GARBAGE) for offset in range(self._block_tokens[group])
                    ]
