# SPDX-License-Identifier: Apache-2.0
"""From vLLM's scheduler output to an ``EngineStep``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvoffload.connector.engine import NO_BLOCK, BlockIds, BoundaryState, EngineStep, ScheduledRequest

__all__ = ["StepTranslator", "with_states"]


class StepTranslator:
    """Knows the id of vLLM's null block, which stands where a request has no GPU block."""

    def __init__(self, null_block_id: int = 0) -> None:
        self._null = null_block_id

    def block_ids(self, ids: Sequence[Sequence[int]]) -> BlockIds:
        null = self._null
        return tuple(
            group if null not in group else [NO_BLOCK if each == null else each for each in group] for group in ids
        )

    def step(self, output: Any) -> EngineStep:
        """``output``: vLLM's ``SchedulerOutput``."""
        tokens = output.num_scheduled_tokens
        scheduled = [
            ScheduledRequest(
                new.req_id, self.block_ids(new.block_ids), new.num_computed_tokens, tokens[new.req_id], True
            )
            for new in output.scheduled_new_reqs
        ]
        cached = output.scheduled_cached_reqs
        for request_id, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            scheduled.append(
                ScheduledRequest(
                    request_id,
                    () if ids is None else self.block_ids(ids),
                    computed,
                    tokens[request_id],
                    request_id in cached.resumed_req_ids,
                )
            )
        return EngineStep(tuple(scheduled), frozenset(output.preempted_req_ids or ()))


def with_states(step: EngineStep, output: Any) -> EngineStep:
    """``step``, and what vLLM says of recurrent states in the same ``output``: those to store, and its own copies.

    vLLM names a state in the step that ends at it, or when the last token of its block becomes known.
    """
    named = output.kv_connector_block_state
    states = tuple(
        BoundaryState(request_id, group, block_id, num_tokens)
        for request_id, entries in (named.boundary_state_offloads.items() if named is not None else ())
        for group, block_id, num_tokens in entries
    )
    copied = tuple(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    return replace(step, boundary_states=states, copied_block_ids=copied)
