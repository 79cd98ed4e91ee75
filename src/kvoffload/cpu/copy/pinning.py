# SPDX-License-Identifier: Apache-2.0
"""Page-lock a region's memory for a device.

The region is registered in pieces, because the driver rejects hundreds of GiB in one call. No copy may cross from one
piece into the next. So pieces end at multiples of both the slot size and the page size, and ``borders`` lists their
boundaries for the code that cuts the copies.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import time

import numpy as np
import numpy.typing as npt

from kvoffload.cpu.copy.driver import CudaError, Driver
from kvoffload.cpu.copy.numa import cores_of_node, prefer_node
from kvoffload.cpu.memory_limits import available_bytes, limit_bytes
from kvoffload.cpu.populate import populate
from kvoffload.errors import CapacityError
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

_LARGEST_PIECE_BYTES = 64 << 30
_HOPELESS = {
    800: "Check the container's rights and IPC_LOCK.",
    801: "Confidential computing and some virtual machines forbid it.",
}
"""Errors that do not depend on the size, with the remedy or the cause for each: not permitted, not supported."""
_MAX_PIECES = 1024
"""The region is divided into at most this many pieces of the smallest size. A driver that rejects a piece of that size
has no memory left."""


class PinnedRegion:
    """All of a region's bytes, registered with the driver and kept alive until ``unpin``.

    If the driver rejects a piece, half of it is tried, and the pieces after it are no larger. Raises ``CapacityError``,
    with nothing pinned, if the driver rejects even a thousandth of the region. If the driver registers no memory at
    all, nothing is pinned, and the driver copies through pinned memory of its own.
    """

    def __init__(self, driver: Driver, kv_view: memoryview, node: int | None = None) -> None:
        """Pin ``kv_view``, which has shape (num_slots, slot_bytes) and starts at a page boundary.

        Pages that were never touched are allocated on NUMA node ``node``, if it is given and has room.
        """
        shape = kv_view.shape
        assert shape is not None
        self._driver = driver
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(kv_view.cast("B"), dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data
        self.num_bytes = self._bytes.size
        if node is not None and prefer_node(self.address, self.num_bytes, node):
            logger.info("Host memory that is not in use yet will come from NUMA node %d, the device's node.", node)
        started_s = time.monotonic()
        near = frozenset[int]() if node is None else cores_of_node(node)
        if populate(self.address, self.num_bytes, near=near):
            done = format_bytes(self.num_bytes)
            logger.info("The kernel allocated %s of host memory in %.1f s.", done, time.monotonic() - started_s)
        unit = math.lcm(shape[1], mmap.PAGESIZE)
        self._pieces: list[int] = []
        try:
            self._pin(unit)
        except BaseException:
            self.unpin()
            raise
        self.borders: npt.NDArray[np.int64] = np.array(self._pieces[1:], dtype=np.int64)
        """The address where each piece but the first starts, ascending."""

    def __repr__(self) -> str:
        return f"PinnedRegion({format_bytes(self.num_bytes)} in {len(self._pieces)} pieces)"

    @property
    def is_pinned(self) -> bool:
        return bool(self._pieces)

    def unpin(self) -> None:
        """Unregister the memory and release it.

        Idempotent. No copy may be running. Ignores errors of a broken device.
        """
        pieces, self._pieces, self._bytes = self._pieces, [], None
        for address in pieces:
            with contextlib.suppress(CudaError):
                self._driver.unregister(address)

    def _pin(self, unit: int) -> None:
        started_s = time.monotonic()
        piece_bytes = max(unit, _LARGEST_PIECE_BYTES // unit * unit)
        smallest_piece_bytes = max(unit, self.num_bytes // _MAX_PIECES)
        pinned_bytes = 0
        while pinned_bytes < self.num_bytes:
            length = min(piece_bytes, self.num_bytes - pinned_bytes)
            try:
                self._driver.register(self.address + pinned_bytes, length)
            except CudaError as exc:
                if exc.code in _HOPELESS and not pinned_bytes:
                    logger.warning(
                        "The CUDA driver cannot register host memory of any size: %s %s Copies go through the driver's "
                        "own memory, which is slower.",
                        exc,
                        _HOPELESS[exc.code],
                    )
                    return
                piece_bytes = length // 2 // unit * unit
                if piece_bytes < smallest_piece_bytes:
                    raise _refusal(pinned_bytes, self.num_bytes, exc) from exc
                logger.info("Pinning %s at once failed (%s); trying half of it.", format_bytes(length), exc)
                continue
            self._pieces.append(self.address + pinned_bytes)
            pinned_bytes += length
            done, wanted = format_bytes(pinned_bytes), format_bytes(self.num_bytes)
            logger.info("Pinned %s of %s of host memory in %.1f s.", done, wanted, time.monotonic() - started_s)


def _refusal(pinned_bytes: int, wanted_bytes: int, error: CudaError) -> CapacityError:
    limit, available = limit_bytes(), available_bytes()
    memory = "" if available is None else f" {format_bytes(available)} of memory is available"
    memory += "" if limit is None else f" within a limit of {format_bytes(limit)}"
    advice = f"Lower cpu_bytes_to_use to {format_bytes(pinned_bytes)}" if pinned_bytes else "Lower cpu_bytes_to_use"
    return CapacityError(
        f"The CUDA driver pinned {format_bytes(pinned_bytes)} of the {format_bytes(wanted_bytes)} of host memory for "
        f"offloading and rejected the rest: {error}{memory and memory + '.'} {advice}, or give the "
        "container more memory."
    )
