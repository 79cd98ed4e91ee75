# SPDX-License-Identifier: Apache-2.0
"""Both ways of moving runs, at every alignment, against numpy. Other threads may run meanwhile."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizes import by_size

from kvoffload.cpu.copy.host import copy_to_device, copy_to_host, move_one_by_one
from kvoffload.cpu.copy.native import CompiledLater, MoveRuns, compile_mover
from kvoffload.cpu.copy.plan import Runs

compiled = functools.cache(compile_mover)


def native(*runs: Any) -> None:
    mover = compiled()
    if mover is None:
        pytest.skip("llvmlite is not installed here")
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


def test_runs_of_another_shape_are_no_runs() -> None:
    if (move := compiled()) is None:
        pytest.skip("llvmlite is not installed here")
    one, two = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
    move(one[:0], one[:0], one[:0])
    with pytest.raises(AssertionError, match="as many"):
        move(two, one, one)


# ------------------------------------------------------------------------------------------- when it is compiled


def test_copies_go_plain_until_the_first_one_has_had_the_loop_compiled() -> None:
    may_compile, was_plain, was_fast = threading.Event(), [], []

    def compile_slowly() -> MoveRuns:
        assert threading.current_thread() is not threading.main_thread()
        may_compile.wait()
        return lambda *runs: was_fast.append(runs)

    mover = CompiledLater(lambda *runs: was_plain.append(runs), compile_slowly)
    runs = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for _ in range(3):
        mover(*runs)
    assert len(was_plain) == 3
    may_compile.set()
    mover.wait()
    mover(*runs)
    assert (len(was_plain), len(was_fast)) == (3, 1)


def test_where_nothing_faster_can_be_had_copies_stay_plain() -> None:
    calls = []
    mover = CompiledLater(lambda *runs: calls.append(runs), lambda: None)
    runs = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    mover(*runs)
    mover.wait()
    mover(*runs)
    assert len(calls) == 2


@pytest.mark.parametrize("with_llvmlite", by_size([True], [True, False]))
def test_a_process_that_copies_nothing_loads_no_compiler(with_llvmlite: bool) -> None:
    """Also that the first copies are right, with or without one."""
    script = f"""
import sys, threading
if not {with_llvmlite}:
    sys.modules["llvmlite"] = None
import torch
from kvoffload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec, ReqContext
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, parse_config
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.specs import make_spec

def compilers():
    return {{name.partition(".")[0] for name, module in sys.modules.items() if module}} & {{"llvmlite", "numba"}}

config = parse_config({{"cpu_bytes_to_use": 1 << 20, "spec_name": "TieringOffloadingSpec",
                        "secondary_tiers": [{{"type": "memory", "max_bytes": "1MiB"}}]}})
layout = EngineLayout((KVGroupLayout(GroupKind.FULL_ATTENTION, 16, 4096),), 16, "start")
spec = make_spec(config, layout)
manager = spec.get_manager()
cache = torch.arange(8 * 4096, dtype=torch.int64).to(torch.uint8).reshape(8, 4096)
expected = cache.clone()
caches = CanonicalKVCaches([CanonicalKVCacheTensor(cache, 4096)], [[CanonicalKVCacheRef(0, 4096)]])
handlers = spec.get_handlers(caches)
assert not compilers(), compilers()
assert not [thread.name for thread in threading.enumerate() if "compile" in thread.name]
store, load = handlers["GPU", "CPU"], handlers["CPU", "GPU"]
for turn in range(40):
    gpu, cpu = GPULoadStoreSpec(list(range(8)), [8], [0]), CPULoadStoreSpec([7, 6, 5, 4, 3, 2, 1, 0])
    store.transfer_async(2 * turn, (gpu, cpu))
    store.wait([2 * turn])
    cache.zero_()
    load.transfer_async(2 * turn + 1, (cpu, gpu))
    load.wait([2 * turn + 1])
    assert cache.equal(expected), turn
for thread in threading.enumerate():
    if "compile" in thread.name:
        thread.join()
assert compilers() == ({{"llvmlite"}} if {with_llvmlite} else set()), compilers()
spec.shutdown()
print("done")
"""
    if with_llvmlite and compiled() is None:
        pytest.skip("llvmlite is not installed here")
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_without_llvmlite_nothing_is_compiled_and_nothing_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.delitem(sys.modules, "llvmlite.binding", raising=False)
    assert compile_mover() is None
    assert not caplog.records


def test_a_compiler_that_fails_costs_speed_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("releases disagree")

    llvmlite = pytest.importorskip("llvmlite")
    real, llvmlite.binding = pytest.importorskip("llvmlite.binding"), Broken()
    sys.modules["llvmlite.binding"] = llvmlite.binding
    try:
        assert compile_mover() is None
    finally:
        sys.modules["llvmlite.binding"] = llvmlite.binding = real
    assert "more slowly" in caplog.text
    assert "releases disagree" in caplog.text


@pytest.mark.parametrize("move", MOVERS)
def test_other_threads_run_meanwhile(move: Callable[..., None]) -> None:
    """This thread, which needs the GIL, sees half of a copy only if the copy releases it."""
    pages = np.ones(64 << 20, dtype=np.uint8)
    copies = np.zeros_like(pages)
    offsets = np.arange(0, len(pages), 4096, dtype=np.int64)
    arrays = copies.ctypes.data + offsets, pages.ctypes.data + offsets, np.full(len(offsets), 4096, dtype=np.int64)
    move(*(array[:1] for array in arrays))  # compiles, where it does
    seen_halfway = False
    for _ in range(50):
        copies[:] = 0
        thread = threading.Thread(target=move, args=arrays)
        thread.start()
        while thread.is_alive() and not seen_halfway:
            seen_halfway = bool(copies[0] == 1 and copies[-1] == 0)
        thread.join()
        assert np.array_equal(copies, pages)  # a message about 64 MiB would take a second
        if seen_halfway:
            return
    pytest.fail("the copy was never seen halfway")
