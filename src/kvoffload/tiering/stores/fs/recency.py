# SPDX-License-Identifier: Apache-2.0
"""The order in which files of a root were used, as far as one process knows it. No I/O."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from kvoffload.tiering.stores.fs.usage_file import FileSeen

__all__ = ["Recency"]

_CHUNK_FILES = 1024


class Recency:
    """Paths by time of last use, nanoseconds since 1970: those that this process used, and those that the last walk
    found. One thread at a time.

    A file takes some 250 bytes. No call but ``end_walk`` takes longer with more files, so that nothing stops while a
    root of a million is walked: what a walk finds lies in small sorted chunks, which are merged as files are taken.
    """

    def __init__(self) -> None:
        # By when they were begun; each walk begins one. The last holds what was used since the last walk began.
        self._generations: list[OrderedDict[str, int]] = [OrderedDict()]
        # The walk's files: the first of each chunk in the heap, the others in the chunk, latest first.
        self._heap: list[tuple[int, str, int]] = []
        self._chunks: list[list[tuple[int, str]]] = []

    def __len__(self) -> int:
        """Files; those that were used since they were found count twice."""
        return sum(map(len, (*self._generations, *self._chunks))) + len(self._heap)

    def record(self, uses: Iterable[tuple[str, int]]) -> None:
        """Files were used, each later than all before."""
        latest = self._generations[-1]
        for path, used_ns in uses:
            latest[path] = used_ns
            latest.move_to_end(path)

    def forget(self, path: str) -> None:
        for generation in self._generations:
            generation.pop(path, None)

    def take_oldest(self) -> tuple[str, int] | None:
        """Removes the file that was used least recently, and returns it with its time of use."""
        while True:
            oldest: OrderedDict[str, int] | None = None
            oldest_ns = self._heap[0][0] if self._heap else None
            for generation in self._generations:
                if generation and (oldest_ns is None or next(iter(generation.values())) < oldest_ns):
                    oldest, oldest_ns = generation, next(iter(generation.values()))
            if oldest is not None:
                return oldest.popitem(last=False)
            if oldest_ns is None:
                return None
            used_ns, path, number = self._heap[0]
            if chunk := self._chunks[number]:
                heapq.heapreplace(self._heap, (*chunk.pop(), number))
            else:
                heapq.heappop(self._heap)
            if not any(path in generation for generation in self._generations):
                return path, used_ns

    def put_back(self, taken: Iterable[tuple[str, int]]) -> None:
        """Undoes ``take_oldest`` for files that were not used meanwhile; the first of ``taken`` was the oldest."""
        oldest = self._generations[0]
        for path, used_ns in reversed(list(taken)):
            if not any(path in generation for generation in self._generations):
                oldest[path] = used_ns
                oldest.move_to_end(path, last=False)

    def begin_walk(self) -> None:
        self._generations.append(OrderedDict())

    def end_walk(self, chunks: list[list[tuple[int, str]]]) -> list[list[tuple[int, str]]]:
        """The walk has found ``chunks``, which are this object's from now on. Whatever was used before the walk began
        is among them, or gone. Returns the chunks of the walk before."""
        old, self._chunks = self._chunks, chunks
        self._heap = [(*chunk.pop(), number) for number, chunk in enumerate(chunks) if chunk]
        heapq.heapify(self._heap)
        self._generations = self._generations[-1:]
        return old

    @staticmethod
    def chunks_of(files: list[FileSeen]) -> list[list[tuple[int, str]]]:
        """Files as a walk finds them, as chunks for ``end_walk``."""
        return [
            sorted(((file.used_ns, file.path) for file in files[first : first + _CHUNK_FILES]), reverse=True)
            for first in range(0, len(files), _CHUNK_FILES)
        ]
