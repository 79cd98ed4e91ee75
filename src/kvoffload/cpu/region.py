# SPDX-License-Identifier: Apache-2.0
"""The primary tier's memory: slots of bytes, private to a process or shared by the processes of one engine.

A shared region has a name on the shared-memory mount only while processes still have to find it. The last process to
map it unlinks the name, so a crash afterwards leaves no file.

Every process that has joined holds a shared lock on the file, and the kernel drops the lock when the process dies.
So a file without a lock belongs to a start that never finished, and the next start reclaims it. A file that is not
this user's alone is neither joined nor removed.

Pages are allocated outside of the start-up lock, since a large region takes minutes and other engines may start.
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
import time
from collections.abc import Iterator
from pathlib import Path

from kvoffload.cpu.memory_limits import SHM, check_host_memory, check_shared_memory
from kvoffload.cpu.populate import populate
from kvoffload.errors import CapacityError, ConfigError
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

_PREFIX = "kvoffload-"
_MOST_NAMES = 1000
_OURS = re.compile(_PREFIX + r"[0-9a-f]{24}(|\.joined|\.draft)")
"""The names of segments, and of what lies beside them. Nothing else on the mount is reclaimed."""


class SharedOffloadRegion:
    """Exactly ``num_blocks`` slots of ``block_bytes`` bytes of host memory. Make one with ``anonymous`` or ``shared``.

    The first slot is page-aligned, and so is every slot where ``block_bytes`` is a multiple of the page. Fresh bytes
    are zero. Views may be used from any thread; open and close the region from one thread. The bytes live until
    ``close`` was called and the last view of them is gone.
    """

    def __init__(self, memory: mmap.mmap, num_blocks: int, block_bytes: int) -> None:
        """Takes over ``memory``, which has ``num_blocks * block_bytes`` bytes."""
        self._memory: mmap.mmap | None = memory
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes

    def __repr__(self) -> str:
        state = "" if self._memory else ", closed"
        return f"SharedOffloadRegion({self.num_blocks} x {self.block_bytes} bytes{state})"

    @classmethod
    def anonymous(cls, num_blocks: int, block_bytes: int) -> SharedOffloadRegion:
        """Memory of this process alone: children that it forks do not have it.

        Raises ``ConfigError`` for an empty region, and ``CapacityError`` if the host has less memory available.
        """
        size = _size(num_blocks, block_bytes)
        check_host_memory(size)
        # Private: the kernel gives no huge pages to anonymous memory that is shared.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # kernels without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        # Without this, a write after a fork would move a page away from under a device that copies to it.
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
        """Memory that ``num_processes`` processes of this host share. Each of them makes this call once.

        The first call creates the file, the last one unlinks its name. Each returns once all pages are allocated and
        its own process has mapped them, without waiting for the others.

        ``instance_id`` is the same in all of these processes, and differs from that of every other engine instance that
        is starting. ``timeout_s`` bounds the wait for the start-up lock of ``mount``, the shared-memory file system.

        Raises ``ConfigError`` for an empty region or if the processes disagree about its shape or their number, and
        ``CapacityError`` if host or mount have too little memory, or if the lock is not free in time.
        """
        size = _size(num_blocks, block_bytes)
        if num_processes < 1:
            raise ConfigError(f"A shared region needs at least one process, not {num_processes}.")
        segment = mount / (_PREFIX + hashlib.sha256(f"{os.getuid()}\0{instance_id}".encode()).hexdigest()[:24])
        with _exclusive(mount, timeout_s):
            promised_bytes = _reclaim(mount)
            terms = f"{num_blocks} {block_bytes} {num_processes}"
            descriptor, num_joined = _join(segment, size, terms, promised_bytes)
        try:
            memory = _map(descriptor, size, mount)
        except BaseException:
            _unlink(segment, descriptor)
            raise
        else:
            if num_joined == num_processes:
                _unlink(segment, descriptor)
        finally:
            os.close(descriptor)  # the mapping keeps one of its own, and with it the lock
        return cls(memory, num_blocks, block_bytes)

    def create_kv_memoryview(self) -> memoryview:
        """The bytes as a writable view of shape (num_blocks, block_bytes), format ``B``. The view keeps them alive.

        Raises ``ValueError`` once the region is closed.
        """
        if self._memory is None:
            raise ValueError("The region is closed.")
        return memoryview(self._memory).cast("B", (self.num_blocks, self.block_bytes))

    def close(self) -> None:
        """Unmaps the bytes. While views exist, the last of them does. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            with contextlib.suppress(BufferError):  # views exist: the mapping ends with the last of them
                memory.close()


def _leave_out_of_dumps(memory: mmap.mmap) -> None:
    """The blocks are made from prompts, and a core file may go anywhere."""
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTDUMP)


def _size(num_blocks: int, block_bytes: int) -> int:
    if num_blocks < 1 or block_bytes < 1:
        raise ConfigError(f"A region needs at least one block of one byte, not {num_blocks} of {block_bytes}.")
    return num_blocks * block_bytes


