# SPDX-License-Identifier: Apache-2.0
"""Check, before an engine serves, that this machine makes dependent copies in the right order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.base import GPULoadStoreSpec, OffloadingHandler
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.plan import CopyLayout
from kvoffload.errors import TransferError

_SWAPS = 9  # odd: the slots end up swapped
_MAX_BYTES = 256 << 20  # one group's copies: a few milliseconds
_TIMEOUT_S = 30.0


class CopiesHang(TransferError):
    """Copies did not end within the time limit. They may still be running."""


def check_copies(
    store: OffloadingHandler, load: OffloadingHandler, kv_view: memoryview, layout: CopyLayout, seed: int = 0
) -> None:
    """Check that ``store`` and ``load`` keep the order of dependent copies.

    For each group, this swaps two slots of random bytes through two blocks of GPU blocks several times, with all jobs
    submitted at once. If any two consecutive jobs of that chain run out of order, the final bytes are wrong.

    Call it before the handlers are used and before slots hold any data. It restores the GPU blocks and zeroes the slots
    that it used. It takes a few milliseconds. It does nothing if this rank stores fewer than four slots, or if a group
    has fewer than ``2 * layout.factor`` GPU blocks. Raises ``TransferError`` for a wrong byte or a failed copy, and
    ``CopiesHang`` if copies do not end.
    """
    for group, pages in enumerate(layout.groups):
        num_gpu_blocks = min((page.num_blocks for page in pages), default=0)
        if len(_own_slots(layout)) >= 4 and num_gpu_blocks >= 2 * layout.factor:
            _Chain(store, load, kv_view, layout, group).run(np.random.default_rng([seed, group]))


def wait_for_copies(have_ended: Callable[[], bool], nap_s: float = 50e-6) -> None:
    """Return once ``have_ended()`` is true. Raises ``CopiesHang`` after 30 seconds, which is longer than any copy."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not have_ended():
        if time.monotonic() > deadline_s:
            raise CopiesHang(
                f"Copies between the device and host memory did not end within {_TIMEOUT_S:.0f} s; serve without "
                "kvoffload, and report the output of `kvoffload doctor`."
            )
        time.sleep(nap_s)


def _own_slots(layout: CopyLayout) -> range:
    """Return the slots that this rank stores. Replicas check at the same time, each with its own slots."""
    return range(layout.replica, layout.num_slots, layout.num_replicas)


class _Chain:
    """The chain of one group.

    It uses the group's first blocks and this rank's outermost slots. If the region is pinned in several pieces, these
    slots are in different pieces.
    """

    def __init__(
        self,
        store: OffloadingHandler,
        load: OffloadingHandler,
        kv_view: memoryview,
        layout: CopyLayout,
        group: int,
    ) -> None:
        self._store, self._load = store, load
        self._layout, self._group = layout, group
        self._parts = layout.bytes_in_slot(group)
        self._num_bytes = sum(part.stop - part.start for part in self._parts)
        slots: npt.NDArray[np.uint8] = np.frombuffer(kv_view.cast("B"), dtype=np.uint8)
        self._slots = slots.reshape(layout.num_slots, layout.slot_bytes)
        self._num_jobs = 0
        self._job_ids: dict[OffloadingHandler, set[int]] = {store: set(), load: set()}

    def run(self, random: np.random.Generator) -> None:
        own = _own_slots(self._layout)
        swapped, kept = (own[0], own[-1]), (own[1], own[-2])
        before = random.integers(0, 256, (2, self._num_bytes), dtype=np.uint8)
        self._write(swapped, before)
        for block, slot in enumerate(kept):
            self._submit(self._store, block, slot)
        num_swaps = _SWAPS if _SWAPS * 4 * self._num_bytes <= _MAX_BYTES else 1
        for _ in range(num_swaps):
            for block, slot in enumerate(swapped):
                self._submit(self._load, block, slot)
            for block, slot in enumerate(reversed(swapped)):
                self._submit(self._store, block, slot)
        for block, slot in enumerate(kept):
            self._submit(self._load, block, slot)
        self._finish()
        is_right = np.array_equal(self._read(swapped), before[::-1])
        for block, slot in enumerate(swapped):
            self._submit(self._store, block, slot)
        self._finish()
        is_right &= np.array_equal(self._read(swapped), self._read(kept))
        self._write((*swapped, *kept), np.zeros((4, self._num_bytes), dtype=np.uint8))
        if not is_right:
            raise TransferError(
                "Blocks that kvoffload copied to the device and back at startup contain wrong bytes: this machine does "
                "not keep the order of copies; serve without kvoffload, and report the output of `kvoffload doctor`."
            )

    def _read(self, slots: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Return the bytes of ``slots`` that this rank fills, of shape (slots, bytes).

        Other ranks check at the same time, with the other bytes of these slots.
        """
        return np.concatenate([self._slots[list(slots), part] for part in self._parts], axis=1)

    def _write(self, slots: Sequence[int], content: npt.NDArray[np.uint8]) -> None:
        start = 0
        for part in self._parts:
            end = start + part.stop - part.start
            self._slots[list(slots), part] = content[:, start:end]
            start = end

    def _submit(self, handler: OffloadingHandler, block: int, slot: int) -> None:
        sizes, indices = [0] * len(self._layout.groups), [0] * len(self._layout.groups)
        sizes[self._group] = self._layout.factor
        ids = range(block * self._layout.factor, (block + 1) * self._layout.factor)
        gpu, cpu = GPULoadStoreSpec(ids, sizes, indices), CPULoadStoreSpec([slot])
        job_id = self._num_jobs
        self._num_jobs += 1
        self._job_ids[handler].add(job_id)
        handler.transfer_async(job_id, (gpu, cpu) if handler is self._store else (cpu, gpu))

    def _finish(self) -> None:
        """Wait for all jobs. Raises ``TransferError`` if one failed or did not end."""
        for handler, job_ids in self._job_ids.items():
            wait_for_copies(lambda: self._have_ended(handler, job_ids))  # noqa: B023 - called before the next round

    def _have_ended(self, handler: OffloadingHandler, job_ids: set[int]) -> bool:
        for result in handler.get_finished():
            job_ids.discard(result.job_id)
            if not result.success:
                raise TransferError(
                    "Copies between the device and host memory fail at startup; serve without kvoffload, and report "
                    "the error above this one and the output of `kvoffload doctor`."
                )
        return not job_ids
