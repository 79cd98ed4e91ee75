# SPDX-License-Identifier: Apache-2.0
"""The types that an engine passes to the connector: protocols for its own objects, and small records for other data.

vLLM's ``Request`` satisfies ``EngineRequest``, and vLLM's adapter translates its scheduler output into an
``EngineStep``. An engine calls the scheduler side in this order::

    on_new_request(request)                               once, when the request arrives
    get_num_new_matched_tokens(request, computed)         each step while it waits to be admitted
    update_state_after_alloc(request, blocks, external)   when the engine has given it GPU blocks
    build_connector_meta(step)                            once per step, also when nothing is scheduled
    update_connector_output(report)                       with the merged reports of all workers
    request_finished(request)                             once: done, stopped or aborted at any stage

and each worker, with the result of ``build_connector_meta``::

    start_step(meta)       before the forward pass: start the last stores of ended requests, flush jobs that must
                           end first, start loads; the forward pass waits for loads within the step
    end_step()             after the forward pass was submitted: start stores
    get_report()           the transfers that ended since the last call
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

NO_BLOCK = -1
"""The entry of a block table for tokens without a GPU block, because they are outside the window (vLLM's null block).
It is never stored, loaded or fenced."""

BlockIds = tuple[Sequence[int], ...]
"""GPU block ids by KV group, each in the request's block order, with ``NO_BLOCK`` for missing blocks."""


class EngineRequest(Protocol):
    """A request as the engine's scheduler knows it. The connector only reads it, and drops it at
    ``request_finished``.

    It may have two more attributes. If ``skip_reading_prefix_cache: bool`` is true when the request arrives, the
    connector does not look the request up, and the engine never asks twice. ``kv_hints`` is an orchestrator's envelope
    of hints (``connector/hints.py``).
    """

    @property
    def request_id(self) -> str: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The prefix-chained hashes of the request's full hash-blocks so far. The sequence grows as tokens arrive."""

    @property
    def num_tokens(self) -> int:
        """The number of prompt and generated tokens so far."""

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens.

        It grows if the request is a session and its next input arrives. That input replaces generated tokens that are
        not computed yet. The engine allocates blocks for the session (``update_state_after_alloc``) before it
        continues.
        """

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """The parameters that the client sent. ``connector/limits.py`` lists the keys that the connector reads."""


class GPUBlockPool(Protocol):
    """The engine's pool of GPU blocks.

    An engine passes it to the connector (``hold_sources``) only if the engine writes new blocks before ``start_step``,
    because a flush would be too late there.
    """

    def hold(self, gpu_block_ids: Collection[int]) -> None:
        """Prevent the allocation of these blocks, because a store reads them from now on.

        A request owns them at this time. Holds of several stores add up.
        """

    def release(self, gpu_block_ids: Collection[int]) -> None:
        """Undo one hold. Its store has read these blocks, or will have read them when the next step is computed.

        They are in the request's order, group after group.
        """


class ScheduledRequest(NamedTuple):
    """A request whose tokens this step computes. It is a tuple, because an engine makes one for each running request in
    each step."""

    request_id: str
    new_block_ids: BlockIds
    """The GPU blocks allocated to the request in this step, or all of its blocks if ``block_table_is_new``. It may be
    ``()`` if there are none, as in most steps, because that is the fastest to test."""
    num_computed_tokens: int
    """The number of tokens whose KV is on the device before this step (loaded ones included)."""
    num_scheduled_tokens: int
    """The number of tokens that this step computes."""
    block_table_is_new: bool = False
    """Whether the request is scheduled for the first time or resumed after a preemption, so that earlier block ids are
    void."""

    @property
    def done_tokens(self) -> int:
        """The number of tokens whose KV is on the device after this step. It is too high if drafts are rejected."""
        return self.num_computed_tokens + self.num_scheduled_tokens


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """The recurrent state of a request at a block's end. Once this step is computed, ``gpu_block_id`` holds it.

    The block table does not say where a state is, because the engine overwrites states and skips positions. So the
    engine names each state that is worth keeping, in one step. A store that starts in that step reads it in time.
    """

    request_id: str
    group: int
    gpu_block_id: int
    num_tokens: int
    """The exact number of tokens that the state has seen."""


@dataclass(slots=True)
class EngineStep:
    """The engine's decisions for one step, which are never changed. It is empty if nothing is scheduled."""

    scheduled: tuple[ScheduledRequest, ...] = ()
    preempted_request_ids: frozenset[str] = frozenset()
    """Requests that lost their GPU blocks in this step, or between the previous step and this one. This step may
    allocate those blocks to other requests. It may also admit such a request again; blocks allocated to it then are not
    lost."""
    boundary_states: tuple[BoundaryState, ...] = ()
    """The states to store, of groups of kind ``SINGLE_STATE``. No other state of such a group is ever stored."""
    needed_block_ids: Sequence[int] = ()
    """GPU blocks whose transfers must end in this step although ``scheduled`` may not list them as new. The engine
    writes them with its own copies, or would allocate them if they were not held."""
