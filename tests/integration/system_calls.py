# SPDX-License-Identifier: Apache-2.0
"""Kills a process at a given system call, made by Python or by a library. Uses Linux's ``ptrace``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_TRACEME, _SYSCALL, _SETOPTIONS = 0, 24, 0x4200
_SYSCALLS_MARKED, _THREADS_TOO, _DIES_WITH_TRACER = 0x1, 0x8, 0x100000
_ALL_THREADS = 0x40000000  # __WALL
_AT_SYSCALL = signal.SIGTRAP | 0x80

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class NotPermitted(Exception):
    """This host does not permit tracing a process."""


def kill_at(work: Callable[[], None], fatal_call: int, before_last: Callable[[], None]) -> bool:
    """Runs ``work`` in a forked child and kills it just before its system call number ``fatal_call``, with all
    calls before that done and no further instruction. Returns ``False`` if it ended before that, with success.

    Calls ``before_last`` while the child is stopped at the call before that one.
    """
    pid = os.fork()
    if not pid:
        _be_traced(work)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        raise NotPermitted("PTRACE_TRACEME was refused")
    _ptrace(_SETOPTIONS, pid, _SYSCALLS_MARKED | _THREADS_TOO | _DIES_WITH_TRACER)
    _ptrace(_SYSCALL, pid, 0)
    calls, in_call = 0, set[int]()
    while True:
        thread, status = os.waitpid(-1, _ALL_THREADS)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread != pid:
                continue
            assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0, f"the child failed: status {status}"
            return False
        stop = os.WSTOPSIG(status)
        if stop == _AT_SYSCALL:
            in_call ^= {thread}
            if thread in in_call:
                if calls == fatal_call:
                    _kill(pid)
                    return True
                if calls == fatal_call - 1:
                    before_last()
                calls += 1
        # The child's own signals are passed on to it; the stops of new threads are ours.
        passed_on = 0 if stop in (_AT_SYSCALL, signal.SIGTRAP, signal.SIGSTOP) else stop
        try:
            _ptrace(_SYSCALL, thread, passed_on)
        except ProcessLookupError:
            pass  # another thread has ended the process meanwhile, which is reported next


def _be_traced(work: Callable[[], None]) -> None:
    try:
        if _libc.ptrace(_TRACEME, 0, None, None):
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a forked child must not run on into its parent's code
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    while True:
        thread, status = os.waitpid(-1, _ALL_THREADS)
        if thread == pid and os.WIFSIGNALED(status):
            return


def _ptrace(request: int, pid: int, data: int) -> None:
    if _libc.ptrace(request, pid, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "ptrace")
