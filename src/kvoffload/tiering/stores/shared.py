# SPDX-License-Identifier: Apache-2.0
"""Common code of the stores that many machines share."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats
from kvoffload.tiering.stores.seal import sealer_of, shared_identity

_MOST_KEPT = 65_536


class BadBlocks:
    """Blocks that reads of a store found bad. They are deleted, so that they can be written again, and reported as
    lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: list[OffloadKey] = []
        self.count = 0
        """Number of bad blocks since the store was opened."""
        self.kept = set[OffloadKey]()
        """Bad blocks that could not be deleted. They count as absent until they are overwritten."""

    def remove(self, keys: Collection[OffloadKey], store: BlockStore) -> None:
        if not keys:
            return
        try:
            store.discard(list(keys))
        except (StoreError, OSError):
            # Deleting may be forbidden here. Without this, a bad block would be found, read and dropped forever.
            with self._lock:
                self.kept.update(keys)
                while len(self.kept) > _MOST_KEPT:
                    self.kept.pop()
        # Afterwards, so that a write that found them is not announced after their loss.
        with self._lock:
            self._keys += keys
            self.count += len(keys)

    def take(self) -> dict[OffloadKey, LossCause]:
        with self._lock:
            keys, self._keys = self._keys, []
        return dict.fromkeys(keys, "corrupt")


class SharedStore(BlockStore):
    """A store of sealed blocks of ``block_bytes``. With a ``secret`` (``stores/seal.py``) nobody else can make a block
    that is served, or read one."""

    def __init__(self, block_bytes: int, namespace: str, secret: bytes | None) -> None:
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, not {block_bytes}.")
        self._block_bytes = block_bytes
        identity, self._digest = shared_identity(namespace, block_bytes, secret)
        self._sealer = sealer_of(identity, secret)
        self._bad = BadBlocks()

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        return self._bad.take()

    def stats(self) -> StoreStats:
        return StoreStats(corrupt_blocks=self._bad.count)

    def _bytes(self, block: memoryview) -> memoryview:
        return bytes_of(block, self._block_bytes)


def bytes_of(block: memoryview, block_bytes: int) -> memoryview:
    """Return ``block``, which must be ``block_bytes`` long, as plain bytes."""
    assert block.nbytes == block_bytes, f"a block of {block.nbytes} bytes for a store of {block_bytes}"
    return block if block.ndim == 1 and block.format == "B" else block.cast("B")


def outcomes(answers: list[bool], failures: Sequence[StoreError], there: Collection[int] = ()) -> list[bool]:
    """Return the ``answers`` of a batch with these ``failures``: each failed block is a miss. If every block failed,
    the store fails as a whole, and this raises the first failure. Blocks that were ``there`` already (a list of
    indexes) do not prove that the store accepts writes."""
    if failures and not any(is_good and index not in there for index, is_good in enumerate(answers)):
        raise failures[0]
    return answers
