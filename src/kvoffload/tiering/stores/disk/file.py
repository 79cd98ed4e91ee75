# SPDX-License-Identifier: Apache-2.0
"""The two files of a slab: opened without following links, locked, read and written. Payloads move by direct I/O if
possible, or by one copy on a memory file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
import tempfile
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.cpu.memory_limits import memory_file_system
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.direct_io import O_DIRECT, after, is_aligned
from kvoffload.tiering.stores.disk.format import (
    ENTRY_BYTES,
    NEW_PREFIX,
    PAGE_BYTES,
    PAGE_SLOTS,
    PAYLOAD_SUFFIX,
    TABLE_SUFFIX,
    SlabFormat,
)
from kvoffload.tiering.stores.root import SAFE, Access, make_file, open_control, try_lock

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
"""Errors that mean that no slab at all can be opened for now."""

_MAX_VECTOR = 512
_FILES_PER_SLAB = 3
_ALLOCATED_AT_ONCE = 1 << 30
_limit_lock = threading.Lock()


class SlabRefused(StoreError):
    """The files are not a slab of ours: they use another format, belong to another owner, are a link, or are
    damaged."""


class SlabFile:
    """One slab in the directory ``dir_fd``. Any number of threads may use it.

    Payloads move by direct I/O if blocks are whole pages and the file system supports it. A rejected transfer, for
    instance with a wrong alignment, uses the page cache. After the first rejection of whole aligned pages, direct I/O
    is never used again.

    On a memory file system payloads are mapped, and a block is copied to or from its slot, because reading and writing
    such a file takes at least twice as long. Touching a missing page of the file would kill the process. So a file is
    mapped only if all its pages exist and no other user may write to it, and its size and pages are checked before each
    copy. With ``is_shared``, a group may truncate it at any moment, so it is read and written instead.
    """

    def __init__(
        self,
        name: str,
        layout: SlabFormat,
        num_slots: int,
        table_fd: int,
        payload_fd: int,
        *,
        is_shared: bool = False,
    ) -> None:
        self.name = name
        self.num_slots = num_slots
        self._block_bytes = layout.block_bytes
        self._table_fd = table_fd
        self._payload_fd = payload_fd
        is_memory = memory_file_system(f"/proc/self/fd/{payload_fd}") is not None
        self._memory = _map(payload_fd, num_slots * layout.block_bytes) if is_memory and not is_shared else None
        self._mapped_bytes = num_slots * layout.block_bytes
        self._direct_fd = _reopen_direct(payload_fd) if layout.is_paged and not is_memory else -1
        self._uses_at = layout.uses_at(num_slots)
        self._entries_at = layout.entries_at(num_slots)
        self._tails_at, self._tail_bytes = layout.tails_at(num_slots), layout.tail_bytes
        self._is_direct = self._direct_fd >= 0
        self.inodes = os.fstat(table_fd).st_ino, os.fstat(payload_fd).st_ino
        """Inodes of table and payloads. No other file gets these numbers while this one is open."""

    def __repr__(self) -> str:
        return f"SlabFile({self.name!r}, slots={self.num_slots}, direct={self._is_direct})"

    @classmethod
    def create(cls, name: str, layout: SlabFormat, num_slots: int, dir_fd: int, access: Access) -> SlabFile:
        """Create a slab, preallocated and locked. If this raises ``OSError``, it leaves no files behind if possible."""
        fds = list[int]()
        new_names = [NEW_PREFIX + name + suffix for suffix in (TABLE_SUFFIX, PAYLOAD_SUFFIX)]
        try:
            for new in new_names:
                fds.append(make_file(new, dir_fd, access, os.O_EXCL))
                _leave_files(fds[-1])
                if len(fds) == 1 and not try_lock(fds[0]):
                    raise OSError(errno.EBUSY, "locked by somebody else", new)
            table_fd, payload_fd = fds
            _allocate(payload_fd, num_slots * layout.block_bytes)
            # Written, not only allocated, so that each entry has its space on file systems without copy-on-write.
            with open(table_fd, "wb", closefd=False) as table:
                table.write(layout.header(num_slots).ljust(layout.table_bytes(num_slots), b"\0"))
            # The table is last: a slab with a table exists, and is complete.
            for suffix in (PAYLOAD_SUFFIX, TABLE_SUFFIX):
                os.rename(NEW_PREFIX + name + suffix, name + suffix, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            return cls(name, layout, num_slots, table_fd, payload_fd, is_shared=access.is_group)
        except BaseException:
            for fd in fds:
                os.close(fd)
            for left in [*new_names, name + TABLE_SUFFIX, name + PAYLOAD_SUFFIX]:
                try:
                    os.unlink(left, dir_fd=dir_fd)
                except OSError:
                    pass
            raise

    @classmethod
    def open(cls, name: str, layout: SlabFormat, dir_fd: int, access: Access) -> SlabFile:
        """Open an existing slab. Raises ``SlabRefused`` or ``OSError``."""
        fds = list[int]()
        try:
            for suffix in (TABLE_SUFFIX, PAYLOAD_SUFFIX):
                fd = os.open(name + suffix, os.O_RDWR | SAFE, dir_fd=dir_fd)
                fds.append(fd)
                _leave_files(fd)
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or not access.admits(status):
                    raise SlabRefused(f"{name}{suffix} belongs to another user, or is not a file")
                if status.st_nlink != 1:
                    raise SlabRefused(f"{name}{suffix} has a hard link under another name")
            table_fd, payload_fd = fds
            num_slots = layout.parse_header(os.pread(table_fd, PAGE_BYTES, 0))
            if num_slots is None:
                raise SlabRefused(f"{name}{TABLE_SUFFIX} is damaged, or has another version or block size")
            if os.fstat(table_fd).st_size < layout.table_bytes(num_slots):
                raise SlabRefused(f"{name}{TABLE_SUFFIX} was cut off")
            if os.fstat(payload_fd).st_size < num_slots * layout.block_bytes:
                raise SlabRefused(f"{name}{PAYLOAD_SUFFIX} was cut off")
            return cls(name, layout, num_slots, table_fd, payload_fd, is_shared=access.is_group)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close the files, which also ends the lock. The caller ensures that no transfer is running."""
        for fd in (self._table_fd, self._payload_fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._memory = None  # this also unmaps it
        self._table_fd = self._payload_fd = self._direct_fd = -1

    def try_lock(self) -> bool:
        """Lock the slab for writing, and return whether this process now has the lock. Raises ``OSError`` if locking
        fails."""
        return try_lock(self._table_fd)

    def unlock(self) -> None:
        """Let another process have the slab."""
        fcntl.flock(self._table_fd, fcntl.LOCK_UN)

    def is_linked(self, dir_fd: int) -> bool:
        """Return whether the slab is still in its directory under its name."""
        for fd, suffix in ((self._table_fd, TABLE_SUFFIX), (self._payload_fd, PAYLOAD_SUFFIX)):
            try:
                if not os.path.samestat(
                    os.stat(self.name + suffix, dir_fd=dir_fd, follow_symlinks=False), os.fstat(fd)
                ):
                    return False
            except OSError:
                return False
        return True

    # ------------------------------------------------------------------------------------------------------ table

    def read_entries(self, first: int, count: int) -> bytearray:
        return self._read_table(self._entries_at + first * ENTRY_BYTES, count * ENTRY_BYTES)

    def write_entries(self, first: int, entries: bytes) -> None:
        self._write_table(self._entries_at + first * ENTRY_BYTES, entries)

    def read_tails(self, first: int, count: int) -> bytearray:
        """Return the tails of the seals of ``count`` slots, concatenated."""
        return self._read_table(self._tails_at + first * self._tail_bytes, count * self._tail_bytes)

    def write_tails(self, first: int, tails: bytes) -> None:
        self._write_table(self._tails_at + first * self._tail_bytes, tails)

    def read_changes(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self._read_table(PAGE_BYTES, 4 * -(-self.num_slots // PAGE_SLOTS)), np.uint32)

    def write_changes(self, changes: npt.NDArray[np.uint32]) -> None:
        self._write_table(PAGE_BYTES, changes.tobytes())

    def read_uses(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self._read_table(self._uses_at, 4 * self.num_slots), np.uint32)

    def write_uses(self, uses: npt.NDArray[np.uint32]) -> None:
        self._write_table(self._uses_at, uses.tobytes())

    def _read_table(self, offset: int, num_bytes: int) -> bytearray:
        buffer = bytearray(num_bytes)
        view, done = memoryview(buffer), 0
        while done < num_bytes:
            count = os.preadv(self._table_fd, [view[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, "was cut off", self.name + TABLE_SUFFIX)
            done += count
        return buffer

    def _write_table(self, offset: int, content: bytes) -> None:
        if (count := os.pwrite(self._table_fd, content, offset)) == len(content):
            return
        view, offset = memoryview(content)[count:], offset + count
        while view:
            count = os.pwrite(self._table_fd, view, offset)
            if not count:
                raise OSError(errno.EIO, "the kernel wrote nothing", self.name + TABLE_SUFFIX)
            view, offset = view[count:], offset + count

    # --------------------------------------------------------------------------------------------------- payloads

    def read(self, first: int, blocks: Sequence[memoryview]) -> int:
        """Fill ``blocks`` (contiguous bytes) from neighbouring slots. Returns the number of complete blocks. Raises
        ``OSError``."""
        if (memory := self._memory) is None:
            return self._move(os.preadv, first, blocks)
        size = self._block_bytes
        if not self._is_backed(first, len(blocks)):
            return self._move(os.preadv, first, blocks)
        for at, block in enumerate(blocks):
            begin = (first + at) * size
            np.copyto(np.frombuffer(block, np.uint8), memory[begin : begin + size])
        return len(blocks)

    def read_buffered(self, index: int, block: memoryview) -> bool:
        """Read one block through the page cache, as a second way."""
        return self._move(os.preadv, index, [block], is_direct=False) == 1

    def write(self, first: int, blocks: Sequence[memoryview]) -> int:
        """Write neighbouring slots. Returns the number of complete blocks. Raises ``OSError``."""
        if (memory := self._memory) is None:
            return self._move(os.pwritev, first, blocks)
        size = self._block_bytes
        if not self._is_backed(first, len(blocks)):
            return self._move(os.pwritev, first, blocks)
        for at, block in enumerate(blocks):
            begin = (first + at) * size
            np.copyto(memory[begin : begin + size], np.frombuffer(block, np.uint8))
        return len(blocks)

    def _is_backed(self, first: int, count: int) -> bool:
        """Return whether ``count`` mapped slots may be touched. If the file was truncated or has a hole, it is never
        used as memory again."""
        status = os.fstat(self._payload_fd)
        backed_bytes = status.st_size - first * self._block_bytes
        if backed_bytes >= count * self._block_bytes and 512 * status.st_blocks >= self._mapped_bytes:
            return True
        self._memory = None
        return False

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        first: int,
        blocks: Sequence[memoryview],
        is_direct: bool = True,
    ) -> int:
        size, moved_blocks = self._block_bytes, 0
        if len(blocks) <= _MAX_VECTOR:
            return self._move_part(call, first * size, blocks, is_direct) // size
        for begin in range(0, len(blocks), _MAX_VECTOR):
            part = blocks[begin : begin + _MAX_VECTOR]
            moved = self._move_part(call, (first + begin) * size, part, is_direct)
            moved_blocks += moved // size
            if moved < len(part) * size:
                break
        return moved_blocks

    def _move_part(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        offset: int,
        buffers: Sequence[memoryview],
        is_direct: bool,
    ) -> int:
        fd = self._direct_fd if is_direct and self._is_direct else self._payload_fd
        left, done, wanted = buffers, 0, self._block_bytes * len(buffers)
        while left:
            try:
                moved = call(fd, left, offset + done)
                if moved == wanted:
                    return moved
            except OSError as exc:
                if exc.errno != errno.EINVAL or fd != self._direct_fd:
                    raise
                # The kernel knows which buffers it can transfer directly. Checking only after a rejection costs nothing
                # until then.
                if all(map(is_aligned, left)):
                    self._is_direct = False
                fd = self._payload_fd
                continue
            if moved == 0:
                break
            done += moved
            left = after(left, moved)
            fd = self._payload_fd  # the rest need not be aligned
        return done


def check_preallocation(root: str, access: Access) -> None:
    """Raise ``ConfigError`` if the file system of ``root`` cannot preallocate files. A disk that is full or read-only
    at the moment passes."""
    control = open_control(root, access)
    try:
        with tempfile.TemporaryFile(dir=f"/proc/self/fd/{control}/.") as file:  # never through a link
            _allocate(file.fileno(), PAGE_BYTES)
    except OSError as exc:
        if exc.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise ConfigError(
                f"The file system of {root} cannot preallocate files; choose a directory on another one (ext4, XFS, "
                "Btrfs, a tmpfs), or use a tier of type 'fs'."
            ) from exc
    finally:
        os.close(control)


def most_slabs() -> int:
    """Return the number of slabs that this process can have open besides its other files, under the hard limit on open
    files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 20 if hard == resource.RLIM_INFINITY else max(1, hard // (2 * _FILES_PER_SLAB + 2))


def _leave_files(fd: int) -> None:
    """Keep half of the files that a process may open for other uses than slabs. ``fd`` was just opened and is the
    lowest free number, so at least that many files are open. Raises the soft limit if necessary, and ``OSError``
    (EMFILE) at the hard limit."""
    with _limit_lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        while soft != resource.RLIM_INFINITY and fd >= soft // 2:
            more = 2 * soft if hard == resource.RLIM_INFINITY else min(2 * soft, hard)
            try:
                if more > soft:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            except (OSError, ValueError):
                more = soft  # a sandbox does not allow it
            if more == soft:
                raise OSError(errno.EMFILE, f"{fd} files are open, half of this process's limit; raise it (ulimit -n)")
            soft = more


def _reopen_direct(fd: int) -> int:
    """Open the same file again for direct I/O. Returns -1 if its file system does not support that."""
    if not O_DIRECT:
        return -1
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1


def _map(fd: int, num_bytes: int) -> npt.NDArray[np.uint8] | None:
    """Map a file and return its memory, or ``None`` if pages are missing or it cannot be mapped."""
    try:
        if os.fstat(fd).st_blocks * 512 < num_bytes:
            return None
        mapped = mmap.mmap(fd, num_bytes)
        mapped.madvise(mmap.MADV_DONTDUMP)
    except (OSError, ValueError):
        return None
    return np.frombuffer(mapped, np.uint8)


def _allocate(fd: int, num_bytes: int) -> None:
    """Preallocate a file, so that writes to it cannot run out of space. Raises ``OSError``.

    Not ``os.posix_fallocate``, because on file systems without support, the C library writes to each page instead.
    """
    done, at_once = 0, _ALLOCATED_AT_ONCE
    while done < num_bytes:
        count = min(at_once, num_bytes - done)
        try:
            _fallocate(fd, done, count)
        except InterruptedError:
            # After a signal, a tmpfs releases the allocated space, and a timer's signals could interrupt every attempt.
            at_once = max(PAGE_BYTES, count // 2)
            continue
        done += count


def _fallocate(fd: int, offset: int, num_bytes: int) -> None:
    """Call fallocate(2). Raises ``OSError``, with ``ENOSYS`` if it does not exist."""
    if _libc_fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc_fallocate(fd, 0, offset, num_bytes):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    try:
        library = ctypes.CDLL(None, use_errno=True)
        call = getattr(library, "fallocate64", None) or library.fallocate
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    call.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = call
    return found


_libc_fallocate = _find_fallocate()
