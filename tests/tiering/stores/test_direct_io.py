# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap
import os
import signal
from pathlib import Path

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


def test_a_direct_read_has_ended_when_its_call_returns(tmp_path: Path) -> None:
    """This includes a read that a signal interrupts: the reported bytes are there, and nothing is written to the buffer
    later."""
    size, marked = 16 * PAGE_BYTES, b"\xa5"
    (tmp_path / "file").write_bytes(content := os.urandom(size))
    try:
        file = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("no direct I/O here")
    memory = memoryview(mmap.mmap(-1, 50 * size))
    slots = [memory[start : start + size] for start in range(0, memory.nbytes, size)]
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        for slot in slots:
            count = os.preadv(file, [slot], 0)
            assert slot[:count] == content[:count]
            slot[:] = marked * size
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(file)
    assert memory.tobytes() == marked * memory.nbytes
