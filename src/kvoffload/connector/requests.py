# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's state of one request. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.config import GroupKind
from kvoffload.connector.engine import BlockIds, EngineRequest, ScheduledRequest
from kvoffload.connector.epochs import FIRST, Epoch
from kvoffload.connector.groups import GroupGeometry
from kvoffload.connector.limits import RequestLimits

__all__ = ["UNKNOWN", "UNLIMITED", "GroupState", "Hit", "PortionState", "RequestKeys", "RequestOffloadState"]

UNLIMITED = 1 << 60
UNKNOWN: tuple[None, None] = None, None
"""``Hit.possible`` before it was looked for."""
_SINGLE_STATE = GroupKind.SINGLE_STATE


@dataclass(slots=True)
class GroupState:
    """One group of one request."""

    keys: list[OffloadKey] = field(default_factory=list)
    """Of the request's full blocks so far. Only shortened when a session goes on with other tokens."""
    gpu_block_ids: list[int] = field(default_factory=list)
    next_block: int = 0
    """Block index: earlier blocks were offered for store, or came from a hit, or left the device before that. Of a
    group of states: those that came from a hit."""
    states: dict[int, int] = field(default_factory=dict)
    """Of a group of states: the GPU block of each state that the engine named in this step, by the block it ends."""
    num_owned: int = 0
    """Leading keys that ``RequestKeys.owns_any`` has seen."""


@dataclass(slots=True)
class PortionState:
    """How one request offers its blocks for store, as ``offers.offer_in_portions`` decides it."""

    max_blocks: int = UNLIMITED
    """Blocks per group to offer at once. Cut by refusals, so that a full tier costs O(1) a step."""
    evicts_itself: bool = False
    """A store evicted another block of the same request: the tier is smaller than the prefix, so offers end."""
    touched_at: int = 0
    """What ``Turnover`` had counted when the request's prefix was touched last."""


@dataclass(slots=True)
class Hit:
    """What one request found, from the engine's first question to the end of the load."""

    computed_tokens: int = 0
    """Tokens on the device at admission: its own prefix cache's hit, and after a load the loaded ones too."""
    tokens: int = 0
    """The value of ``computed_tokens`` once the load has succeeded."""
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    """Those of them that are loaded, by the tier in which their blocks lay."""
    is_answered: bool = False
    """The engine has an answer, and has not reported yet which GPU blocks it allocated upon it."""
    is_counted: bool = False
    """The request was admitted before: it is counted once, however often it is preempted."""
    wait_s: float = 0.0
    """How long questions had no answer since the last admission."""
    possible: tuple[int | None, set[OffloadKey] | None] = UNKNOWN
    """While a lookup has no answer: the most tokens that the hit can have, and where it may end (``possible_hit``)."""
    awaited_job_id: int | None = None
    """A load of another request for which this one waited, once, instead of loading the same blocks itself."""
    load_job_id: int | None = None
    """The load that the request waits for."""
    load_failed: bool = False
    """A load of the request failed. It gets no other, so that it cannot retry for ever."""

    def answer(self, computed_tokens: int) -> None:
        self.computed_tokens, self.is_answered, self.possible = computed_tokens, True, UNKNOWN

    def admit(self, num_external_tokens: int) -> None:
        self.tokens = self.computed_tokens + num_external_tokens
        self.is_answered, self.wait_s = False, 0.0

    def end_load(self, success: bool) -> None:
        self.load_job_id = None
        if success:
            self.computed_tokens = self.tokens
        else:
            self.load_failed = True

    def lose_gpu_blocks(self) -> None:
        """The request waits to be admitted anew, and no longer for a load in flight."""
        self.computed_tokens = self.tokens = 0
        self.is_answered = False
        self.load_job_id = self.awaited_job_id = None


