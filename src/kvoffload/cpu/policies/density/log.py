# SPDX-License-Identifier: Apache-2.0
"""A recency list kept as a log. A use only appends an entry; the block's old entry becomes stale and is dropped
later."""

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
"""The number of entries at which a chunk accepts no further batch."""
_FEW = 16
"""Below this number of times, extending an array one by one is as fast as copying a buffer."""
_CHUNK_WEIGHT = 16
"""The memory of an empty chunk, in entries."""


class Chunk:
    """Consecutive uses in a log, with ascending times.

    Entries before ``first`` were removed. Any other entry is live while its block's ``policy_state`` is this chunk, so
    a block has at most one live entry in all logs.

    ``left`` is set when a block leaves the chunk. From then on, the chunk accepts no more blocks, because if that block
    returned, its old entry would be live again.
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
        """Drop entries that are not live."""
        # Paths are used as a whole, so usually all entries are live, or none of them.
        blocks, times = self.blocks[self.first :], self.times[self.first :]
        live = [block.policy_state is self for block in blocks]
        if not all(live):
            blocks, times = list(compress(blocks, live)), array("q", compress(times, live))
        self.blocks, self.times, self.first = blocks, times, 0


class Skipped:
    """A block that an eviction stepped over and removed from its chunk.

    It is live while the block's ``policy_state`` is this object.
    """

    __slots__ = ("block", "class_", "time")

    def __init__(self, class_: int, time: int, block: BlockStatus) -> None:
        self.class_ = class_
        self.time = time
        self.block = block
        block.policy_state = self


class UseLog:
    """The blocks of one class, from least to most recently used, each with the time of its last use.

    Only its ``policy_state`` makes a block part of the log, so removing a block costs nothing. ``head`` drops the stale
    entries that it visits, and ``tidy`` limits the number of stale entries.

    An eviction skips pinned and protected blocks. Skipped blocks are less recent than all blocks in the chunks. The
    pinned ones stay in ``waiting``, which all logs of a policy share, until ``released`` queues them again. So a pinned
    block costs one step in total. An eviction is a series of ``head`` and ``take``, then ``put_back`` if it found too
    few blocks, then ``end_eviction``.
    """

    __slots__ = ("_clean", "_deferred", "_rest", "_waiting", "class_", "skipped", "weight")

    def __init__(self, class_: int, waiting: dict[OffloadKey, Skipped]) -> None:
        self.class_ = class_
        self.weight = 0
        """The memory of all chunks, in entries."""
        # Blocks are in the order skipped, _clean, _rest. ``tidy`` moves chunks from _rest to _clean.
        self._clean: deque[Chunk] = deque()
        self._rest: deque[Chunk] = deque()
        self.skipped: list[tuple[int, Skipped]] = []
        """A heap, by time, of the skipped blocks that may be idle."""
        self._waiting = waiting
        self._deferred: list[Skipped] = []
        """Protected blocks, out of the heap until the eviction is over."""

    def open(self) -> Chunk:
        """Return the chunk that the next ``append`` fills.

        If a block's ``policy_state`` is a chunk, the caller first sets ``left`` of that chunk. Then it sets
        ``policy_state`` to the returned chunk.
        """
        if self._rest:
            last = self._rest[-1]
            if len(last.times) < _FULL and not last.left:
                return last
        chunk = Chunk(self.class_)
        self._rest.append(chunk)
        self.weight += _CHUNK_WEIGHT
        return chunk

    def append(self, blocks: Sequence[BlockStatus], begin: int) -> None:
        """Add blocks that were used one after the other, the first at time ``begin``."""
        if blocks:
            chunk, end = self._rest[-1], begin + len(blocks)
            chunk.blocks += blocks
            if len(blocks) < _FEW:
                chunk.times.extend(range(begin, end))
            else:
                chunk.times.frombytes(np.arange(begin, end, dtype=np.int64).tobytes())
            self.weight += len(blocks)

    def head(self, protected: Collection[OffloadKey]) -> int | None:
        """Return the time of last use of the least recent idle, unprotected block, or ``None`` if there is none."""
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
        """Move blocks last used at or before ``until`` to ``victims``, least recent first.

        Moves at least the block that ``head`` has just found, and at most ``n`` blocks. It may stop early, so callers
        alternate ``head`` and ``take``.
        """
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
        """Undo ``take`` for the ``victims`` that came from ``entry``. They become skipped blocks."""
        if isinstance(entry, Skipped):
            self.queue(entry)
            return
        times = {id(block): time for block, time in zip(entry.blocks, entry.times)}
        for block in victims:
            if block.policy_state is entry:
                self.queue(Skipped(self.class_, times[id(block)], block))

    def end_eviction(self) -> bool:
        """End an eviction and return whether it stepped over protected blocks.

        The next eviction considers them again.
        """
        if not self._deferred:
            return False
        while self._deferred:
            self.queue(self._deferred.pop())
        return True

    def queue(self, one: Skipped) -> None:
        """Let a skipped block that may be idle take part in evictions again."""
        heappush(self.skipped, (one.time, one))

    def idle(self) -> Iterator[tuple[int, BlockStatus]]:
        """Yield the time of last use and the block for all idle blocks, least recently used first.

        The caller must change nothing until the iteration ends.
        """
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
        """Drop the stale entries of the next chunk, in turn. Returns how many entries it looked at."""
        rest = self._rest
        if len(rest) < 2:
            # All chunks but the last are clean, so the round is over. The next round starts with the oldest chunk.
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
        """Return all blocks except the waiting ones, with their times, in order. For tests: O(blocks)."""
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
        """Return the least recent chunk that still has entries, and drop the chunks before it."""
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
