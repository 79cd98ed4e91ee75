# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's state of one request. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.config import GroupKind
from kvoffload.connector.engine import BlockIds, EngineRequest, ScheduledRequest
from kvoffload.connector.epochs import FIRST, Epoch
from kvoffload.connector.groups import GroupGeometry
from kvoffload.connector.limits import RequestLimits

if TYPE_CHECKING:
    from kvoffload.connector.story import Story

__all__ = ["UNLIMITED", "GroupState", "PortionState", "RequestOffloadState"]

UNLIMITED = 1 << 60
_SINGLE_STATE = GroupKind.SINGLE_STATE


@dataclass(slots=True)
class GroupState:
    """One group of one request."""

    keys: list[OffloadKey] = field(default_factory=list)
    """Of the request's full blocks so far. Only shortened when a session goes on with other tokens."""
    gpu_block_ids: list[int] = field(default_factory=list)
    cursor: int = 0
    """Block index: earlier blocks were offered for store, or came from a hit, or left the device before that. Of a
    group of states: those that came from a hit."""
    states: dict[int, int] = field(default_factory=dict)
    """Of a group of states: the GPU block of each state that the engine named in this step, by the block it ends."""
    num_owned: int = 0
    """Leading keys that are in ``RequestOffloadState._own_keys`` already."""


@dataclass(slots=True)
class PortionState:
    """How one request offers its blocks for store, as ``offers.offer_in_portions`` decides it."""

    max_blocks: int = UNLIMITED
    """Blocks per group to offer at once. Cut by refusals, so that a full tier costs O(1) a step."""
    evicts_itself: bool = False
    """A store evicted another block of the same request: the tier is smaller than the prefix, so offers end."""
    touched_at: int = 0
    """What ``Turnover`` had counted when the request's prefix was touched last."""


