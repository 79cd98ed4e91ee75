# SPDX-License-Identifier: Apache-2.0
"""A block store in an object store: one object per block, which is the block and then its seal."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.tiering.stores.object.client import (
    Client,
    Deadlines,
    asks_to_slow_down,
    check_url,
    code_of,
    in_words,
    is_without_reason,
)
from kvoffload.tiering.stores.object.pace import Pace
from kvoffload.tiering.stores.requests import Requests
from kvoffload.tiering.stores.secrets import Secret
from kvoffload.tiering.stores.shared import SharedStore, outcomes

T = TypeVar("T")

_LONGEST_KEY = 112
_UNREADABLE = ("InvalidObjectState", "BlobArchived")
"""Codes of S3 and Azure for an object that a lifecycle rule has moved to an archive. Its size can be asked, but it
cannot be read."""


class ObjectStore(SharedStore):
    """Blocks of ``block_bytes`` as objects below ``url``: ``s3://bucket/prefix``, ``gs://...`` or ``az://...``.

    The constructor does no I/O. ``config`` are obstore's settings for the service (``endpoint``, ``region``,
    ``access_key_id`` and so on); missing settings come from the environment and the machine. Up to ``requests`` of each
    direction are in flight at once, in the store's own threads. The store does not evict; use a lifecycle rule of the
    bucket.

    The client gets copies of blocks and returns its own memory, so that a request that outlives its deadline never
    refers to a slot.
    """

    requests_in_flight = 2
    """A batch keeps all requests busy, and a second batch is ready when its last requests end."""

    def __init__(
        self,
        url: str,
        block_bytes: int,
        namespace: str = "",
        *,
        config: Mapping[str, Secret] | None = None,
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
        self._client = Client(url, config or {}, deadlines, tls_ca)
        self._pace = Pace(2 * requests)
        self._reads, self._writes = Requests("object-read", requests), Requests("object-write", requests)

    def __repr__(self) -> str:
        return f"ObjectStore({self._where!r}, {self._digest!r}, block_bytes={self._block_bytes})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._outcomes(self._reads, lambda index: self._is_there(keys[index]), len(keys))

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        there: set[int] = set()

        def put(index: int) -> bool:
            # Another engine may have written it. Asking costs a fraction of an upload, which the service would receive
            # completely before rejecting it.
            if self._is_there(keys[index]):
                there.add(index)
                return True
            sealed = b"".join(self._sealer.seal(keys[index], self._bytes(blocks[index])))
            path = self._path(keys[index])
            # Not on the condition that it is absent: some services reject conditions, and both writers have this block.
            self._request(lambda bucket: self._client.obstore.put(bucket, path, sealed, use_multipart=False))
            self._bad.kept.discard(keys[index])
            return True

        return self._outcomes(self._writes, put, len(keys), there)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        bad: list[OffloadKey] = []

        def get(index: int) -> bool:
            key, block = keys[index], self._bytes(blocks[index])
            try:
                found = self._request(lambda bucket: self._client.obstore.get(bucket, self._path(key)))
                if found.meta["size"] == self._file_bytes:
                    value = memoryview(found.buffer())
                    if self._sealer.unseal(value[block.nbytes :], key, value[: block.nbytes], block):
                        return True
            except FileNotFoundError:
                return False
            except Exception as exc:
                if code_of(exc) not in _UNREADABLE:
                    raise
            bad.append(key)
            return False

        answers = self._outcomes(self._reads, get, len(keys))
        self._bad.remove(bad, self)
        return answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        if not keys:
            return
        with self._errors_in_words(), self._pace.turn():
            try:
                paths = [self._path(key) for key in dict.fromkeys(keys)]
                self._request(lambda bucket: self._client.obstore.delete(bucket, paths))
            except FileNotFoundError:
                pass

    def close(self) -> None:
        self._reads.close()
        self._writes.close()

    def check(self) -> None:
        """Raise ``StoreError``, in one sentence, if the bucket cannot be used. A request for a missing block would not
        suffice, because a missing bucket gives the same answer."""
        with self._errors_in_words():
            self._request(self._list)

    # --------------------------------------------------------------------------------------------------- helpers

    @property
    def _file_bytes(self) -> int:
        return self._block_bytes + self._sealer.seal_bytes

    def _is_there(self, key: OffloadKey) -> bool:
        return key not in self._bad.kept and self._size(key) == self._file_bytes

    def _size(self, key: OffloadKey) -> int | None:
        """Return the bytes of the object of ``key``, or ``None`` without one."""
        try:
            return int(self._request(lambda bucket: self._client.obstore.head(bucket, self._path(key)))["size"])
        except FileNotFoundError:
            return None

    def _list(self, bucket: Any) -> None:
        next(self._client.obstore.list(bucket, self._digest + "/", chunk_size=1), None)

    def _request(self, call: Callable[[Any], T]) -> T:
        """Return the result of ``call`` for the bucket. If it fails and the credentials have been replaced since the
        client was opened, call it once more with the new ones."""
        bucket, num_slowed = self._client.bucket, self._pace.num_slowed
        try:
            result = call(bucket)
        except (FileNotFoundError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # a panic of obstore's is not an Exception
            if asks_to_slow_down(exc):
                self._pace.slow_down(num_slowed)
                raise
            if not self._client.renew(bucket):
                raise
            return call(self._client.bucket)
        self._pace.go_on()
        return result

    def _path(self, key: OffloadKey) -> str:
        # Some services are file systems inside, with names of 255 bytes at most.
        name = key.hex() if len(key) <= _LONGEST_KEY else f"~{hashlib.blake2b(key, digest_size=32).hexdigest()}"
        return f"{self._digest}/{name}"

    def _outcomes(
        self, requests: Requests, call: Callable[[int], bool], count: int, there: Collection[int] = ()
    ) -> list[bool]:
        """Return the outcomes of ``count`` requests. A failed request is a miss; if all requests fail, the store fails.

        A batch contains more requests than threads, and perhaps than turns. So that requests to a frozen server do not
        wait for one deadline after another, no request begins after one has failed and the deadline since the start of
        the batch has passed.
        """
        ends_s, has_failed = time.monotonic() + self._request_s, False

        def ask(index: int) -> bool:
            nonlocal has_failed
            with self._pace.turn():
                if has_failed and time.monotonic() >= ends_s:
                    return False
                try:
                    return call(index)
                except BaseException:
                    has_failed = True
                    raise

        results = requests.run(ask, count)
        errors = [result for result in results if isinstance(result, BaseException)]
        answers = [result is True for result in results]
        if errors and not any(answers) and is_without_reason(errors[0]):
            # The answer to a HEAD request lacks a body and therefore a reason, so an operator has to find it.
            errors[:0] = [each for each in requests.run(lambda _: self._list(self._client.bucket), 1) if each]
        return outcomes(answers, [self._failed(error) for error in errors], there)

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # a panic of obstore's is not an Exception
            raise self._failed(exc) from exc

    def _failed(self, exc: BaseException) -> StoreError:
        failure = StoreError(f"The object store {self._where} fails: {in_words(exc) or type(exc).__name__}.")
        failure.__cause__ = exc
        return failure
