# SPDX-License-Identifier: Apache-2.0
"""The rules of the CUDA backend, each as a scenario that breaks without it. None depends on luck: streams are held
where a wait is missing only if the other stream could run ahead, and everything else is let go as far as it can.

``test_cuda.py`` runs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from tests.cpu.copy.cuda_rig import PAGES, CudaRig, Make, make_rig
from tests.cpu.copy.fake_cuda import FakeCuda
from tests.fakes.handler_contract import collect

from kvoffload.base import GPULoadStoreSpec
from kvoffload.cpu.common import CPULoadStoreSpec

Scenario = Callable[[FakeCuda, Make], None]

SCENARIOS: list[Scenario] = []


def scenario(check: Callable[[CudaRig], None]) -> Scenario:
    """A scenario over a rig of one GPU block per block. It must leave nothing behind."""

    def run(cuda: FakeCuda, make: Make) -> None:
        rig = make_rig(cuda, make=make)
        try:
            check(rig)
        finally:
            rig.close()
        assert cuda.count("faults") == 0
        assert cuda.count("pageable") == 0

    run.__name__ = check.__name__
    SCENARIOS.append(run)
    return run


# ---------------------------------------------------------------------------------------------------------- compute


@scenario
def a_store_waits_for_the_compute_that_writes_its_blocks(rig: CudaRig) -> None:
    with rig.cuda.held(rig.compute):
        rig.compute_fills(1, 5)
        rig.start(1, rig.store, 1, 2)
    rig.store.wait([1])
    assert rig.in_slot(2) == {5}


def _read_while_loading(rig: CudaRig, start: Callable[[], None]) -> None:
    rig.tensors[0][3] = 4
    rig.slots[0] = 9
    seen = torch.zeros(PAGES[0], dtype=torch.uint8)
    rig.cuda.adopt(seen)
    with rig.cuda.held(rig.compute):
        rig.cuda.copy_on_device(seen, rig.tensors[0][3, : PAGES[0]], rig.compute)
        start()
    rig.load.wait([1])
    rig.cuda.settle()
    rig.cuda.disown(seen)
    assert seen.unique().tolist() == [4]
    assert rig.in_block(3) == {9}


@scenario
def a_load_waits_for_the_compute_that_still_reads_its_blocks(rig: CudaRig) -> None:
    _read_while_loading(rig, lambda: rig.start(1, rig.load, 3, 0))


@scenario
def a_load_does_not_wait_for_the_compute_after_it(rig: CudaRig) -> None:
    rig.start(1, rig.load, 3, 0)
    with rig.cuda.held(rig.compute):
        rig.compute_fills(1, 5)
        rig.cuda.settle()
        assert [result.job_id for result in rig.load.get_finished()] == [1]


@scenario
def compute_waits_on_the_device_for_flushed_stores(rig: CudaRig) -> None:
    rig.tensors[0][1] = 3
    with rig.cuda.held(rig.stream_of(rig.store)):
        rig.start(1, rig.store, 1, 2)
        rig.store.flush([1])  # returns although the store cannot end
        rig.load.flush([1])
        rig.compute_fills(1, 9)
    rig.store.wait([1])
    rig.cuda.settle()
    assert rig.in_slot(2) == {3}
    assert rig.in_block(1) == {9}


@scenario
def compute_reads_the_blocks_that_a_flushed_load_writes(rig: CudaRig) -> None:
    """For a hit that is served within the step, the step's own kernels read the blocks."""
    rig.slots[2] = 6
    seen = torch.zeros(PAGES[0], dtype=torch.uint8)
    rig.cuda.adopt(seen)
    with rig.cuda.held(rig.stream_of(rig.load)):
        rig.put(1, rig.load, [5], [2])
        rig.load.flush([1])  # returns although the load cannot end
        rig.cuda.copy_on_device(seen, rig.tensors[0][5, : PAGES[0]], rig.compute)
    rig.load.wait([1])
    rig.cuda.settle()
    rig.cuda.disown(seen)
    assert seen.unique().tolist() == [6]


@scenario
def compute_reads_a_flushed_load_that_follows_a_store_into_its_slot(rig: CudaRig) -> None:
    rig.tensors[0][1] = 7
    seen = torch.zeros(PAGES[0], dtype=torch.uint8)
    rig.cuda.adopt(seen)
    with rig.cuda.held(rig.stream_of(rig.store)):
        rig.put(1, rig.store, [1], [2])
        rig.put(2, rig.load, [5], [2])
        rig.load.flush([2])
        rig.cuda.copy_on_device(seen, rig.tensors[0][5, : PAGES[0]], rig.compute)
    rig.load.wait([2])
    rig.cuda.settle()
    rig.cuda.disown(seen)
    assert seen.unique().tolist() == [7]


