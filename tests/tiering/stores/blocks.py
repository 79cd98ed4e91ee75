# SPDX-License-Identifier: Apache-2.0
"""Blocks in and out of a store, in buffers that show whether anything touched them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.base import BlockStore

BLOCK_BYTES = 4096
UNTOUCHED = b"\xa5"


def write(store: BlockStore, keys: Sequence[OffloadKey], block_bytes: int = BLOCK_BYTES) -> list[bool]:
    return store.write(keys, [memoryview(block_of(key, block_bytes)) for key in keys])


def buffers(count: int, block_bytes: int = BLOCK_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(UNTOUCHED * block_bytes)) for _ in range(count)]


def read(store: BlockStore, keys: Sequence[OffloadKey], block_bytes: int = BLOCK_BYTES) -> list[bool]:
    """The outcomes. A block that is said to be read must be the right one."""
    targets = buffers(len(keys), block_bytes)
    answers = store.read_into(keys, targets)
    for key, target, is_read in zip(keys, targets, answers, strict=True):
        assert not is_read or bytes(target) == block_of(key, block_bytes), "a wrong byte was served"
    return answers


def succeeds(call: Callable[[], bool]) -> bool:
    """Return the answer of a call that fails until its server is back or the machine resumes."""
    try:
        return call()
    except StoreError:
        return False
