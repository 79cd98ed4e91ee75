# SPDX-License-Identifier: Apache-2.0
"""Copies are timed against large ones and compared byte for byte, within host memory and over the fake driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
from tests.cpu.copy.fake_cuda import FakeCuda, cuda

from kvoffload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingHandler, TransferResult
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy import cuda as backend
from kvoffload.cpu.copy import lane, self_check
from kvoffload.cpu.copy.plan import CopyLayout
from kvoffload.cpu.copy.self_check import CopiesHang
from kvoffload.doctor import copies as doctor
from kvoffload.doctor.copies import (
    DevicePlace,
    Handlers,
    HostPlace,
    Place,
    check_copies_under_load,
    page_speed,
)

__all__ = ["cuda"]


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "host":
        yield HostPlace(2)
        return
    fake: FakeCuda = request.getfixturevalue("cuda")
    idle = fake.driver.create_stream()
    yield DevicePlace(fake.device(idle))
    fake.driver.destroy_stream(idle)


def test_what_is_right_is_right(place: Place) -> None:
    checked = check_copies_under_load(place, seconds=0)
    assert checked.wrong is None
    assert checked.jobs == 2 * 18
    assert checked.num_bytes > 1 << 20


def test_whatever_is_checked_is_checked_beside_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    class Busy(HostPlace):
        def computing(self) -> AbstractContextManager[Callable[[], None]]:
            return nullcontext(lambda: begun.append("compute"))

    monkeypatch.setattr(doctor, "check_copies", lambda *_, **__: begun.append("check"))
    assert check_copies_under_load(Busy(2), seconds=0).wrong is None
    before = [begun[at - 1] if at else "" for at, what in enumerate(begun) if what == "check"]
    assert before == ["compute", "compute"]
    assert begun[-1] == "compute", "beside random jobs too"


@pytest.mark.long
def test_speeds_are_those_of_all_bytes(place: Place) -> None:
    speed = page_speed(place, 4096, num_bytes=1 << 20, layers=2, repeats=2)
    assert speed.page_bytes == 4096
    for one in (speed.store, speed.load, speed.both):
        assert one.bytes_per_s > 0
        assert one.ratio > 0


def test_a_rig_copies_where_it_says(place: Place) -> None:
    with place.rig(layers=3, page_bytes=4096, num_blocks=8) as rig:
        rig.slots[:] = np.arange(8, dtype=np.uint8)[:, None]
        rig.submit_load([1, 5], [6, 2])
        rig.submit_store([2, 6], [0, 7])
        assert rig.finish() == 4 * 3 * 4096
        assert rig.slots[:, 0].tolist() == [5, 1, 2, 3, 4, 5, 6, 1]
        assert (rig.slots == rig.slots[:, :1]).all()


def test_memory_that_cannot_be_pinned_is_what_is_wrong(cuda: FakeCuda) -> None:
    idle = cuda.driver.create_stream()
    cuda.limit_registrations(largest_bytes=1 << 60, most_bytes=4096)
    checked = check_copies_under_load(DevicePlace(cuda.device(idle)), seconds=0)
    assert checked.wrong is not None
    assert "rejected the rest" in checked.wrong
    cuda.driver.destroy_stream(idle)


def test_copies_that_hang_are_what_is_wrong_and_nothing_waits_for_them(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "_TIMEOUT_S", 0.2)
    kept: list[Any] = []
    monkeypatch.setattr(backend, "_MEMORY_OF_HUNG_DEVICES", kept)
    idle = cuda.driver.create_stream()
    cuda.calls.fake_hold_new_streams(1)
    checked = check_copies_under_load(DevicePlace(cuda.device(idle)), seconds=0)
    cuda.calls.fake_hold_new_streams(0)
    assert checked.wrong is not None
    assert "did not end within" in checked.wrong
    cuda.calls.fake_let_all_go()
    for copies in kept:
        assert all(each.close() for each in copies.lanes.values())
    assert cuda.count("faults") == 0, "their memory was freed"
    cuda.calls.fake_forget_registrations()
    cuda.driver.destroy_stream(idle)


@pytest.fixture
def device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[DevicePlace]:
    """Yield the place of a device that hangs after its first copies.

    Nobody waits for it or frees memory that it may use.
    """
    monkeypatch.setattr(lane, "DRAIN_S", 0.2)
    kept: list[Any] = []
    monkeypatch.setattr(backend, "_MEMORY_OF_HUNG_DEVICES", kept)
    monkeypatch.setattr(doctor, "_MEMORY_OF_COPIES_THAT_HANG", kept)
    idle = cuda.driver.create_stream()
    yield DevicePlace(cuda.device(idle))
    assert kept
    assert cuda.count("faults") == 0, "memory was freed under a copy"
    cuda.calls.fake_let_all_go()
    cuda.settle()
    cuda.calls.fake_forget_registrations()


def test_jobs_that_hang_after_the_first_check_end_a_measurement(
    cuda: FakeCuda, device: DevicePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure() -> None:
        with device.rig(layers=2, page_bytes=4096, num_blocks=8) as rig:
            cuda.calls.fake_hold(rig.store._lane.stream, 1)  # type: ignore[attr-defined]
            monkeypatch.setattr(self_check, "_TIMEOUT_S", 0.2)  # not before: on a busy machine copies take longer
            rig.submit_store([1], [2])
            rig.finish()

    with pytest.raises(CopiesHang):
        measure()


def test_large_copies_that_hang_end_a_measurement(
    cuda: FakeCuda, device: DevicePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure() -> None:
        monkeypatch.setattr(self_check, "_TIMEOUT_S", 0.2)
        cuda.calls.fake_hold_new_streams(1)
        with device.large_copies(1 << 16) as large:
            cuda.calls.fake_hold_new_streams(0)
            large.both()

    with pytest.raises(CopiesHang):
        measure()


# ------------------------------------------------------------------------------------------------------ wrong bytes

Spec = tuple[LoadStoreSpec, LoadStoreSpec]


class _Spoiled(OffloadingHandler):
    """Passes jobs on, after ``spoil`` had a look at them."""

    def __init__(self, handler: OffloadingHandler, spoil: _Spoil) -> None:
        self._handler = handler
        self._spoil = spoil

    def transfer_async(self, job_id: int, spec: Spec) -> None:
        self._handler.transfer_async(job_id, self._spoil(spec))

    def get_finished(self) -> list[TransferResult]:
        return self._handler.get_finished()

    def wait(self, job_ids: Sequence[int]) -> None:  # type: ignore[override]
        self._handler.wait(job_ids)

    def shutdown(self) -> None:
        self._handler.shutdown()


class _Spoil:
    """A fault: the ``at``-th job of several blocks uses its first slot in place of its second one."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, spec: Spec) -> Spec:
        cpu = next(each for each in spec if isinstance(each, CPULoadStoreSpec))
        if len(cpu.block_ids) < 2:
            return spec
        self._left -= 1
        if self._left:
            return spec
        ids = cpu.block_ids.tolist()
        swapped = CPULoadStoreSpec([ids[1], ids[0], *ids[2:]])
        source, destination = (swapped if each is cpu else each for each in spec)
        assert isinstance(source, GPULoadStoreSpec) or isinstance(destination, GPULoadStoreSpec)
        return source, destination


@pytest.mark.parametrize("at", [2, 9, 15])
def test_one_block_in_the_wrong_place_is_noticed(at: int) -> None:
    class Place(HostPlace):
        def _make_handlers(self, view: memoryview, layout: CopyLayout) -> Handlers:
            spoil = _Spoil(at + 1)  # the first job of a rig is its own
            return {way: _Spoiled(each, spoil) for way, each in super()._make_handlers(view, layout).items()}

    assert check_copies_under_load(Place(1), seconds=0).wrong is not None
