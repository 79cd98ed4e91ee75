# SPDX-License-Identifier: Apache-2.0
"""Explanations of requests: where the tokens of a prompt came from, what it waited for, and why the rest was missing.

Only made while requests are recorded or traced. Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffload.base import OffloadingManager, OffloadKey
from kvoffload.config import GroupKind
from kvoffload.connector.epochs import Epoch
from kvoffload.connector.groups import GroupGeometry, finest_of, hit_unit_tokens
from kvoffload.connector.requests import UNLIMITED, RequestOffloadState
from kvoffload.lost_blocks import Loss
from kvoffload.miss import Miss

__all__ = ["DEVICE", "Explanation", "Explanations", "Phase"]

DEVICE = "device"


class Phase(NamedTuple):
    """A time in which a request waited for one thing, by the scheduler side's clock."""

    name: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Explanation:
    """Of one request, from its arrival to its first token."""

    phase: str | None
    """What it waits for now."""
    since_s: float
    phases: list[Phase] = field(default_factory=list)
    """What it waited for, in order: ``queue`` (for the engine), ``tiers``, ``another load``, ``own transfers`` and
    ``load``."""
    found: dict[str, int] = field(default_factory=dict)
    """Prompt tokens by where they were: on the device, in host memory (``CPU``), in a tier."""
    missed: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that were computed, by cause. With ``found`` they are all tokens of the prompt."""
    lost_s: dict[str, float] = field(default_factory=dict)
    """For causes with a time, such as evictions: how long ago, as the mean over the tokens."""
    promoted_bytes: dict[str, int] = field(default_factory=dict)
    """What lower tiers brought to host memory while it waited, by tier."""
    loaded_bytes: int = 0
    """What its load copied to the device, on all ranks."""

    def enter(self, phase: str | None, now_s: float) -> None:
        """What it waits for from now on; ``None``: for nothing."""
        if self.phase is not None and now_s > self.since_s:
            self.phases.append(Phase(self.phase, self.since_s, now_s))
        self.phase, self.since_s = phase, now_s

    @property
    def waited_s(self) -> dict[str, float]:
        """Seconds by what it waited for."""
        waited_s: dict[str, float] = {}
        for name, begin_s, end_s in self.phases:
            waited_s[name] = waited_s.get(name, 0.0) + end_s - begin_s
        return waited_s

    def as_json(self) -> dict[str, object]:
        return {
            "found": self.found,
            "missed": self.missed,
            "lost_s": {cause: round(seconds, 1) for cause, seconds in self.lost_s.items()},
            "waited_s": {phase: round(seconds, 6) for phase, seconds in self.waited_s.items()},
            "promoted_bytes": self.promoted_bytes,
            "loaded_bytes": self.loaded_bytes,
        }


class Explanations:
    """Explains requests, and records the blocks that are lost, which explain what later ones miss.

    The scheduler side reports what becomes of a request. The manager explains why it did not get a block
    (``OffloadingManager.explain``). A block that is here although it was not used lies after a missing one, and has its
    cause.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        geometry: Sequence[GroupGeometry],
        num_slots: int,
        block_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._num_slots = num_slots
        self._block_bytes = block_bytes
        self._geometry = tuple(geometry)
        self._finest = finest_of(geometry)
        self._clock = clock
        self._lost = manager.lost
        self._open: dict[RequestOffloadState, Explanation] = {}
        """Of requests that have not ended."""
        self._before: Epoch | None = None
        """The epoch that the last reset ended."""
        self._reset_s = 0.0

    def __repr__(self) -> str:
        return f"Explanations({len(self._open)} requests)"

    def begin(self, state: RequestOffloadState) -> None:
        self._open[state] = Explanation("queue", self._clock())

    def deferred(self, state: RequestOffloadState, phase: str) -> None:
        """A lookup had no answer, because of ``phase``."""
        explanation = self._open.get(state)
        if explanation is not None and not explanation.found:
            explanation.enter(phase, self._clock())

    def answered(self, state: RequestOffloadState) -> None:
        """The lookup has an answer; the engine is to admit the request."""
        explanation = self._open.get(state)
        if explanation is not None and not explanation.found and explanation.phase != "queue":
            explanation.enter("queue", self._clock())
            blocks = Counter(self._manager.sources(state.context).values())
            explanation.promoted_bytes = {tier: number * self._block_bytes for tier, number in blocks.items()}

    def admitted(self, state: RequestOffloadState, hits: dict[str, int]) -> None:
        """The request has GPU blocks. ``hits``: the tokens to load, by tier. Later admissions change nothing."""
        explanation = self._open.get(state)
        if explanation is None or explanation.found:
            return
        explanation.enter("load" if hits else None, self._clock())
        prompt_tokens = state.request.num_prompt_tokens
        on_device = min(state.hit.computed_tokens, prompt_tokens)
        explanation.found = {DEVICE: on_device, **hits}
        begin = min(on_device + sum(hits.values()), prompt_tokens)
        self._explain(state, explanation, begin, prompt_tokens)

    def reset(self, ended: Epoch) -> None:
        """The cache was reset, and ``ended`` is over."""
        self._before, self._reset_s = ended, self._clock()

    def _losses(self, keys: Sequence[OffloadKey], state: RequestOffloadState) -> list[Loss | None]:
        """Why the request did not get each of ``keys``; ``None``: it is here or below. What the tiers kept of the epoch
        before the reset was lost by it."""
        losses = self._manager.explain(keys, state.context)
        if self._before is None or self._before.seed == state.keys.epoch.seed:
            return losses
        old = self._before.engine_keys(state.keys.epoch.engine_keys(keys))
        by_reset = Loss(Miss.RESET, seconds_ago=self._clock() - self._reset_s)
        held = self._manager.holds(old)
        before = [by_reset if is_held else loss for loss, is_held in zip(self._lost.find(old), held, strict=True)]
        return [
            old_loss if old_loss is not None and loss is not None and loss.miss is Miss.NEW else loss
            for loss, old_loss in zip(losses, before, strict=True)
        ]

    def load_ended(self, state: RequestOffloadState, success: bool, num_bytes: int) -> None:
        """A load ended. If its request has ended too, it is not a part of the explanation."""
        explanation = self._open.get(state)
        if explanation is None or explanation.phase != "load":
            return
        explanation.enter(None, self._clock())
        explanation.loaded_bytes = num_bytes
        if not success:
            lost = sum(explanation.found.values()) - explanation.found[DEVICE]
            explanation.found = {DEVICE: explanation.found[DEVICE]}
            explanation.missed[Miss.LOAD_FAILED] = explanation.missed.get(Miss.LOAD_FAILED, 0) + lost

    def store_failed(self, keys: Sequence[OffloadKey]) -> None:
        self._lost.record(keys, Miss.STORE_FAILED)

    def end(self, state: RequestOffloadState, most_tokens: int, has_no_room: bool) -> Explanation | None:
        """The request ended. Blocks of it that were not accepted for store are lost; those from ``most_tokens`` on were
        not to be stored. Returns its explanation, if it has one; without places it was never admitted."""
        self._record_losses(state, most_tokens, has_no_room)
        explanation = self._open.pop(state, None)
        if explanation is not None:
            explanation.enter(None, self._clock())
        return explanation

    def _record_losses(self, state: RequestOffloadState, most_tokens: int, has_no_room: bool) -> None:
        limit = state.limits.max_offload_tokens
        beyond = Miss.REQUEST_LIMIT if limit is not None and limit <= most_tokens else Miss.PROMPT_ONLY
        if state.keys.is_outdated:
            beyond = Miss.RESET
        short = Miss.TOO_LONG if state.portions.evicts_itself else None
        if has_no_room:
            # Its own stores may have kept all slots.
            short = Miss.TOO_LONG if self._surely_stored(state) > self._num_slots else Miss.REFUSED
        ready_tokens = state.ready_tokens()
        for group, own in zip(self._geometry, state.groups, strict=True):
            ready = min(ready_tokens // group.block_tokens, len(own.keys))
            first_beyond = min(max(most_tokens // group.block_tokens, own.next_block), ready)
            if short is not None and own.next_block < first_beyond:
                self._lost.record(own.keys[own.next_block : first_beyond], short)
            if first_beyond < ready:
                self._lost.record(own.keys[first_beyond:ready], beyond)

    def _surely_stored(self, state: RequestOffloadState) -> int:
        """Blocks that the whole request stores at the least. Most states are never kept, and blocks after a window may
        be gone before they are offered."""
        blocks = dict.fromkeys(GroupKind, 0)
        for group, own in zip(self._geometry, state.groups, strict=True):
            blocks[group.kind] += len(own.keys)
        return blocks[GroupKind.FULL_ATTENTION] or blocks[GroupKind.SLIDING_WINDOW]

    def _explain(self, state: RequestOffloadState, explanation: Explanation, begin: int, prompt_tokens: int) -> None:
        """Fills in why the prompt's tokens from ``begin`` on were missing."""
        unit, size = hit_unit_tokens(self._geometry), self._finest.block_tokens
        keys = state.groups[self._finest.index].keys
        # As far as a hit can reach. Hits end between blocks of the device, which may be smaller than offloaded ones.
        longest = [group.longest_hit(len(own.keys)) for group, own in zip(self._geometry, state.groups, strict=True)]
        end = max(min(prompt_tokens - 1, *longest) // unit * unit, begin)
        if tail := prompt_tokens - end:
            explanation.missed[Miss.TAIL] = tail
        if end == begin:
            return
        if not state.context.reads_cache:
            explanation.missed[Miss.NOT_READ] = end - begin
            return
        blocks = range(begin // size, min(-(-end // size), len(keys)))
        losses = self._losses(keys[blocks.start : blocks.stop], state)
        loadable = UNLIMITED
        if state.limits.max_load_tokens is not None:
            loadable = (state.hit.computed_tokens + state.limits.max_load_tokens) // unit * unit
        loss = Loss(Miss.NEW)
        is_first = True
        for block, own in zip(blocks, losses, strict=True):
            if max(begin, block * size) >= loadable:
                loss = Loss(Miss.LOAD_LIMIT)
            elif own is not None:
                loss = own
            elif is_first:
                loss = self._why_no_longer_hit(state, (begin // unit + 1) * unit)
            is_first = False
            tokens = min(end, (block + 1) * size) - max(begin, block * size)
            before = explanation.missed.get(loss.cause, 0)
            explanation.missed[loss.cause] = before + tokens
            if loss.seconds_ago is not None:
                mean_s = explanation.lost_s.get(loss.cause, 0.0)
                explanation.lost_s[loss.cause] = (mean_s * before + loss.seconds_ago * tokens) / (before + tokens)

    def _why_no_longer_hit(self, state: RequestOffloadState, hit_tokens: int) -> Loss:
        """Why there was no hit of ``hit_tokens``, the least beyond the one there was, although the group with the
        smallest blocks has the next one: it needs a block that another group lacks, or that it looks ahead to. After a
        failed load there is no other."""
        if state.hit.load_failed:
            return Loss(Miss.LOAD_FAILED)
        for group, own in zip(self._geometry, state.groups, strict=True):
            blocks = group.blocks_to_find(state.hit.computed_tokens, hit_tokens)
            for loss in self._losses(own.keys[blocks.start : blocks.stop], state):
                if loss is not None:
                    return loss
        return Loss(Miss.UNKNOWN)