# -------------------------------------------------------------------------------------------- jobs among each other


@scenario
def a_load_waits_for_the_store_into_its_slot(rig: CudaRig) -> None:
    rig.tensors[0][1] = 7
    with rig.cuda.held(rig.stream_of(rig.store)):
        rig.start(1, rig.store, 1, 2)
        rig.start(2, rig.load, 5, 2)
    rig.load.wait([2])
    assert rig.in_block(5) == {7}


@scenario
def a_store_into_a_slot_waits_for_the_load_from_it(rig: CudaRig) -> None:
    rig.slots[2] = 6
    rig.tensors[0][1] = 7
    with rig.cuda.held(rig.stream_of(rig.load)):
        rig.start(1, rig.load, 5, 2)
        rig.start(2, rig.store, 1, 2)
    rig.load.wait([1])
    assert rig.in_block(5) == {6}


@scenario
def a_load_into_a_gpu_block_waits_for_the_store_of_it(rig: CudaRig) -> None:
    rig.slots[0] = 6
    rig.tensors[0][1] = 7
    with rig.cuda.held(rig.stream_of(rig.store)):
        rig.start(1, rig.store, 1, 2)
        rig.start(2, rig.load, 1, 0)
    rig.store.wait([1])
    assert rig.in_slot(2) == {7}


@scenario
def a_store_of_a_gpu_block_waits_for_the_load_into_it(rig: CudaRig) -> None:
    rig.slots[0] = 6
    with rig.cuda.held(rig.stream_of(rig.load)):
        rig.start(1, rig.load, 1, 0)
        rig.start(2, rig.store, 1, 2)
    rig.store.wait([2])
    assert rig.in_slot(2) == {6}


@scenario
def a_source_is_read_when_its_stream_comes_to_it(rig: CudaRig) -> None:
    """Reads are in order, although the calls return long before: an open store writes each load's slot."""
    for round_ in range(12):
        rig.tensors[0][1] = round_ + 1
        rig.tensors[0][2] = round_ + 101
        with rig.cuda.held(rig.stream_of(rig.store)):
            rig.submit(2 * round_, rig.store, [1, 2], [2, 5])
            rig.submit(2 * round_ + 1, rig.load, [7, 9], [2, 5])
        collect(rig.load, [2 * round_ + 1])
        collect(rig.store, [2 * round_])
        assert (rig.in_block(7), rig.in_block(9)) == ({round_ + 1}, {round_ + 101})


@scenario
def the_last_of_two_copies_to_one_place_is_made(rig: CudaRig) -> None:
    rig.slots[2], rig.slots[5] = 6, 7
    twice = GPULoadStoreSpec([3, 3], [2, 0], [0, 0])
    rig.load.transfer_async(1, (CPULoadStoreSpec([2, 5]), twice))
    assert collect(rig.load, [1])[1].success
    assert rig.in_block(3) == {7}
    rig.tensors[0][1], rig.tensors[0][4] = 8, 9
    rig.store.transfer_async(2, (GPULoadStoreSpec([1, 4], [2, 0], [0, 0]), CPULoadStoreSpec([2, 2])))
    assert collect(rig.store, [2])[2].success
    assert rig.in_slot(2) == {9}


@scenario
def a_job_takes_one_batch(rig: CudaRig) -> None:
    before = rig.cuda.count("batches")
    gpu = GPULoadStoreSpec(range(0, 16, 2), [8, 0], [0, 0])
    rig.store.transfer_async(1, (gpu, CPULoadStoreSpec(range(8))))
    collect(rig.store, [1])
    assert rig.cuda.count("batches") == before + 1


# --------------------------------------------------------------------------------------------- ends, and what follows


@scenario
def a_job_is_reported_when_its_copies_have_ended(rig: CudaRig) -> None:
    rig.cuda.pace(seed=3, longest_pause_us=30_000)  # which copies take, and records do not
    for job_id in range(4):
        rig.tensors[0][1] = job_id + 1
        rig.start(job_id, rig.store, 1, 2)
        collect(rig.store, [job_id])
        assert rig.in_slot(2) == {job_id + 1}


