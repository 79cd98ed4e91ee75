# SPDX-License-Identifier: Apache-2.0
"""The contract of handlers, over plain arrays: a right pair passes, wrong ones fail."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.handler_contract import Bytes, HandlerContract, HandlerRig, collect
from tests.fakes.manual_handler import ManualHandler

from kvoffload.base import BlockIDsLoadStoreSpec, LoadStoreSpec, TransferResult

NUM_GPU_BLOCKS, NUM_SLOTS, PAGE_BYTES, FACTOR = 16, 8, 32, 2


class AtOnceHandler(ManualHandler):
    """A handler that runs every transfer at once, and fails impossible ones."""

    is_shut_down = False

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        if self.is_shut_down or not self._is_possible(*spec):
            self._finished.append(TransferResult(job_id, success=False))
            return
        super().transfer_async(job_id, spec)
        self.run(job_id)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _is_possible(self, source: LoadStoreSpec, destination: LoadStoreSpec) -> bool:
        ends = sorted((source, destination), key=lambda end: end.medium())
        assert all(isinstance(end, BlockIDsLoadStoreSpec) for end in ends)
        slots, gpu = (end.block_ids for end in ends)  # type: ignore[attr-defined]
        first = max(getattr(ends[1], "block_indices", (0,)))
        fits = len(slots) == -(-(first % FACTOR + len(gpu)) // FACTOR)
        in_range = all(((ids >= 0) & (ids < end)).all() for ids, end in ((gpu, NUM_GPU_BLOCKS), (slots, NUM_SLOTS)))
        return bool(in_range and fits)


class Rig(HandlerRig):
    def __init__(self, handler: type[ManualHandler]) -> None:
        self.gpu = np.zeros((NUM_GPU_BLOCKS, PAGE_BYTES), np.uint8)
        slots = np.zeros((NUM_SLOTS, FACTOR * PAGE_BYTES), np.uint8)
        store, load = (handler(self.gpu, slots, (PAGE_BYTES,), FACTOR) for _ in range(2))
        super().__init__(store, load, FACTOR, [[0]])

    def read_page(self, tensor_idx: int, gpu_block: int) -> Bytes:
        return self.gpu[gpu_block].copy()

    def fill(self, seed: int) -> None:
        self.gpu[:] = np.random.default_rng(seed).integers(0, 256, self.gpu.shape, np.uint8)

    def close(self) -> None:
        self.store.shutdown()
        self.load.shutdown()


class TestAtOnceHandlers(HandlerContract):
    def make_rig(self) -> HandlerRig:
        return Rig(AtOnceHandler)


class OffByOnePage(AtOnceHandler):
    """Copies every page but the last."""

    def _pages(self, source: LoadStoreSpec, destination: LoadStoreSpec) -> list[tuple[Bytes, Bytes]]:
        return super()._pages(source, destination)[:-1]


class WritesBeforeItRefuses(AtOnceHandler):
    def _is_possible(self, source: LoadStoreSpec, destination: LoadStoreSpec) -> bool:
        self._gpu[1] = 0
        return super()._is_possible(source, destination)


@pytest.mark.parametrize(
    ("handler", "test"),
    [
        (OffByOnePage, "test_blocks_come_back_elsewhere_in_every_group"),
        (WritesBeforeItRefuses, "test_impossible_transfers_fail_and_write_nothing"),
    ],
)
def test_wrong_handlers_fail(handler: type[ManualHandler], test: str) -> None:
    class Contract(HandlerContract):
        def make_rig(self) -> HandlerRig:
            return Rig(handler)

    with pytest.raises(AssertionError):
        getattr(Contract(), test)()


def test_collect_refuses_results_that_nobody_asked_for() -> None:
    class Chatty(AtOnceHandler):
        def get_finished(self) -> list[TransferResult]:
            return [TransferResult(7, success=True)]

    handler = Chatty(np.zeros((1, 1), np.uint8), np.zeros((1, 1), np.uint8), (1,), 1)
    with pytest.raises(AssertionError, match="never asked for"):
        collect(handler, [1])
