# SPDX-License-Identifier: Apache-2.0
"""A recency list kept as a log: a use only appends an entry, and the stale entry it leaves is dropped later."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import compress, islice

import numpy as np

from kvoffload.base import OffloadKey
from kvoffload.cpu.policies.base import BlockStatus

_FULL = 128
"""A chunk this long takes no further batch."""
_FEW = 16
"""Times that an array takes as fast one by one as from a buffer."""
_CHUNK_WEIGHT = 16
"""Memory of an empty chunk, counted in entries."""


class Chunk:
    """Consecutive uses in a log, with their rising times. Entries before ``first`` are gone. Of the others, an entry is
    live while its block's ``policy_state`` is the chunk, so a block has at most one live entry in all logs.

    Once a block has ``left``, the chunk takes no more blocks: if that one came back, its old entry would be live again.
    """

    __slots__ = ("blocks", "class_", "first", "left", "times")

    def __init__(self, class_: int) -> None:
        self.class_ = class_
        self.left = False
        self.blocks: list[BlockStatus] = []
        self.times = array("q")
        self.first = 0

    @property
    def weight(self) -> int:
        return len(self.blocks) + _CHUNK_WEIGHT

    def clean(self) -> None:
        """Drops entries that are not live."""
        # Paths are used as a whole, so mostly all entries are live, or none.
        blocks, times = self.blocks[self.first :], self.times[self.first :]
        live = [block.policy_state is self for block in blocks]
        if not all(live):
            blocks, times = list(compress(blocks, live)), array("q", compress(times, live))
        self.blocks, self.times, self.first = blocks, times, 0


class Skipped:
    """A block that an eviction stepped over, no longer in a chunk. Live while its block's ``policy_state`` is this."""

    __slots__ = ("block", "class_", "time")

    def __init__(self, class_: int, time: int, block: BlockStatus) -> None:
        self.class_ = class_
        self.time = time
        self.block = block
        block.policy_state = self


