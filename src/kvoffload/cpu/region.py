# SPDX-License-Identifier: Apache-2.0
"""The primary tier's memory: slots of bytes, private to a process or shared by the processes of one engine.

A shared region has a name on the shared-memory mount only while processes still have to find it. The last process to
map it unlinks the name, so a crash afterwards leaves nothing behind.

Every process that has mapped the file holds a shared lock on it, and the kernel drops the lock when the process dies.
So a file that nobody locks belongs to a start that never finished, and the next start reclaims it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvoffload.cpu.memory_limits import check_host_memory, check_shared_memory
from kvoffload.errors import CapacityError, ConfigError
from kvoffload.units import format_bytes

__all__ = ["SharedOffloadRegion"]

logger = logging.getLogger(__name__)

_MOUNT = Path("/dev/shm")
_PREFIX = "kvoffload-"


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
        """Memory of this process, and of children it forks, alone.

        Raises ``ConfigError`` for an empty region, and ``CapacityError`` if the host has less memory available.
        """
        size = _size(num_blocks, block_bytes)
        check_host_memory(size)
        memory = mmap.mmap(-1, size)
        with contextlib.suppress(OSError):  # kernels without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(memory, num_blocks, block_bytes)

    @classmethod
    def shared(
        cls,
        instance_id: str,
        num_blocks: int,
        block_bytes: int,
        num_processes: int,
        timeout_s: float = 300.0,
        mount: Path = _MOUNT,
    ) -> SharedOffloadRegion:
        """Memory that ``num_processes`` processes of this host share. Each of them makes this call once.

        The first call creates the memory, the last one unlinks its name. Each returns as soon as its own process has
        mapped the memory, without waiting for the others.

        ``instance_id`` is the same in all of these processes, and differs from that of every other engine instance that
        is starting. ``timeout_s`` bounds the wait for the start-up lock of ``mount``, the shared-memory file system.

        Raises ``ConfigError`` for an empty region or if the processes disagree about its size or their number, and
        ``CapacityError`` if host or mount have too little memory, or if the lock is not free in time.
        """
        size = _size(num_blocks, block_bytes)
        if num_processes < 1:
            raise ConfigError(f"A shared region needs at least one process, not {num_processes}.")
        name = _PREFIX + hashlib.sha256(f"{os.getuid()}\0{instance_id}".encode()).hexdigest()[:24]
        with _exclusive(mount, timeout_s):
            _reclaim(mount)
            memory = _attach(mount / name, size, num_processes)
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


def _size(num_blocks: int, block_bytes: int) -> int:
    if num_blocks < 1 or block_bytes < 1:
        raise ConfigError(f"A region needs at least one block of one byte, not {num_blocks} of {block_bytes}.")
    return num_blocks * block_bytes


@contextlib.contextmanager
def _exclusive(mount: Path, timeout_s: float) -> Iterator[None]:
    """Only one process at a time creates, joins or reclaims segments. The lock is on the mount's directory, so that no
    lock file stays behind."""
    deadline = time.monotonic() + timeout_s
    descriptor = os.open(mount, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CapacityError(
                        f"Another process has held the lock on {mount} for {timeout_s:.0f} s; end it and start again."
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _attach(segment: Path, size: int, num_processes: int) -> mmap.mmap:
    """Creates or joins ``segment``. The last of ``num_processes`` to join unlinks it. The caller holds the lock."""
    joined_file = segment.with_suffix(".joined")
    terms = f"{size} {num_processes}"
    try:
        descriptor = os.open(segment, os.O_RDWR | os.O_CLOEXEC)
        joined, _, expected = joined_file.read_text().partition(" ")
        if expected != terms:
            os.close(descriptor)
            raise ConfigError(
                f"The processes of one engine disagree about its shared region: {expected!r} and {terms!r} (bytes, "
                "processes); give all of them the same configuration."
            )
        count = int(joined) + 1
    except FileNotFoundError:
        check_shared_memory(size, segment.parent)
        check_host_memory(size)
        descriptor = _create(segment, size)
        count = 1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        memory = mmap.mmap(descriptor, size)  # keeps a descriptor of its own, and with it the lock
    finally:
        os.close(descriptor)
    if count == num_processes:
        segment.unlink()
        joined_file.unlink(missing_ok=True)
    else:
        # Renamed into place: a process killed in the middle of writing must not leave half a count.
        draft = segment.with_suffix(".draft")
        draft.write_text(f"{count} {terms}")
        draft.replace(joined_file)
    return memory


def _create(segment: Path, size: int) -> int:
    descriptor = os.open(segment, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Every page is taken now: a sparse file would end in SIGBUS on the day the mount fills up.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as exc:
        os.close(descriptor)
        segment.unlink()
        raise CapacityError(
            f"{segment.parent} could not give {format_bytes(size)} of shared memory ({exc.strerror}); lower "
            "cpu_bytes_to_use or enlarge that mount."
        ) from exc
    return descriptor


def _reclaim(mount: Path) -> None:
    """Removes segments whose processes are all dead. The caller holds the lock."""
    for path in mount.glob(f"{_PREFIX}*"):
        if path.suffix in (".joined", ".draft"):
            if not path.with_suffix("").exists():
                path.unlink(missing_ok=True)
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or just unlinked
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            logger.info("Reclaiming the shared region %s of a start that never finished.", path.name)
            path.unlink(missing_ok=True)
            path.with_suffix(".joined").unlink(missing_ok=True)
        finally:
            os.close(descriptor)
