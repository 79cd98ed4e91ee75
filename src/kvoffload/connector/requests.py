# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's state of one request: its keys by KV group, its hit, its offers. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.base import OffloadKey, OffloadPolicy, ReqContext
from kvoffload.config import GroupKind
from kvoffload.connector.engine import BlockIds, EngineRequest, ScheduledRequest
from kvoffload.connector.epochs import Epoch
from kvoffload.connector.groups import GroupGeometry, by_position
from kvoffload.connector.limits import RequestLimits

UNLIMITED = 1 << 60
_NOTHING = RequestLimits(max_offload_tokens=0, max_load_tokens=0)
UNKNOWN: tuple[None, None] = None, None
"""``Hit.possible`` before it was looked for."""
_SINGLE_STATE = GroupKind.SINGLE_STATE


@dataclass(slots=True, eq=False)
class Keys:
    """One KV group of one request: its full blocks so far, and where their bytes are on the device."""

    group: GroupGeometry
    keys: list[OffloadKey] = field(default_factory=list)
    """Only shortened when a session goes on with other tokens."""
    gpu_block_ids: list[int] = field(default_factory=list)
    next_block: int = 0
    """Block index: earlier blocks were offered for store, or came from a hit, or left the device before that. Of a
    group of states: those that came from a hit. ``UNLIMITED`` until the request's first admission, with block level."""
    states: dict[int, int] = field(default_factory=dict)
    """Of a group of states: the GPU block of each state that the engine named in this step, by the block it ends."""
    _own: set[OffloadKey] = field(default_factory=set)
    """The leading keys, as many as ``owns_any`` has seen."""

    def renew(self, block_hashes: Sequence[bytes], epoch: Epoch) -> None:
        """Makes all keys anew. Blocks from the first with another key on are to be offered again."""
        before, self.keys = self.keys, []
        self.group.extend_keys(self.keys, block_hashes, epoch)
        same = next((n for n, pair in enumerate(zip(before, self.keys)) if pair[0] != pair[1]), len(before))
        self.next_block = min(self.next_block, same, len(self.keys))
        self._own.clear()

    def owns_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether any of ``keys`` is one of this group's. O(keys) but for blocks that became full since last time."""
        self._own.update(self.keys[len(self._own) :])
        return not self._own.isdisjoint(keys)


@dataclass(slots=True)
class Hit:
    """What one request found, from the engine's first question to the end of the load."""

    computed_tokens: int = 0
    """Tokens on the device at admission: its own prefix cache's hit, and after a load the loaded ones too."""
    tokens: int = 0
    """The value of ``computed_tokens`` once the load has succeeded."""
    tokens_by_tier: dict[str, int] | None = None
    """Those of them that are loaded, by the tier in which their blocks lay. ``None``: it was never admitted."""
    sources: Mapping[OffloadKey, str] = field(default_factory=dict)
    """The tiers below that its blocks came from, as of the first answer since the last admission. The manager forgets
    them when the request's time limit has passed, also while it queues with an answer."""
    is_answered: bool = False
    """The engine has an answer, and has not reported yet which GPU blocks it allocated upon it."""
    wait_s: float = 0.0
    """How long questions had no answer since the last admission."""
    possible: tuple[int | None, set[OffloadKey] | None] = UNKNOWN
    """While a lookup has no answer: the most tokens that the hit can have, and where it may end (``possible_hit``)."""
    unknown: OffloadKey | None = None
    """While that is not known: a block of which it is not known whether it is anywhere."""
    awaited_job_id: int | None = None
    """A load of another request for which this one waited, once, instead of loading the same blocks itself."""
    within_step: bool = False
    """The load of the last answer is short: its step waits for it, and computes the request. Else the request waits."""
    load_job_id: int | None = None
    """The load that the request waits for."""
    load_failed: bool = False
    """A load of the request failed. It gets no other, so that it cannot retry for ever."""


