# SPDX-License-Identifier: Apache-2.0
"""The GPU blocks of one KV group: their users, their content, and the order in which free ones are overwritten."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kvoffload.connector import NO_BLOCK


class BlockPool:
    """Manages block ids from 0 to ``num_blocks`` - 1. A block is used (its reference count is above 0) or free.

    A free block keeps its content and can be found by its hash until it is allocated for other content. The least
    recently freed block is allocated first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"BlockPool({len(self._free)} of {len(self._references)} free, {len(self._block_of)} named)"

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this content, or ``None``."""
        return self._block_of.get(block_hash)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` free blocks, and forget their content. There must be enough (``num_free``)."""
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these blocks, whether or not it is free."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user from each of these blocks. The tail is freed first, and therefore overwritten first, because it
        is useless without the head."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released too often"
            if not self._references[block]:
                self._free[block] = None

    def name(self, block: int, block_hash: bytes) -> None:
        """Record the content of ``block``. If another block already has the same content, ``find`` keeps returning that
        one."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget_all(self) -> None:
        """Forget all content. Users keep their blocks."""
        self._block_of.clear()
        self._hash_of.clear()

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Check the pool against ``tables``, the block tables of all requests. For tests."""
        users = Counter(block for table in tables for block in table if block != NO_BLOCK)
        assert self._references == [users[block] for block in range(len(self._references))]
        assert set(self._free) == {block for block, count in enumerate(self._references) if not count}
        assert {block: name for name, block in self._block_of.items()} == self._hash_of
