# SPDX-License-Identifier: Apache-2.0
"""Prefix-chained block hashes, which identify a block's content and are the same in every process and on every
machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_VERSION = b"kvoffload reference engine 1"


def root_hash(cache_salt: str = "") -> bytes:
    """Return the parent hash of a request's first block. Requests with different salts never share a block."""
    return hashlib.sha256(_VERSION + b"\0" + cache_salt.encode()).digest()


def extend_block_hashes(hashes: list[bytes], root: bytes, tokens: Sequence[int], block_tokens: int) -> None:
    """Append the 32-byte hashes of the blocks of ``tokens`` that have become full since the last call.

    A hash covers its block's tokens and, through its parent's hash, all tokens before them.
    """
    for block in range(len(hashes), len(tokens) // block_tokens):
        parent = hashes[block - 1] if block else root
        ids = np.asarray(tokens[block * block_tokens : (block + 1) * block_tokens], dtype="<u4")
        hashes.append(hashlib.sha256(parent + ids.tobytes()).digest())
