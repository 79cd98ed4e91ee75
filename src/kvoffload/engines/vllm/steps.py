# SPDX-License-Identifier: Apache-2.0
"""Translate vLLM's scheduler output into an ``EngineStep``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvoffload.connector.engine import NO_BLOCK, BlockIds, BoundaryState, EngineStep, ScheduledRequest

_record: Callable[[Iterable[Any]], ScheduledRequest] = partial(tuple.__new__, ScheduledRequest)


class StepTranslator:
    """Translates steps. It knows the id of vLLM's null block, which vLLM uses where a request has no GPU block, and the
    KV groups that are offloaded."""

    def __init__(self, group_ids: Sequence[int] | None = None, null_block_id: int = 0) -> None:
        """Create a translator. ``group_ids`` lists vLLM's numbers of the offloaded groups in order; ``None``: all
        groups are offloaded."""
        self._null = null_block_id
        self._group_ids = group_ids
        self._others: list[int] = []
        """GPU blocks of other groups that requests received since the last step."""

    def block_ids(self, ids: Sequence[Sequence[int]]) -> BlockIds:
        null = self._null
        if self._group_ids is not None:
            ids = self._offloaded(ids)
        return tuple(
            group if null not in group else [NO_BLOCK if each == null else each for each in group] for group in ids
        )

    def _offloaded(self, ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        assert self._group_ids is not None
        for number, group in enumerate(ids):
            if number not in self._group_ids:
                self._others += group
        return [ids[number] for number in self._group_ids] if ids else ids

    def step(self, output: Any) -> EngineStep:
        """Translate ``output``, a ``SchedulerOutput`` of vLLM. Blocks of groups that are not offloaded are also
        *needed*, because a store may still read their earlier content."""
        tokens = output.num_scheduled_tokens
        scheduled = [
            ScheduledRequest(
                new.req_id, self.block_ids(new.block_ids), new.num_computed_tokens, tokens[new.req_id], True
            )
            for new in output.scheduled_new_reqs
        ]
        cached = output.scheduled_cached_reqs
        # One each for the requests that run: without a call of Python for each.
        scheduled += map(
            _record,
            zip(
                cached.req_ids,
                [() if ids is None else self.block_ids(ids) for ids in cached.new_block_ids],
                cached.num_computed_tokens,
                map(tokens.__getitem__, cached.req_ids),
                map(cached.resumed_req_ids.__contains__, cached.req_ids),
                strict=True,
            ),
        )
        others, self._others = self._others, []
        return EngineStep(tuple(scheduled), frozenset(output.preempted_req_ids or ()), needed_block_ids=tuple(others))


def with_states(step: EngineStep, output: Any, group_ids: Sequence[int] | None = None) -> EngineStep:
    """Return ``step`` with the recurrent states that vLLM names in the same ``output``: the states to store, and the
    blocks that vLLM copies itself.

    vLLM names a state in the step that ends at it, or when the last token of its block becomes known. ``group_ids`` as
    in ``StepTranslator``.
    """
    named = output.kv_connector_block_state
    states = tuple(
        BoundaryState(request_id, group if group_ids is None else group_ids.index(group), block_id, num_tokens)
        for request_id, entries in (named.boundary_state_offloads.items() if named is not None else ())
        for group, block_id, num_tokens in entries
        if group_ids is None or group in group_ids
    )
    copied = tuple(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    return with_needed_blocks(replace(step, boundary_states=states), copied)


def with_needed_blocks(step: EngineStep, block_ids: Sequence[int]) -> EngineStep:
    """Return ``step`` with these GPU blocks added to the needed ones."""
    return replace(step, needed_block_ids=(*step.needed_block_ids, *block_ids)) if block_ids else step