@contextlib.contextmanager
def _exclusive(mount: Path, timeout_s: float) -> Iterator[None]:
    """Only one process of this user at a time creates, joins or reclaims segments.

    The lock is on a file of our own, so that no other user can hold it. Its holder unlinks it, so whoever gets the lock
    of a file that has lost its name tries again.
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
    """The first name for the lock that no other user has taken: everybody may make files on ``mount``, and nobody may
    remove another's. Raises ``ConfigError`` if all names are taken."""
    for number in range(_MOST_NAMES):
        path = mount / f"{_PREFIX}{os.geteuid()}{f'-{number}' if number else ''}.lock"
        try:
            if path.lstat().st_uid == os.geteuid():
                return path
        except FileNotFoundError:
            return path
    raise ConfigError(f"Other users have made all of {mount}/{_PREFIX}{os.geteuid()}-*.lock; remove these files.")


def _is_named(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _open_own(path: Path, flags: int = 0) -> int:
    """Opens a file that no other user may touch, never through a link. Raises ``FileNotFoundError`` if there is none,
    and ``ConfigError`` for anything else in its place."""
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise ConfigError(f"{path} is not a file of this user's alone ({exc.strerror}); remove it.") from exc
    if not _is_own(os.fstat(descriptor)):
        os.close(descriptor)
        raise ConfigError(f"{path} is not a file of this user's alone (wrong owner or mode); remove it.")
    return descriptor


def _is_own(status: os.stat_result) -> bool:
    is_private = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
    return is_private and status.st_uid == os.geteuid()


def _join(segment: Path, size: int, terms: str, promised_bytes: int) -> tuple[int, int]:
    """Creates or joins ``segment``, on the terms of all. Returns its descriptor, locked, and how many have joined. The
    caller holds the start-up lock. ``promised_bytes``: what other segments have still to allocate."""
    joined_file = segment.with_suffix(".joined")
    try:
        descriptor = _open_own(segment)
    except FileNotFoundError:
        check_shared_memory(size, segment.parent, promised_bytes)
        check_host_memory(size, promised_bytes)
        descriptor = os.open(segment, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        num_joined = 0
    else:
        try:
            num_joined = _num_joined(joined_file, terms)
        except BaseException:
            os.close(descriptor)
            raise
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not num_joined:
            os.truncate(descriptor, size)
        _write_joined(joined_file, f"{num_joined + 1} {terms}")
    except BaseException:
        _unlink(segment, descriptor)
        os.close(descriptor)
        raise
    return descriptor, num_joined + 1


def _map(descriptor: int, size: int, mount: Path) -> mmap.mmap:
    """Maps the file once all of its pages are allocated. A sparse file would end in SIGBUS on the day the mount fills
    up. Every process of the engine sees to it, so that none has to wait for another."""
    memory = mmap.mmap(descriptor, size)
    with contextlib.suppress(OSError):  # kernels without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    _leave_out_of_dumps(memory)
    stats = os.statvfs(mount)
    if size - os.fstat(descriptor).st_blocks * 512 <= stats.f_bavail * stats.f_frsize:
        populate(ctypes.addressof(ctypes.c_char.from_buffer(memory)), size)  # several threads; what follows is one
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
    """Removes the name of the open ``segment``, if it still has it. Nobody reclaims it meanwhile: it is locked."""
    if _is_named(segment, descriptor):
        segment.unlink(missing_ok=True)
        segment.with_suffix(".joined").unlink(missing_ok=True)


def _num_joined(joined_file: Path, terms: str) -> int:
    """How many processes have joined on these ``terms``. Raises ``ConfigError`` if it was on others."""
    with open(_open_own(joined_file)) as file:
        joined, _, expected = file.read().partition(" ")
    if expected != terms:
        raise ConfigError(
            f"The processes of one engine disagree about its shared region: {expected!r} and {terms!r} (blocks, bytes "
            "of a block, processes); give all of them the same configuration, and pipeline stages of equal size."
        )
    return int(joined)


def _write_joined(joined_file: Path, text: str) -> None:
    # Renamed into place: a process killed in the middle of writing must not leave half a count.
    draft = joined_file.with_suffix(".draft")
    with open(_open_own(draft, os.O_CREAT), "w") as file:
        file.truncate()
        file.write(text)
    draft.replace(joined_file)


def _reclaim(mount: Path) -> int:
    """Removes this user's segments whose processes are all dead. Returns the bytes that those of the living have still
    to allocate. The caller holds the lock."""
    promised_bytes = 0
    for path in mount.glob(f"{_PREFIX}*"):
        if not _OURS.fullmatch(path.name):
            continue
        if path.suffix:
            if not os.path.lexists(path.with_suffix("")):
                _unlink_own(path)
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
            logger.info("Reclaiming the shared region %s of a start that never finished.", path.name)
            path.unlink(missing_ok=True)
            _unlink_own(path.with_suffix(".joined"))
        finally:
            os.close(descriptor)
    return promised_bytes


def _unlink_own(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_uid == os.geteuid():
            path.unlink()
