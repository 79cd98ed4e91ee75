# SPDX-License-Identifier: Apache-2.0
"""Test the CUDA backend over a fake driver: the shipped contract, its rules one by one, failures, and random jobs.

This proves order and lifetimes according to our reading of CUDA's documentation. ``test_cuda_device.py`` tests a real
device.
"""

from __future__ import annotations

import gc
import logging
import random
import time
import weakref
from collections.abc import Collection

import numpy as np
import pytest
import torch
from tests.cpu.copy.cuda_rig import CudaRig, layout_of, make_rig
from tests.cpu.copy.fake_cuda import BROKEN, FakeCuda, cuda
from tests.cpu.copy.scenarios import SCENARIOS, Scenario
from tests.fakes.handler_contract import HandlerContract, HandlerRig, collect
from tests.sizes import by_size

from kvoffload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingHandler, TransferResult
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy import cuda as backend
from kvoffload.cpu.copy import lane, self_check
from kvoffload.cpu.copy.cuda import CudaDevice, make_cuda_handlers
from kvoffload.cpu.copy.driver import CudaError
from kvoffload.cpu.copy.plan import CopyLayout, PageRef
from kvoffload.errors import CapacityError, LayoutError, TransferError

__all__ = ["cuda"]

ALL_SWAPS = self_check._SWAPS


class _Contract(HandlerContract):
    cuda: FakeCuda

    @pytest.fixture(autouse=True)
    def _use(self, cuda: FakeCuda) -> None:
        self.cuda = cuda


class TestCudaHandlers(_Contract):
    def make_rig(self) -> HandlerRig:
        return make_rig(self.cuda)


class TestCudaHandlersOfSmallPages(_Contract):
    def make_rig(self) -> HandlerRig:
        return make_rig(self.cuda, small=True)


class TestCudaHandlersOverPieces(_Contract):
    def make_rig(self) -> HandlerRig:
        self.cuda.limit_registrations(largest_bytes=1 << 20)
        rig = make_rig(self.cuda, factor=3, rank=1)
        assert self.cuda.count("registrations") > 2
        return rig


class TestCudaHandlersWithSingleCopies(_Contract):
    def make_rig(self) -> HandlerRig:
        self.cuda.set_version(12_070)
        assert not self.cuda.driver.has_batch
        return make_rig(self.cuda, factor=2)


class TestCudaHandlersWithoutRegistration(_Contract):
    """As under confidential computing."""

    def make_rig(self) -> HandlerRig:
        self.cuda.refuse_registrations()
        rig = make_rig(self.cuda, factor=2)
        assert self.cuda.count("registrations") == 0
        return rig


@pytest.mark.parametrize("check", SCENARIOS, ids=lambda check: check.__name__)
def test_rule(cuda: FakeCuda, check: Scenario) -> None:
    check(cuda, make_cuda_handlers)


@pytest.mark.parametrize("seed", range(by_size(6, 60)))
def test_random_jobs_leave_what_a_serial_run_leaves(cuda: FakeCuda, seed: int) -> None:
    """Jobs of several blocks, some named twice, flushes, and compute that overwrites blocks after a flush."""
    cuda.pace(seed)
    if seed % 3 == 1:
        cuda.limit_registrations(largest_bytes=1 << 18)
    if seed % 3 == 2:
        cuda.refuse_registrations()
    rig, chance = make_rig(cuda, layered=seed % 4 > 1), random.Random(seed)
    rig.fill(seed)
    blocks = [rig.read_page(0, block) for block in range(16)]
    slots: dict[int, np.ndarray] = {}
    open_jobs: dict[OffloadingHandler, list[int]] = {rig.store: [], rig.load: []}
    for job_id in range(by_size(150, 600)):
        n = chance.randrange(1, 4)
        is_store = len(slots) < 4 or chance.random() < 0.5
        if is_store:
            gpu_ids = [chance.randrange(16) for _ in range(n)]
            slot_ids = chance.sample(range(8), n)
            slots |= {slot: blocks[block] for block, slot in zip(gpu_ids, slot_ids, strict=True)}
        else:
            gpu_ids = chance.sample(range(16), n)
            slot_ids = [chance.choice(list(slots)) for _ in range(n)]
            for block, slot in zip(gpu_ids, slot_ids, strict=True):
                blocks[block] = slots[slot]
        gpu, cpu = GPULoadStoreSpec(gpu_ids, [n, 0], [0, 0]), CPULoadStoreSpec(slot_ids)
        handler = rig.store if is_store else rig.load
        handler.transfer_async(job_id, (gpu, cpu) if is_store else (cpu, gpu))
        open_jobs[handler].append(job_id)
        if chance.random() < 0.2:
            for handler, ids in open_jobs.items():
                handler.flush(ids)
            block = chance.randrange(16)
            blocks[block] = np.full(4096, chance.randrange(256), np.uint8)
            rig.compute_fills(block, int(blocks[block][0]))
    for handler, ids in open_jobs.items():
        assert all(result.success for result in collect(handler, ids).values())
    cuda.settle()
    for block in range(16):
        np.testing.assert_array_equal(rig.read_page(0, block), blocks[block])
    rig.close()