class UseLog:
    """The blocks of one class, from least to most recently used, each with the time of its last use.

    Only its ``policy_state`` makes a block part of the log, so leaving it costs nothing. ``head`` drops the stale
    entries it meets, and ``tidy`` bounds how many there are.

    An eviction skips pinned and protected blocks; skipped blocks are less recent than all in the chunks. The pinned
    ones stay in ``waiting``, which the logs of a policy share, until ``released`` queues them again, so a pinned block
    costs one step in all. An eviction is a series of ``head`` and ``take``, then ``put_back`` if it found too few
    blocks, then ``end_eviction``.
    """

    __slots__ = ("_clean", "_deferred", "_rest", "_waiting", "class_", "skipped", "weight")

    def __init__(self, class_: int, waiting: dict[OffloadKey, Skipped]) -> None:
        self.class_ = class_
        self.weight = 0
        """Memory of all chunks, counted in entries."""
        # The order is skipped, _clean, _rest. ``tidy`` moves chunks from _rest to _clean.
        self._clean: deque[Chunk] = deque()
        self._rest: deque[Chunk] = deque()
        self.skipped: list[tuple[int, Skipped]] = []
        """A heap of those that may be idle, by time."""
        self._waiting = waiting
        self._deferred: list[Skipped] = []
        """Protected ones, out of the heap until the eviction is over."""

    def open(self) -> Chunk:
        """Returns the chunk that the next ``append`` fills. The caller sets the ``policy_state`` of the blocks to it,
        and before, if that was a chunk, its ``left``."""
        if self._rest:
            last = self._rest[-1]
            if len(last.times) < _FULL and not last.left:
                return last
        chunk = Chunk(self.class_)
        self._rest.append(chunk)
        self.weight += _CHUNK_WEIGHT
        return chunk

    def append(self, blocks: Sequence[BlockStatus], begin: int) -> None:
        """Adds blocks that were used one after the other, the first at time ``begin``."""
        if blocks:
            chunk, end = self._rest[-1], begin + len(blocks)
            chunk.blocks += blocks
            if len(blocks) < _FEW:
                chunk.times.extend(range(begin, end))
            else:
                chunk.times.frombytes(np.arange(begin, end, dtype=np.int64).tobytes())
            self.weight += len(blocks)

    def head(self, protected: Collection[OffloadKey]) -> int | None:
        """When the least recent idle and unprotected block was used."""
        skipped = self.skipped
        while skipped:
            time, one = skipped[0]
            block = one.block
            if block.policy_state is one and not block.pins and block.key not in protected:
                return time
            heappop(skipped)
            if block.policy_state is one:
                self._step_over(one)
        while (chunk := self._first_chunk()) is not None:
            blocks = chunk.blocks
            for at in range(chunk.first, len(blocks)):
                block = blocks[at]
                if block.policy_state is chunk:
                    if not block.pins and block.key not in protected:
                        chunk.first = at
                        last: int = chunk.times[at]
                        return last
                    self._step_over(Skipped(self.class_, chunk.times[at], block))
            chunk.first = len(chunk.blocks)
        return None

    def take(self, n: int, until: float, protected: Collection[OffloadKey], victims: list[BlockStatus]) -> None:
        """Moves blocks last used at or before ``until`` to ``victims``, least recent first: at least the one that
        ``head`` has just found, and at most ``n``. It may stop early, so callers call ``head`` and ``take`` in turn."""
        if self.skipped:
            victims.append(heappop(self.skipped)[1].block)
            return
        chunk = self._first_chunk()
        assert chunk is not None
        start, times = chunk.first, chunk.times
        if n == 1:
            victims.append(chunk.blocks[start])
            chunk.first = start + 1
            return
        stop = min(start + n, len(times))
        if times[stop - 1] > until:
            stop = bisect_right(times, until, start, stop)
        found = chunk.blocks[start:stop]
        idle = [block for block in found if block.policy_state is chunk and not block.pins]
        if protected:
            idle = [block for block in idle if block.key not in protected]
        victims += idle
        chunk.first = stop
        if len(idle) != len(found):
            taken = set(map(id, idle))
            for at, block in enumerate(found, start):
                if block.policy_state is chunk and id(block) not in taken:
                    self._step_over(Skipped(self.class_, times[at], block))

    def put_back(self, entry: Chunk | Skipped, victims: Iterable[BlockStatus]) -> None:
        """Undoes ``take`` for those of ``victims`` that came from ``entry``. They become skipped blocks."""
        if isinstance(entry, Skipped):
            self.queue(entry)
            return
        times = {id(block): time for block, time in zip(entry.blocks, entry.times)}
        for block in victims:
            if block.policy_state is entry:
                self.queue(Skipped(self.class_, times[id(block)], block))

    def end_eviction(self) -> bool:
        """Ends an eviction. The protected blocks that it stepped over take part in the next one. Returns whether there
        were any."""
        if not self._deferred:
            return False
        while self._deferred:
            self.queue(self._deferred.pop())
        return True

    def queue(self, one: Skipped) -> None:
        """A skipped block that may be idle takes part in evictions again."""
        heappush(self.skipped, (one.time, one))

    def idle(self) -> Iterator[tuple[int, BlockStatus]]:
        """Idle blocks and the times of their last uses, least recently used first. Nothing may change meanwhile."""
        for time, one in sorted(self.skipped):
            if one.block.policy_state is one and not one.block.pins:
                yield time, one.block
        for chunks in self._clean, self._rest:
            for chunk in chunks:
                before = chunk.weight
                chunk.clean()
                self.weight -= before - chunk.weight
                for time, block in zip(chunk.times, chunk.blocks):
                    if not block.pins:
                        yield time, block

    def tidy(self) -> int:
        """Drops the stale entries of one chunk, of each in turn. Returns how many entries it looked at."""
        rest = self._rest
        if len(rest) < 2:
            # All but the last chunk are clean: the round is over. The next round begins with the oldest chunk.
            self._clean += rest
            self._clean, self._rest = rest, self._clean
            rest.clear()
            return 0
        chunk = rest.popleft()
        looked_at = chunk.weight
        self.weight -= looked_at
        chunk.clean()
        last = self._clean[-1] if self._clean else None
        if last is not None and len(last.times) + len(chunk.times) <= _FULL:
            self.weight -= last.weight
            last.clean()
            last.blocks += chunk.blocks
            last.times += chunk.times
            for block in chunk.blocks:
                block.policy_state = last
            self.weight += last.weight
        elif chunk.blocks:
            self._clean.append(chunk)
            self.weight += chunk.weight
        return looked_at

    def clear(self) -> None:
        for part in self._clean, self._rest, self.skipped:
            part.clear()
        self.weight = 0

    def live(self) -> list[tuple[int, BlockStatus]]:
        """Every block but those waiting, with its time, in order. For tests: O(blocks)."""
        skipped = [(time, one.block) for time, one in sorted(self.skipped) if one.block.policy_state is one]
        return skipped + [
            (time, block)
            for chunk in (*self._clean, *self._rest)
            for time, block in islice(zip(chunk.times, chunk.blocks), chunk.first, None)
            if block.policy_state is chunk
        ]

    def check_invariants(self) -> None:
        assert not self._deferred
        assert self.weight == sum(chunk.weight for chunk in (*self._clean, *self._rest))
        times = [time for time, _ in self.live()]
        assert times == sorted(set(times)), "not in order of recency"
        for chunk in (*self._clean, *self._rest):
            assert len(chunk.times) == len(chunk.blocks)
            live = [block for block in chunk.blocks[chunk.first :] if block.policy_state is chunk]
            assert len(set(map(id, live))) == len(live), "a block has two live entries"

    def _first_chunk(self) -> Chunk | None:
        """The least recent chunk that has entries left; those before it are dropped."""
        for chunks in self._clean, self._rest:
            while chunks:
                chunk = chunks[0]
                if chunk.first < len(chunk.blocks):
                    return chunk
                chunks.popleft()
                self.weight -= chunk.weight
        return None

    def _step_over(self, one: Skipped) -> None:
        if one.block.pins:
            assert one.block.key is not None
            self._waiting[one.block.key] = one
        else:
            self._deferred.append(one)
