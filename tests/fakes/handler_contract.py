# SPDX-License-Identifier: Apache-2.0
"""Tests that a pair of offloading handlers must pass, to be inherited.

GPU blocks contain random bytes, so that a wrong block, slot, page or offset is visible.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.base import GPULoadStoreSpec, OffloadingHandler, TransferResult
from kvoffload.cpu.common import CPULoadStoreSpec

__all__ = ["HandlerContract", "HandlerRig", "collect"]

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class HandlerRig:
    """A pair of handlers, and direct access to the device memory below them."""

    store: OffloadingHandler
    load: OffloadingHandler
    factor: int
    group_pages: Sequence[Sequence[int]]
    """The tensor index of each page of a group's GPU blocks, by group."""

    def read_page(self, tensor_idx: int, gpu_block: int) -> Bytes:
        """Return a copy of one page's bytes."""
        raise NotImplementedError

    def fill(self, seed: int) -> None:
        """Overwrites all device memory with random bytes."""
        raise NotImplementedError

    def close(self) -> None:
        """Shuts the handlers down and frees both sides."""
        raise NotImplementedError


def collect(handler: OffloadingHandler, job_ids: Sequence[int], timeout_s: float = 30.0) -> dict[int, TransferResult]:
    """Polls until every job has a result. Fails if a job is unknown, has two results, or has none in time."""
    found: dict[int, TransferResult] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < len(job_ids):
        for result in handler.get_finished():
            assert result.job_id in job_ids, f"{result} was never asked for"
            assert result.job_id not in found, f"{result} was returned twice"
            found[result.job_id] = result
        assert time.monotonic() < deadline, f"{sorted(found)} of {sorted(job_ids)} ended in time"
        time.sleep(0.0005)
    return found


