# SPDX-License-Identifier: Apache-2.0
"""Device memory without a device, with bytes that depend on their meaning, and a pool with a prefix cache.

There is no model. "Computing" a GPU block writes bytes that are derived from the tokens up to its end, the KV group and
the rank's slice. So the bytes of any block show whether they are right.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["DevicePool", "chain_hash", "page_of"]

Bytes = npt.NDArray[np.uint8]


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of some tokens and everything before them."""
    return hashlib.blake2b(parent + repr(tuple(tokens)).encode(), digest_size=16).digest()


@functools.lru_cache(4096)
def page_of(prefix_hash: bytes, group: int, slice_index: int, page_bytes: int) -> Bytes:
    """The right bytes of a GPU block that ends a prefix, on the ranks with a slice. Not to be written to."""
    seed = hashlib.blake2b(prefix_hash + bytes((group, slice_index)), digest_size=32).digest()
    page = np.resize(np.frombuffer(seed, dtype=np.uint8), page_bytes)
    page.setflags(write=False)
    return page


class DevicePool:
    """GPU block ids, shared by all groups, with a prefix cache.

    A freed block keeps its content, and can be found by its hash, until it is allocated again: least recently freed
    first, or, with ``reuses_newest``, most recently freed first, which is hardest on transfers that still use it.
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.reuses_newest = False
        self._refs = [0] * num_gpu_blocks
        self._free: dict[int, None] = dict.fromkeys(range(num_gpu_blocks))
        self._cached: dict[tuple[bytes, int], int] = {}
        self._name: dict[int, tuple[bytes, int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> dict[tuple[bytes, int], int]:
        """GPU block by (prefix hash, group)."""
        return self._cached

    def take(self, n: int) -> list[int] | None:
        """``n`` GPU blocks to write, or ``None`` if fewer are free."""
        if n > len(self._free):
            return None
        ids: list[int] = []
        for _ in range(n):
            block_id = next(reversed(self._free) if self.reuses_newest else iter(self._free))
            del self._free[block_id]
            self.forget(block_id)
            self._refs[block_id] = 1
            ids.append(block_id)
        return ids

    def share(self, block_id: int) -> None:
        """Add a reader of a cached block."""
        self._free.pop(block_id, None)
        self._refs[block_id] += 1

    def give_back(self, block_id: int) -> None:
        self._refs[block_id] -= 1
        assert self._refs[block_id] >= 0
        if self._refs[block_id] == 0:
            self._free[block_id] = None

    def name(self, block_id: int, prefix_hash: bytes, group: int) -> None:
        """Adds a full, valid block to the prefix cache. Of several equal ones, the first is kept."""
        if (prefix_hash, group) not in self._cached and block_id not in self._name:
            self._cached[prefix_hash, group] = block_id
            self._name[block_id] = (prefix_hash, group)

    def move_cached(self) -> tuple[int, int] | None:
        """Lets another free block stand for a cached one that is not in use: (from, to), for the caller to copy.

        It is the one freed last, which is hardest on transfers that still use it.
        """
        source = next((block_id for block_id in self._name if block_id in self._free), None)
        target = next((block_id for block_id in reversed(self._free) if block_id != source), None)
        if source is None or target is None:
            return None
        name = self._name[source]
        self.forget(source)
        self.forget(target)
        self.name(target, *name)
        return source, target

    def forget(self, block_id: int) -> None:
        if (name := self._name.pop(block_id, None)) is not None:
            del self._cached[name]

    def forget_all(self) -> None:
        self._cached.clear()
        self._name.clear()

    def check_invariants(self) -> None:
        assert all((refs == 0) == (block_id in self._free) for block_id, refs in enumerate(self._refs))
        assert {name: block_id for block_id, name in self._name.items()} == self._cached