@dataclass(slots=True, eq=False)
class RequestOffloadState:
    """One request from its arrival to its end. Its jobs in flight keep it alive until they end."""

    request: EngineRequest
    context: ReqContext
    policy: OffloadPolicy
    groups: tuple[GroupState, ...]
    limits: RequestLimits = field(default_factory=RequestLimits)
    epoch: Epoch = FIRST
    """The epoch of its keys: the one in which it was admitted. A reset does not change what it has on the device."""
    is_outdated: bool = False
    """A reset has ended that epoch, so the request stores nothing more: what it computes rests on what it has."""
    computed_tokens: int = 0
    """Tokens on the device at admission: its own prefix cache's hit, and after a load the loaded ones too."""
    hit_tokens: int = 0
    """The value of ``computed_tokens`` once the load in flight has succeeded."""
    last_scheduled: ScheduledRequest | None = None
    """Its part of the last step that computed tokens for it. ``None`` if none has since it was given GPU blocks."""
    offered_tokens: int = 0
    """Tokens that were surely computed when it offered blocks last."""
    next_offer_tokens: int = 0
    """No block can be offered before this many tokens are computed. Comparing with it is all an idle step costs."""
    portions: PortionState = field(default_factory=PortionState)
    load_job_id: int | None = None
    job_ids: set[int] = field(default_factory=set)
    """Jobs in flight: one load, or any number of stores, never both."""
    load_failed: bool = False
    """A load of this request failed. It gets no other, so that it cannot retry for ever."""
    failed_keys: set[OffloadKey] = field(default_factory=set)
    """The keys of that load, for the request's story."""
    awaited_job_id: int | None = None
    """A load of another request for which this one waited, once, instead of loading the same blocks itself."""
    asked: bool = False
    """The engine asked for hits, and has not reported yet which GPU blocks it allocated upon the answer."""
    possible_hit: int | None = None
    """The most tokens that a hit can have, by what is anywhere, while its lookup has no answer; ``None``: not known."""
    hit_ends: set[OffloadKey] | None = None
    """Where such a hit may end, if not everywhere (``OffloadingManager.lookup_prefix``)."""
    deferred_since_s: float | None = None
    """When the lookup that has no answer yet was made first."""
    lookup_wait_s: float = 0.0
    """How long its lookups had no answer since the last admission."""
    story: Story | None = None
    """What is recorded of it, if a trace is."""
    finished: bool = False
    num_hashes: int = 0
    """Block hashes that ``extend_keys`` has seen."""
    num_prompt_tokens: int = field(init=False)
    """The request's, when its keys were seen last. In a session they grow (see ``_follow_session``)."""
    _own_keys: set[OffloadKey] = field(default_factory=set)
    _stored_keys: set[OffloadKey] = field(default_factory=set)
    """Keys that this request stored; only known if it reads no cache."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.request.num_prompt_tokens

    def extend_keys(self, geometry: Sequence[GroupGeometry]) -> None:
        if self.request.num_prompt_tokens != self.num_prompt_tokens:
            self._follow_session(geometry)
        hashes = self.request.block_hashes
        if len(hashes) == self.num_hashes:
            return
        self.num_hashes = len(hashes)
        for group, state in zip(geometry, self.groups):
            group.extend_keys(state.keys, hashes, self.epoch)

    def enter(self, epoch: Epoch) -> None:
        """The request is to be admitted anew, and has nothing on the device: its keys are those of ``epoch``."""
        is_same, self.epoch, self.is_outdated = epoch.seed == self.epoch.seed, epoch, False
        if is_same:
            return
        self.num_hashes = 0
        for state in self.groups:
            state.keys, state.cursor, state.num_owned = [], 0, 0
        self.failed_keys, self._own_keys, self._stored_keys = set(), set(), set()
        self.possible_hit = self.hit_ends = None

    def _follow_session(self, geometry: Sequence[GroupGeometry]) -> None:
        """The next part of a session's input came. The engine has put it in place of the last token that it generated,
        whose block may have had a key already, and whose position an asynchronous step may even have computed. So keys
        are made anew, and what was computed is ready only as far as later steps show.
        """
        self.num_prompt_tokens = self.request.num_prompt_tokens
        self.forget_computed()
        hashes = self.request.block_hashes
        self.num_hashes = len(hashes)
        for group, state in zip(geometry, self.groups, strict=True):
            before, state.keys = state.keys, []
            group.extend_keys(state.keys, hashes, self.epoch)
            same = next((n for n, pair in enumerate(zip(before, state.keys)) if pair[0] != pair[1]), len(before))
            same = min(same, len(state.keys))
            state.cursor, state.num_owned = min(state.cursor, same), min(state.num_owned, same)
        self.wait_for_next_block(geometry)

    def set_gpu_blocks(self, block_ids: BlockIds) -> None:
        for state, ids in zip(self.groups, block_ids, strict=True):
            state.gpu_block_ids = list(ids)

    def add_gpu_blocks(self, block_ids: BlockIds) -> None:
        for state, ids in zip(self.groups, block_ids, strict=True):
            if ids:
                state.gpu_block_ids.extend(ids)

    def start_offers_after(self, hit_tokens: int, geometry: Sequence[GroupGeometry]) -> None:
        """Sets the cursors at admission.

        Block level offers only what is computed from here on; a block in which the hit ends is offered whole. Request
        level offers every block once, those of the hit too, so its cursors stay: what a resumed request computes again
        was offered before.
        """
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            for group, state in zip(geometry, self.groups, strict=True):
                state.cursor = hit_tokens // group.block_tokens
        self.forget_computed()
        self.portions.evicts_itself = False
        self.wait_for_next_block(geometry)

    def stores(self, keys: Iterable[OffloadKey]) -> None:
        """A store of ``keys`` begins."""
        if not self.context.reads_cache:
            self._stored_keys.update(keys)

    def keys_in_use(self) -> list[OffloadKey]:
        """What to touch when the whole prefix was used. A request that reads no cache uses only what it stored."""
        keys = [key for state in self.groups for key in state.keys]
        return keys if self.context.reads_cache else [key for key in keys if key in self._stored_keys]

    def fail_load(self, keys: Iterable[OffloadKey]) -> None:
        self.load_failed = True
        self.failed_keys.update(keys)

    def forget_computed(self) -> None:
        """Nothing that was computed so far may be offered until a step has computed more."""
        self.last_scheduled, self.offered_tokens = None, 0

    def ready_tokens(self) -> int:
        """Tokens that are surely computed by the steps so far, whatever step is next.

        The last token may have been generated just now, and what follows it may be drafts that were rejected.
        """
        if self.last_scheduled is None or self.request.num_prompt_tokens != self.num_prompt_tokens:
            return 0
        return max(self.offered_tokens, min(self.last_scheduled.done_tokens, self.request.num_tokens - 1))

    def owns_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether any of ``keys`` belongs to this request. O(keys) but for blocks that became full since last time."""
        if not keys:
            return False
        for state in self.groups:
            self._own_keys.update(state.keys[state.num_owned :])
            state.num_owned = len(state.keys)
        return not self._own_keys.isdisjoint(keys)

    def wait_for_next_block(self, geometry: Sequence[GroupGeometry]) -> None:
        next_tokens = UNLIMITED
        for group, state in zip(geometry, self.groups):
            end = (state.cursor + 1) * group.block_tokens
            # States come when the engine names them.
            if end < next_tokens and group.kind is not _SINGLE_STATE:
                next_tokens = end
        self.next_offer_tokens = next_tokens

    def lose_gpu_blocks(self) -> None:
        """The request was preempted. It waits to be admitted anew, and no longer for a load in flight."""
        self.computed_tokens = self.hit_tokens = 0
        self.forget_computed()
        self.asked = False
        self.load_job_id = None
        self.awaited_job_id = None
        for state in self.groups:
            state.gpu_block_ids = []
