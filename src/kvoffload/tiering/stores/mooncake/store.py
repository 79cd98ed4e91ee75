# SPDX-License-Identifier: Apache-2.0
"""A block store over Mooncake's client, which moves blocks between registered memories."""

from __future__ import annotations

import http.client
import queue
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.errors import MissingExtraError, StoreError
from kvoffload.tiering.stores.seal import SEAL_BYTES
from kvoffload.tiering.stores.shared import SharedStore, outcomes

__all__ = ["MooncakeStore"]

_BATCH_BLOCKS = 64
_STAGED_BLOCKS = 4
_MOST_CALLS = 16
_ABSENT, _TOO_LONG, _NO_TRANSFER = -704, -600, -800
"""The library's codes for no such object, for a value longer than the memory it should go to, and for a transfer that
failed, which a value that is too short gives as well."""
_CONNECT_S = 1.0


class MooncakeStore(SharedStore):
    """Blocks of ``block_bytes`` in the pool that ``master`` (host:port) manages.

    The client connects at the first call, in an I/O thread, once the metadata service answers. Its calls end by
    deadlines of its own, some 30 s, and cannot be ended sooner: until then they keep their thread, and the tier keeps
    their slots.

    A value is a block and its seal, gathered from two memories and scattered to two. Blocks that are rows of the
    attached memory move without a copy; others go through a registered memory of the store's own, one call at a time.
    """

    batch_blocks = _BATCH_BLOCKS
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
        self._memory: npt.NDArray[np.uint8] | None = None
        self._staging = np.zeros((_STAGED_BLOCKS, 0), np.uint8)
        self._staging_lock = threading.Lock()
        # Rows for the seals of one call each. A call that hangs keeps its row, and its memory.
        self._seals = np.zeros((_MOST_CALLS, _BATCH_BLOCKS, SEAL_BYTES), np.uint8)
        self._free_rows: queue.SimpleQueue[int] = queue.SimpleQueue()
        for row in range(_MOST_CALLS):
            self._free_rows.put(row)

    def __repr__(self) -> str:
        return f"MooncakeStore({self._master!r}, {self._directory!r}, block_bytes={self._block_bytes})"

    def attach(self, memory: memoryview) -> None:
        self._memory = np.asarray(memory).reshape(-1)

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        if not keys:
            return []
        found = self._connected().batch_is_exist([self._name(key) for key in keys])
        if all(code < 0 for code in found):
            raise self._failed(found[0])
        return [code == 1 for code in found]

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return self._in_batches(self._write, keys, blocks)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        # The library fills one memory per key, also if a key is given twice.
        first = {key: index for index, key in reversed(list(enumerate(keys)))}
        once = sorted(first.values())
        found = self._in_batches(self._read, [keys[index] for index in once], [blocks[index] for index in once])
        is_here = {keys[index]: answer for index, answer in zip(once, found, strict=True)}
        for index, key in enumerate(keys):
            if first[key] != index and is_here[key]:
                blocks[index][:] = blocks[first[key]]
        return [is_here[key] for key in keys]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            # By force: a block that was read lately has a lease, which says nothing about whether it is good.
            self._connected().batch_remove([self._name(key) for key in keys], True)

    def close(self) -> None:
        with self._client_lock:
            client, self._client = self._client, None
            self._is_closed = True
        if client is not None:
            client.close()
        self._memory = None

    # --------------------------------------------------------------------------------------------------- batches

    def _in_batches(self, call: Any, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        """``call`` for as many blocks as there is registered memory for, one part after the other."""
        answers: list[bool] = []
        failures: list[StoreError] = []
        client = self._connected()
        all_views = [np.frombuffer(self._bytes(block), np.uint8) for block in blocks]
        is_attached = all(self._is_attached(view) for view in all_views)
        step = _BATCH_BLOCKS if is_attached else _STAGED_BLOCKS
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            views = all_views[part]
            try:
                row = self._free_rows.get_nowait()
            except queue.Empty:
                raise StoreError(f"All {_MOST_CALLS} calls to Mooncake at {self._master} hang.") from None
            try:
                seals = self._seals[row]
                if is_attached:
                    codes = call(client, keys[part], views, views, seals)
                else:
                    with self._staging_lock:
                        codes = call(client, keys[part], views, list(self._staging[: len(views)]), seals)
            finally:
                self._free_rows.put(row)
            answers += [code == 0 for code in codes]
            failures += [self._failed(code) for code in codes if code not in (0, _ABSENT)]
        return outcomes(answers, failures)

    def _write(
        self,
        client: Any,
        keys: Sequence[OffloadKey],
        blocks: list[npt.NDArray[np.uint8]],
        memories: list[npt.NDArray[np.uint8]],
        seals: npt.NDArray[np.uint8],
    ) -> list[int]:
        for index, (key, block, memory) in enumerate(zip(keys, blocks, memories, strict=True)):
            if memory is not block:
                memory[:] = block
            seals[index] = np.frombuffer(self._sealer.seal(key, memory.data), np.uint8)
        codes = client.batch_put_from_multi_buffers(*self._arguments(keys, memories, seals))
        return [int(code) for code in codes]

    def _read(
        self,
        client: Any,
        keys: Sequence[OffloadKey],
        blocks: list[npt.NDArray[np.uint8]],
        memories: list[npt.NDArray[np.uint8]],
        seals: npt.NDArray[np.uint8],
    ) -> list[int]:
        codes = client.batch_get_into_multi_buffers(*self._arguments(keys, memories, seals))
        ends, bad = [], []
        for index, (key, code) in enumerate(zip(keys, codes, strict=True)):
            memory = memories[index]
            # A value that is shorter than its memory is a success to the library.
            is_whole = code == self._block_bytes + SEAL_BYTES
            if is_whole and self._sealer.fits(seals[index].tobytes(), key, memory.data):
                if memory is not blocks[index]:
                    blocks[index][:] = memory
                ends.append(0)
            elif code >= 0 or code == _TOO_LONG or (code == _NO_TRANSFER and self._is_other(client, key)):
                bad.append(key)
                ends.append(_ABSENT)
            else:
                ends.append(int(code))
        self._remove_bad(bad)
        return ends

    def _arguments(
        self, keys: Sequence[OffloadKey], memories: list[npt.NDArray[np.uint8]], seals: npt.NDArray[np.uint8]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Names, and for each of them the addresses and sizes of its two parts."""
        addresses = [[memory.ctypes.data, seals[index].ctypes.data] for index, memory in enumerate(memories)]
        return [self._name(key) for key in keys], addresses, [[self._block_bytes, SEAL_BYTES]] * len(keys)

    # --------------------------------------------------------------------------------------------------- helpers

    def _is_other(self, client: Any, key: OffloadKey) -> bool:
        """Whether the value of ``key`` has another length than a block and its seal."""
        size = client.get_size(self._name(key))
        return bool(size >= 0 and size != self._block_bytes + SEAL_BYTES)

    def _name(self, key: OffloadKey) -> str:
        return self._directory + key.hex()

    def _is_attached(self, block: npt.NDArray[np.uint8]) -> bool:
        memory = self._memory
        if memory is None:
            return False
        first: int = memory.ctypes.data
        return bool(first <= block.ctypes.data and block.ctypes.data + block.nbytes <= first + memory.nbytes)

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
            # The library would look for a master that is not there for a minute and a half.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except (OSError, ValueError) as exc:
            raise StoreError(f"Mooncake at {self._master} cannot be reached: {exc}.") from exc
        self._check_that_it_answers()
        client = self._library.MooncakeDistributedStore()
        code = client.setup(*self._setup)
        if code:
            raise self._failed(code)
        self._staging = np.zeros((_STAGED_BLOCKS, self._block_bytes), np.uint8)
        for memory in (self._memory, self._seals, self._staging):
            if memory is not None and (code := client.register_buffer(memory.ctypes.data, memory.nbytes)):
                client.close()
                raise self._failed(code)
        return client

    def _check_that_it_answers(self) -> None:
        """Asks the metadata service for anything. A frozen master still takes connections, and the library's setup
        keeps Python's interpreter to itself while it waits for minutes: no thread of the engine would run."""
        if not self._metadata.startswith(("http://", "https://")):
            return
        try:
            urllib.request.urlopen(f"{self._metadata}?key=kvoffload", timeout=_CONNECT_S).close()
        except urllib.error.HTTPError as exc:
            exc.close()  # that it has no such key is an answer
        except (OSError, http.client.HTTPException, ValueError) as exc:  # of no URL, or of no HTTP
            raise StoreError(f"The metadata service of Mooncake at {self._master} does not answer: {exc!r}.") from exc

    def _failed(self, code: int) -> StoreError:
        return StoreError(f"Mooncake at {self._master} fails with its code {code}.")
