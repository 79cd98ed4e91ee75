# SPDX-License-Identifier: Apache-2.0
"""Blocks as files in a directory: bounded, verified on every read, and still there after a restart."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from typing import Literal

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, StoreStats
from kvoffload.tiering.stores.fs.batch import Look, look
from kvoffload.tiering.stores.fs.format import BlockFormat, directory_of, parse_name
from kvoffload.tiering.stores.fs.io import FileIO, NewFile, ReadOutcome
from kvoffload.tiering.stores.fs.native import NAMED, NOTHING
from kvoffload.tiering.stores.fs.quota import Booking, Doomed, Space
from kvoffload.tiering.stores.fs.staging import Workplace, publish, sweep, unlink_quietly
from kvoffload.tiering.stores.fs.usage_file import LEDGER_BYTES

__all__ = ["FileSystemStore"]


_PUBLISH_ATTEMPTS = 100
"""Each lost to a neighbour that wrote the same block, and to another that evicted it, within microseconds."""


class FileSystemStore(BlockStore):
    """One file per block of ``block_bytes`` under ``root`` (``fs_format`` has the layout).

    A block is written to a temporary file, completely, and renamed into place; each read verifies every byte of the
    file, the key's identity included. What does not verify twice is deleted and is a miss.

    ``max_bytes`` bounds all files under the root, of every namespace and process, headers included; the least
    recently used go first, in an order that survives restarts. A write that cannot have room is ``False``.
    ``durability="fsync"`` has a block on the disk when ``write`` answers; with ``"none"`` a power failure may lose
    or tear recent blocks, which verification turns into misses.

    Several processes of one host may share a root. The root is made once, here; if it goes away later, calls raise
    ``StoreError`` until it is back. Blocks of a prefix are best given head to tail.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        block_bytes: int,
        namespace: str = "",
        max_bytes: int | None = None,
        *,
        durability: Literal["none", "fsync"] = "none",
    ) -> None:
        if durability not in ("none", "fsync"):
            raise ConfigError(f"durability must be 'none' or 'fsync', not {durability!r}.")
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, not {block_bytes}.")
        layout = BlockFormat(directory_of(namespace), block_bytes)
        if max_bytes is not None and max_bytes < layout.file_bytes + LEDGER_BYTES:
            raise ConfigError(
                f"max_bytes={max_bytes} has no room for one block: a file takes {layout.file_bytes} bytes, "
                f"the ledger {LEDGER_BYTES}."
            )
        self._root = os.path.abspath(os.fspath(root))
        self._layout = layout
        self._durable = durability == "fsync"
        try:
            os.makedirs(self._root, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"The store's directory {self._root} cannot be made: {exc.strerror}.") from exc
        self._io = FileIO(layout, durable=self._durable)
        self._workplace = Workplace(self._root)
        self._space = Space(self._root, max_bytes, self._workplace)
        self._lock = threading.Lock()
        self._bad: list[OffloadKey] = []
        self._num_bad = 0
        sweep(self._root)

    def __repr__(self) -> str:
        return f"FileSystemStore({self._root!r}, {self._layout.directory!r}, block_bytes={self._layout.block_bytes})"

    # ------------------------------------------------------------------------------------------------ BlockStore

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        answers, trouble = list[bool](), _Trouble(self._root)
        fulls = [self._full(self._layout.path_of(key)) for key in keys]
        for full, found in zip(fulls, look(fulls)):
            try:
                # Whatever does not look right is looked at again with care, which tells absent from out of order.
                answers.append(self._is_ours(found) or self._is_whole(full))
            except OSError as exc:
                trouble.note(exc)
                answers.append(False)
        trouble.judge(any(answers), len(keys))
        return answers

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        try:
            return self._write(keys, blocks)
        except OSError as exc:
            raise StoreError(f"Writing to {self._root} failed: {exc}") from exc

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        answers, trouble, bad = list[bool](), _Trouble(self._root), list[Doomed]()
        payloads = [_flat(block, self._layout) for block in blocks]
        for first in range(0, len(keys), self._io.files_per_batch):
            batch = slice(first, first + self._io.files_per_batch)
            paths = [self._layout.path_of(key) for key in keys[batch]]
            # Stamped in the order of the batch.
            stamps_ns = self._space.stamps(len(paths))
            good = self._io.try_to_read([self._full(path) for path in paths], keys[batch], payloads[batch], stamps_ns)
            for key, path, payload, stamp_ns, is_good in zip(keys[batch], paths, payloads[batch], stamps_ns, good):
                try:
                    answers.append(is_good or self._read(path, key, payload, stamp_ns, bad))
                except OSError as exc:
                    trouble.note(exc)
                    answers.append(False)
                if answers[-1]:
                    self._space.used(path, stamp_ns)
        self._space.remove(bad)
        trouble.judge(any(answers), len(keys))
        return answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._space.remove(Doomed(self._layout.path_of(key), self._layout.file_bytes) for key in keys)

    def close(self) -> None:
        self._workplace.close()
        self._space.close()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        own = self._layout.directory + "/"
        try:
            for files in self._space.scan():
                whole = [file for file in files if file.size_bytes == self._layout.file_bytes]
                keys = [parse_name(os.path.basename(file.path)) for file in whole if file.path.startswith(own)]
                yield [key for key in keys if key is not None]
        except OSError as exc:
            raise StoreError(f"Scanning {self._root} failed: {exc}") from exc

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        for key, stamp_ns in zip(reversed(keys), self._space.stamps(len(keys))):
            path = self._layout.path_of(key)
            try:
                os.utime(self._full(path), ns=(stamp_ns, stamp_ns))
            except OSError:
                continue
            self._space.used(path, stamp_ns)

    def take_evicted(self) -> list[OffloadKey]:
        with self._lock:
            bad, self._bad = self._bad, []
        own = self._layout.directory + "/"
        evicted = [parse_name(os.path.basename(path)) for path in self._space.take_evicted() if path.startswith(own)]
        return bad + [key for key in evicted if key is not None]

    def stats(self) -> StoreStats:
        return StoreStats(self._space.used_bytes, self._num_bad, self._space.num_evicted)

    # --------------------------------------------------------------------------------------------------- writing

    def _write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        paths = [self._layout.path_of(key) for key in keys]
        fulls = [self._full(path) for path in paths]
        answers = [self._is_ours(found) for found in look(fulls)]
        # A key may be given twice: its first block is the one that is written.
        wanted = {path: index for index, path in reversed(list(enumerate(paths))) if not answers[index]}
        new = sorted(wanted.values())
        self.touch([key for key, is_here in zip(keys, answers) if is_here][::-1])
        if not new:
            return answers
        self._workplace.open()
        # What the caller is told to be here must not go for the sake of its own batch.
        booking = self._space.reserve(len(new), self._layout.file_bytes, set(paths))
        trouble, num_unused = _Trouble(self._root), booking.count
        try:
            for first in range(0, booking.count, self._io.files_per_batch):
                batch = new[first : min(first + self._io.files_per_batch, booking.count)]
                files = [
                    NewFile(keys[at], _flat(blocks[at], self._layout), stamp_ns, self._temporary(booking), fulls[at])
                    for at, stamp_ns in zip(batch, self._space.stamps(len(batch)))
                ]
                self._io.try_to_write(files)
                for index, file in zip(batch, files):
                    try:
                        num_unused -= self._finish(paths[index], file)
                        answers[index] = True
                    except OSError as exc:
                        trouble.note(exc)
        finally:
            self._space.settle(booking, num_unused)
        if self._durable:
            for directory in {os.path.dirname(paths[index]) for index in new if answers[index]}:
                _sync_directory(self._full(directory))
        trouble.judge(any(answers), len(keys))
        return [answers[wanted[path]] if path in wanted else answer for path, answer in zip(paths, answers)]

    def _temporary(self, booking: Booking) -> str:
        return booking.recycled.pop() if booking.recycled else self._workplace.new_path()

    def _finish(self, path: str, file: NewFile) -> bool:
        """Completes one reserved block; whether that took a reserved place, rather than finding or replacing one."""
        is_new = file.reached == NAMED
        if not is_new:
            try:
                if file.reached == NOTHING:
                    self._io.write(file.temporary, file.key, file.payload, file.stamp_ns)
                try:
                    is_new = self._publish(file.temporary, file.final)
                except FileNotFoundError:
                    self._make_directory(os.path.dirname(path))
                    is_new = self._publish(file.temporary, file.final)
            except OSError:
                unlink_quietly(file.temporary)
                raise
        self._space.published(path, file.stamp_ns)
        return is_new

    def _publish(self, temporary: str, full: str) -> bool:
        """Puts a finished file under its name; whether that took a reserved place."""
        for _ in range(_PUBLISH_ATTEMPTS):
            if publish(temporary, full):
                return True
            if self._is_whole(full):  # the same block, written by somebody else just now
                os.unlink(temporary)
                return False
            if os.path.lexists(full):
                # Broken, or not ours. What it was booked with is not known, so the place stays booked until the next
                # count: too much is safe.
                try:
                    os.rename(temporary, full)
                except IsADirectoryError:
                    os.rmdir(full)  # an empty one may go
                    os.rename(temporary, full)
                return True
            # Somebody else's is gone again: a new file after all.
        raise OSError(errno.EBUSY, "written and evicted again and again", full)

    def _make_directory(self, path: str) -> None:
        if not os.path.isdir(self._root):
            raise FileNotFoundError(f"{self._root} is gone")
        os.makedirs(self._full(path), exist_ok=True)
        if self._durable:
            _sync_directory(os.path.dirname(self._full(path)))
            _sync_directory(self._root)

    def _read(self, path: str, key: OffloadKey, payload: memoryview, stamp_ns: int, bad: list[Doomed]) -> bool:
        """Reads one block with care; what is wrong for sure is added to ``bad``."""
        outcome, inode = self._io.read(self._full(path), key, payload, stamp_ns)
        if outcome is ReadOutcome.GOOD:
            return True
        if outcome is ReadOutcome.ABSENT or not self._is_still(path, inode):
            self._space.forget(path)  # evicted, and perhaps written over, while we read
        elif outcome is ReadOutcome.BAD:
            bad.append(Doomed(path, self._layout.file_bytes, inode))
            with self._lock:
                self._bad.append(key)
                self._num_bad += 1
        return False

    # --------------------------------------------------------------------------------------------------- helpers

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _is_still(self, path: str, inode: int) -> bool:
        try:
            return os.stat(self._full(path), follow_symlinks=False).st_ino == inode
        except FileNotFoundError:
            return False

    def _is_ours(self, found: Look | None) -> bool:
        return found is not None and found.size_bytes == self._layout.file_bytes

    def _is_whole(self, full: str) -> bool:
        try:
            status = os.stat(full)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == self._layout.file_bytes


class _Trouble:
    """Tells one bad block from a store that is down: nothing worked, and something was wrong."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._first: OSError | None = None

    def note(self, exc: OSError) -> None:
        self._first = self._first or exc

    def judge(self, anything_worked: bool, num_keys: int) -> None:
        if anything_worked or not num_keys:
            return
        if self._first is not None:
            raise StoreError(f"The store at {self._root} fails: {self._first}") from self._first
        if not os.path.isdir(self._root):
            raise StoreError(f"The store's directory {self._root} is gone.")


def _flat(block: memoryview, layout: BlockFormat) -> memoryview:
    assert block.nbytes == layout.block_bytes, f"a block of {block.nbytes} bytes for a store of {layout.block_bytes}"
    return block if block.ndim == 1 and block.format == "B" else block.cast("B")


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