@dataclass(slots=True, eq=False)
class Request:
    """One request from its arrival to its end. Its jobs in flight keep it alive until they end."""

    of_engine: EngineRequest
    context: ReqContext
    policy: OffloadPolicy
    groups: tuple[Keys, ...]
    epoch: Epoch
    """The epoch of the keys: the one in which the request was admitted. A reset does not change what it has on the
    device."""
    asked: RequestLimits = field(default_factory=RequestLimits)
    """What its client asked for. Nothing once it was left out."""
    leaves_out: Callable[[EngineRequest], bool] | None = None
    """That of ``OffloadingConnectorScheduler``."""
    hit: Hit = field(default_factory=Hit)
    num_prompt_tokens: int = field(init=False)
    """The engine's, when its keys were seen last. In a session they grow."""
    stored: set[OffloadKey] = field(default_factory=set)
    """Keys that the request stored, if it reads no cache."""
    job_ids: set[int] = field(default_factory=set)
    """Jobs in flight: one load, or any number of stores. Both only if the load ends within a step."""
    last_scheduled: ScheduledRequest | None = None
    """Its part of the last step that computed tokens for it. ``None`` if none has since it was given GPU blocks."""
    offered_tokens: int = 0
    """Tokens that were surely computed when it offered blocks last."""
    next_offer_tokens: int = 0
    """No block can be offered before this many tokens are computed. Comparing with it is all an idle step costs."""
    max_blocks: int = UNLIMITED
    """Blocks per group to offer at once. Cut by refusals, so that a full tier costs O(1) a step. 0: a store evicted
    another block of the same request, so the tier is smaller than the prefix, and offers end."""
    touched_at: int = 0
    """What ``Turnover`` had counted when the request's prefix was touched last."""

    def __post_init__(self) -> None:
        self._compute_nothing_yet()
        self.num_prompt_tokens = self.of_engine.num_prompt_tokens
        self._leave_out()

    @property
    def limits(self) -> RequestLimits:
        """Those of now: a session's next part may bring media, and an adapter may get other weights meanwhile."""
        self._leave_out()
        return self.asked

    @property
    def max_load_tokens(self) -> int:
        """Tokens of the request that may be loaded."""
        most = self.limits.max_load_tokens
        return self.of_engine.num_tokens if most is None else most

    @property
    def ready_tokens(self) -> int:
        """Tokens that are surely computed by the steps so far, whatever step is next.

        The last token may have been generated just now, and what follows it may be drafts that were rejected.
        """
        if self.last_scheduled is None or self.of_engine.num_prompt_tokens != self.num_prompt_tokens:
            return 0
        return max(self.offered_tokens, min(self.last_scheduled.done_tokens, self.of_engine.num_tokens - 1))

    def extend_keys(self) -> None:
        """Adds the keys of blocks that became full.

        The next part of a session's input may have come. The engine has put it in place of the last token that it
        generated, whose block may have had a key already, and whose position an asynchronous step may even have
        computed. So keys are made anew, and what was computed is ready only as far as later steps show.
        """
        hashes = self.of_engine.block_hashes
        if self.of_engine.num_prompt_tokens == self.num_prompt_tokens:
            for own in self.groups:
                own.group.extend_keys(own.keys, hashes, self.epoch)
            return
        self.num_prompt_tokens = self.of_engine.num_prompt_tokens
        for own in self.groups:
            own.renew(hashes, self.epoch)
        self.forget_computed()
        self.wait_for_next_block()

    @property
    def is_prefilled_elsewhere(self) -> bool:
        """Whether another connector gets the prompt's KV from the engine that computes it. That connector takes the
        mark away when it begins, so a request that fails there is looked up at its next admission."""
        params = self.of_engine.kv_transfer_params
        return isinstance(params, dict) and bool(params.get("do_remote_prefill"))

    def enter(self, epoch: Epoch) -> None:
        """The request is to be admitted anew, and has nothing on the device: its keys are those of ``epoch``. If they
        are others, nothing was offered under them yet."""
        if epoch.seed != self.epoch.seed:
            self.groups = tuple(Keys(own.group, gpu_block_ids=own.gpu_block_ids) for own in self.groups)
            self._compute_nothing_yet()
            self.stored = set()
        self.epoch = epoch
        self.hit.possible, self.hit.unknown = UNKNOWN, None

    def forget_computed(self) -> None:
        """Nothing that was computed so far may be offered until a step has computed more."""
        self.last_scheduled, self.offered_tokens = None, 0

    def set_gpu_blocks(self, block_ids: BlockIds) -> None:
        for own, ids in zip(self.groups, block_ids, strict=True):
            own.gpu_block_ids = list(ids)

    def lose_gpu_blocks(self) -> None:
        """The request was preempted. It waits to be admitted anew, and no longer for a load in flight."""
        self.set_gpu_blocks(((),) * len(self.groups))
        self.forget_computed()
        hit = self.hit
        hit.computed_tokens = hit.tokens = 0
        hit.is_answered = False
        hit.load_job_id = hit.awaited_job_id = None

    def begin_offers(self, hit_tokens: int) -> None:
        """Begin to offer blocks: the request was admitted with ``hit_tokens``.

        Block level offers only what the request computes from here on, and a block in which the hit ends is offered
        whole. If the request computed blocks before a preemption and they were not accepted, they are offered too,
        although the engine's own cache kept them and they are a hit by now. Request level offers every block once,
        those of the hit too, so nothing changes: what a resumed request computes again was offered before.
        """
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            for own in self.groups:
                own.next_block = min(own.next_block, hit_tokens // own.group.block_tokens)
        self.forget_computed()
        self.max_blocks = self.max_blocks or UNLIMITED
        self.wait_for_next_block()

    def wait_for_next_block(self) -> None:
        """Nothing can be offered before the next block is full. States come when the engine names them."""
        self.next_offer_tokens = UNLIMITED
        for own in self.groups:
            end = (own.next_block + 1) * own.group.block_tokens
            if end < self.next_offer_tokens and own.group.kind is not _SINGLE_STATE:
                self.next_offer_tokens = end

    def keys_in_use(self) -> list[OffloadKey]:
        """Return the keys to touch when the whole prefix was used, by position. A request that reads no cache uses only
        the blocks that it stored."""
        blocks = [range(len(own.keys)) for own in self.groups]
        keys = by_position((own.group for own in self.groups), blocks, [key for own in self.groups for key in own.keys])
        return keys if self.context.reads_cache else [key for key in keys if key in self.stored]

    def _compute_nothing_yet(self) -> None:
        """Offer no block of a hit as if the request had computed it."""
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            for own in self.groups:
                own.next_block = UNLIMITED

    def _leave_out(self) -> None:
        """For good. The reason may go: a session whose grammar refuses a token is none any more when vLLM ends it."""
        if self.leaves_out is not None and self.leaves_out(self.of_engine):
            self.asked, self.leaves_out = _NOTHING, None
