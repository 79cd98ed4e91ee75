# SPDX-License-Identifier: Apache-2.0
"""What the stores that many machines share do alike."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats
from kvoffload.tiering.stores.seal import sealer_of, shared_identity

__all__ = ["SharedStore", "bytes_of", "outcomes"]


class SharedStore(BlockStore):
    """A store of sealed blocks of ``block_bytes``. What it read whole and found bad it deletes, so that it can be
    written anew, and reports as lost. With a ``secret`` (``stores/seal.py``) nobody
    else can make a block that is served, or read one."""

    def __init__(self, block_bytes: int, namespace: str, secret: bytes | None) -> None:
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, not {block_bytes}.")
        self._block_bytes = block_bytes
        identity, self._digest = shared_identity(namespace, block_bytes, secret)
        self._sealer = sealer_of(identity, secret)
        self._lock = threading.Lock()
        self._bad: list[OffloadKey] = []
        self._num_bad = 0

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        with self._lock:
            bad, self._bad = self._bad, []
        return dict.fromkeys(bad, "corrupt")

    def stats(self) -> StoreStats:
        return StoreStats(corrupt_blocks=self._num_bad)

    def _bytes(self, block: memoryview) -> memoryview:
        return bytes_of(block, self._block_bytes)

    def _remove_bad(self, keys: Collection[OffloadKey]) -> None:
        if not keys:
            return
        try:
            self.discard(list(keys))
        except StoreError:
            pass  # the next read finds them bad again
        # Afterwards: a write that found them there is not announced after their loss.
        with self._lock:
            self._bad += keys
            self._num_bad += len(keys)


def bytes_of(block: memoryview, block_bytes: int) -> memoryview:
    """``block``, which must have ``block_bytes``, as plain bytes."""
    assert block.nbytes == block_bytes, f"a block of {block.nbytes} bytes for a store of {block_bytes}"
    return block if block.ndim == 1 and block.format == "B" else block.cast("B")


def outcomes(answers: list[bool], failures: Sequence[StoreError], there: Collection[int] = ()) -> list[bool]:
    """The ``answers`` of a batch in which ``failures`` happened: what failed is a miss. If nothing came of the batch,
    the store fails as a whole: raises the first of them. Blocks that were ``there`` already, by their indexes, do not
    show that a store takes any."""
    if failures and not any(is_good and index not in there for index, is_good in enumerate(answers)):
        raise failures[0]
    return answers
