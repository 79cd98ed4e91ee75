# SPDX-License-Identifier: Apache-2.0
"""The primary tier's memory: rows of bytes, private to a process or shared by the processes of one engine.

A shared region is a file on the shared-memory mount only for as long as processes still have to find it: whoever
maps it last unlinks it, so a crash afterwards leaves nothing behind. A process that has the file open holds a shared
lock on it, which the kernel drops when the process dies; a file on which nobody holds a lock belongs to a start that
never finished, and the next start reclaims it.
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
    """(num_blocks, block_bytes) bytes of host memory, exactly, page-aligned at the start and so in every row whose
    size is a multiple of the page.

    Thread-safe to use; open and close from one thread. The bytes live until ``close`` and until the last view made from
    them is gone. Fresh bytes are zero.
    """

    def __init__(self, memory: mmap.mmap, num_blocks: int, block_bytes: int) -> None:
        """Takes over ``memory``. Use ``anonymous`` or ``shared``."""
        self._memory: mmap.mmap | None = memory
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes

    def __repr__(self) -> str:
        state = "" if self._memory else ", closed"
        return f"SharedOffloadRegion({self.num_blocks} x {self.block_bytes} bytes{state})"

    @classmethod
    def anonymous(cls, num_blocks: int, block_bytes: int) -> SharedOffloadRegion:
        """Memory of this process (and of children it forks) alone."""
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
        """Memory that ``num_processes`` processes of this host see, each of which makes this call once.

        The first to come creates it, the last unlinks its name. ``instance_id`` must be the same in all of them and
        in no other engine instance that is starting. Returns as soon as this process has mapped it, without waiting
        for the others; ``timeout_s`` bounds the wait for the start-up lock of the mount.
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
        """The bytes as a writable view of shape (num_blocks, block_bytes), format ``B``. It keeps them alive."""
        if self._memory is None:
            raise ValueError("The region is closed.")
        return memoryview(self._memory).cast("B", (self.num_blocks, self.block_bytes))

    def close(self) -> None:
        """Unmaps the bytes, or leaves that to the last view while views exist. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            with contextlib.suppress(BufferError):  # views are out: the mapping goes with the last of them
                memory.close()


def _size(num_blocks: int, block_bytes: int) -> int:
    if num_blocks < 1 or block_bytes < 1:
        raise ConfigError(f"A region needs at least one block of one byte, not {num_blocks} of {block_bytes}.")
    return num_blocks * block_bytes


@contextlib.contextmanager
def _exclusive(mount: Path, timeout_s: float) -> Iterator[None]:
    """One process at a time creates, joins or reclaims segments. The lock is on the mount itself, so that nothing of it
    stays behind."""
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
    """Creates or joins ``segment``; the last of ``num_processes`` to join unlinks it. Under the lock."""
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
    """Removes segments whose processes are all dead. Under the lock."""
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
