# SPDX-License-Identifier: Apache-2.0
"""Both ways of moving runs, at every alignment, against numpy. Other threads may run meanwhile."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.cpu.copy.host import copy_to_device, copy_to_host, move_one_by_one
from kvoffload.cpu.copy.native import MoveRuns, native_mover
from kvoffload.cpu.copy.plan import Runs


def native(*runs: Any) -> None:
    mover = native_mover()
    if mover is None:
        pytest.skip("numba is not installed here")
    mover(*runs)


MOVERS: list[MoveRuns] = [native, move_one_by_one]


@pytest.mark.parametrize("move", MOVERS)
@settings(max_examples=60)
@given(
    runs=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=12),
    aligned=st.booleans(),
)
def test_exactly_the_runs_are_written(move: MoveRuns, runs: list[tuple[int, int, int]], aligned: bool) -> None:
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
    move(*(np.array(column, dtype=np.int64) for column in zip(*moves, strict=True)))
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


@pytest.fixture
def fresh_mover() -> Any:
    native_mover.cache_clear()
    yield
    native_mover.cache_clear()


@pytest.mark.usefixtures("fresh_mover")
def test_without_numba_the_plain_way_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert native_mover() is None
    assert not caplog.records
    test_directions(4096)


@pytest.mark.usefixtures("fresh_mover")
def test_a_numba_that_cannot_compile_costs_speed_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if native_mover() is None:
        pytest.skip("numba is not installed here")
    native_mover.cache_clear()
    real_import = builtins.__import__

    def broken(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("llvmlite"):
            raise RuntimeError("releases disagree")
        return real_import(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert native_mover() is None
    assert "copied slower" in caplog.text
    assert "releases disagree" in caplog.text


@pytest.mark.parametrize("move", MOVERS)
def test_other_threads_run_meanwhile(move: Callable[..., None]) -> None:
    """This thread, which needs the GIL, sees half of a copy only if the copy releases it."""
    pages = np.ones(64 << 20, dtype=np.uint8)
    copies = np.zeros_like(pages)
    offsets = np.arange(0, len(pages), 4096, dtype=np.int64)
    arrays = copies.ctypes.data + offsets, pages.ctypes.data + offsets, np.full(len(offsets), 4096, dtype=np.int64)
    move(*(array[:1] for array in arrays))  # compiles
    seen_halfway = False
    for _ in range(50):
        copies[:] = 0
        thread = threading.Thread(target=move, args=arrays)
        thread.start()
        while thread.is_alive() and not seen_halfway:
            seen_halfway = bool(copies[0] == 1 and copies[-1] == 0)
        thread.join()
        np.testing.assert_array_equal(copies, pages)
        if seen_halfway:
            return
    pytest.fail("the copy was never seen halfway")
