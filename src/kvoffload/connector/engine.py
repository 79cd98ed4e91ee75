# SPDX-License-Identifier: Apache-2.0
"""What an engine passes to the connector: protocols for objects it has anyway, small records for the rest.

vLLM's ``Request`` satisfies ``EngineRequest`` as it is; its scheduler output is translated into an ``EngineStep``. An
engine calls the scheduler side in this order::

    on_new_request(request)                               once, when the request arrives
    get_num_new_matched_tokens(request, computed)         each step while it waits to be admitted
    update_state_after_alloc(request, blocks, external)   when the engine has given it GPU blocks
    build_connector_meta(step)                            once per step, also when nothing is scheduled
    update_connector_output(report)                       with the merged reports of all workers
    request_finished(request)                             once: done, stopped or aborted at any stage

and each worker, with what ``build_connector_meta`` returned::

    start_step(meta)       before the forward pass: start the last stores of ended requests, flush what must end
                           first, start loads
    end_step()             after the forward pass was submitted: start stores
    get_report()           the transfers that ended since the last call
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# ``ScheduledRequest`` and ``EngineStep`` are values that are never changed. They are not frozen, because a frozen
# dataclass takes three times as long to make, and an engine makes one for each running request in each step.

NO_BLOCK = -1
"""Stands in a block table where a request has no GPU block, because its tokens lie outside the window (vLLM's null
block). Never stored, loaded or fenced."""

BlockIds = tuple[Sequence[int], ...]
"""GPU block ids by KV group, each in the request's block order; ``NO_BLOCK`` where there is none."""


class EngineRequest(Protocol):
    """A request as the engine's scheduler knows it. The connector only reads it, and drops it at
    ``request_finished``.

    It may also have ``skip_reading_prefix_cache: bool``. If that is true when the request arrives, the request is not
    looked up, and the engine never asks twice. And it may have ``kv_hints``, an orchestrator's envelope of hints
    (``connector/hints.py``).
    """

    @property
    def request_id(self) -> str: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Prefix-chained hashes of the request's full hash-blocks so far; grows as tokens arrive."""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """Grows if the request is a session and the next part of its input comes. That part replaces what was generated
        and not computed; the engine gives the session blocks (``update_state_after_alloc``) before it goes on."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What the client sent along. ``connector/limits.py`` has the keys that the connector reads."""


class GPUBlockPool(Protocol):
    """Where the engine allocates GPU blocks. Only an engine that writes new blocks before ``start_step`` gives the
    connector one (``hold_sources``): there a flush comes too late."""

    def hold(self, gpu_block_ids: Collection[int]) -> None:
        """A store reads these blocks from now on: they must not be allocated. A request has them at the time. Holds of
        several stores add up."""

    def release(self, gpu_block_ids: Collection[int]) -> None:
        """One store has read these blocks, or will have when the next step is computed. They are in the request's
        order, group after group."""


@dataclass(slots=True)
class ScheduledRequest:
    """A request that this step computes tokens for."""

    request_id: str
    new_block_ids: BlockIds
    """GPU blocks allocated to it in this step; all of its blocks if ``block_table_is_new``. May be ``()`` if there are
    none, as in most steps, which is the fastest to see."""
    num_computed_tokens: int
    """Tokens whose KV is on the device before this step (loaded ones included)."""
    num_scheduled_tokens: int
    """Tokens this step computes."""
    block_table_is_new: bool = False
    """Scheduled for the first time, or resumed after a preemption: earlier block ids are void."""

    @property
    def done_tokens(self) -> int:
        """Tokens whose KV is on the device after this step. Too many, if some of them are drafts that are rejected."""
        return self.num_computed_tokens + self.num_scheduled_tokens


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """The recurrent state of a request at a block's end. Once this step is computed, ``gpu_block_id`` holds it.

    The block table does not say where a state is, since the engine writes states over and skips positions. So the
    engine names each state that is worth keeping, in one step. A store that begins in that step reads it in time.
    """

    request_id: str
    group: int
    gpu_block_id: int
    num_tokens: int
    """The tokens that the state has seen, exactly."""


@dataclass(slots=True)
class EngineStep:
    """What the engine decided for one step. Empty when nothing is scheduled."""

    scheduled: tuple[ScheduledRequest, ...] = ()
    preempted_request_ids: frozenset[str] = frozenset()
    """Requests that lost their GPU blocks in this step, or between it and the one before. The same step may allocate
    those blocks to others. It may also admit such a request again, and what is allocated to it then is not lost."""
    boundary_states: tuple[BoundaryState, ...] = ()
    """The states to store, of groups of kind ``SINGLE_STATE``. No other state of such a group is ever stored."""
    needed_block_ids: Sequence[int] = ()
    """GPU blocks whose transfers must end in this step, and that ``scheduled`` may not name as new: the engine writes
    them by copies of its own, or would allocate them if they were not held."""
