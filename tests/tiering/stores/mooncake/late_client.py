# SPDX-License-Identifier: Apache-2.0
"""A replacement for Mooncake's client: a pool in this process, whose transfers may end after their calls have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

NO_TRANSFER, ABSENT, RPC_FAILED = -800, -704, -900


class _Write(NamedTuple):
    addresses: Sequence[int]
    sizes: Sequence[int]
    value: bytes


class LateClient:
    """One client.

    With ``is_late``, a read fails with the code of an abandoned transfer. It writes its data when ``write_late`` is
    called, as the library does 60 s after a donor stopped answering.
    """

    def __init__(self) -> None:
        self.pool: dict[str, bytes] = {}
        self.is_late = False
        self.is_mute = False
        """Whether the master has stopped answering."""
        self.num_registered = 0
        self._late: list[_Write] = []

    def MooncakeDistributedStore(self) -> LateClient:
        return self

    def setup(self, *_: Any) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.num_registered += 1
        return 0

    def batch_is_exist(self, names: Sequence[str]) -> list[int]:
        return [RPC_FAILED if self.is_mute else int(name in self.pool) for name in names]

    def get_size(self, name: str) -> int:
        return len(self.pool[name]) if name in self.pool else ABSENT

    def batch_put_from_multi_buffers(
        self, names: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[int]:
        for name, places, lengths in zip(names, addresses, sizes, strict=True):
            self._check(places, lengths)
            self.pool[name] = b"".join(map(ctypes.string_at, places, lengths))
        return [0] * len(names)

    def batch_get_into_multi_buffers(
        self, names: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[int]:
        return list(map(self._get, names, addresses, sizes))

    def batch_remove(self, names: Sequence[str], by_force: bool) -> list[int]:
        return [0 if self.pool.pop(name, None) else ABSENT for name in names]

    def close(self) -> None:
        self._late.clear()

    def write_late(self) -> None:
        for late in self._late:
            _scatter(late)

    def _get(self, name: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        self._check(addresses, sizes)
        if self.is_mute:
            return RPC_FAILED
        if name not in self.pool:
            return ABSENT
        read = _Write(addresses, sizes, self.pool[name])
        if self.is_late:
            self._late.append(read)
            return NO_TRANSFER
        _scatter(read)
        return len(read.value)

    def _check(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        for address, size in zip(addresses, sizes, strict=True):
            for late in self._late:
                for busy, length in zip(late.addresses, late.sizes, strict=True):
                    assert address + size <= busy or busy + length <= address, "a late transfer may write here"


def _scatter(write: _Write) -> None:
    rest = write.value
    for address, size in zip(write.addresses, write.sizes, strict=True):
        ctypes.memmove(address, rest[:size], min(size, len(rest)))
        rest = rest[size:]
