# SPDX-License-Identifier: Apache-2.0
"""Pages ahead of their use."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from kvoffload.cpu import populate


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _resident_pages(memory: mmap.mmap) -> int:
    num_pages = len(memory) // mmap.PAGESIZE
    seen = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mincore(ctypes.c_void_p(_address(memory)), ctypes.c_size_t(len(memory)), seen)
    return sum(page & 1 for page in seen)


def test_every_page_is_there_and_what_was_written_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate, "_PIECE_BYTES", 3 * mmap.PAGESIZE)
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[5] = 7
    assert _resident_pages(memory) < 64
    if not populate.populate(_address(memory), len(memory), num_threads=3):
        pytest.skip("this kernel cannot allocate pages ahead")
    assert _resident_pages(memory) == 64
    assert memory[5] == 7
    assert sum(memory[:]) == 7


@pytest.mark.parametrize("is_known", [True, False])
def test_pages_are_made_near_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    allowed = os.sched_getaffinity(0)
    near = {max(allowed)} if is_known else {1 << 20}
    seen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: seen.append(cores))
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    populate.populate(_address(memory), len(memory), near=near)
    assert seen == [near if is_known else allowed]


def test_what_cannot_be_done_ahead_is_said_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    monkeypatch.setattr(populate, "_MADV_POPULATE_WRITE", 9999)  # as an old kernel answers
    assert not populate.populate(_address(memory), len(memory))
