# SPDX-License-Identifier: Apache-2.0
"""The copy loop as machine code, compiled with numba where that is installed (vLLM brings it).

Two things make it as fast as one large memcpy although its pages are scattered. It asks for what it will read 4 KiB
later, across the end of a run into the next one, since hardware prefetchers start anew with every page. And it writes
past the caches, as the C library does for large copies but not for small ones: an ordinary store first reads the line
that it overwrites, which is a third of all traffic, and pushes out what compute would have found there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MoveRuns", "native_mover"]

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
MoveRuns = Callable[[Int64s, Int64s, Int64s], None]
"""(destination addresses, source addresses, lengths in bytes), contiguous arrays; runs must not overlap. Releases the
GIL."""

_LINE_BYTES = 64
_VECTOR_BYTES = 32
_AHEAD_BYTES = 4096


@functools.cache
def native_mover() -> MoveRuns | None:
    """The compiled loop, or ``None`` where numba is missing or unusable. The first call takes about a second."""
    try:
        import numba
    except ImportError:
        return None
    try:
        return _compile(numba)
    except Exception:
        # Releases of numba, llvmlite, numpy and the C library can disagree; one memmove per run is always right.
        logger.warning("numba is installed but cannot compile: small pages will be copied slower.", exc_info=True)
        return None


def _compile(numba: Any) -> MoveRuns:
    types = numba.types
    memmove = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))
    stream_line, prefetch_line, fence = _stream_line(), _prefetch_line(), _fence()
    line_bytes, vector_bytes, ahead_bytes = _LINE_BYTES, _VECTOR_BYTES, _AHEAD_BYTES

    def move(destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
        last = len(lengths) - 1
        for i in range(len(lengths)):
            destination, source, length = destinations[i], sources[i], lengths[i]
            if destination % vector_bytes:
                memmove(destination, source, length)
                continue
            whole = length - length % line_bytes
            within = whole - min(ahead_bytes, whole)
            for offset in range(0, within, line_bytes):
                prefetch_line(source + offset + ahead_bytes)
                stream_line(destination + offset, source + offset)
            # A prefetch beyond the next run's end, or beyond mapped memory, does nothing.
            following = sources[min(i + 1, last)]
            for offset in range(within, whole, line_bytes):
                prefetch_line(following + offset - within)
                stream_line(destination + offset, source + offset)
            if whole < length:
                memmove(destination + whole, source + whole, length - whole)
        # Stores past the caches are weakly ordered: they must be seen before the job's end is.
        fence()

    addresses = types.Array(types.int64, 1, "C")
    compiled: MoveRuns = numba.njit(types.void(addresses, addresses, addresses), nogil=True)(move)
    return compiled


# Each of these is one or two LLVM instructions, which LLVM lowers for whatever processor it runs on. Their signatures
# are read by numba: they take the typing context first, then the types of the arguments.


def _stream_line() -> Any:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    word = ir.IntType(64)
    vector = ir.VectorType(word, _VECTOR_BYTES // 8)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        destination, source = arguments
        past_the_caches = builder.module.add_metadata([ir.IntType(32)(1)])
        offsets = [word(offset) for offset in range(0, _LINE_BYTES, _VECTOR_BYTES)]
        pointer = vector.as_pointer()
        loaded = [builder.load(builder.inttoptr(builder.add(source, at), pointer), align=1) for at in offsets]
        for at, value in zip(offsets, loaded, strict=True):
            target = builder.inttoptr(builder.add(destination, at), pointer)
            builder.store(value, target, align=_VECTOR_BYTES).set_metadata("nontemporal", past_the_caches)
        return context.get_dummy_value()

    def stream_line(typing_context: Any, destination: Any, source: Any) -> Any:
        return types.void(types.int64, types.int64), generate

    return intrinsic(stream_line)


def _prefetch_line() -> Any:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    byte_pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.prefetch", (byte_pointer,), kind)
        to_read, keep, of_data = number(0), number(3), number(1)
        builder.call(function, [builder.inttoptr(arguments[0], byte_pointer), to_read, keep, of_data])
        return context.get_dummy_value()

    def prefetch_line(typing_context: Any, address: Any) -> Any:
        return types.void(types.int64), generate

    return intrinsic(prefetch_line)


def _fence() -> Any:
    from numba import types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    def fence(typing_context: Any) -> Any:
        return types.void(), generate

    return intrinsic(fence)
