# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import pytest
from tests.cpu.copy.fake_cuda import FakeCuda, cuda

from kvoffload.cpu.copy.driver import CudaError
from kvoffload.cpu.copy.pinning import PinnedRegion
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.errors import CapacityError

__all__ = ["cuda"]

KIB = 1024


def test_a_region_is_pinned_whole_where_the_driver_agrees(cuda: FakeCuda) -> None:
    region = SharedOffloadRegion.anonymous(10, 12 * KIB)
    pinned = PinnedRegion(cuda.driver, region.create_kv_memoryview())
    assert cuda.count("registrations") == 1
    assert cuda.count("narrow_registrations") == 0, "each context and the device itself can use them"
    assert pinned.borders.tolist() == []
    pinned.unpin()
    pinned.unpin()
    region.close()


def test_refused_pieces_are_halved_and_end_where_slots_and_pages_do(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.limit_registrations(largest_bytes=50 * KIB)
    region = SharedOffloadRegion.anonymous(100, 6 * KIB)  # two slots are three pages
    with caplog.at_level(logging.INFO):
        pinned = PinnedRegion(cuda.driver, region.create_kv_memoryview())
    offsets = [border - pinned.address for border in pinned.borders.tolist()]
    assert all(offset % (12 * KIB) == 0 for offset in offsets)
    sizes = [high - low for low, high in zip([0, *offsets], [*offsets, 600 * KIB], strict=True)]
    assert sum(sizes) == 600 * KIB
    assert max(sizes) == 36 * KIB  # 600 / 16, in whole pairs of slots
    assert cuda.count("registrations") == len(sizes)
    assert "Pinning 600 KiB at once failed" in caplog.text
    assert "Pinned 600 KiB of 600 KiB of host memory in" in caplog.text
    pinned.unpin()
    region.close()


def test_what_the_driver_refuses_for_good_is_refused_in_one_sentence_with_nothing_pinned(cuda: FakeCuda) -> None:
    cuda.limit_registrations(largest_bytes=1 << 40, most_bytes=300 * KIB)
    region = SharedOffloadRegion.anonymous(100, 12 * KIB)
    with pytest.raises(
        CapacityError,
        match=r"pinned 300 KiB of the 1\.17 MiB of host memory .*CUDA error 2 .*\. Lower cpu_bytes_to_use to 300 KiB",
    ):
        PinnedRegion(cuda.driver, region.create_kv_memoryview())
    assert cuda.count("registrations") == 0
    region.close()


@pytest.mark.parametrize(("code", "name"), [(801, "CUDA_ERROR_NOT_SUPPORTED"), (800, "CUDA_ERROR_NOT_PERMITTED")])
def test_a_driver_that_registers_no_memory_at_all_is_asked_once(
    code: int, name: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under confidential computing: a smaller piece would be rejected as well."""
    asked: list[int] = []

    def register(address: int, num_bytes: int) -> None:
        asked.append(num_bytes)
        raise CudaError("cuMemHostRegister", code, name)

    monkeypatch.setattr(cuda.driver, "register", register)
    region = SharedOffloadRegion.anonymous(100, 12 * KIB)
    with caplog.at_level(logging.INFO):
        pinned = PinnedRegion(cuda.driver, region.create_kv_memoryview())
    assert len(asked) == 1
    assert not pinned.is_pinned
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert name in said.getMessage() and "cpu_bytes_to_use" not in said.getMessage()
    assert "trying half" not in caplog.text
    pinned.unpin()
    region.close()


def test_a_region_outlives_its_mapping_while_it_is_pinned(cuda: FakeCuda) -> None:
    region = SharedOffloadRegion.anonymous(4, 4 * KIB)
    pinned = PinnedRegion(cuda.driver, region.create_kv_memoryview())
    region.close()
    pinned.unpin()