@dataclass(slots=True, eq=False)
class RequestKeys:
    """How the keys of one request's groups come about, and what is known of all of them."""

    request: EngineRequest
    groups: tuple[GroupState, ...]
    epoch: Epoch
    """The epoch of the keys: the one in which the request was admitted. A reset does not change what it has on the
    device."""
    is_outdated: bool = field(init=False)
    """The epoch has ended or is closed, so the request stores nothing more: what it computes rests on what it has."""
    num_hashes: int = 0
    """Block hashes that ``extend`` has seen."""
    num_prompt_tokens: int = field(init=False)
    """The request's, when its keys were seen last. In a session they grow."""
    stored: set[OffloadKey] = field(default_factory=set)
    """Keys that the request stored, if it reads no cache."""
    _own: set[OffloadKey] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.is_outdated = self.epoch.is_closed
        self.num_prompt_tokens = self.request.num_prompt_tokens

    def extend(self, geometry: Sequence[GroupGeometry]) -> bool:
        """Adds the keys of blocks that became full. Returns whether the next part of a session's input came, so that
        all keys were made anew. Blocks from the first with another key on are to be offered again then."""
        if self.request.num_prompt_tokens == self.num_prompt_tokens:
            if len(self.request.block_hashes) != self.num_hashes:
                self._add_keys(geometry)
            return False
        self.num_prompt_tokens = self.request.num_prompt_tokens
        before = [own.keys for own in self.groups]
        for own in self.groups:
            own.keys = []
        self._add_keys(geometry)
        for own, keys in zip(self.groups, before, strict=True):
            same = next((n for n, pair in enumerate(zip(keys, own.keys)) if pair[0] != pair[1]), len(keys))
            same = min(same, len(own.keys))
            own.next_block, own.num_owned = min(own.next_block, same), min(own.num_owned, same)
        return True

    def _add_keys(self, geometry: Sequence[GroupGeometry]) -> None:
        hashes = self.request.block_hashes
        self.num_hashes = len(hashes)
        for group, own in zip(geometry, self.groups):
            group.extend_keys(own.keys, hashes, self.epoch)

    def enter(self, epoch: Epoch) -> None:
        """The keys are those of ``epoch`` from now on. If they are others, nothing was offered under them yet."""
        is_same, self.epoch, self.is_outdated = epoch.seed == self.epoch.seed, epoch, epoch.is_closed
        if not is_same:
            self.num_hashes = 0
            for own in self.groups:
                own.keys, own.next_block, own.num_owned = [], 0, 0
            self.stored, self._own = set(), set()

    def owns_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether any of ``keys`` belongs to this request. O(keys) but for blocks that became full since last time."""
        if not keys:
            return False
        for own in self.groups:
            self._own.update(own.keys[own.num_owned :])
            own.num_owned = len(own.keys)
        return not self._own.isdisjoint(keys)


@dataclass(slots=True, eq=False)
class RequestOffloadState:
    """One request from its arrival to its end. Its jobs in flight keep it alive until they end."""

    request: EngineRequest
    context: ReqContext
    policy: OffloadPolicy
    groups: tuple[GroupState, ...]
    limits: RequestLimits = field(default_factory=RequestLimits)
    epoch: InitVar[Epoch] = FIRST
    keys: RequestKeys = field(init=False)
    hit: Hit = field(default_factory=Hit)
    portions: PortionState = field(default_factory=PortionState)
    last_scheduled: ScheduledRequest | None = None
    """Its part of the last step that computed tokens for it. ``None`` if none has since it was given GPU blocks."""
    offered_tokens: int = 0
    """Tokens that were surely computed when it offered blocks last."""
    next_offer_tokens: int = 0
    """No block can be offered before this many tokens are computed. Comparing with it is all an idle step costs."""
    job_ids: set[int] = field(default_factory=set)
    """Jobs in flight: one load, or any number of stores, never both."""

    def __post_init__(self, epoch: Epoch) -> None:
        self.keys = RequestKeys(self.request, self.groups, epoch)

    @property
    def max_load_tokens(self) -> int:
        """Tokens of the request that may be loaded."""
        most = self.limits.max_load_tokens
        return self.request.num_tokens if most is None else most

    def extend_keys(self, geometry: Sequence[GroupGeometry]) -> None:
        """Adds the keys of blocks that became full.

        The next part of a session's input may have come. The engine has put it in place of the last token that it
        generated, whose block may have had a key already, and whose position an asynchronous step may even have
        computed. So keys are made anew, and what was computed is ready only as far as later steps show.
        """
        if self.keys.extend(geometry):
            self.forget_computed()
            self.wait_for_next_block(geometry)

    def enter(self, epoch: Epoch) -> None:
        """The request is to be admitted anew, and has nothing on the device: its keys are those of ``epoch``."""
        self.keys.enter(epoch)
        self.hit.possible = UNKNOWN

    def set_gpu_blocks(self, block_ids: BlockIds) -> None:
        for state, ids in zip(self.groups, block_ids, strict=True):
            state.gpu_block_ids = list(ids)

    def add_gpu_blocks(self, block_ids: BlockIds) -> None:
        for state, ids in zip(self.groups, block_ids, strict=True):
            if ids:
                state.gpu_block_ids.extend(ids)

    def start_offers_after(self, hit_tokens: int, geometry: Sequence[GroupGeometry]) -> None:
        """Sets each group's ``next_block`` at admission.

        Block level offers only what is computed from here on; a block in which the hit ends is offered whole. Request
        level offers every block once, those of the hit too, so nothing changes: what a resumed request computes again
        was offered before.
        """
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            for group, state in zip(geometry, self.groups, strict=True):
                state.next_block = hit_tokens // group.block_tokens
        self.forget_computed()
        self.portions.evicts_itself = False
        self.wait_for_next_block(geometry)

    def stores(self, keys: Iterable[OffloadKey]) -> None:
        """A store of ``keys`` begins."""
        if not self.context.reads_cache:
            self.keys.stored.update(keys)

    def keys_in_use(self) -> list[OffloadKey]:
        """What to touch when the whole prefix was used. A request that reads no cache uses only what it stored."""
        keys = [key for state in self.groups for key in state.keys]
        return keys if self.context.reads_cache else [key for key in keys if key in self.keys.stored]

    def forget_computed(self) -> None:
        """Nothing that was computed so far may be offered until a step has computed more."""
        self.last_scheduled, self.offered_tokens = None, 0

    def ready_tokens(self) -> int:
        """Tokens that are surely computed by the steps so far, whatever step is next.

        The last token may have been generated just now, and what follows it may be drafts that were rejected.
        """
        if self.last_scheduled is None or self.request.num_prompt_tokens != self.keys.num_prompt_tokens:
            return 0
        return max(self.offered_tokens, min(self.last_scheduled.done_tokens, self.request.num_tokens - 1))

    def wait_for_next_block(self, geometry: Sequence[GroupGeometry]) -> None:
        next_tokens = UNLIMITED
        for group, state in zip(geometry, self.groups):
            end = (state.next_block + 1) * group.block_tokens
            # States come when the engine names them.
            if end < next_tokens and group.kind is not _SINGLE_STATE:
                next_tokens = end
        self.next_offer_tokens = next_tokens

    def lose_gpu_blocks(self) -> None:
        """The request was preempted."""
        self.hit.lose_gpu_blocks()
        self.forget_computed()
        for state in self.groups:
            state.gpu_block_ids = []