# -------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "call",
    [
        "cuStreamWaitEvent",
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventElapsedTime",
    ],
)
def test_an_error_of_any_call_ends_one_job(cuda: FakeCuda, call: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(cuda)
    rig.start(0, rig.store, 0, 0)
    cuda.fail(call)
    with caplog.at_level(logging.ERROR):
        for job_id in range(1, 50):  # until the pool is empty
            rig.start(job_id, rig.store, job_id % 16, job_id % 8)
    results = collect(rig.store, range(50))
    assert sorted(result.success for result in results.values()) == [False] + [True] * 49
    assert "transfer" in caplog.text
    rig.start(50, rig.load, 1, 1)
    assert collect(rig.load, [50])[50].success
    rig.close()


def test_an_error_of_a_wait_waits_all_the_same(cuda: FakeCuda) -> None:
    cuda.pace(1, longest_pause_us=20_000)
    rig = make_rig(cuda)
    rig.tensors[0][1] = 5
    rig.start(1, rig.store, 1, 2)
    cuda.fail("cuEventQuery")
    rig.store.wait([1])
    assert rig.in_slot(2) == {5}
    rig.tensors[0][1] = 6
    rig.start(2, rig.store, 1, 2)
    cuda.fail("cuStreamWaitEvent")
    rig.store.flush([2])
    assert rig.in_slot(2) == {6}
    with cuda.held(rig.compute):
        rig.compute_fills(3, 1)
        rig.start(3, rig.load, 3, 2)
    rig.load.wait([3])
    cuda.settle()
    assert rig.in_block(3) == {6}
    rig.close()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the memory that the process keeps because copies may still use it."""
    memory: list[object] = []
    monkeypatch.setattr(backend, "_MEMORY_OF_HUNG_DEVICES", memory)
    return memory


@pytest.mark.parametrize("holds_compute", [False, True])
def test_a_broken_device_fails_jobs_and_hangs_nothing(cuda: FakeCuda, kept: list[object], holds_compute: bool) -> None:
    """Only the store that the device may still be copying gets no result, so that its slot stays in use."""
    rig = make_rig(cuda)
    if holds_compute:
        cuda.calls.fake_hold(rig.compute, 1)
        rig.compute_fills(1, 3)
    rig.start(0, rig.store, 0, 0)
    cuda.break_device()
    rig.start(1, rig.load, 2, 0)
    rig.store.wait([0])
    rig.load.wait([1])
    rig.store.flush([0])
    assert not collect(rig.load, [1])[1].success
    calls = cuda.count("batches")
    rig.start(2, rig.store, 0, 0)
    assert not collect(rig.store, [2])[2].success
    assert cuda.count("batches") == calls
    assert rig.store.get_finished() == []
    if holds_compute:
        cuda.calls.fake_hold(rig.compute, 0)
    _close_broken(cuda, rig, kept)


@pytest.mark.parametrize(
    "call",
    ["cuMemcpyBatchAsync", "cuMemsetD8Async", "cuStreamWaitEvent", "cuEventRecord", "cuEventQuery"],
)
def test_a_sticky_error_of_any_call_fails_all_jobs(
    cuda: FakeCuda,
    kept: list[object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    rig = make_rig(cuda, layered=True)
    monkeypatch.setattr(lane, "PIECE_RUNS", 4)
    cuda.fail(call, code=BROKEN)
    for job_id in range(4):
        rig.put(job_id, rig.store, range(4), range(4))
        rig.put(10 + job_id, rig.load, range(4), range(4))
    assert not any(result.success for result in collect(rig.load, range(10, 14)).values())
    rig.store.wait(range(4))
    assert not any(result.success for result in rig.store.get_finished())
    assert all(job.has_copies for job in rig.store._open)  # type: ignore[attr-defined]
    assert "The CUDA device is broken" in caplog.text
    _close_broken(cuda, rig, kept)


def test_a_late_copy_of_a_broken_device_meets_no_other_block(cuda: FakeCuda, kept: list[object]) -> None:
    rig = make_rig(cuda)
    rig.tensors[0][1] = 5
    cuda.pace(seed=3, longest_pause_us=30_000)
    rig.start(1, rig.store, 1, 2)
    cuda.break_device()
    for _ in range(100):
        assert rig.store.get_finished() == []
    rig.store.wait([1])
    cuda.settle()
    assert rig.store.get_finished() == [], "the copy may have ended just now"
    _close_broken(cuda, rig, kept)


def test_a_device_that_breaks_while_the_host_waits(cuda: FakeCuda, kept: list[object]) -> None:
    rig = make_rig(cuda)
    cuda.calls.fake_hold(rig.stream_of(rig.store), 1)
    rig.start(0, rig.store, 0, 0)
    cuda.break_device()
    rig.store.wait([0])
    assert rig.store.get_finished() == []
    cuda.calls.fake_hold(rig.stream_of(rig.store), 0)
    _close_broken(cuda, rig, kept)


def _close_broken(cuda: FakeCuda, rig: CudaRig, kept: list[object]) -> None:
    """Shut down, although each call fails. Memory that a copy may still use is kept, and everything else is freed."""
    cuda.settle()
    tensor = weakref.ref(rig.tensors[0])
    may_copy = bool(rig.store._open)  # type: ignore[attr-defined]
    rig.store.shutdown()
    rig.load.shutdown()
    rig.store.shutdown()
    assert bool(kept) == may_copy
    while kept:  # the end of the process does the same
        kept.pop().region.unpin()  # type: ignore[attr-defined]
    cuda.disown(*rig.tensors)
    rig.tensors = ()
    gc.collect()
    assert tensor() is None
    rig.region.close()
    with pytest.raises(ValueError, match="closed"):
        rig.region.create_kv_memoryview()
    cuda.mend_device()  # a real device takes its registrations along
    cuda.calls.fake_forget_registrations()


def test_the_failure_of_a_flushed_load_is_known_at_once(cuda: FakeCuda) -> None:
    """A step waits for its loads, and must not compute with blocks that a load has not filled."""
    cuda.pace(1, longest_pause_us=20_000)
    rig = make_rig(cuda)
    for job_id in range(9):
        rig.start(job_id, rig.load, job_id, 0)
    rig.put(9, rig.load, [9], [999])  # no such slot, which the lane finds out
    rig.load.flush([9])
    ends = {result.job_id: result.success for result in rig.load.get_finished()}
    assert ends.get(9) is False
    rig.close()


def test_a_handler_that_is_closed_touches_the_device_no_more(cuda: FakeCuda) -> None:
    rig = make_rig(cuda)
    rig.store.shutdown()
    rig.load.shutdown()
    rig.store.flush([1])
    rig.store.wait([1])
    rig.close()


@pytest.mark.parametrize("code", [1, 801])
def test_batched_copies_that_the_machine_refuses_become_single_copies(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    cuda.fail("cuMemcpyBatchAsync", code=code)
    with caplog.at_level(logging.WARNING):
        rig = make_rig(cuda)
    assert not cuda.driver.has_batch
    assert f"CUDA error {code}" in caplog.text
    rig.tensors[0][1] = 5
    rig.start(1, rig.store, 1, 2)
    assert collect(rig.store, [1])[1].success
    assert rig.in_slot(2) == {5}
    rig.close()


@pytest.mark.parametrize("code", [2, 999])
def test_another_error_of_a_batch_fails_its_job_and_keeps_batches(cuda: FakeCuda, code: int) -> None:
    rig = make_rig(cuda)
    cuda.fail("cuMemcpyBatchAsync", code=code)
    rig.start(1, rig.store, 1, 2)
    assert not collect(rig.store, [1])[1].success
    copies = cuda.count("batches")
    rig.tensors[0][1] = 5
    rig.start(2, rig.store, 1, 2)
    assert collect(rig.store, [2])[2].success
    assert (rig.in_slot(2), cuda.count("batches")) == ({5}, copies + 1)
    rig.close()


def test_a_job_without_an_end_event_is_reported_while_others_keep_its_lane_busy(cuda: FakeCuda) -> None:
    rig = make_rig(cuda, plain=True)
    cuda.fail("cuEventRecord", code=2, after=3)  # the one after its copies
    rig.submit(1, rig.store, [0], [0])
    rig.submit(2, rig.store, [1], [1])
    results = {result.job_id: result.success for result in rig.store.get_finished()}
    cuda.settle()
    with cuda.held(rig.stream_of(rig.store)):
        rig.submit(3, rig.store, [2], [2])
        results |= {result.job_id: result.success for result in rig.store.get_finished()}
        assert results == {1: False, 2: True}
    assert collect(rig.store, [3])[3].success
    rig.close()


@pytest.mark.parametrize("times", [1, 1000])
def test_a_job_never_overtakes_one_whose_end_event_failed(cuda: FakeCuda, times: int) -> None:
    """It waits for an event that is recorded later, or it fails. With its own thread, it waits for the end."""
    rig = make_rig(cuda)
    rig.tensors[0][1] = 7
    rig.slots[2] = 3
    with cuda.held(rig.stream_of(rig.store)):
        cuda.fail("cuEventRecord", code=2, after=3, times=times)
        rig.start(1, rig.store, 1, 2)
        (rig.start if times > 1 else rig.put)(2, rig.load, *((5, 2) if times > 1 else ([5], [2])))  # type: ignore[operator]
        cuda.settle()
        assert rig.in_block(5) == {0}
    cuda.stop_failing()
    assert collect(rig.load, [2])[2].success == (times == 1)
    assert rig.in_block(5) == ({7} if times == 1 else {0})
    collect(rig.store, [1])
    rig.close()


def test_a_capture_of_the_engine_survives_the_lanes_calls(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "PIECE_RUNS", 1)
    rig = make_rig(cuda)
    before = cuda.count("batches")
    with cuda.held(rig.stream_of(rig.store)), cuda.capture():
        rig.put(1, rig.store, range(0, 16, 2), range(8))
        while cuda.count("batches") < before + lane.OPEN_PIECES:
            time.sleep(0.001)
        time.sleep(0.02)  # the lane polls in this time
    assert collect(rig.store, [1])[1].success
    assert cuda.count("invalidated") == 0
    rig.close()


def test_an_engine_thread_on_another_device_is_served_and_stays_there(cuda: FakeCuda) -> None:
    cuda.calls.fake_set_num_devices(2)
    rig = make_rig(cuda)
    cuda.driver.use_device(1)
    for job_id in range(60):  # until the pools need new events
        rig.tensors[0][1] = job_id
        rig.put(job_id, rig.store, [1], [2])
        rig.put(100 + job_id, rig.load, [5], [2])
        rig.load.flush([100 + job_id])
        if job_id % 10 == 0:
            rig.load.wait([100 + job_id])
            assert rig.in_block(5) == {job_id}
    assert all(result.success for result in collect(rig.store, range(60)).values())
    assert all(result.success for result in collect(rig.load, range(100, 160)).values())
    event, stream = cuda.driver.create_event(), cuda.driver.create_stream()
    cuda.driver.record(event, stream)  # both belong to the second device
    with pytest.raises(CudaError):
        cuda.driver.record(event, rig.compute)
    cuda.driver.destroy_event(event)
    cuda.driver.destroy_stream(stream)
    rig.close()


def test_handlers_start_while_another_device_is_current(cuda: FakeCuda) -> None:
    cuda.calls.fake_set_num_devices(2)

    def make(*arguments: object) -> dict[tuple[str, str], OffloadingHandler]:
        cuda.driver.use_device(1)
        try:
            return make_cuda_handlers(*arguments)  # type: ignore[arg-type]
        finally:
            cuda.driver.use_device(0)

    make_rig(cuda, make=make).close()


def test_a_device_with_other_addresses_for_pinned_memory_gets_single_copies(cuda: FakeCuda) -> None:
    cuda.calls.fake_set_one_address(0)
    rig = make_rig(cuda)
    rig.tensors[0][1] = 5
    rig.start(1, rig.store, 1, 2)
    assert collect(rig.store, [1])[1].success
    assert rig.in_slot(2) == {5}
    assert cuda.count("batches") == 0
    rig.close()


def test_a_graph_that_is_captured_meanwhile_fails_no_job(cuda: FakeCuda) -> None:
    rig = make_rig(cuda)
    rig.start(1, rig.store, 1, 2)
    cuda.fail("cuEventQuery", code=900)
    assert rig.store.get_finished() == []
    assert collect(rig.store, [1])[1].success
    rig.close()


# ---------------------------------------------------------------------------------------------- the engine's thread


def test_the_engine_pays_for_no_copy_and_waits_for_no_queue(cuda: FakeCuda) -> None:
    rig = make_rig(cuda)
    for handler in (rig.store, rig.load):
        cuda.limit_queue(rig.stream_of(handler), 8)
    everything = range(8)
    with cuda.engine(), cuda.held(rig.compute):
        rig.compute_fills(1, 3)
        for job_id in range(20):
            rig.put(2 * job_id, rig.store, everything, everything)
            rig.put(2 * job_id + 1, rig.load, everything, everything)
        before = cuda.count("copies")
        cuda.settle()
        time.sleep(0.02)  # copies would be submitted now, if they did not wait for compute
        assert cuda.count("copies") == before
        assert rig.store.get_finished() == rig.load.get_finished() == []
        assert (cuda.count("engine_copies"), cuda.count("engine_waits")) == (0, 0)
    for handler, first in ((rig.store, 0), (rig.load, 1)):
        assert all(result.success for result in collect(handler, range(first, 40, 2)).values())
    rig.close()


def test_a_flush_of_a_job_that_waits_for_compute_does_not_wait_for_it(cuda: FakeCuda) -> None:
    rig = make_rig(cuda)
    with cuda.held(rig.compute):
        rig.compute_fills(1, 3)
        rig.put(1, rig.store, [1], [2])
        rig.put(2, rig.load, [5], [2])
        rig.load.flush([2])  # and so the store before it
        rig.store.flush([1])
        rig.compute_fills(1, 9)
        rig.compute_fills(5, 9)
    rig.store.wait([1])
    cuda.settle()
    assert (rig.in_slot(2), rig.in_block(1), rig.in_block(5)) == ({3}, {9}, {9})
    rig.close()


def test_a_large_job_goes_in_pieces_and_few_at_a_time(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "PIECE_RUNS", 1)
    rig = make_rig(cuda)
    rig.fill(1)
    blocks, slots = range(0, 16, 2), range(8)
    before, fills = cuda.count("batches"), cuda.count("fills")
    with cuda.held(rig.stream_of(rig.store)):
        rig.put(1, rig.store, blocks, slots)
        deadline_s = time.monotonic() + 60
        while cuda.count("batches") < before + lane.OPEN_PIECES and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(0.02)  # more would come now, if they were not held back
        assert cuda.count("batches") == before + lane.OPEN_PIECES
    assert collect(rig.store, [1])[1].success
    pieces = cuda.count("batches") - before
    assert pieces > 8
    assert cuda.count("fills") == fills + pieces - 1, "others' copies get in between"
    for block, slot in zip(blocks, slots, strict=True):
        assert (rig.slots[slot, : rig.pages[0]] == rig.read_page(0, block)).all()
    rig.close()


def test_open_pieces_stay_below_what_a_channel_seems_to_hold() -> None:
    """Each copy may be a launch, and so are a piece's memset and event, and the job's two events."""
    assert lane.OPEN_PIECES * (lane.PIECE_RUNS + 2) + 2 < 1024


# -------------------------------------------------------------------------------------------------- devices that hang


def test_copies_that_hang_at_start_are_refused_and_not_waited_for_again(
    cuda: FakeCuda, kept: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(lane, "DRAIN_S", 1e9)
    made: list[FakeCuda] = []

    def make(*arguments: object) -> dict[tuple[str, str], OffloadingHandler]:
        cuda.calls.fake_hold_new_streams(1)
        try:
            return make_cuda_handlers(*arguments)  # type: ignore[arg-type]
        finally:
            cuda.calls.fake_hold_new_streams(0)
            made.append(cuda)
            assert cuda.count("registrations") > 0
            assert kept
            cuda.calls.fake_let_all_go()
            for copies in kept:  # the rest of the chain is submitted now, and has to end before the memory goes
                assert all(each.close() for each in copies.lanes.values())  # type: ignore[attr-defined]

    with pytest.raises(TransferError, match="did not end within"):
        make_rig(cuda, make=make)
    assert made
    cuda.calls.fake_forget_registrations()


@pytest.mark.usefixtures("kept")
def test_a_device_that_hangs_amid_a_large_job_is_not_waited_for_at_shutdown(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "PIECE_RUNS", 1)
    rig = make_rig(cuda)
    monkeypatch.setattr(lane, "DRAIN_S", 0.2)
    before = cuda.count("batches")
    cuda.calls.fake_hold(rig.stream_of(rig.store), 1)
    rig.put(1, rig.store, range(0, 16, 2), range(8))
    while cuda.count("batches") < before + lane.OPEN_PIECES:  # the thread waits for the first piece from now on
        time.sleep(0.001)
    rig.store.shutdown()
    rig.load.shutdown()
    assert rig.store.get_finished() == []
    cuda.calls.fake_let_all_go()
    rig.store._lane._thread.join(60)  # type: ignore[attr-defined]  # it submits the rest of the job
    cuda.settle()
    rig.close()
    cuda.calls.fake_forget_registrations()


def test_a_shutdown_puts_nothing_into_a_full_queue_of_a_device_that_hangs(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_MEMORY_OF_HUNG_DEVICES", [])
    rig = make_rig(cuda)
    monkeypatch.setattr(lane, "DRAIN_S", 0.2)
    stream = rig.stream_of(rig.store)
    cuda.calls.fake_hold(stream, 1)
    cuda.limit_queue(stream, 4)
    with cuda.engine():
        for job_id in range(4):
            rig.put(job_id, rig.store, [job_id], [job_id])
        rig.store.shutdown()
        rig.load.shutdown()
        assert (cuda.count("engine_copies"), cuda.count("engine_waits")) == (0, 0)
    assert rig.store.get_finished() == []
    cuda.calls.fake_let_all_go()
    rig.store._lane._thread.join(60)  # type: ignore[attr-defined]
    cuda.settle()
    rig.close()
    cuda.calls.fake_forget_registrations()


def test_a_device_that_hangs_is_not_waited_for_at_shutdown_and_its_memory_is_kept(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(backend, "_MEMORY_OF_HUNG_DEVICES", kept)
    rig = make_rig(cuda)
    monkeypatch.setattr(lane, "DRAIN_S", 0.2)
    cuda.calls.fake_hold(rig.stream_of(rig.store), 1)
    rig.start(1, rig.store, 1, 2)
    rig.store.shutdown()
    rig.load.shutdown()
    assert rig.store.get_finished() == []  # it may still write to its slot
    assert kept
    assert cuda.count("registrations") > 0
    cuda.calls.fake_let_all_go()
    cuda.settle()
    rig.close()
    cuda.calls.fake_forget_registrations()


# ------------------------------------------------------------------------------------------------------- the start


@pytest.fixture
def checks_whole(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_SWAPS", ALL_SWAPS)


@pytest.mark.usefixtures("checks_whole")
def test_the_check_at_start_leaves_everything_as_it_was(cuda: FakeCuda) -> None:
    for factor in (1, 2, 3):
        rig = make_rig(cuda, factor=factor)
        assert not rig.slots.any()
        rig.close()
    rig = make_rig(cuda)
    rig.fill(1)
    before = [[rig.read_page(tensor, block) for block in range(16)] for tensor in range(3)]
    view = rig.region.create_kv_memoryview()
    self_check.check_copies(rig.store, rig.load, view, rig.layout)
    after = [[rig.read_page(tensor, block) for block in range(16)] for tensor in range(3)]
    np.testing.assert_equal(before, after)
    assert not rig.slots.any()
    assert cuda.count("copies") > 100
    rig.close()


@pytest.mark.usefixtures("checks_whole")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("factor", [1, 2])
def test_the_check_at_start_leaves_the_bytes_of_other_ranks(cuda: FakeCuda, rank: int, factor: int) -> None:
    """They check at the same time."""

    def make(
        caches: CanonicalKVCaches, view: memoryview, layout: CopyLayout, device: CudaDevice
    ) -> dict[tuple[str, str], OffloadingHandler]:
        np.asarray(view)[:] = 7
        return make_cuda_handlers(caches, view, layout, device)

    rig = make_rig(cuda, factor=factor, rank=rank, shared=True, make=make)
    own = np.zeros(rig.slots.shape[1], dtype=bool)
    for part in [*rig.layout.bytes_in_slot(0), *rig.layout.bytes_in_slot(1)]:
        own[part] = True
    assert own.any()
    assert (rig.slots[:, ~own] == 7).all()
    assert not rig.slots[0, own].any()
    rig.close()


def test_a_failed_copy_at_start_is_refused_in_one_sentence(cuda: FakeCuda) -> None:
    cuda.fail("cuStreamWaitEvent", after=3)
    with pytest.raises(TransferError, match="fail at startup; serve without kvoffload, and report the error above"):
        make_rig(cuda)


@pytest.mark.usefixtures("checks_whole")
def test_wrong_bytes_at_start_are_refused_in_one_sentence(cuda: FakeCuda) -> None:
    def corrupt(*arguments: object) -> dict[tuple[str, str], OffloadingHandler]:
        handlers = make_cuda_handlers(*arguments)  # type: ignore[arg-type]
        store, load = handlers["GPU", "CPU"], handlers["CPU", "GPU"]
        view = arguments[1]
        assert isinstance(view, memoryview)
        with pytest.raises(TransferError, match=r"wrong bytes: this machine does not keep the order of copies; serve"):
            self_check.check_copies(_OffByOne(store), load, view, layout_of(store))
        return handlers

    make_rig(cuda, make=corrupt).close()


class _OffByOne(OffloadingHandler):
    """Stores the next GPU block."""

    def __init__(self, inner: OffloadingHandler) -> None:
        self._inner = inner

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        gpu, cpu = spec
        assert isinstance(gpu, GPULoadStoreSpec)
        wrong = GPULoadStoreSpec((gpu.block_ids + 1) % 16, gpu.group_sizes, gpu.block_indices)
        self._inner.transfer_async(job_id, (wrong, cpu))

    def get_finished(self) -> list[TransferResult]:
        return self._inner.get_finished()

    def wait(self, job_ids: Collection[int]) -> None:
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        self._inner.shutdown()


def test_memory_that_cannot_be_pinned_is_refused_before_anything_else(cuda: FakeCuda) -> None:
    cuda.limit_registrations(largest_bytes=1 << 30, most_bytes=0)
    with pytest.raises(CapacityError, match=r"pinned 0 B of the .* CUDA error 2 .* Lower cpu_bytes_to_use"):
        make_rig(cuda)
    assert cuda.count("registrations") == 0


def test_a_region_too_small_for_the_check_goes_without(cuda: FakeCuda) -> None:
    calls: list[object] = []
    self_check.check_copies(calls, calls, memoryview(b""), _layout_of(0))  # type: ignore[arg-type]
    assert not calls


def _layout_of(num_slots: int) -> CopyLayout:
    return CopyLayout(((PageRef(0, 8, 8, 8),),), 1, 0, 8, num_slots)


def test_devices_of_amd_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(LayoutError, match="cannot offload KV caches from AMD devices, because it copies with"):
        CudaDevice.of(torch.device("cuda"))


def test_the_log_names_the_code_of_a_broken_device(
    cuda: FakeCuda, kept: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(cuda)
    cuda.break_device()
    with caplog.at_level(logging.ERROR):
        rig.start(0, rig.store, 0, 0)
    assert f"CUDA error {BROKEN}" in caplog.text
    assert "device is broken" in caplog.text
    _close_broken(cuda, rig, kept)
