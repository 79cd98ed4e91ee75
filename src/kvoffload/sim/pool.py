# SPDX-License-Identifier: Apache-2.0
"""The engine's own KV pool and prefix cache, as vLLM and the reference engine manage it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class DevicePool:
    """GPU blocks. A block is used by requests, or free. A free block keeps its content, and can be found by its key,
    until it is taken for other content. The least recently freed block is taken first.

    ``num_blocks`` of 0 means that the size is not known: there is always room, and nothing is found.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._next = 0
        """Blocks from here on were never used. Those from ``num_blocks`` on do not exist (``take``)."""
        self._free: OrderedDict[int, None] = OrderedDict()
        """Blocks that were used, in the order in which they were freed."""
        self._users: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"DevicePool({self.num_free} of {self.num_blocks} free, {len(self._block_of)} found by key)"

    @property
    def num_free(self) -> int:
        return max(self.num_blocks - self._next, 0) + len(self._free) if self.num_blocks else 1 << 60

    @property
    def is_unused(self) -> bool:
        return not self._users

    def find_prefix(self, path: Sequence[bytes]) -> list[int]:
        """Return the blocks with the first keys of ``path``, up to the first key that is not here."""
        found: list[int] = []
        if self._block_of:
            for key in path:
                block = self._block_of.get(key)
                if block is None:
                    break
                found.append(block)
        return found

    def find(self, keys: Sequence[bytes]) -> list[int] | None:
        """Return the blocks with these keys, or ``None`` if one is not here."""
        found = [block for key in keys if (block := self._block_of.get(key)) is not None]
        return found if len(found) == len(keys) else None

    def room_beside(self, found: Iterable[int]) -> int:
        """Count the blocks that can be taken while ``found`` are used."""
        return self.num_free - sum(block in self._free for block in found)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these blocks."""
        users = self._users
        for block in blocks:
            if block in users:
                users[block] += 1
            else:
                del self._free[block]
                users[block] = 1

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks for new content. Beyond what is free, the blocks are made up: only a request that is
        larger than the pool, and has it alone, may take so many."""
        if not self.num_blocks:
            self._next += count
            return [*range(self._next - count, self._next)]
        fresh = max(min(count, self.num_blocks - self._next), 0)
        taken = [*range(self._next, self._next + fresh)]
        self._next += fresh
        while len(taken) < count and self._free:
            block, _ = self._free.popitem(last=False)
            if (key := self._key_of.pop(block, None)) is not None:
                del self._block_of[key]
            taken.append(block)
        if (missing := count - len(taken)) > 0:
            self._next = max(self._next, self.num_blocks)
            taken += range(self._next, self._next + missing)
            self._next += missing
        for block in taken:
            self._users[block] = 1
        return taken

    def name(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Let others find ``blocks`` by these keys. A key that another block has already stays with that block."""
        if self.num_blocks:
            for block, key in zip(blocks, keys):
                if block < self.num_blocks and key not in self._block_of and block not in self._key_of:
                    self._block_of[key], self._key_of[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a user from each of these blocks. The tail is freed first, so it is taken first."""
        if not self.num_blocks:
            return
        users = self._users
        for block in reversed(blocks):
            users[block] -= 1
            if not users[block]:
                del users[block]
                if block < self.num_blocks:
                    self._free[block] = None

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """For tests. ``tables`` has the blocks of each request."""
        if not self.num_blocks:
            return
        users: dict[int, int] = {}
        for table in tables:
            for block in table:
                users[block] = users.get(block, 0) + 1
        assert users == self._users
        assert not users.keys() & self._free.keys()
        real = sum(block < self.num_blocks for block in users)
        assert real + self.num_free == self.num_blocks
        assert {block: key for key, block in self._block_of.items()} == self._key_of
