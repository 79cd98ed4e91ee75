# SPDX-License-Identifier: Apache-2.0
"""Make keys for tests."""

from __future__ import annotations

from kvoffload.base import OffloadKey, make_offload_key


def key(number: int, group_idx: int = 0) -> OffloadKey:
    """Return the key for ``number``. It has a realistic size (36 bytes)."""
    return make_offload_key(number.to_bytes(32, "big"), group_idx)


def keys(*numbers: int) -> list[OffloadKey]:
    """Return a key of group 0 for each of ``numbers``."""
    return [key(number) for number in numbers]