class HandlerContract:
    """Inherit in a class whose name starts with ``Test``, and supply ``make_rig``: at least 16 GPU blocks, 8 slots, and
    ``group_pages`` for every group."""

    def make_rig(self) -> HandlerRig:
        raise NotImplementedError

    def _pages(self, rig: HandlerRig, group: int, blocks: Sequence[int]) -> list[Bytes]:
        return [rig.read_page(tensor, block) for tensor in rig.group_pages[group] for block in blocks]

    def _spec(self, rig: HandlerRig, group: int, blocks: Sequence[int], index: int = 0) -> GPULoadStoreSpec:
        sizes, indices = [0] * len(rig.group_pages), [0] * len(rig.group_pages)
        sizes[group], indices[group] = len(blocks), index
        return GPULoadStoreSpec(blocks, sizes, indices)

    def _round_trip(
        self, rig: HandlerRig, group: int, source: Sequence[int], slots: Sequence[int], target: Sequence[int]
    ) -> None:
        before = self._pages(rig, group, source)
        rig.store.transfer_async(1, (self._spec(rig, group, source), CPULoadStoreSpec(slots)))
        assert collect(rig.store, [1])[1].success
        rig.fill(seed=99)
        rig.load.transfer_async(2, (CPULoadStoreSpec(slots), self._spec(rig, group, target)))
        result = collect(rig.load, [2])[2]
        assert result.success
        assert result.num_bytes == sum(page.size for page in before)
        for stored, loaded in zip(before, self._pages(rig, group, target), strict=True):
            np.testing.assert_array_equal(stored, loaded)

    def test_blocks_come_back_elsewhere_in_every_group(self) -> None:
        rig = self.make_rig()
        for group in range(len(rig.group_pages)):
            rig.fill(seed=group)
            count = 2 * rig.factor
            self._round_trip(rig, group, range(count), [5, 2], range(15, 15 - count, -1))
        rig.close()

    def test_a_transfer_may_start_and_end_inside_a_block(self) -> None:
        rig = self.make_rig()
        rig.fill(seed=7)
        whole = list(range(3 * rig.factor))
        before = self._pages(rig, 0, whole[rig.factor - 1 : rig.factor + 1])
        rig.store.transfer_async(1, (self._spec(rig, 0, whole), CPULoadStoreSpec([6, 0, 3])))
        collect(rig.store, [1])
        rig.fill(seed=8)
        inner = self._spec(rig, 0, [14, 15], index=rig.factor - 1)
        rig.load.transfer_async(2, (CPULoadStoreSpec([6, 0]), inner))
        assert collect(rig.load, [2])[2].success
        for stored, loaded in zip(before, self._pages(rig, 0, [14, 15]), strict=True):
            np.testing.assert_array_equal(stored, loaded)
        rig.close()

    def test_groups_share_a_job(self) -> None:
        rig = self.make_rig()
        rig.fill(seed=3)
        groups = range(len(rig.group_pages))
        blocks = [[2 * group + 1] for group in groups]
        before = [self._pages(rig, group, blocks[group]) for group in groups]
        spec = GPULoadStoreSpec([block for one in blocks for block in one], [1 for _ in groups], [0 for _ in groups])
        rig.store.transfer_async(1, (spec, CPULoadStoreSpec(list(groups))))
        collect(rig.store, [1])
        rig.fill(seed=4)
        rig.load.transfer_async(2, (CPULoadStoreSpec(list(groups)), spec))
        assert collect(rig.load, [2])[2].success
        for group in groups:
            for stored, loaded in zip(before[group], self._pages(rig, group, blocks[group]), strict=True):
                np.testing.assert_array_equal(stored, loaded)
        rig.close()

    def test_a_gpu_block_may_occur_twice(self) -> None:
        rig = self.make_rig()
        rig.fill(seed=5)
        before = self._pages(rig, 0, [3])
        rig.store.transfer_async(1, (self._spec(rig, 0, [3] * (2 * rig.factor)), CPULoadStoreSpec([1, 4])))
        assert collect(rig.store, [1])[1].success
        rig.load.transfer_async(2, (CPULoadStoreSpec([4]), self._spec(rig, 0, [9])))
        collect(rig.load, [2])
        for stored, loaded in zip(before, self._pages(rig, 0, [9]), strict=True):
            np.testing.assert_array_equal(stored, loaded)
        rig.close()

    def test_a_gpu_block_that_a_load_names_twice_has_the_bytes_of_the_last_slot(self) -> None:
        rig = self.make_rig()
        rig.fill(seed=6)
        slots = list(range(8))
        sources = [block % 16 for block in range(len(slots) * rig.factor)]
        rig.store.transfer_async(1, (self._spec(rig, 0, sources), CPULoadStoreSpec(slots)))
        assert collect(rig.store, [1])[1].success
        last = self._pages(rig, 0, sources[: rig.factor])  # slot 0 is named last
        rig.fill(seed=7)
        targets = list(range(rig.factor))
        rig.load.transfer_async(2, (CPULoadStoreSpec(slots[::-1]), self._spec(rig, 0, targets * len(slots))))
        assert collect(rig.load, [2])[2].success
        for stored, loaded in zip(last, self._pages(rig, 0, targets), strict=True):
            np.testing.assert_array_equal(stored, loaded)
        rig.close()

    def test_jobs_that_touch_the_same_blocks_run_in_order(self) -> None:
        """The test copies a chain through two slots and back.

        Any reordering of consecutive jobs leaves wrong bytes at its end.
        """
        rig = self.make_rig()
        for round_ in range(20):
            rig.fill(seed=round_)
            before = self._pages(rig, 0, [0])
            number = round_ * 10
            for step in range(4):
                here, there = self._spec(rig, 0, [step]), self._spec(rig, 0, [step + 1])
                slot = CPULoadStoreSpec([step % 2])
                rig.store.transfer_async(number + 2 * step, (here, slot))
                rig.load.transfer_async(number + 2 * step + 1, (slot, there))
            collect(rig.store, [number + 2 * step for step in range(4)])
            collect(rig.load, [number + 2 * step + 1 for step in range(4)])
            for first, last in zip(before, self._pages(rig, 0, [4]), strict=True):
                np.testing.assert_array_equal(first, last)
        rig.close()

    def test_impossible_transfers_fail_and_write_nothing(self) -> None:
        rig = self.make_rig()
        rig.fill(seed=6)
        before = [self._pages(rig, group, range(16)) for group in range(len(rig.group_pages))]
        bad = [
            (CPULoadStoreSpec([10**6]), self._spec(rig, 0, [1])),
            (CPULoadStoreSpec([0]), self._spec(rig, 0, [10**6])),
            (CPULoadStoreSpec([0]), self._spec(rig, 0, [-1])),
            (CPULoadStoreSpec([-1]), self._spec(rig, 0, [1])),
            (CPULoadStoreSpec([0, 1, 2]), self._spec(rig, 0, [1])),
            (CPULoadStoreSpec([]), self._spec(rig, 0, [1])),
        ]
        for job_id, spec in enumerate(bad):
            rig.load.transfer_async(job_id, spec)
        results = collect(rig.load, range(len(bad)))
        assert not any(result.success or result.num_bytes for result in results.values())
        for group, pages in enumerate(before):
            for then, now in zip(pages, self._pages(rig, group, range(16)), strict=True):
                np.testing.assert_array_equal(then, now)
        rig.close()

    def test_waiting_and_empty_jobs(self) -> None:
        rig = self.make_rig()
        rig.fill(seed=2)
        rig.store.wait([12345])
        rig.store.transfer_async(1, (self._spec(rig, 0, [0]), CPULoadStoreSpec([0])))
        rig.store.transfer_async(2, (self._spec(rig, 0, []), CPULoadStoreSpec([])))
        rig.store.wait([1, 2])
        assert {result.job_id for result in rig.store.get_finished()} == {1, 2}
        assert rig.store.get_finished() == []
        rig.close()

    def test_after_shutdown_jobs_fail(self) -> None:
        rig = self.make_rig()
        rig.store.shutdown()
        rig.store.shutdown()
        rig.store.transfer_async(1, (self._spec(rig, 0, [0]), CPULoadStoreSpec([0])))
        assert not collect(rig.store, [1])[1].success
        rig.store.wait([1])
        rig.close()
