# SPDX-License-Identifier: Apache-2.0
"""A region's memory, page-locked for a device.

In pieces, since the driver refuses hundreds of GiB in one call. No copy may cross from one piece into the next, so
pieces end where slots and pages do, and their ``borders`` are known to whoever cuts the copies.
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
_MAX_PIECES = 1024
"""If all were equal. A driver that refuses a thousandth has no more memory to give."""


class PinnedRegion:
    """All of a region's bytes, registered with the driver until ``unpin``. Keeps them alive as long.

    A piece that the driver refuses is halved and tried again, and the ones after it are as small. Raises
    ``CapacityError``, with nothing pinned, if a thousandth of the region is refused too.
    """

    def __init__(self, driver: Driver, kv_view: memoryview, node: int | None = None) -> None:
        """``kv_view`` has shape (num_slots, slot_bytes) and begins a page. Pages of it that were never touched come
        from NUMA node ``node``, if that is given and has room."""
        shape = kv_view.shape
        assert shape is not None
        self._driver = driver
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(kv_view.cast("B"), dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data
        self.num_bytes = self._bytes.size
        if node is not None and prefer_node(self.address, self.num_bytes, node):
            logger.info("Host memory that is not in use yet is asked for from NUMA node %d, that of the device.", node)
        started_s = time.monotonic()
        near = frozenset[int]() if node is None else cores_of_node(node)
        if populate(self.address, self.num_bytes, near=near):
            done = format_bytes(self.num_bytes)
            logger.info("%s of host memory have their pages after %.1f s.", done, time.monotonic() - started_s)
        unit = math.lcm(shape[1], mmap.PAGESIZE)
        self._pieces: list[int] = []
        try:
            self._pin(unit)
        except BaseException:
            self.unpin()
            raise
        self.borders: npt.NDArray[np.int64] = np.array(self._pieces[1:], dtype=np.int64)
        """Addresses between two pieces, ascending."""

    def __repr__(self) -> str:
        return f"PinnedRegion({format_bytes(self.num_bytes)} in {len(self._pieces)} pieces)"

    def unpin(self) -> None:
        """Idempotent; no copy may be running. Errors of a broken device are ignored."""
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
    memory = "" if available is None else f" {format_bytes(available)} of memory are available"
    memory += "" if limit is None else f" below a limit of {format_bytes(limit)}"
    advice = f"Lower cpu_bytes_to_use to {format_bytes(pinned_bytes)}" if pinned_bytes else "Lower cpu_bytes_to_use"
    return CapacityError(
        f"The CUDA driver pinned {format_bytes(pinned_bytes)} of the {format_bytes(wanted_bytes)} of host memory for "
        f"offloading and refused the rest: {error}{memory and memory + '.'} {advice}, or give the "
        "container more memory."
    )
