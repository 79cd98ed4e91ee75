# SPDX-License-Identifier: Apache-2.0
"""Keys for tests."""

from __future__ import annotations

from kvoffload.base import OffloadKey, make_offload_key

__all__ = ["key", "keys"]


def key(number: int, group_idx: int = 0) -> OffloadKey:
    """A key of realistic size (36 bytes) that is a function of ``number``."""
    return make_offload_key(number.to_bytes(32, "big"), group_idx)


def keys(*numbers: int) -> list[OffloadKey]:
    return [key(number) for number in numbers]
