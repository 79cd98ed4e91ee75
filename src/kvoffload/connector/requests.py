# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side remembers of one request. Owned by the scheduler; dropped when the request ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.connector.engine import BlockIds, EngineRequest
from kvoffload.connector.groups import GroupGeometry

__all__ = ["UNLIMITED", "GroupState", "PortionState", "RequestOffloadState"]

UNLIMITED = 1 << 60


@dataclass(slots=True)
class GroupState:
    """One group of one request."""

    keys: list[OffloadKey] = field(default_factory=list)
    """Of the request's full blocks so far; only ever extended."""
    gpu_block_ids: list[int] = field(default_factory=list)
    cursor: int = 0
    """Blocks before this one were offered to ``prepare_store``, or came from a hit, or left the device unoffered."""
    num_owned: int = 0
    """Keys that ``RequestOffloadState.owns_any`` knows already."""


@dataclass(slots=True)
class PortionState:
    """How one request offers its blocks for store, as ``offers.offer_in_portions`` decides it."""

    max_blocks: int = UNLIMITED
    """Blocks per group to offer at once. Cut by refusals, so that a full tier costs O(1) a step."""
    evicts_itself: bool = False
    """A store evicted another block of the same request: the tier is smaller than the prefix, so offers end."""


@dataclass(slots=True, eq=False)
class RequestOffloadState:
    """One request from its arrival to its end. Jobs in flight may keep it alive a little longer."""

    request: EngineRequest
    context: ReqContext
    policy: OffloadPolicy
    groups: tuple[GroupState, ...]
    computed_tokens: int = 0
    """Tokens on the device at admission: its own prefix cache's hit, and after a load the loaded ones too."""
    hit_tokens: int = 0
    """What ``computed_tokens`` becomes when the load in flight succeeds."""
    next_offer_tokens: int = 0
    """No block can be offered before so many tokens are computed: the one comparison of an idle step."""
    portions: PortionState = field(default_factory=PortionState)
    load_job_id: int | None = None
    job_ids: set[int] = field(default_factory=set)
    """Ids of jobs in flight: one load, or any number of stores."""
    failed_keys: set[OffloadKey] = field(default_factory=set)
    """Keys whose load failed: misses for this request for good."""
    awaited_job_id: int | None = None
    """The other request's load it once waited for instead of loading the same blocks again."""
    asked: bool = False
    """The engine asked for hits, and has not told yet which GPU blocks it allocated upon the answer."""
    finished: bool = False
    _own_keys: set[OffloadKey] = field(default_factory=set)

    @property
    def request_id(self) -> str:
        return self.context.req_id

    def extend_keys(self, geometry: Sequence[GroupGeometry]) -> None:
        hashes = self.request.block_hashes
        for group, state in zip(geometry, self.groups, strict=True):
            group.extend_keys(state.keys, hashes)

    def set_gpu_blocks(self, block_ids: BlockIds) -> None:
        for state, ids in zip(self.groups, block_ids, strict=True):
            state.gpu_block_ids = list(ids)

    def add_gpu_blocks(self, block_ids: BlockIds) -> None:
        for state, ids in zip(self.groups, block_ids, strict=True):
            if ids:
                state.gpu_block_ids.extend(ids)

    def start_offers_after(self, hit_tokens: int, geometry: Sequence[GroupGeometry]) -> None:
        """Sets the cursors at admission: block level offers only what is computed from here on.

        A block that the hit ends in is computed in part and offered whole. At request level all blocks are offered
        once, those of the hit too, so the cursors stay; what a resumed request computes again was offered before.
        """
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            for group, state in zip(geometry, self.groups, strict=True):
                state.cursor = hit_tokens // group.block_tokens
        self.portions.evicts_itself = False
        self.wait_for_next_block(geometry)

    def owns_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether any of ``keys`` is of this request's prefix. O(keys), after the first time."""
        if not keys:
            return False
        for state in self.groups:
            self._own_keys.update(state.keys[state.num_owned :])
            state.num_owned = len(state.keys)
        return not self._own_keys.isdisjoint(keys)

    def wait_for_next_block(self, geometry: Sequence[GroupGeometry]) -> None:
        self.next_offer_tokens = min(
            (state.cursor + 1) * group.block_tokens for group, state in zip(geometry, self.groups, strict=True)
        )

    def lose_gpu_blocks(self) -> None:
        """Preempted: it waits to be admitted anew, and a load in flight brings it nothing any more."""
        self.computed_tokens = self.hit_tokens = 0
        self.asked = False
        self.load_job_id = None
        self.awaited_job_id = None
        for state in self.groups:
            state.gpu_block_ids = []