@scenario
def waiting_returns_when_the_copies_have_ended(rig: CudaRig) -> None:
    rig.cuda.pace(seed=4, longest_pause_us=30_000)
    for job_id in range(4):
        rig.tensors[0][1] = job_id + 1
        rig.start(job_id, rig.store, 1, 2)
        rig.store.wait([job_id])
        assert rig.in_slot(2) == {job_id + 1}


@scenario
def an_event_is_used_again_only_after_its_job(rig: CudaRig) -> None:
    with rig.cuda.held(rig.stream_of(rig.store)):
        rig.start(1, rig.store, 1, 2)
        for job_id in range(2, 6):
            rig.start(job_id, rig.load, 5, 6)
        rig.cuda.settle()
        assert len(rig.load.get_finished()) == 4
        assert rig.store.get_finished() == []


@scenario
def a_failed_job_is_reported_when_its_copies_have_ended(rig: CudaRig) -> None:
    rig.cuda.pace(seed=5, longest_pause_us=30_000)
    rig.tensors[0][1] = 5
    rig.cuda.fail("cuEventRecord", after=3)  # the event of the end fails, while copies are running
    rig.start(1, rig.store, 1, 2)
    assert not collect(rig.store, [1])[1].success
    rig.slots[2] = 1  # somebody else's by now
    rig.cuda.settle()
    assert rig.in_slot(2) == {1}


@scenario
def a_job_whose_end_cannot_be_seen_is_reported_when_its_copies_have_ended(rig: CudaRig) -> None:
    rig.cuda.pace(seed=6, longest_pause_us=30_000)
    rig.start(1, rig.store, 1, 2)
    rig.cuda.fail("cuEventQuery", code=1)
    assert not collect(rig.store, [1])[1].success
    rig.slots[2] = 1
    rig.cuda.settle()
    assert rig.in_slot(2) == {1}


def shutdown_waits_for_copies(cuda: FakeCuda, make: Make) -> None:
    num_streams = cuda.count("streams")
    rig = make_rig(cuda, make=make)
    cuda.pace(seed=7, longest_pause_us=30_000)
    gpu = GPULoadStoreSpec(range(8), [8, 0], [0, 0])
    for job_id in range(3):
        rig.store.transfer_async(job_id, (gpu, CPULoadStoreSpec(range(8))))
        rig.load.transfer_async(job_id, (CPULoadStoreSpec(range(8)), gpu))
    rig.close()
    assert {result.success for result in (*rig.store.get_finished(), *rig.load.get_finished())} == {True}
    assert cuda.count("faults") == 0
    assert cuda.count("registrations") == 0
    assert cuda.count("streams") == num_streams


SCENARIOS.append(shutdown_waits_for_copies)


def copies_stop_at_the_borders_of_registrations(cuda: FakeCuda, make: Make) -> None:
    """Eight blocks that are adjacent on both sides form one run, and they are in four registrations."""
    cuda.limit_registrations(largest_bytes=150_000)
    rig = make_rig(cuda, plain=True, make=make)
    assert cuda.count("registrations") == 4
    rig.fill(seed=1)
    before = [rig.read_page(0, block) for block in range(8)]
    gpu = GPULoadStoreSpec(range(8), [8, 0], [0, 0])
    rig.store.transfer_async(1, (gpu, CPULoadStoreSpec(range(8))))
    assert collect(rig.store, [1])[1].success
    rig.fill(seed=2)
    rig.load.transfer_async(2, (CPULoadStoreSpec(range(8)), gpu))
    assert collect(rig.load, [2])[2].success
    after = [rig.read_page(0, block) for block in range(8)]
    assert all((left == right).all() for left, right in zip(before, after, strict=True))
    rig.close()


SCENARIOS.append(copies_stop_at_the_borders_of_registrations)


def a_thread_without_a_context_gets_one(cuda: FakeCuda, make: Make) -> None:
    rigs: list[CudaRig] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            compute = cuda.driver
            compute.use_device(0)
            rig = make_rig(cuda, make=lambda *arguments: _without_context(cuda, make, *arguments))
            rigs.append(rig)
        except BaseException as exc:  # noqa: BLE001 - it belongs to the other thread
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    rigs[0].close()


def _without_context(cuda: FakeCuda, make: Make, *arguments: object) -> object:
    cuda.calls.cuCtxSetCurrent(None)
    return make(*arguments)


SCENARIOS.append(a_thread_without_a_context_gets_one)
