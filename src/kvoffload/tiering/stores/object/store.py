# SPDX-License-Identifier: Apache-2.0
"""A block store in an object store: one object per block, the block and then its seal."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats
from kvoffload.tiering.stores.object.client import Deadlines, check_url, open_client
from kvoffload.tiering.stores.requests import Requests
from kvoffload.tiering.stores.seal import SEAL_BYTES, Sealer, shared_identity

__all__ = ["ObjectStore"]

_LIST_CHUNK = 1000
_LONGEST_KEY = 112


class ObjectStore(BlockStore):
    """Blocks of ``block_bytes`` as objects below ``url``: ``s3://bucket/prefix``, ``gs://...`` or ``az://...``.

    The constructor does no I/O. ``config`` are obstore's settings for the service (``endpoint``, ``region``,
    ``access_key_id`` and so on); what is left out comes from the environment and the machine. ``requests`` of each
    direction are in flight at once, in threads of the store's own. Nothing here evicts: a lifecycle rule of the bucket
    does.

    The client gets copies of blocks and returns memory of its own, so that nothing of a request that outlives its
    deadline refers to a slot.
    """

    requests_in_flight = 2
    """A batch keeps all requests busy, and a second one is there when its last ones end."""

    def __init__(
        self,
        url: str,
        block_bytes: int,
        namespace: str = "",
        *,
        config: Mapping[str, str] | None = None,
        requests: int = 16,
        secret: bytes | None = None,
        deadlines: Deadlines | None = None,
        tls_ca: str | None = None,
    ) -> None:
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, not {block_bytes}.")
        self.batch_blocks = requests
        self._block_bytes = block_bytes
        self._where = check_url(url)
        identity, digest = shared_identity(namespace, block_bytes, secret)
        self._directory = digest
        self._sealer = Sealer(identity, secret)
        deadlines = deadlines or Deadlines()
        self._request_s = deadlines.request_s
        self._client, self._objects = open_client(url, config or {}, deadlines, tls_ca)
        self._reads, self._writes = Requests("object-read", requests), Requests("object-write", requests)
        self._lock = threading.Lock()
        self._bad: list[OffloadKey] = []
        self._num_bad = 0

    def __repr__(self) -> str:
        return f"ObjectStore({self._where!r}, {self._directory!r}, block_bytes={self._block_bytes})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        def is_here(index: int) -> bool:
            try:
                size = self._client.head(self._objects, self._path(keys[index]))["size"]
            except FileNotFoundError:
                return False
            return bool(size == self._block_bytes + SEAL_BYTES)

        return self._outcomes(self._reads, is_here, len(keys))

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        def put(index: int) -> bool:
            block = self._bytes(blocks[index])
            sealed = b"".join((block, self._sealer.seal(keys[index], block)))
            try:
                self._client.put(self._objects, self._path(keys[index]), sealed, mode="create", use_multipart=False)
            except self._client.exceptions.AlreadyExistsError:
                pass
            return True

        return self._outcomes(self._writes, put, len(keys))

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        bad: list[OffloadKey] = []

        def get(index: int) -> bool:
            key, block = keys[index], self._bytes(blocks[index])
            try:
                found = self._client.get(self._objects, self._path(key))
                if found.meta["size"] == block.nbytes + SEAL_BYTES:
                    value = memoryview(found.buffer())
                    payload, seal = value[: block.nbytes], value[block.nbytes :]
                    if self._sealer.fits(seal, key, payload):
                        block[:] = payload
                        return True
            except FileNotFoundError:
                return False
            bad.append(key)
            return False

        answers = self._outcomes(self._reads, get, len(keys))
        if bad:
            self._remove_bad(bad)
        return answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        if not keys:
            return
        with self._errors_in_words():
            try:
                self._client.delete(self._objects, [self._path(key) for key in dict.fromkeys(keys)])
            except FileNotFoundError:
                pass

    def close(self) -> None:
        self._reads.close()
        self._writes.close()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        with self._errors_in_words():
            pages = self._client.list(self._objects, self._directory + "/", chunk_size=_LIST_CHUNK)
        while True:
            with self._errors_in_words():
                page = next(pages, None)
            if page is None:
                return
            names = [entry["path"].rpartition("/")[2] for entry in page if entry["size"] == self._file_bytes]
            yield [key for key in map(_key_of, names) if key is not None]

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        with self._lock:
            bad, self._bad = self._bad, []
        return dict.fromkeys(bad, "corrupt")

    def stats(self) -> StoreStats:
        return StoreStats(corrupt_blocks=self._num_bad)

    def check(self) -> None:
        """Raises ``StoreError``, in one sentence, if the bucket cannot be used. A missing block alone looks like a
        missing bucket."""
        with self._errors_in_words():
            next(self._client.list(self._objects, self._directory + "/", chunk_size=1), None)

    # --------------------------------------------------------------------------------------------------- helpers

    @property
    def _file_bytes(self) -> int:
        return self._block_bytes + SEAL_BYTES

    def _path(self, key: OffloadKey) -> str:
        # Some services are file systems inside, with names of 255 bytes at most. A scan leaves out what has a digest.
        name = key.hex() if len(key) <= _LONGEST_KEY else f"~{hashlib.blake2b(key, digest_size=32).hexdigest()}"
        return f"{self._directory}/{name}"

    def _bytes(self, block: memoryview) -> memoryview:
        assert block.nbytes == self._block_bytes, f"a block of {block.nbytes} bytes for a store of {self._block_bytes}"
        return block if block.ndim == 1 and block.format == "B" else block.cast("B")

    def _outcomes(self, requests: Requests, call: Callable[[int], bool], count: int) -> list[bool]:
        """The outcomes of ``count`` requests. What fails is a miss; if nothing came of the batch, the store fails.

        There are more requests than threads. So that those of a frozen server do not wait for one deadline after the
        other, none begins once one has failed and the deadline has passed since the batch began.
        """
        ends_s, has_failed = time.monotonic() + self._request_s, False

        def ask(index: int) -> bool:
            nonlocal has_failed
            if has_failed and time.monotonic() >= ends_s:
                return False
            try:
                return call(index)
            except BaseException:
                has_failed = True
                raise

        results = requests.run(ask, count)
        answers = [result is True for result in results]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and not any(answers):
            raise self._failed(errors[0]) from errors[0]
        return answers

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # a panic of obstore's is not an Exception
            raise self._failed(exc) from exc

    def _failed(self, exc: BaseException) -> StoreError:
        # The client's message goes on for many lines, with all of the request.
        reason = str(exc).strip().split("\n")[0].strip().rstrip(".")
        return StoreError(f"The object store {self._where} fails: {reason or type(exc).__name__}.")

    def _remove_bad(self, keys: list[OffloadKey]) -> None:
        with self._lock:
            self._bad += keys
            self._num_bad += len(keys)
        try:
            self.discard(keys)
        except StoreError:
            pass  # the next read finds them bad again


def _key_of(name: str) -> OffloadKey | None:
    try:
        return OffloadKey(bytes.fromhex(name))
    except ValueError:
        return None  # not ours
