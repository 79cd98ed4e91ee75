# SPDX-License-Identifier: Apache-2.0
"""The memory behind the slots: private to a process, or shared by the processes of one engine.

A shared region has a name on the shared-memory mount only until all processes have found it. The last process to map it
unlinks the name, so a later crash leaves no file.

The file ends with the terms that all processes must agree on, and the number of processes that have joined. Each of
these holds a shared lock on the file, and the kernel drops the lock when the process dies. So a file without a lock
belongs to a start that never finished, and the next start reclaims it. Files that other users can access are neither
joined nor removed.

Pages are allocated outside of the start-up lock, because a large region takes minutes and other engines may start
meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvoffload.cpu.memory_limits import SHM, check_host_memory, check_shared_memory, room_of
from kvoffload.cpu.populate import populate
from kvoffload.errors import CapacityError, ConfigError, reason_of
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

_PREFIX = "kvoffload-"
_MOST_NAMES = 1000
_OURS = re.compile(_PREFIX + "[0-9a-f]{24}")
"""The names of segments. Nothing else on the mount is reclaimed."""
_TERMS = struct.Struct("<QQQQ")
"""The end of a segment: blocks, bytes of a block, processes in total, processes that have joined."""


class SharedOffloadRegion:
    """Host memory for exactly ``num_blocks`` slots of ``block_bytes`` bytes. Create it with ``anonymous`` or
    ``shared``.

    The first slot is page-aligned, and so are all slots if ``block_bytes`` is a multiple of the page. New memory is
    zero. Any thread may use a view, but only one thread may open and close the region. The memory is released after
    ``close`` and after the last view is gone.
    """

    def __init__(self, memory: mmap.mmap, num_blocks: int, block_bytes: int) -> None:
        """Take ownership of ``memory``, which has ``num_blocks * block_bytes`` bytes."""
        self._memory: mmap.mmap | None = memory
        self._shared: _Shared | None = None
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes

    def __repr__(self) -> str:
        state = "" if self._memory else ", closed"
        return f"SharedOffloadRegion({self.num_blocks} x {self.block_bytes} bytes{state})"

    @classmethod
    def anonymous(cls, num_blocks: int, block_bytes: int) -> SharedOffloadRegion:
        """Allocate memory for this process alone. Children that it forks do not inherit it.

        Raises ``ConfigError`` for an empty region, and ``CapacityError`` if the host has less memory available.
        """
        size = _size(num_blocks, block_bytes)
        check_host_memory(size)
        # Private, because the kernel uses no huge pages for shared anonymous memory.
        memory = _mapped(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # kernels without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        # Without this, a write after a fork would move a page while a GPU copies to it.
        memory.madvise(mmap.MADV_DONTFORK)
        _leave_out_of_dumps(memory)
        return cls(memory, num_blocks, block_bytes)

    @classmethod
    def shared(
        cls,
        instance_id: str,
        num_blocks: int,
        block_bytes: int,
        num_processes: int,
        timeout_s: float = 300.0,
        mount: Path = SHM,
    ) -> SharedOffloadRegion:
        """Map memory that ``num_processes`` processes of this host share. Each of them makes this call once.

        The first call creates the file, and the last call unlinks its name. Each call returns when all pages are
        allocated and its own process has mapped them, without waiting for the other processes.

        ``instance_id`` is the same in all of these processes, and unique among the engine instances that are starting.
        ``timeout_s`` limits the wait for the start-up lock of ``mount``, the shared-memory file system.

        Raises ``ConfigError`` for an empty region or if the processes disagree about its shape or their number, and
        ``CapacityError`` if the host or the mount has too little memory, or if the lock is not free in time.
        """
        size = _size(num_blocks, block_bytes)
        if num_processes < 1:
            raise ConfigError(f"A shared region needs at least one process, not {num_processes}.")
        if not os.access(mount, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{mount}, where the processes of one engine share host memory, does not exist or cannot be written "
                "to; mount a tmpfs there."
            )
        segment = mount / (_PREFIX + hashlib.sha256(f"{os.getuid()}\0{instance_id}".encode()).hexdigest()[:24])
        with _exclusive(mount, timeout_s):
            promised_bytes = _reclaim(mount)
            descriptor, num_joined = _join(segment, (num_blocks, block_bytes, num_processes), promised_bytes)
        try:
            memory = _map(descriptor, size, mount)
        except BaseException:
            _unlink(segment, descriptor)
            raise
        else:
            if num_joined == num_processes:
                _unlink(segment, descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)  # the mapping keeps its own descriptor, and with it the lock
        region = cls(memory, num_blocks, block_bytes)
        region._shared = _Shared(segment, (status.st_dev, status.st_ino))
        return region

    def wait_for_all(self, timeout_s: float) -> int | None:
        """Wait until all processes have joined the region, for at most ``timeout_s``.

        Return ``None`` if they have, and otherwise how many have. In this case, later processes cannot join.
        """
        if self._shared is None:
            return None
        deadline = time.monotonic() + timeout_s
        while (num_joined := self._shared.num_joined()) is not None:
            if time.monotonic() > deadline:
                self._shared.segment.unlink(missing_ok=True)
                return num_joined
            time.sleep(0.01)
        return None

    def create_kv_memoryview(self) -> memoryview:
        """Return a writable view of shape (num_blocks, block_bytes) and format ``B``. The view keeps the memory alive.

        Raises ``ValueError`` once the region is closed.
        """
        if self._memory is None:
            raise ValueError("The region is closed.")
        return memoryview(self._memory).cast("B", (self.num_blocks, self.block_bytes))

    def close(self) -> None:
        """Unmap the memory, or let the last view unmap it. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            with contextlib.suppress(BufferError):  # views exist, and the mapping ends with the last one
                memory.close()


