# SPDX-License-Identifier: Apache-2.0
"""Compile the copy loop to machine code with LLVM, if llvmlite is installed (vLLM depends on it).

The loop copies scattered pages as fast as one large memcpy, for two reasons. First, it prefetches the data that it will
read 4 KiB later, across the end of a run into the next one, because hardware prefetchers start over at each page.
Second, it writes past the caches, as the C library does for large copies only. An ordinary store first reads the line
that it overwrites, which causes a third of all memory traffic, and evicts data from the cache that compute needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Int64s = npt.NDArray[np.int64]
MoveRuns = Callable[[Int64s, Int64s, Int64s], None]
"""(destination addresses, source addresses, lengths in bytes); runs must not overlap. Releases the GIL."""


class CompiledLater:
    """A ``MoveRuns`` that calls ``plain`` until a faster one has been compiled.

    The first call starts ``compile`` in its own thread and does not wait for it, so compilation never delays a copy,
    and a process that copies nothing compiles nothing. ``compile`` returns ``None`` if it has nothing faster. Any
    thread may call.
    """

    def __init__(self, plain: MoveRuns, compile: Callable[[], MoveRuns | None]) -> None:
        self._move = plain
        self._compile = compile
        self._first_call = threading.Lock()  # acquired once and never released
        self._has_ended = threading.Event()

    def __repr__(self) -> str:
        return f"CompiledLater({self._move!r})"

    def __call__(self, destinations: Int64s, sources: Int64s, lengths: Int64s) -> None:
        if self._first_call.acquire(blocking=False):
            # This is not a daemon thread, because a process must not exit while LLVM is running.
            try:
                threading.Thread(target=self._replace, name="kvoffload-compile").start()
            except RuntimeError:
                self._has_ended.set()  # a process that is exiting, or has too many threads, keeps using ``plain``
        self._move(destinations, sources, lengths)

    def wait(self) -> None:
        """Return when the compilation that the first call started has ended."""
        self._has_ended.wait()

    def _replace(self) -> None:
        try:
            self._move = self._compile() or self._move
        finally:
            self._has_ended.set()


def compile_mover() -> MoveRuns | None:
    """Return the compiled loop, or ``None`` if llvmlite is missing or unusable. Takes about 50 ms of CPU time."""
    try:
        import llvmlite.binding as llvm

        return _compile(llvm)
    except ImportError:
        return None
    except Exception:
        # A release of llvmlite may not support this processor. One memmove per run always works.
        logger.warning(
            "llvmlite is installed but cannot compile, so kvoffload copies small pages more slowly.", exc_info=True
        )
        return None


_CODE = """
define void @move(ptr %destinations, ptr %sources, ptr %lengths, i64 %num_runs) {
start:
  %last = sub i64 %num_runs, 1
  br label %run

run:
  %i = phi i64 [0, %start], [%next, %rest]
  %next = add i64 %i, 1
  %is_last = icmp eq i64 %i, %last
  %following = select i1 %is_last, i64 %i, i64 %next
  %destination.at = getelementptr i64, ptr %destinations, i64 %i
  %source.at = getelementptr i64, ptr %sources, i64 %i
  %length.at = getelementptr i64, ptr %lengths, i64 %i
  %next_source.at = getelementptr i64, ptr %sources, i64 %following
  %destination = load ptr, ptr %destination.at
  %source = load ptr, ptr %source.at
  %length = load i64, ptr %length.at
  %next_source = load ptr, ptr %next_source.at

  ; If the destination is aligned for vectors, whole lines are streamed. memmove copies the remaining bytes.
  %address = ptrtoint ptr %destination to i64
  %misaligned_by = and i64 %address, 31
  %is_aligned = icmp eq i64 %misaligned_by, 0
  %whole_lines = and i64 %length, -64
  %streamed = select i1 %is_aligned, i64 %whole_lines, i64 0
  %last_4096 = sub i64 %streamed, 4096
  %has_lines = icmp ne i64 %streamed, 0
  br i1 %has_lines, label %line, label %rest

line:
  %offset = phi i64 [0, %run], [%next_offset, %line]

  ; Prefetch the data that is read 4 KiB later, from this or the next run. Prefetching unmapped memory does nothing.
  %ahead = add i64 %offset, 4096
  %beyond = sub i64 %offset, %last_4096
  %is_within = icmp slt i64 %beyond, 0
  %in_this_run = getelementptr i8, ptr %source, i64 %ahead
  %in_next_run = getelementptr i8, ptr %next_source, i64 %beyond
  %soon = select i1 %is_within, ptr %in_this_run, ptr %in_next_run
  call void @llvm.prefetch.p0(ptr %soon, i32 0, i32 3, i32 1)

  %from.low = getelementptr i8, ptr %source, i64 %offset
  %from.high = getelementptr i8, ptr %from.low, i64 32
  %to.low = getelementptr i8, ptr %destination, i64 %offset
  %to.high = getelementptr i8, ptr %to.low, i64 32
  %low = load <4 x i64>, ptr %from.low, align 1
  %high = load <4 x i64>, ptr %from.high, align 1
  store <4 x i64> %low, ptr %to.low, align 32, !nontemporal !0
  store <4 x i64> %high, ptr %to.high, align 32, !nontemporal !0

  %next_offset = add i64 %offset, 64
  %has_more = icmp ult i64 %next_offset, %streamed
  br i1 %has_more, label %line, label %rest

rest:
  %left = sub i64 %length, %streamed
  %from.rest = getelementptr i8, ptr %source, i64 %streamed
  %to.rest = getelementptr i8, ptr %destination, i64 %streamed
  call void @llvm.memmove.p0.p0.i64(ptr %to.rest, ptr %from.rest, i64 %left, i1 false)
  br i1 %is_last, label %end, label %run

end:
  ; Stores past the caches are weakly ordered, and must become visible before the end of the job does.
  fence seq_cst
  ret void
}

declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
!0 = !{i32 1}
"""
"""The function ``move`` in LLVM's language, for any processor that LLVM supports. ``num_runs`` is at least 1."""


def _compile(llvm: Any) -> MoveRuns:
    with contextlib.suppress(RuntimeError):
        llvm.initialize()  # newer releases initialise themselves and raise RuntimeError here
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_CODE)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    code = llvm.create_mcjit_compiler(module, machine)
    code.finalize_object()
    pointers = [ctypes.c_void_p] * 3
    call = ctypes.CFUNCTYPE(None, *pointers, ctypes.c_size_t)(code.get_function_address("move"))

    def move(destinations: Int64s, sources: Int64s, lengths: Int64s, _keep_alive: object = code) -> None:
        columns = [np.ascontiguousarray(column, dtype=np.int64) for column in (destinations, sources, lengths)]
        assert {column.shape for column in columns} == {(len(lengths),)}, "as many sources as destinations and lengths"
        if len(lengths):
            call(*(column.ctypes.data for column in columns), len(lengths))

    return move
