# SPDX-License-Identifier: Apache-2.0
"""The KV pool and prefix cache of an engine's KV group, for the reference engine and for the simulator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class DevicePool:
    """Manages GPU blocks. A block is used by requests, or free. A free block keeps its content and can be found by its
    key until it is allocated for other content. The least recently freed block is allocated first.

    If ``num_blocks`` is 0, the size is not known: there is always room, and no block is found. Several blocks may have
    the same content. With ``finds_copies``, the next copy is found when the first is taken; without, a copy cannot be
    found.
    """

    def __init__(self, num_blocks: int, *, finds_copies: bool = False) -> None:
        self.num_blocks = num_blocks
        self._finds_copies = finds_copies
        self._next = 0
        """The first block that was never used. Blocks from ``num_blocks`` on do not exist (see ``take``)."""
        self._free: OrderedDict[int, None] = OrderedDict()
        """Blocks that were used, in the order in which they were freed."""
        self._first: list[int] = []
        """Free blocks to take before all others, the last one first."""
        self._users: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}
        """Further blocks with the same key, oldest first."""

    def __repr__(self) -> str:
        return f"DevicePool({self.num_free} of {self.num_blocks} free, {len(self._block_of)} found by key)"

    @property
    def num_free(self) -> int:
        return max(self.num_blocks - self._next, 0) + len(self._free) + len(self._first) if self.num_blocks else 1 << 60

    @property
    def is_unused(self) -> bool:
        return not self._users

    def find_prefix(self, path: Sequence[bytes]) -> list[int]:
        """Return the blocks with the first keys of ``path``, up to the first missing key."""
        found: list[int] = []
        if self._block_of:
            for key in path:
                block = self._block_of.get(key)
                if block is None:
                    break
                found.append(block)
        return found

    def find(self, keys: Sequence[bytes]) -> list[int] | None:
        """Return the blocks with these keys, or ``None`` if one is missing."""
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
        """Allocate ``count`` blocks for new content. If there are too few free blocks, the others are fictitious: only
        a request that is larger than the pool, and uses it alone, may allocate so many."""
        if not self.num_blocks:
            self._next += count
            return [*range(self._next - count, self._next)]
        taken: list[int] = []
        while self._first and len(taken) < count:
            taken.append(self._first.pop())
        fresh = max(min(count - len(taken), self.num_blocks - self._next), 0)
        taken += range(self._next, self._next + fresh)
        self._next += fresh
        free, key_of, block_of, copies = self._free, self._key_of, self._block_of, self._copies
        for _ in range(min(count - len(taken), len(free))):
            block, _ = free.popitem(last=False)
            if (key := key_of.pop(block, None)) is not None:
                if key in copies:
                    self._forget_one_of(block, key)
                else:
                    del block_of[key]
            taken.append(block)
        if (missing := count - len(taken)) > 0:
            self._next = max(self._next, self.num_blocks)
            taken += range(self._next, self._next + missing)
            self._next += missing
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def _forget_one_of(self, block: int, key: bytes) -> None:
        """Forget that ``block`` has this key, as other blocks do."""
        copies = self._copies[key]
        if self._block_of[key] == block:
            self._block_of[key] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]

    def name(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Let others find ``blocks`` by these keys. Leaves out blocks that do not exist."""
        if not self.num_blocks:
            return
        num_blocks, key_of, block_of = self.num_blocks, self._key_of, self._block_of
        for block, key in zip(blocks, keys):
            if not 0 <= block < num_blocks or block in key_of:
                continue
            if key not in block_of:
                block_of[key], key_of[block] = block, key
            elif self._finds_copies:
                self._copies.setdefault(key, []).append(block)
                key_of[block] = key

    def release(self, blocks: Sequence[int], unfilled: Sequence[int] = ()) -> None:
        """Remove a user from each of these blocks. The tail is freed first, so it is taken first. Blocks that are not
        filled (``unfilled``) cannot be found again, so they are taken before all others."""
        if not self.num_blocks:
            return
        self._free.update(dict.fromkeys(self._freed(reversed(blocks))))
        self._first += self._freed(unfilled)

    def _freed(self, blocks: Iterable[int]) -> list[int]:
        """Remove a user from each of these blocks, and return the blocks that are then free."""
        users, num_blocks = self._users, self.num_blocks
        freed: list[int] = []
        for block in blocks:
            if (others := users[block] - 1) > 0:
                users[block] = others
            else:
                del users[block]
                if block < num_blocks:
                    freed.append(block)
        return freed

    def forget_all(self) -> None:
        """Forget all content. Users keep their blocks."""
        for names in (self._key_of, self._block_of, self._copies):
            names.clear()

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Check the pool against ``tables``, the blocks of each request. For tests."""
        if not self.num_blocks:
            return
        users: dict[int, int] = {}
        for table in tables:
            for block in table:
                users[block] = users.get(block, 0) + 1
        assert users == self._users
        assert not users.keys() & {*self._free, *self._first}
        assert not {*self._first} & {*self._free, *self._key_of}
        real = sum(block < self.num_blocks for block in users)
        assert real + self.num_free == self.num_blocks
        named = {block: key for key, block in self._block_of.items()}
        named |= {block: key for key, copies in self._copies.items() for block in copies}
        assert named == self._key_of
        assert all(self._copies.values())
