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
_SINGLE_STATE = GroupKind.SINGLE_STATE


@dataclass(slots=True, eq=False)
class Keys:
    """One KV group of one request: its full blocks so far, and the places of their bytes on the GPU."""

    group: GroupGeometry
    keys: list[OffloadKey] = field(default_factory=list)
    """The keys of the full blocks. The list is shortened only if a session continues with other tokens."""
    gpu_block_ids: list[int] = field(default_factory=list)
    next_block: int = 0
    """Block index: earlier blocks were offered for store, came from a hit, or left the GPU before they were offered. In
    a group of states, earlier blocks came from a hit. With block level, it is ``UNLIMITED`` until the request's first
    admission."""
    states: dict[int, int] = field(default_factory=dict)
    """In a group of states: the GPU block of each state that the engine named in this step, by the block at whose end
    the state was taken."""
    _own: set[OffloadKey] = field(default_factory=set)
    """The leading keys that ``owns_any`` has seen."""

    def renew(self, block_hashes: Sequence[bytes], epoch: Epoch) -> None:
        """Compute all keys again. All blocks from the first changed key on must be offered again."""
        before, self.keys = self.keys, []
        self.group.extend_keys(self.keys, block_hashes, epoch)
        same = next((n for n, pair in enumerate(zip(before, self.keys)) if pair[0] != pair[1]), len(before))
        self.next_block = min(self.next_block, same, len(self.keys))
        self._own.clear()

    def owns_any(self, keys: Sequence[OffloadKey]) -> bool:
        """Return whether this group contains any of ``keys``. O(keys), plus the blocks that became full since the last
        call."""
        self._own.update(self.keys[len(self._own) :])
        return not self._own.isdisjoint(keys)


@dataclass(slots=True)
class CachedPrefix:
    """The tokens that one request need not compute, from the engine's first question to the end of the load."""

    computed_tokens: int = 0
    """Number of tokens on the GPU at admission: the hit in the engine's own prefix cache, plus the loaded tokens after
    a load."""
    tokens: int = 0
    """The value of ``computed_tokens`` once the load has succeeded."""
    tokens_by_tier: dict[str, int] | None = None
    """Number of loaded tokens, by the tier that contained their blocks. ``None``: the request was never admitted."""
    sources: Mapping[OffloadKey, str] = field(default_factory=dict)
    """The lower tiers that supplied its blocks, as of the first answer since the last admission. The manager forgets
    them when the request's time limit has passed, even while the request queues with an answer."""
    searched: tuple[int, int, int, Epoch] | None = None
    """The conditions of the last search: the computed tokens, all tokens, the tokens that may be loaded, the epoch."""
    found: tuple[int, bool] = (0, False)
    """The result of that search. It holds as long as these conditions and the manager's answers are the same."""
    is_answered: bool = False
    """The engine has an answer, but has not yet reported the GPU blocks that it allocated because of it."""
    wait_s: float = 0.0
    """Number of seconds during which questions had no answer, since the last admission."""
    awaited_job_id: int | None = None
    """Another request's load for which this request waited, once, instead of loading the same blocks itself."""
    within_step: bool = False
    """Whether the load of the last answer is short, so that its step waits for it and computes the request. Otherwise
    the request waits."""
    load_job_id: int | None = None
    """The load that the request waits for."""
    load_failed: bool = False
    """A load of the request failed. The request gets no second load, so that it cannot retry forever."""


