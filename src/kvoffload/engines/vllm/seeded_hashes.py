# SPDX-License-Identifier: Apache-2.0
"""Block hashes that also contain something that vLLM's do not: the weights of an adapter, or the content of media."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import overload


class SeededHashes(Sequence[bytes]):
    """The block hashes of a request, each hashed with a seed."""

    def __init__(self, hashes: Sequence[bytes], seed_of: Callable[[int], bytes]) -> None:
        """``seed_of`` returns the seed of a block by its index. Empty: vLLM's hash is enough."""
        self._hashes, self._seed_of = hashes, seed_of

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        chosen = range(len(self._hashes))[index]
        return self._seeded(chosen) if isinstance(chosen, int) else [self._seeded(each) for each in chosen]

    def _seeded(self, index: int) -> bytes:
        block_hash, seed = self._hashes[index], self._seed_of(index)
        return (
            hashlib.blake2b(block_hash, digest_size=len(block_hash), key=seed).digest() if seed else bytes(block_hash)
        )
