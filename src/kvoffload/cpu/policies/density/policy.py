# SPDX-License-Identifier: Apache-2.0
"""A policy that evicts the block with the fewest expected hits per unit of cache space and time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple, cast

from kvoffload.base import NextUse, OffloadKey
from kvoffload.cpu.policies.base import BlockStatus, CachePolicy, Victims
from kvoffload.cpu.policies.density.classes import (
    CERTAIN,
    NUM_CLASSES,
    NUM_DRAWS,
    NUM_USES,
    OFTEN_USED,
    RISEN,
    SAME_USES,
    SHARED,
)
from kvoffload.cpu.policies.density.log import Chunk, Skipped, UseLog
from kvoffload.cpu.policies.density.model import HitDensity, UseCounts
from kvoffload.metrics import Stats

_SLACK = 1024
_TIDY_EVERY = 256


class _Front(NamedTuple):
    """The least recent block of a class. Fronts compare in the order of eviction: the least is evicted first."""

    value: float
    last: int
    """The time of the block's last use."""
    class_: int
    limit: float
    """Blocks of this class that were last used after this time are worth more than ``value``."""
    expires: float
    """The time at which the block's age enters the next bucket and its value may fall."""

    def until(self, rival: _Front | None) -> float:
        """Return the latest time of last use for which blocks of this class are evicted before ``rival``.

        ``rival`` is the least front of the other classes, or ``None``.
        """
        return min(self.limit, rival.last) if rival is not None and rival.value == self.value else self.limit


