# SPDX-License-Identifier: Apache-2.0
"""Keys for tests."""

from __future__ import annotations

from kvoffload.base import OffloadKey, make_offload_key


def key(number: int, group_idx: int = 0) -> OffloadKey:
    """The key for ``number``, of realistic size (36 bytes)."""
    return make_offload_key(number.to_bytes(32, "big"), group_idx)


def keys(*numbers: int) -> list[OffloadKey]:
    """A key for each of ``numbers``, of group 0."""
    return [key(number) for number in numbers]
