# SPDX-License-Identifier: Apache-2.0
"""A block store over Mooncake's client, which moves blocks between registered memories."""

from __future__ import annotations

import http.client
import mmap
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.errors import MissingExtraError, StoreError
from kvoffload.tiering.stores.remote import connect
from kvoffload.tiering.stores.shared import SharedStore, outcomes

_MOST_BLOCKS = 64
_BATCH_BYTES = 64 << 20
_MOST_STAGED_BYTES = 1 << 30
_ABSENT, _NOT_READY, _TOO_LONG, _NO_TRANSFER = -704, -703, -600, -800
"""The library's codes for a missing object, for an unfinished object, for a value longer than its target memory, and
for a failed transfer. The last one is also the code for a value that is too short."""
_NOT_BEGUN = frozenset((_ABSENT, _NOT_READY, _TOO_LONG))
"""Codes that the library returns before it moves any byte. After any other failure it may still write: it stops waiting
after 60 s, and its transfer continues."""
_LINE_BYTES = 64
_CONNECT_S = 1.0

Row = npt.NDArray[np.uint8]

_RETIRED: list[Row] = []
"""Memory that the library may still write to for the rest of the process, even after its store was closed."""


class _Staging:
    """Registered memory, in rows of a block and its seal. Any thread may use it."""

    def __init__(self, row_bytes: int, register: Callable[[npt.NDArray[np.uint8]], None]) -> None:
        self._row_bytes, self._register = row_bytes, register
        self._lock = threading.Lock()
        self._free: list[Row] = []
        self._memories: list[npt.NDArray[np.uint8]] = []
        """Memories of all rows, including retired ones."""

    def take(self, count: int) -> list[Row]:
        """Take rows for the caller's exclusive use, until ``end``. Raises ``StoreError`` if too many are retired."""
        with self._lock:
            if len(self._free) < count:
                self._grow(count)
            rows, self._free = self._free[:count], self._free[count:]
        return rows

    def end(self, rows: Sequence[Row], are_over: Iterable[bool]) -> None:
        """End the caller's use of ``rows``. Rows that no transfer can write to become free. The others, including rows
        that ``are_over`` does not cover, are retired."""
        over = [*are_over, *[False] * len(rows)]
        with self._lock:
            self._free += [row for row, is_over in zip(rows, over) if is_over]
        _RETIRED.extend(row for row, is_over in zip(rows, over) if not is_over)

    def _grow(self, count: int) -> None:
        stride = -(-self._row_bytes // _LINE_BYTES) * _LINE_BYTES
        staged = sum(memory.nbytes for memory in self._memories)
        if self._memories and staged + count * stride > _MOST_STAGED_BYTES:
            raise StoreError(
                f"All {staged} bytes for transfers of Mooncake are in use by transfers that never ended; restart the "
                "engine to free them."
            )
        mapped = mmap.mmap(-1, count * stride)
        mapped.madvise(mmap.MADV_DONTDUMP)  # a core file may end up anywhere
        memory = np.frombuffer(mapped, np.uint8).reshape(count, stride)
        self._register(memory)
        self._memories.append(memory)
        self._free += [row[: self._row_bytes] for row in memory]


class MooncakeStore(SharedStore):
    """Blocks of ``block_bytes`` in the pool that ``master`` (host:port) manages.

    The client connects at the first call, in an I/O thread, once the metadata service answers. Its calls end by its own
    deadlines, about 60 s, and cannot be ended sooner. Until then they occupy their thread.

    A value is a block and its seal. It moves through the store's own registered memory, never directly into a slot,
    because the library may still write to memory after it has reported a failure. Such memory is retired.
    """

    requests_in_flight = 2

    def __init__(
        self,
        master: str,
        metadata: str,
        block_bytes: int,
        namespace: str = "",
        *,
        hostname: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
        segment_bytes: int = 0,
        secret: bytes | None = None,
    ) -> None:
        super().__init__(block_bytes, namespace, secret)
        try:
            from mooncake import store as library
        except ImportError as exc:
            raise MissingExtraError(
                "The 'mooncake' tier needs kvoffload's extra 'mooncake': pip install mooncake-transfer-engine."
            ) from exc
        self._library: Any = library
        self._master, self._metadata = master, metadata
        self._setup = (hostname, metadata, segment_bytes, 16 << 20, protocol, device, master)
        self._directory = f"kvoffload:{self._digest}:"
        self._client_lock = threading.Lock()
        self._client: Any = None
        self._is_closed = False
        self.batch_blocks = max(1, min(_MOST_BLOCKS, _BATCH_BYTES // block_bytes))
        self._staging = _Staging(block_bytes + self._sealer.seal_bytes, self._register)

    def __repr__(self) -> str:
        return f"MooncakeStore({self._master!r}, {self._directory!r}, block_bytes={self._block_bytes})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        if not keys:
            return []
        found = self._connected().batch_is_exist([self._name(key) for key in keys])
        if all(code < 0 for code in found):
            raise self._failed(found[0])
        return [code == 1 for code in found]

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return self._in_batches(self._write, keys, [self._bytes(block) for block in blocks])

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return self._in_batches(self._read, keys, [self._bytes(block) for block in blocks])

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            # By force, because a recently read block is leased, even if it is bad.
            self._connected().batch_remove([self._name(key) for key in keys], True)

    def close(self) -> None:
        with self._client_lock:
            client, self._client = self._client, None
            self._is_closed = True
        if client is not None:
            client.close()

    # --------------------------------------------------------------------------------------------------- batches

    def _in_batches(
        self,
        call: Callable[[Any, Sequence[OffloadKey], Sequence[memoryview]], Sequence[int]],
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
    ) -> list[bool]:
        """Run ``call`` for each part of at most a batch of blocks, one after the other."""
        codes: list[int] = []
        client = self._connected()
        step = self.batch_blocks or len(keys)
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            codes += call(client, keys[part], blocks[part])
        failures = [self._failed(code) for code in codes if code not in (0, _ABSENT)]
        return outcomes([code == 0 for code in codes], failures)

    def _write(self, client: Any, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[int]:
        """Write blocks. The library may read the rows of a failed write later; their contents then do not fit the seal
        of this key."""
        rows = self._staging.take(len(keys))
        try:
            for key, block, row in zip(keys, blocks, rows, strict=True):
                _, row.data[self._block_bytes :] = self._sealer.seal(key, block, row.data[: self._block_bytes])
            return [int(code) for code in client.batch_put_from_multi_buffers(*self._arguments(keys, rows))]
        finally:
            self._staging.end(rows, [True] * len(rows))

    def _read(self, client: Any, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[int]:
        # Asked first, so that a master that does not answer costs no memory. The library fills one memory per key.
        wanted = dict(zip(keys, blocks, strict=True))
        found = dict(zip(wanted, client.batch_is_exist([self._name(key) for key in wanted]), strict=True))
        here = [key for key in wanted if found[key] == 1]
        ends = {key: _ABSENT if code >= 0 else int(code) for key, code in found.items()}
        rows = self._staging.take(len(here))
        codes: list[int] = []
        bad = []
        try:
            if here:
                codes += map(int, client.batch_get_into_multi_buffers(*self._arguments(here, rows)))
            for key, row, code in zip(here, rows, codes, strict=True):
                ends[key] = code
                stored, seal = row.data[: self._block_bytes], row.data[self._block_bytes :]
                # The library reports success for a value that is shorter than its memory.
                if code == row.nbytes and self._sealer.unseal(seal, key, stored, wanted[key]):
                    ends[key] = 0
                elif code >= 0 or code == _TOO_LONG or (code == _NO_TRANSFER and self._is_other(client, key)):
                    bad.append(key)
                    ends[key] = _ABSENT
        finally:
            self._staging.end(rows, (code >= 0 or code in _NOT_BEGUN for code in codes))
        for key, block in zip(keys, blocks, strict=True):
            if block is not wanted[key] and not ends[key]:
                block[:] = wanted[key]
        self._bad.remove(bad, self)
        return [ends[key] for key in keys]

    def _arguments(
        self, keys: Sequence[OffloadKey], rows: Sequence[Row]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Return the names, and for each of them the addresses and sizes of its parts."""
        return [self._name(key) for key in keys], [[row.ctypes.data] for row in rows], [[row.nbytes] for row in rows]

    # --------------------------------------------------------------------------------------------------- helpers

    def _is_other(self, client: Any, key: OffloadKey) -> bool:
        """Return whether the length of the value of ``key`` differs from that of a block with its seal."""
        size = client.get_size(self._name(key))
        return bool(size >= 0 and size != self._block_bytes + self._sealer.seal_bytes)

    def _name(self, key: OffloadKey) -> str:
        return self._directory + key.hex()

    def _connected(self) -> Any:
        with self._client_lock:
            if self._is_closed:
                raise StoreError("The store is closed.")
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        host, _, port = self._master.rpartition(":")
        try:
            # The library would search for a missing master for a minute and a half.
            connect(host.strip("[]"), int(port), _CONNECT_S).close()
        except (OSError, ValueError) as exc:
            raise StoreError(f"Mooncake at {self._master} cannot be reached: {exc}.") from exc
        self._check_that_it_answers()
        client = self._library.MooncakeDistributedStore()
        code = client.setup(*self._setup)
        if code:
            raise self._failed(code)
        return client

    def _check_that_it_answers(self) -> None:
        """Send any request to the metadata service, to check that it answers. A frozen master still accepts
        connections, and the library's setup would hold the interpreter lock for minutes while it waits, so that no
        thread of the engine could run."""
        if not self._metadata.startswith(("http://", "https://")):
            return
        try:
            urllib.request.urlopen(f"{self._metadata}?key=kvoffload", timeout=_CONNECT_S).close()
        except urllib.error.HTTPError as exc:
            exc.close()  # a missing key is also an answer
        except (OSError, http.client.HTTPException, ValueError) as exc:  # an invalid URL, or not HTTP
            # The text of an error may contain a part of the URL, with a password.
            reason = getattr(exc, "strerror", None) or type(exc).__name__
            raise StoreError(f"The metadata service of Mooncake at {self._master} does not answer: {reason}.") from None

    def _register(self, memory: npt.NDArray[np.uint8]) -> None:
        if code := self._connected().register_buffer(memory.ctypes.data, memory.nbytes):
            raise self._failed(code)

    def _failed(self, code: int) -> StoreError:
        return StoreError(f"Mooncake at {self._master} fails with its code {code}.")