@dataclass(slots=True, eq=False)
class Request:
    """One request, from its arrival to its end. Its jobs in flight keep this object alive until they end."""

    of_engine: EngineRequest
    context: ReqContext
    policy: OffloadPolicy
    groups: tuple[Keys, ...]
    epoch: Epoch
    """The epoch of the keys, in which the request was admitted. A reset does not change the request's blocks on the
    GPU."""
    asked: RequestLimits = field(default_factory=RequestLimits)
    """The limits that its client asked for. They exclude everything once the request was left out."""
    leaves_out: Callable[[EngineRequest], bool] | None = None
    """The ``leaves_out`` of ``OffloadingConnectorScheduler``."""
    prefix: CachedPrefix = field(default_factory=CachedPrefix)
    num_prompt_tokens: int = field(init=False)
    """The engine's number of prompt tokens when this object last saw the keys. It grows in a session."""
    stored: set[OffloadKey] = field(default_factory=set)
    """The keys that the request stored, if it reads no cache."""
    job_ids: set[int] = field(default_factory=set)
    """Jobs in flight: one load, or any number of stores. Both occur together only if the load ends within a step."""
    last_scheduled: ScheduledRequest | None = None
    """Its part of the last step that computed tokens for it. ``None`` if no step has done so since the request received
    GPU blocks."""
    offered_tokens: int = 0
    """Number of tokens that were certainly computed when it last offered blocks."""
    next_offer_tokens: int = 0
    """Nothing is offered before this many tokens are computed. An idle step costs only one comparison with it."""
    max_blocks: int = UNLIMITED
    """Number of blocks per group to offer at once. Rejections reduce it, so that a full cache costs O(1) per step. 0: a
    store evicted another block of the same request, so the cache is smaller than the prefix, and offers end."""
    touched_at: int = 0
    """The count of ``Turnover`` when the request's prefix was last touched."""

    def __post_init__(self) -> None:
        self._compute_nothing_yet()
        self.num_prompt_tokens = self.of_engine.num_prompt_tokens
        self.limits()

    def limits(self) -> RequestLimits:
        """Return the current limits. They can change, because a session's next part may contain media, and an adapter
        may get other weights. The request is then left out for good, even if the reason disappears later: when a
        grammar rejects a token of a session and vLLM ends it, it no longer looks like a session."""
        if self.leaves_out is not None and self.leaves_out(self.of_engine):
            self.asked, self.leaves_out = _NOTHING, None
        return self.asked

    def max_load_tokens(self) -> int:
        """Return the number of tokens of the request that may be loaded."""
        most = self.limits().max_load_tokens
        return self.of_engine.num_tokens if most is None else most

    @property
    def ready_tokens(self) -> int:
        """Number of tokens that the steps so far have certainly computed, whatever the next step is.

        The last token may have just been generated, and rejected drafts may follow it.
        """
        if self.last_scheduled is None or self.of_engine.num_prompt_tokens != self.num_prompt_tokens:
            return 0
        return max(self.offered_tokens, min(self.last_scheduled.done_tokens, self.of_engine.num_tokens - 1))

    def extend_keys(self) -> None:
        """Append the keys of blocks that became full.

        If the next part of a session's input has arrived, the engine has replaced the last generated token by it. The
        block of that token may already have a key, and an asynchronous step may even have computed its position. So all
        keys are computed again, and computed tokens count as ready only after later steps confirm them.
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
        self.wait_for_blocks(1)

    @property
    def is_prefilled_elsewhere(self) -> bool:
        """Whether another connector fetches the prompt's KV from the engine that computes it. That connector removes
        this mark when it begins. So if it fails, the request is looked up at its next admission."""
        params = self.of_engine.kv_transfer_params
        return isinstance(params, dict) and bool(params.get("do_remote_prefill"))

    def enter(self, epoch: Epoch) -> None:
        """Use the keys of ``epoch``, because the request will be admitted again and has no blocks on the GPU. If these
        keys are different, no block has been offered under them yet."""
        if epoch.seed != self.epoch.seed:
            self.groups = tuple(Keys(own.group, gpu_block_ids=own.gpu_block_ids) for own in self.groups)
            self._compute_nothing_yet()
            self.stored = set()
        self.next_offer_tokens = 0  # it may have stopped offering while its epoch was over
        self.epoch = epoch

    def forget_computed(self) -> None:
        """Offer none of the tokens computed so far until a step has computed more."""
        self.last_scheduled, self.offered_tokens = None, 0

    def set_gpu_blocks(self, block_ids: BlockIds) -> None:
        for own, ids in zip(self.groups, block_ids, strict=True):
            own.gpu_block_ids = list(ids)

    def lose_gpu_blocks(self) -> None:
        """Forget the request's GPU blocks, because it was preempted. It waits for its next admission, and no longer for
        a load in flight."""
        self.set_gpu_blocks(((),) * len(self.groups))
        self.forget_computed()
        prefix = self.prefix
        prefix.computed_tokens = prefix.tokens = 0
        prefix.is_answered = False
        prefix.load_job_id = prefix.awaited_job_id = None

    def begin_offers(self, hit_tokens: int) -> None:
        """Begin to offer blocks: the request was admitted with ``hit_tokens``.

        Block level offers only the blocks that the request computes after the hit, and offers the block in which the
        hit ends as a whole. Blocks that the request computed before a preemption and that were not accepted are also
        offered, although the engine's own cache may have kept them, so that they are a hit. Request level offers every
        block once, including the hit, so nothing changes: blocks that a resumed request computes again have already
        been offered.
        """
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            for own in self.groups:
                own.next_block = min(own.next_block, hit_tokens // own.group.block_tokens)
        self.forget_computed()
        self.max_blocks = self.max_blocks or UNLIMITED
        self.wait_for_blocks(1)

    def wait_for_blocks(self, num_blocks: int) -> None:
        """Offer nothing before some group has ``num_blocks`` more blocks, at least 1. States are offered when the
        engine names them."""
        self.next_offer_tokens = UNLIMITED
        for own in self.groups:
            end = (own.next_block + num_blocks) * own.group.block_tokens
            if end < self.next_offer_tokens and own.group.kind is not _SINGLE_STATE:
                self.next_offer_tokens = end

    def keys_in_use(self) -> list[OffloadKey]:
        """Return the keys to touch when the whole prefix was used, by position. A request that reads no cache uses only
        the blocks that it stored."""
        blocks = [range(len(own.keys)) for own in self.groups]
        keys = [key for own in self.groups for key in own.keys]
        keys = by_position([own.group for own in self.groups], blocks, keys)
        return keys if self.context.reads_cache else [key for key in keys if key in self.stored]

    def _compute_nothing_yet(self) -> None:
        """Offer no block of a hit as if the request had computed it."""
        if self.policy is OffloadPolicy.BLOCK_LEVEL:
            for own in self.groups:
                own.next_block = UNLIMITED
