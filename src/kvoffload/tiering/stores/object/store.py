# SPDX-License-Identifier: Apache-2.0
"""A block store in an object store: one object per block, the block and then its seal."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.tiering.stores.object.client import Deadlines, check_url, open_client
from kvoffload.tiering.stores.requests import Requests
from kvoffload.tiering.stores.shared import SharedStore, outcomes

_LONGEST_KEY = 112


class ObjectStore(SharedStore):
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
        super().__init__(block_bytes, namespace, secret)
        self.batch_blocks = requests
        self._where = check_url(url)
        deadlines = deadlines or Deadlines()
        self._request_s = deadlines.request_s
        self._client, self._objects = open_client(url, config or {}, deadlines, tls_ca)
        self._reads, self._writes = Requests("object-read", requests), Requests("object-write", requests)

    def __repr__(self) -> str:
        return f"ObjectStore({self._where!r}, {self._digest!r}, block_bytes={self._block_bytes})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._outcomes(self._reads, lambda index: self._size(keys[index]) == self._file_bytes, len(keys))

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        there: set[int] = set()

        def put(index: int) -> bool:
            # Another engine may have written it. The question is a fraction of an upload, which the service would
            # take whole before it refuses it.
            size = self._size(keys[index])
            if size == self._file_bytes:
                there.add(index)
                return True
            sealed = b"".join(self._sealer.seal(keys[index], self._bytes(blocks[index])))
            mode = "create" if size is None else "overwrite"  # a value of another length is not the block
            try:
                self._client.put(self._objects, self._path(keys[index]), sealed, mode=mode, use_multipart=False)
            except self._client.exceptions.AlreadyExistsError:
                pass
            return True

        return self._outcomes(self._writes, put, len(keys), there)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        bad: list[OffloadKey] = []

        def get(index: int) -> bool:
            key, block = keys[index], self._bytes(blocks[index])
            try:
                found = self._client.get(self._objects, self._path(key))
                if found.meta["size"] == self._file_bytes:
                    value = memoryview(found.buffer())
                    if self._sealer.unseal(value[block.nbytes :], key, value[: block.nbytes], block):
                        return True
            except FileNotFoundError:
                return False
            bad.append(key)
            return False

        answers = self._outcomes(self._reads, get, len(keys))
        self._bad.remove(bad, self)
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

    def check(self) -> None:
        """Raises ``StoreError``, in one sentence, if the bucket cannot be used. A missing block alone looks like a
        missing bucket."""
        with self._errors_in_words():
            next(self._client.list(self._objects, self._digest + "/", chunk_size=1), None)

    # --------------------------------------------------------------------------------------------------- helpers

    @property
    def _file_bytes(self) -> int:
        return self._block_bytes + self._sealer.seal_bytes

    def _size(self, key: OffloadKey) -> int | None:
        """Bytes of the object of ``key``; ``None``: there is none."""
        try:
            return int(self._client.head(self._objects, self._path(key))["size"])
        except FileNotFoundError:
            return None

    def _path(self, key: OffloadKey) -> str:
        # Some services are file systems inside, with names of 255 bytes at most.
        name = key.hex() if len(key) <= _LONGEST_KEY else f"~{hashlib.blake2b(key, digest_size=32).hexdigest()}"
        return f"{self._digest}/{name}"

    def _outcomes(
        self, requests: Requests, call: Callable[[int], bool], count: int, there: Collection[int] = ()
    ) -> list[bool]:
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
        failures = [self._failed(result) for result in results if isinstance(result, BaseException)]
        return outcomes([result is True for result in results], failures, there)

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # a panic of obstore's is not an Exception
            raise self._failed(exc) from exc

    def _failed(self, exc: BaseException) -> StoreError:
        # The message of obstore goes on for many lines, with all of the request.
        reason = str(exc).strip().split("\n")[0].strip().rstrip(".")
        failure = StoreError(f"The object store {self._where} fails: {reason or type(exc).__name__}.")
        failure.__cause__ = exc
        return failure