@dataclass(frozen=True, slots=True)
class _Shared:
    """The name of a shared region, which the last of its processes removes."""

    segment: Path
    inode: tuple[int, int]
    """Device and number. Another region may get the same name later."""

    def num_joined(self) -> int | None:
        """Return how many processes have joined, or ``None`` if all have."""
        try:
            descriptor = _open_own(self.segment)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            return _read_terms(descriptor)[-1] if (status.st_dev, status.st_ino) == self.inode else None
        finally:
            os.close(descriptor)


def _leave_out_of_dumps(memory: mmap.mmap) -> None:
    """Exclude the memory from core files, because blocks are computed from prompts and a core file may be sent
    anywhere."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTDUMP)


def _mapped(descriptor: int, size: int, flags: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, size, flags=flags)
    except (OSError, OverflowError) as exc:
        raise CapacityError(
            f"cpu_bytes_to_use needs {format_bytes(size)} of host memory, but the system rejects this mapping "
            f"({reason_of(exc)}); lower cpu_bytes_to_use, or raise the limit of address space (ulimit -v, or "
            "vm.overcommit_memory)."
        ) from exc


def _size(num_blocks: int, block_bytes: int) -> int:
    if num_blocks < 1 or block_bytes < 1:
        raise ConfigError(f"A region needs at least one block of one byte, not {num_blocks} of {block_bytes}.")
    return num_blocks * block_bytes


@contextlib.contextmanager
def _exclusive(mount: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock with which only one process of this user at a time creates, joins or reclaims segments.

    The lock is on a file of this user, so that no other user can hold it. Its holder unlinks the file, so a process
    that locks a file without a name tries again.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        path = _lock_path(mount)
        descriptor = _open_own(path, os.O_CREAT)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CapacityError(
                        f"Another process has held the lock {path} for {timeout_s:.0f} s; end it and start again."
                    ) from None
                time.sleep(0.01)
                continue
            if not _is_named(path, descriptor):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(descriptor)


def _lock_path(mount: Path) -> Path:
    """Return the first name for the lock that no other user has taken. Everybody may create files on ``mount``, but
    nobody may remove another user's file. Raises ``ConfigError`` if all names are taken."""
    for number in range(_MOST_NAMES):
        path = mount / f"{_PREFIX}{os.geteuid()}{f'-{number}' if number else ''}.lock"
        try:
            if path.lstat().st_uid == os.geteuid():
                return path
        except FileNotFoundError:
            return path
    raise ConfigError(f"Other users own all of {mount}/{_PREFIX}{os.geteuid()}-*.lock; remove these files.")


