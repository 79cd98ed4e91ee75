# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap

import pytest

from kvoffload.tiering.stores.direct_io import PAGE_BYTES, after, is_aligned


@pytest.mark.parametrize("readonly", [False, True])
def test_a_buffer_is_aligned_if_it_begins_at_a_page(readonly: bool) -> None:
    memory = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
    memory = memory.toreadonly() if readonly else memory
    assert [is_aligned(memory[at:]) for at in (0, 1, 512, PAGE_BYTES - 1, PAGE_BYTES)] == [True, *[False] * 3, True]


def test_what_is_left_of_buffers() -> None:
    buffers = [memoryview(b"abc"), memoryview(b"de"), memoryview(b"f")]
    for moved in range(7):
        assert b"".join(after(buffers, moved)) == b"abcdef"[moved:]
        assert all(left.nbytes for left in after(buffers, moved))