class DensityCachePolicy(CachePolicy):
    """Evicts the block that a learned model values least.

    The policy keeps blocks in classes by number of uses, and each class in order of recency. It compares the least
    recent blocks of all classes, and evicts the one that the model (``kvoffload.cpu.policies.density.model``) values
    least; among equals, the oldest.

    Until the model has learned something, the policy is LRU. Then it keeps blocks of classes that are reused late,
    evicts blocks of classes that are hardly ever reused, and stays LRU where the number of uses predicts nothing.
    ``docs/design/0009-policies.md`` reports measurements.

    It remembers the keys and classes of evicted blocks for the next 1.5 to 3 capacities of evictions. Uses while a
    block is being written belong to the request that writes it: they refresh the block but do not count.
    """

    def __init__(self, cache_capacity: int) -> None:
        self._model = HitDensity(cache_capacity)
        self._past_uses = UseCounts(cache_capacity * 3 // 2)
        self._blocks: dict[OffloadKey, BlockStatus] = {}
        self._waiting: dict[OffloadKey, Skipped] = {}
        """Blocks that evictions stepped over because they were pinned."""
        self._logs = [UseLog(class_, self._waiting) for class_ in range(NUM_USES)]
        """One log for each class. The logs of classes with hints are added with the first hint."""
        self._fronts: list[_Front | None] = []
        """The front of each class, as last seen. A class may have lost its front since then, but cannot have a lesser
        one: a pinned block that becomes idle and a new fit remove the front from here, and a front expires when its age
        enters the next bucket."""
        self._forget_fronts()
        self._draw = 1
        self._now = 0
        """The number of block uses so far, which is the clock for ages."""
        self._tidied = 0
        """The class whose log ``_tidy`` is working on."""
        self._tidied_at = self._tidied_weight = 0

    def __repr__(self) -> str:
        return f"DensityCachePolicy({len(self)} blocks, {self._model!r})"

    def get(self, key: OffloadKey) -> BlockStatus | None:
        return self._blocks.get(key)

    def get_all(self, keys: Collection[OffloadKey]) -> list[BlockStatus | None]:
        return list(map(self._blocks.get, keys))

    def insert(self, key: OffloadKey, block: BlockStatus) -> None:
        self.insert_all((key,), (block,))

    def insert_all(
        self, keys: Sequence[OffloadKey], blocks: Sequence[BlockStatus], next_use: NextUse = NextUse.UNKNOWN
    ) -> None:
        if next_use:
            self._expect_hints()
        begin = self._now + 1
        self._now += len(blocks)
        self._blocks.update(zip(keys, blocks))
        # Prefixes are remembered longer than their tails, so all blocks after an unknown block are unknown as well.
        known = self._past_uses.recall(keys[::-1])
        num_new = len(blocks) - len(known)
        if num_new:
            new = blocks[:num_new] if known else blocks
            log = self._logs[next_use * NUM_USES]
            chunk = log.open()
            for block in new:
                block.policy_state = chunk
            log.append(new, begin)
        if known:
            for time, block, past in zip(range(begin + num_new, self._now + 1), blocks[num_new:], known[::-1]):
                log = self._logs[RISEN[CERTAIN][next_use][past]]
                block.policy_state = log.open()
                log.append((block,), time)
        self._model.used(keys, blocks, begin)
        if self._now - self._tidied_at > _TIDY_EVERY:
            self._tidy()

    def touch(self, keys: Iterable[OffloadKey], counts: bool = True, next_use: NextUse = NextUse.UNKNOWN) -> None:
        path = keys if isinstance(keys, (list, tuple)) else list(keys)
        if next_use:
            self._expect_hints()
        begin = self._now + 1
        if not counts:
            blocks, _ = self._refresh(path, SAME_USES, next_use)
            if len(self._logs) > NUM_USES:
                self._model.hinted_anew(blocks, begin)
            return
        self._draw = (self._draw * 1103515245 + 12345) & 0x7FFFFFFF
        if not path:
            self._model.used((), (), begin)
            return
        blocks, all_ready = self._refresh(path, RISEN[(self._draw >> 16) % NUM_DRAWS], next_use)
        self._model.used(path, blocks, begin, all_ready)

    def _expect_hints(self) -> None:
        if len(self._logs) == NUM_USES:
            self._logs += [UseLog(class_, self._waiting) for class_ in range(NUM_USES, NUM_CLASSES)]
            self._forget_fronts()

    def _refresh(
        self, path: Sequence[OffloadKey], risen: Sequence[Sequence[int]], group: int
    ) -> tuple[list[BlockStatus], bool]:
        """Move the resident blocks of ``path``, tail to head, to the end of the log of their ``risen[group][class]``.

        Blocks that are being written move to the end of their own log. Returns the blocks in this order, and whether
        all of them are ready.

        Once there are hints, blocks that several clients share enter the group ``SHARED``. If the tail was used often,
        that is the whole path. Otherwise it is the part from the head to the last block whose hint differs from the
        tail's, because a later request used that part and gave another hint.
        """
        found = list(map(self._blocks.get, reversed(path)))
        blocks: list[BlockStatus]
        blocks = found if all(found) else [block for block in found if block is not None]  # type: ignore[assignment]
        begin = self._now + 1
        self._now += len(blocks)
        logs = self._logs
        start, all_ready, source = 0, True, None
        log = logs[0]
        chunk = None
        said: int | None = None
        hinted = len(logs) > NUM_USES
        # A path consists of few runs: consecutive blocks that leave one chunk together and enter one chunk together.
        # Invariant: ``blocks[start:at]`` already have ``chunk`` as their state, and are not in ``log`` yet. A run ends
        # where a block leaves another chunk than ``source`` or is being written. It is appended as a whole, with the
        # times that its blocks would get one by one. It never enters a chunk that a block has left, which may be one of
        # its own blocks, because such a block would have two live entries there.
        for at, block in enumerate(blocks):
            if block.policy_state is not source or block.pins < 0:
                if at:
                    log.append(blocks[start:at], begin + start)
                    start = at
                source = block.policy_state
                if isinstance(source, Chunk):
                    source.left = True
                if block.pins < 0:
                    log = logs[source.class_]
                    source, all_ready = None, False
                else:
                    if hinted:
                        before, (said, uses) = said, divmod(source.class_, NUM_USES)
                        if (uses >= OFTEN_USED) if before is None else (said != before):
                            group = SHARED
                    log = logs[risen[group][source.class_]]
                chunk = log.open()
            block.policy_state = chunk
        log.append(blocks[start:], begin + start)
        if self._now - self._tidied_at > _TIDY_EVERY:
            self._tidy()
        return blocks, all_ready

    def _tidy(self) -> None:
        """Keep the logs' memory below about twice the memory of their live entries, in small steps.

        Each step looks at three times as many entries as were added since the previous step.
        """
        logs, enough = self._logs, 3 * len(self._blocks) // 2 + _SLACK
        weight = sum(log.weight for log in logs)
        budget, rounds = 3 * (weight - self._tidied_weight), 0
        while weight > enough and budget > 0 and rounds <= len(logs):
            log = logs[self._tidied]
            before = log.weight
            looked_at = log.tidy()
            weight += log.weight - before
            budget -= looked_at
            if not looked_at:
                self._tidied = (self._tidied + 1) % len(logs)
                rounds += 1
        self._tidied_at, self._tidied_weight = self._now, weight

    def remove(self, key: OffloadKey) -> BlockStatus | None:
        block = self._blocks.pop(key, None)
        if block is not None:
            if isinstance(block.policy_state, Chunk):
                block.policy_state.left = True
            block.policy_state = None
            self._waiting.pop(key, None)
            self._model.forget(key)
        return block

    def evict(self, n: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey] = ()) -> Victims | None:
        if n == 0:
            return []
        logs, fronts, now = self._logs, self._fronts, self._now
        if self._fronts_values is not self._model.values:
            self._forget_fronts()
        for log, front in zip(logs, fronts):
            if (front is None or front.expires <= now) and (log.weight or log.skipped):
                head = log.head(protected)
                fronts[log.class_] = None if head is None else self._front(head, log.class_)
        victims: list[BlockStatus] = []
        classes: list[int] = []
        while len(victims) < n and (seen := list(filter(None, fronts))):
            best = min(seen)
            class_ = best.class_
            fronts[class_] = None
            log = logs[class_]
            head = log.head(protected)
            if head == best.last:
                missing = n - len(victims)
                until = best.until(min(filter(None, fronts), default=None)) if missing > 1 else head
                while head is not None and head <= until:
                    log.take(missing, until, protected, victims)
                    missing = n - len(victims)
                    if not missing:
                        break
                    head = log.head(protected)
                classes += repeat(class_, len(victims) - len(classes))
                if not missing:
                    break  # the next eviction looks for the new front of this class
            if head is not None:
                fronts[class_] = self._front(head, class_)
        if len(victims) < n:
            for entry in {id(block.policy_state): block.policy_state for block in victims}.values():
                self._logs[entry.class_].put_back(entry, victims)
            self._forget_fronts()
        if protected:
            for log in logs:
                if log.end_eviction():
                    self._forget_fronts()
        if len(victims) < n:
            return None
        keys: list[OffloadKey] = [block.key for block in victims]  # type: ignore[misc]
        deque(map(self._blocks.__delitem__, keys), maxlen=0)
        self._past_uses.remember(keys, classes)
        return list(zip(keys, victims))

    def _forget_fronts(self) -> None:
        self._fronts[:] = [None] * len(self._logs)
        self._fronts_values = self._model.values

    def next_victims(self, n: int) -> list[OffloadKey]:
        ranked: list[_Front] = []
        rest = [log.idle() for log in self._logs]
        heads = [next(idle, None) for idle in rest]
        for class_, head in enumerate(heads):
            if head is not None:
                ranked.append(self._front(head[0], class_))
        keys: list[OffloadKey] = []
        while ranked and len(keys) < n:
            best = min(ranked)
            ranked.remove(best)
            until = best.until(min(ranked, default=None))
            head = heads[best.class_]
            while head is not None and len(keys) < n and head[0] <= until:
                keys.append(cast(OffloadKey, head[1].key))
                head = next(rest[best.class_], None)
            heads[best.class_] = head
            if head is not None:
                ranked.append(self._front(head[0], best.class_))
        return keys

    def _front(self, last: int, class_: int) -> _Front:
        model, now = self._model, self._now
        bucket = bisect_right(model.bounds, now - last)
        expires = last + model.bounds[bucket] if bucket < len(model.bounds) else math.inf
        return _Front(model.values[class_][bucket], last, class_, now - model.youngest[bucket], expires)

    def clear(self) -> None:
        for log in self._logs:
            log.clear()
        self._waiting.clear()
        self._blocks.clear()
        self._past_uses.clear()
        self._model.clear()
        self._forget_fronts()
        self._tidied_weight = 0
        self._draw = 1

    def __len__(self) -> int:
        return len(self._blocks)

    def released(self, keys: Iterable[OffloadKey]) -> None:
        waiting = self._waiting
        if waiting:
            for key in keys:
                if key in waiting:
                    one = waiting.pop(key)
                    if one.block.policy_state is one:
                        self._logs[one.class_].queue(one)
                        self._fronts[one.class_] = None

    def get_stats(self) -> Stats:
        return {("hint_score",): self._model.hint_score, ("hints_in_use",): int(self._model.uses_hints)}

    def check_invariants(self) -> None:
        ordered: list[BlockStatus] = []
        for log in self._logs:
            log.check_invariants()
            ordered += (block for _, block in log.live())
        for one in self._waiting.values():
            if one.block.policy_state is one:
                assert not one.block.is_idle, f"{one.block!r} is idle, but no eviction would find it"
                ordered.append(one.block)
        assert len(ordered) == len(self._blocks) == len(set(map(id, ordered)))
        for key, block in self._blocks.items():
            assert block.key == key
        assert sum(log.weight for log in self._logs) <= 2 * len(self._blocks) + 8 * _SLACK
