# SPDX-License-Identifier: Apache-2.0
"""Small pages through a buffer in device memory, so that a slot is one copy.

Copy engines reach a tenth of the link with pages below some 28 KiB. The pages of a block lie side by side in its slot.
So a kernel moves them between their places and a buffer, in the order of the slot, and one copy moves the slot.
Everything is on the stream of one lane, which orders the kernel and the copies, and each piece after the one before it
in the same buffer.

The kernel is text that the driver compiles: no compiler is needed, and no torch. It takes the addresses of the pages by
value, so nothing has to outlive the call. It is off unless ``GATHER_BELOW`` is set: no device has measured it yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os

import numpy as np
import numpy.typing as npt

from kvoffload.base import Direction
from kvoffload.cpu.copy.driver import CudaError, Driver, Stream
from kvoffload.cpu.copy.plan import Runs
from kvoffload.errors import ConfigError

logger = logging.getLogger(__name__)

GATHER_BELOW = "KVOFFLOAD_GATHER_BELOW"
"""The environment variable that says below how many bytes a page goes through the buffer. It is of the machine, not of
the model. 0, the default: none does."""

KERNEL = "move_pages"
PAGES_PER_LAUNCH = 254
"""A kernel takes 4,096 bytes of arguments, of which the table has 4,064."""
PTX = """
.version 7.0
.target sm_60
.address_size 64

// A group of threads for each page, 16 bytes a thread at a time. An entry of the table: the page's address, its offset
// in the buffer and its length, both in bytes. Addresses, offsets and lengths are multiples of 16.
.visible .entry move_pages(
    .param .u64 buffer,
    .param .u32 is_store,
    .param .align 8 .b8 pages[4064]
)
{
    .reg .pred %store, %more;
    .reg .b32 %at, %offset, %length, %step, %a, %b, %c, %d;
    .reg .b64 %entry, %page, %inside, %from, %to, %wide;

    mov.u32 %at, %ctaid.x;
    mul.wide.u32 %wide, %at, 16;
    mov.u64 %entry, pages;
    add.u64 %entry, %entry, %wide;
    ld.param.u64 %page, [%entry];
    ld.param.u32 %offset, [%entry+8];
    ld.param.u32 %length, [%entry+12];
    ld.param.u64 %inside, [buffer];
    cvt.u64.u32 %wide, %offset;
    add.u64 %inside, %inside, %wide;
    ld.param.u32 %at, [is_store];
    setp.ne.u32 %store, %at, 0;
    selp.b64 %from, %page, %inside, %store;
    selp.b64 %to, %inside, %page, %store;

    mov.u32 %at, %tid.x;
    shl.b32 %at, %at, 4;
    mov.u32 %step, %ntid.x;
    shl.b32 %step, %step, 4;
    cvt.u64.u32 %wide, %at;
    add.u64 %from, %from, %wide;
    add.u64 %to, %to, %wide;
    cvt.u64.u32 %wide, %step;
MORE:
    setp.lt.u32 %more, %at, %length;
    @!%more bra DONE;
    ld.global.v4.u32 {%a, %b, %c, %d}, [%from];
    st.global.v4.u32 [%to], {%a, %b, %c, %d};
    add.u32 %at, %at, %step;
    add.u64 %from, %from, %wide;
    add.u64 %to, %to, %wide;
    bra MORE;
DONE:
    ret;
}
"""

_THREADS = 256
_VECTOR_BYTES = 16
_ENTRY = np.dtype([("page", "<u8"), ("offset", "<u4"), ("length", "<u4")])

Int64s = npt.NDArray[np.int64]


def gather_below() -> int:
    """What the environment says. Raises ``ConfigError`` for what is no number of bytes."""
    text = os.environ.get(GATHER_BELOW, "0")
    if not text.isdecimal():
        raise ConfigError(f"{GATHER_BELOW} must be a number of bytes, and 0 for never, not {text!r}.")
    return int(text)


class Gatherer:
    """The kernel and the buffer of one lane. Whoever submits to the lane calls it."""

    def __init__(self, driver: Driver, num_bytes: int, below: int) -> None:
        """``num_bytes``: of the buffer, and the most that ``copy`` is given at a time. Raises ``CudaError`` for a
        driver that refuses the kernel, or has no memory left."""
        self._driver = driver
        self._below = below
        self._kernel = driver.load_kernel(PTX, KERNEL)
        self._buffer = driver.allocate(num_bytes)

    @classmethod
    def if_wanted(cls, driver: Driver, num_bytes: int, below: int) -> Gatherer | None:
        """``None`` for ``below`` 0, and for a driver that refuses."""
        try:
            return cls(driver, num_bytes, below) if below else None
        except CudaError as exc:
            logger.warning("%s Small pages are copied one by one.", exc)
            return None

    def close(self) -> None:
        """Nothing of it may be running."""
        with contextlib.suppress(CudaError):
            self._driver.free(self._buffer)

    def copy(self, runs: Runs, direction: Direction, borders: Int64s, stream: Stream) -> Runs:
        """Submits what is worth gathering of ``runs``, which are by ascending host addresses, and returns the others.
        ``borders``: those of ``Runs.cut_at``. Once the driver refuses something, nothing is gathered any more."""
        is_small = runs.lengths < self._below
        is_small &= (runs.device | runs.lengths) % _VECTOR_BYTES == 0
        small = runs.select(is_small)
        offsets = np.cumsum(small.lengths) - small.lengths
        copies = Runs(self._buffer + offsets, small.host, small.lengths).merged().cut_at(borders)
        if not len(offsets) or 2 * len(copies.lengths) > len(offsets):
            return runs
        pages = np.empty(len(offsets), _ENTRY)
        pages["page"], pages["offset"], pages["length"] = small.device, offsets, small.lengths
        try:
            if direction is Direction.STORE:
                self._move(pages, True, stream)
                self._driver.copy_runs(copies.host, copies.device, copies.lengths, stream)
            else:
                self._driver.copy_runs(copies.device, copies.host, copies.lengths, stream)
                self._move(pages, False, stream)
        except CudaError as exc:
            # What runs already moves the same bytes to the same places, before the copies that are made instead.
            logger.warning("%s Small pages are copied one by one from now on.", exc)
            self._below = 0
            return runs
        return runs.select(~is_small)

    def _move(self, pages: npt.NDArray[np.void], is_store: bool, stream: Stream) -> None:
        buffer, way, table = (
            ctypes.c_uint64(self._buffer),
            ctypes.c_uint32(is_store),
            np.zeros(PAGES_PER_LAUNCH, _ENTRY),
        )
        arguments = ctypes.addressof(buffer), ctypes.addressof(way), table.ctypes.data
        for start in range(0, len(pages), PAGES_PER_LAUNCH):
            part = pages[start : start + PAGES_PER_LAUNCH]
            table[: len(part)] = part
            self._driver.launch(self._kernel, len(part), _THREADS, arguments, stream)
