# SPDX-License-Identifier: Apache-2.0
"""Small pages through a buffer: the kernel's text, and the backend with it over the fake driver, which knows what the
kernel does."""

from __future__ import annotations

import importlib.util
import logging
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tests.cpu.copy import ptx
from tests.cpu.copy.cuda_rig import CudaRig, make_rig
from tests.cpu.copy.fake_cuda import FakeCuda, cuda
from tests.fakes.handler_contract import HandlerContract, HandlerRig, collect

from kvoffload.base import Direction
from kvoffload.cpu.copy import gather
from kvoffload.cpu.copy.gather import GATHER_BELOW, KERNEL, PAGES_PER_LAUNCH, PTX, Gatherer
from kvoffload.cpu.copy.plan import Runs
from kvoffload.errors import ConfigError

__all__ = ["cuda"]

_BELOW = 16_384


class TestCudaHandlersThatGather(HandlerContract):
    @pytest.fixture(autouse=True)
    def _use(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(GATHER_BELOW, str(_BELOW))
        self.cuda = cuda

    def make_rig(self) -> HandlerRig:
        rig = make_rig(self.cuda, layered=True)
        assert self.cuda.count("kernels") > 0
        return rig


def test_a_gathered_copy_ends_where_a_registration_does(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(GATHER_BELOW, str(_BELOW))
    cuda.limit_registrations(largest_bytes=1 << 18)  # three slots, and so two: one ends amid those that are stored
    rig = make_rig(cuda, layered=True)
    rig.fill(1)
    _store_and_load(rig)
    assert "one by one" not in caplog.text
    rig.close()


@pytest.fixture
def rig(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> CudaRig:
    monkeypatch.setenv(GATHER_BELOW, str(_BELOW))
    rig = make_rig(cuda, layered=True)
    rig.fill(1)
    return rig


def _store_and_load(rig: CudaRig) -> None:
    """Blocks 0 to 7 to slots in another order, and back to blocks 8 to 15."""
    slots = [3, 4, 5, 0, 2, 1, 7, 6]
    rig.submit(1, rig.store, range(8), slots)
    rig.submit(2, rig.load, range(8, 16), slots)
    assert collect(rig.store, [1])[1].success
    assert collect(rig.load, [2])[2].success
    for tensor, block in ((tensor, block) for tensor in rig.group_pages[0] for block in range(8)):
        np.testing.assert_array_equal(rig.read_page(tensor, block), rig.read_page(tensor, block + 8))


def test_the_small_pages_of_a_slot_are_one_copy(cuda: FakeCuda, rig: CudaRig) -> None:
    before = {what: cuda.count(what) for what in ("kernels", "copies")}
    rig.submit(1, rig.store, [1, 5], [2, 6])
    assert collect(rig.store, [1])[1].success
    assert cuda.count("kernels") == before["kernels"] + 1
    moved, gathered, large = 2 * 4, 2 * 2, 2  # small pages lie before and after the large one
    assert cuda.count("copies") == before["copies"] + moved + gathered + large
    rig.close()


def test_more_pages_than_a_launch_takes(cuda: FakeCuda, rig: CudaRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "PAGES_PER_LAUNCH", 10)
    before = cuda.count("kernels")
    _store_and_load(rig)
    assert cuda.count("kernels") == before + 2 * 4
    rig.close()


@pytest.mark.parametrize("after", range(4))
def test_a_refused_launch_ends_gathering_of_its_direction_and_no_job(
    cuda: FakeCuda, rig: CudaRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, after: int
) -> None:
    """Of two launches of a store, and two of a load."""
    monkeypatch.setattr(gather, "PAGES_PER_LAUNCH", 20)
    cuda.fail("cuLaunchKernel", code=701, after=after)
    with caplog.at_level(logging.WARNING):
        _store_and_load(rig)
        before = cuda.count("kernels")
        _store_and_load(rig)
    assert caplog.text.count("cuLaunchKernel failed with CUDA error 701") == 1
    assert cuda.count("kernels") == before + 2
    rig.close()


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuMemAlloc"])
def test_a_driver_that_refuses_the_kernel_copies_pages_one_by_one(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    cuda.fail(call, code=218)
    with caplog.at_level(logging.WARNING):
        assert Gatherer.if_wanted(cuda.driver, 1 << 20, _BELOW) is None
    assert "Small pages are copied one by one" in caplog.text


def test_nothing_is_gathered_unless_somebody_asks_for_it(cuda: FakeCuda) -> None:
    rig = make_rig(cuda, layered=True)
    rig.fill(1)
    _store_and_load(rig)
    assert cuda.count("kernels") == 0
    rig.close()


@pytest.mark.parametrize("wrong", ["-1", "many", "16k"])
def test_a_wrong_size_is_refused_before_memory_is_pinned(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv(GATHER_BELOW, wrong)
    with pytest.raises(ConfigError, match=f"{GATHER_BELOW} must be a number of bytes"):
        make_rig(cuda)
    assert cuda.calls.fake_num_registrations() == 0


def test_what_is_gathered(cuda: FakeCuda) -> None:
    """Pages below the limit, of lengths and at addresses that the kernel can move, if copies become half as many."""
    driver, stream = cuda.driver, cuda.driver.create_stream()
    device, host = driver.allocate(1 << 20), driver.allocate(1 << 20)
    gatherer = Gatherer(driver, 1 << 20, below=4096)
    none = np.empty(0, dtype=np.int64)

    def left(lengths: list[int], gap: int = 0, shift: int = 0) -> list[int]:
        sizes = np.array(lengths, dtype=np.int64)
        starts = np.cumsum(sizes + gap) - sizes - gap
        runs = Runs(device + shift + np.arange(len(sizes)) * 8192, host + starts, sizes)
        rest: list[int] = gatherer.copy(runs, Direction.STORE, none, stream).lengths.tolist()
        return rest

    assert left([64, 64, 4080]) == []
    assert left([64, 64, 4096]) == [4096]
    assert left([64, 64, 72]) == [72]
    assert left([64, 64], shift=8) == [64, 64]
    assert left([64, 64, 64], gap=16) == [64, 64, 64]
    assert left([64]) == [64]
    assert left([]) == []
    assert cuda.count("kernels") == 3
    driver.synchronize(stream)
    gatherer.close()
    driver.destroy_stream(stream)


# ------------------------------------------------------------------------------------------------------ the kernel


@pytest.mark.parametrize("is_store", [True, False])
def test_the_kernels_text_moves_pages_between_their_places_and_the_buffer(is_store: bool) -> None:
    chance = random.Random(1)
    memory = bytearray(chance.randbytes(4096))
    before = bytes(memory)
    buffer, lengths, pages = 2048, (16, 160, 48, 256), (1600, 16, 512, 1024)
    offsets = [sum(lengths[:n]) for n in range(len(lengths))]
    table = np.zeros(PAGES_PER_LAUNCH, gather._ENTRY)
    table[: len(pages)] = list(zip(pages, offsets, lengths, strict=True))
    number = int(is_store).to_bytes(4, "little") + bytes(4)  # the table begins at a multiple of 8
    ptx.run(
        PTX,
        memory,
        {"buffer": buffer.to_bytes(8, "little"), "is_store": number, "pages": table.tobytes()},
        num_groups=len(pages),
        group_threads=4,
    )
    expected = bytearray(before)
    for page, offset, length in zip(pages, offsets, lengths, strict=True):
        to, source = (buffer + offset, page) if is_store else (page, buffer + offset)
        expected[to : to + length] = before[source : source + length]
    assert memory == expected


def test_a_launch_fits_what_every_driver_takes_as_arguments() -> None:
    assert 8 + 4 + 4 + PAGES_PER_LAUNCH * gather._ENTRY.itemsize <= 4096
    assert f"pages[{PAGES_PER_LAUNCH * gather._ENTRY.itemsize}]" in PTX
    assert f".visible .entry {KERNEL}(" in PTX


@pytest.mark.parametrize("model", ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_nvidias_assembler_takes_the_text(tmp_path: Path, model: str) -> None:
    assembler = _assembler()
    if assembler is None:
        pytest.skip("needs ptxas, which comes with CUDA's toolkit, triton or nvidia-cuda-nvcc")
    source = tmp_path / "kernel.ptx"
    source.write_text(PTX)
    command = [assembler, "--gpu-name", model, "--warning-as-error", "--output-file", tmp_path / "out", source]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if "is not defined for option 'gpu-name'" in outcome.stderr:
        pytest.skip(f"this ptxas does not know {model}")
    assert outcome.returncode == 0, outcome.stderr


def _assembler() -> str | Path | None:
    for package in ("nvidia", "triton"):
        spec = importlib.util.find_spec(package)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        for path in (path for folder in folders for path in Path(folder).glob("**/bin/ptxas")):
            return path
    return shutil.which("ptxas")
