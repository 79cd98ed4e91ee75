# SPDX-License-Identifier: Apache-2.0
"""Moving runs, at every alignment, against numpy. Other threads may run meanwhile."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.cpu.copy.host import copy_to_device, copy_to_host
from kvoffload.cpu.copy.plan import Runs


@settings(max_examples=60)
@given(
    runs=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=12),
    aligned=st.booleans(),
)
def test_exactly_the_runs_are_written(runs: list[tuple[int, int, int]], aligned: bool) -> None:
    """``runs``: (length, gap before it in the source, gap before it in the destination)."""
    source = np.random.default_rng(len(runs)).integers(1, 256, 12 * 900, dtype=np.uint8)
    destination = np.zeros(12 * 900, dtype=np.uint8)
    expected = destination.copy()
    read = written = 0
    moves = []
    for length, source_gap, destination_gap in runs:
        read += source_gap
        written += destination_gap
        if aligned:
            written += -(destination.ctypes.data + written) % 32
        expected[written : written + length] = source[read : read + length]
        moves.append((destination.ctypes.data + written, source.ctypes.data + read, length))
        read += length
        written += length
    moves.reverse()
    destinations, sources, lengths = (np.array(column, dtype=np.int64) for column in zip(*moves, strict=True))
    copy_to_host(Runs(sources, destinations, lengths))
    np.testing.assert_array_equal(destination, expected)


@pytest.mark.parametrize("page_bytes", [4096, 256 << 10])
def test_directions(page_bytes: int) -> None:
    device = np.random.default_rng(0).integers(0, 256, (6, page_bytes), dtype=np.uint8)
    host = np.zeros((6, page_bytes), dtype=np.uint8)
    ids, slots = np.array([4, 1, 3]), np.array([0, 5, 2])
    lengths = np.full(3, page_bytes)
    runs = Runs(device.ctypes.data + ids * page_bytes, host.ctypes.data + slots * page_bytes, lengths)
    copy_to_host(runs)
    np.testing.assert_array_equal(host[slots], device[ids])
    assert not host[[1, 3, 4]].any()
    stored = device.copy()
    device[:] = 0
    copy_to_device(runs)
    np.testing.assert_array_equal(device[ids], stored[ids])
    assert not device[[0, 2, 5]].any()


def test_nothing_is_copied_for_an_empty_plan() -> None:
    nothing = np.empty(0, dtype=np.int64)
    copy_to_host(Runs(nothing, nothing, nothing))


def test_runs_in_order_are_the_same_runs() -> None:
    runs = Runs(np.array([300, 100, 200]), np.array([10, 30, 20]), np.array([1, 2, 3]))
    by_device, by_host = runs.in_order_of(runs.device), runs.in_order_of(runs.host)
    assert (by_device.device.tolist(), by_device.host.tolist(), by_device.lengths.tolist()) == (
        [100, 200, 300],
        [30, 20, 10],
        [2, 3, 1],
    )
    assert by_host.host.tolist() == [10, 20, 30]


def test_other_threads_run_meanwhile() -> None:
    """This thread, which needs the GIL, sees half of a copy only if the copy releases it."""
    pages = np.ones(64 << 20, dtype=np.uint8)
    copies = np.zeros_like(pages)
    offsets = np.arange(0, len(pages), 4096, dtype=np.int64)
    lengths = np.full(len(offsets), 4096, dtype=np.int64)
    runs = Runs(pages.ctypes.data + offsets, copies.ctypes.data + offsets, lengths)
    seen_halfway = False
    for _ in range(50):
        copies[:] = 0
        thread = threading.Thread(target=copy_to_host, args=(runs,))
        thread.start()
        while thread.is_alive() and not seen_halfway:
            seen_halfway = bool(copies[0] == 1 and copies[-1] == 0)
        thread.join()
        assert np.array_equal(copies, pages)  # a message about 64 MiB would take a second
        if seen_halfway:
            return
    pytest.fail("the copy was never seen halfway")