def _is_named(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _open_own(path: Path, flags: int = 0) -> int:
    """Open a file that no other user can access, never through a link. Raises ``FileNotFoundError`` if it does not
    exist, and ``ConfigError`` for anything else in its place."""
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise ConfigError(f"{path} cannot be used as a private file ({exc.strerror}); remove it.") from exc
    if not _is_own(os.fstat(descriptor)):
        os.close(descriptor)
        raise ConfigError(f"{path} cannot be used as a private file (wrong owner or mode); remove it.")
    return descriptor


def _is_own(status: os.stat_result) -> bool:
    is_private = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
    return is_private and status.st_uid == os.geteuid()


def _join(segment: Path, terms: tuple[int, int, int], promised_bytes: int) -> tuple[int, int]:
    """Create or join ``segment``, and return its locked descriptor and the number of processes that have joined. All
    processes must agree on ``terms``. The caller holds the start-up lock. ``promised_bytes`` is the memory that other
    segments have yet to allocate."""
    size = terms[0] * terms[1]
    try:
        descriptor = _open_own(segment)
    except FileNotFoundError:
        check_shared_memory(size, segment.parent, promised_bytes)
        check_host_memory(size, promised_bytes)
        descriptor = os.open(segment, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        num_joined = 0
    else:
        *expected, num_joined = _read_terms(descriptor)
        if tuple(expected) != terms:
            os.close(descriptor)
            raise ConfigError(
                f"The processes of one engine disagree about its shared region: {expected} and {[*terms]} (blocks, "
                "bytes of a block, processes); give all of them the same configuration, and pipeline stages of equal "
                "size."
            )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not num_joined:
            os.truncate(descriptor, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + _TERMS.size)
        os.pwrite(descriptor, _TERMS.pack(*terms, num_joined + 1), os.fstat(descriptor).st_size - _TERMS.size)
    except BaseException as exc:
        _unlink(segment, descriptor)
        os.close(descriptor)
        if not isinstance(exc, OSError):
            raise
        raise CapacityError(
            f"{segment.parent} rejects a file of {format_bytes(size)} ({exc.strerror}); lower cpu_bytes_to_use, or "
            "raise the limit on the size of files (ulimit -f)."
        ) from exc
    return descriptor, num_joined + 1


def _read_terms(descriptor: int) -> tuple[int, int, int, int]:
    """Return the terms of a segment, and the number of processes that have joined."""
    blocks, block_bytes, num_processes, num_joined = _TERMS.unpack(
        os.pread(descriptor, _TERMS.size, os.fstat(descriptor).st_size - _TERMS.size)
    )
    return blocks, block_bytes, num_processes, num_joined


def _map(descriptor: int, size: int, mount: Path) -> mmap.mmap:
    """Map the file, and allocate all of its pages. A sparse file would cause SIGBUS when the mount fills up. Every
    process of the engine does this, so that none has to wait for another."""
    memory = _mapped(descriptor, size, mmap.MAP_SHARED)
    with contextlib.suppress(OSError):  # kernels without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    _leave_out_of_dumps(memory)
    room = room_of(mount)
    if room is None or size - os.fstat(descriptor).st_blocks * 512 <= room.free_bytes:
        populate(ctypes.addressof(ctypes.c_char.from_buffer(memory)), size)  # the next call uses one thread
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as exc:
        memory.close()
        raise CapacityError(
            f"{mount} could not give {format_bytes(size)} of shared memory ({exc.strerror}); lower cpu_bytes_to_use or "
            "enlarge that mount."
        ) from exc
    return memory


def _unlink(segment: Path, descriptor: int) -> None:
    """Remove the name of the open ``segment``, unless it is already gone. Nobody reclaims the segment meanwhile,
    because it is locked."""
    if _is_named(segment, descriptor):
        segment.unlink(missing_ok=True)


def _reclaim(mount: Path) -> int:
    """Remove this user's segments whose processes are all dead, and return the number of bytes that the other segments
    have yet to allocate. The caller holds the lock."""
    promised_bytes = 0
    for path in mount.glob(f"{_PREFIX}*"):
        if not _OURS.fullmatch(path.name):
            continue
        try:
            descriptor = _open_own(path)
        except (FileNotFoundError, ConfigError):  # just unlinked, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            status = os.fstat(descriptor)
            promised_bytes += max(0, status.st_size - status.st_blocks * 512)
        else:
            logger.info(
                "Deleting the shared region %s, because the process that created it ended during startup.", path.name
            )
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    return promised_bytes
