# SPDX-License-Identifier: Apache-2.0
"""Blocks as files in a directory: bounded, verified on every read, and still there after a restart."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats
from kvoffload.tiering.stores.fs.format import BlockFormat, parse_name
from kvoffload.tiering.stores.fs.io import FileIO, ReadOutcome, set_used
from kvoffload.tiering.stores.fs.quota import Deletion, Quota, Reservation
from kvoffload.tiering.stores.fs.staging import StagingDirectory, sweep, unlink_quietly
from kvoffload.tiering.stores.fs.usage_file import USAGE_FILE_BYTES
from kvoffload.tiering.stores.root import CONTROL_DIR, check_directory, check_root, directory_of

__all__ = ["FileSystemStore"]

_BLOCK_ERRORS = (errno.EIO, getattr(errno, "EUCLEAN", errno.EIO), errno.EBADMSG)
"""A file that cannot be read: one block, not the store."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAX_UNREADABLE = 65_536
_FULL_DISK_ROUNDS = 3


class FileSystemStore(BlockStore):
    """One file per block of ``block_bytes`` under ``root`` (``format`` has the layout).

    A write goes to a temporary file, completely, which is then renamed. A read verifies every byte of the file,
    including the key's identity. A file that fails twice is deleted and is a miss.

    ``max_bytes`` bounds all files under the root, of every namespace and process, headers included. The least
    recently used are evicted first, in an order that survives restarts. A block without room is ``False``. With
    ``durability="fsync"`` a block is on the disk when ``write`` returns. With ``"none"`` a power failure may lose or
    tear recent blocks, and verification turns those into misses.

    Only this user may read what is made under the root, whatever the umask. With ``mode="group"`` the root's group may
    read and write as well. Links under the root are never followed, and a root of another user is refused.

    A block that the disk cannot read is a miss until it is written anew. A disk that is full below ``max_bytes`` makes
    room as a full quota does. No writer waits longer than 10 s for a lock, and no reader waits for one at all.

    Several processes of one host may share a root, but not several hosts: locks on directories often end at the host,
    and who sees no lock sweeps another's temporary files. Its file system must have locks. It is made only here: if it
    goes away later, calls raise ``StoreError`` until it is back. Blocks of a prefix are best given head to tail.
    """

    rescan_s = 30.0
    scan_may_rest = False
    """A scan counts the bytes anew beside other writers, and learns the order in which blocks are evicted."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        block_bytes: int,
        namespace: str = "",
        max_bytes: int | None = None,
        *,
        durability: Literal["none", "fsync"] = "none",
        mode: Literal["private", "group"] = "private",
    ) -> None:
        if mode not in ("private", "group"):
            raise ConfigError(f"mode must be 'private' or 'group', not {mode!r}.")
        if durability not in ("none", "fsync"):
            raise ConfigError(f"durability must be 'none' or 'fsync', not {durability!r}.")
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, not {block_bytes}.")
        layout = BlockFormat(directory_of(namespace), block_bytes)
        if max_bytes is not None and max_bytes < layout.file_bytes + USAGE_FILE_BYTES:
            raise ConfigError(
                f"max_bytes={max_bytes} has no room for one block: a file takes {layout.file_bytes} bytes, "
                f"the usage file {USAGE_FILE_BYTES}."
            )
        self._root = os.path.abspath(os.fspath(root))
        self._layout = layout
        access = check_root(self._root, mode)
        if os.path.lexists(os.path.join(self._root, CONTROL_DIR, "slabs")):
            raise ConfigError(f"{self._root} belongs to a 'disk' tier; choose another directory.")
        try:
            check_directory(self._root, layout.directory, access)
        except OSError as exc:
            raise ConfigError(f"{exc.filename} {exc.strerror}; remove it, or choose another directory.") from exc
        self._access = access
        self._durable = durability == "fsync"
        self._io = FileIO(self._root, layout, access, durable=self._durable)
        self._staging = StagingDirectory(self._root, access)
        self._max_bytes = max_bytes
        self._quota = Quota(self._root, max_bytes, self._staging, layout)
        self._lock = threading.Lock()
        self._bad: list[OffloadKey] = []
        self._num_bad = 0
        # Files that the disk could not read, oldest first; each until it is written anew.
        self._unreadable: OrderedDict[str, None] = OrderedDict()
        sweep(self._root, access)

    def __repr__(self) -> str:
        return f"FileSystemStore({self._root!r}, {self._layout.directory!r}, block_bytes={self._layout.block_bytes})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        self._check_directory()
        errors = BatchErrors(self._root)
        answers = self._find(keys, [self._layout.path_of(key) for key in keys], errors)
        errors.raise_unless_any(answers)
        return answers

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._check_directory()
        try:
            return self._write(keys, blocks)
        except OSError as exc:
            raise StoreError(f"Writing to {self._root} failed: {exc}") from exc

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        self._check_directory()
        answers, errors, bad = list[bool](), BatchErrors(self._root), dict[OffloadKey, Deletion]()
        paths = [self._layout.path_of(key) for key in keys]
        for key, block, path, stamp_ns in zip(keys, blocks, paths, self._quota.use(paths), strict=True):
            if self._quota.is_doomed(path):
                answers.append(False)
                continue
            try:
                outcome, inode = self._io.read(path, key, self._bytes(block), stamp_ns)
            except OSError as exc:
                outcome = None
                self._add_error(errors, exc, key, path)
            answers.append(outcome is ReadOutcome.GOOD)
            if answers[-1] and self._unreadable:
                self._unreadable.pop(path, None)
            if outcome is ReadOutcome.ABSENT:
                self._quota.forget(path)
            elif outcome is ReadOutcome.BAD:
                bad[key] = Deletion(path, self._layout.file_bytes, inode)
        if bad:
            with self._lock:
                self._bad += bad
                self._num_bad += len(bad)
            self._quota.remove(bad.values(), timeout_s=0)  # readers wait for no lock
        errors.raise_unless_any(answers)
        return answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._quota.remove(Deletion(self._layout.path_of(key), self._layout.file_bytes) for key in keys)

    def close(self) -> None:
        self._quota.close()
        self._staging.close()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        try:
            for files in self._quota.scan():
                whole = (file.path for file in files if file.size_bytes == self._layout.file_bytes)
                yield self._own_keys(path for path in whole if not self._is_out_of_use(path))
        except OSError as exc:
            raise StoreError(f"Scanning {self._root} failed: {exc}") from exc

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        try:
            self._check_directory()
        except StoreError:
            return
        self._touch([self._layout.path_of(key) for key in reversed(keys)])

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        with self._lock:
            bad, self._bad = self._bad, []
        lost: dict[OffloadKey, LossCause] = dict.fromkeys(bad, "corrupt")
        if self._quota.evicted:
            lost |= dict.fromkeys(self._own_keys(self._quota.take_evicted()), "evicted")
        return lost

    def stats(self) -> StoreStats:
        return StoreStats(self._quota.used_bytes, self._num_bad, self._quota.num_evicted, self._max_bytes)

    # --------------------------------------------------------------------------------------------------- helpers

    def _check_directory(self) -> None:
        """Before each batch: raises ``StoreError`` if somebody has put a link in the place of our directory."""
        try:
            check_directory(self._root, self._layout.directory, self._access)
        except OSError as exc:
            raise StoreError(f"The store at {self._root} fails: {exc}") from exc

    def _find(self, keys: Sequence[OffloadKey], paths: Sequence[str], errors: BatchErrors) -> list[bool]:
        """Which files are there with the right size. Here and below, paths are relative to the root."""
        found = list[bool]()
        for key, path in zip(keys, paths):
            try:
                found.append(not self._is_out_of_use(path) and self._io.is_whole(path))
            except OSError as exc:
                self._add_error(errors, exc, key, path)
                found.append(False)
        return found

    def _is_out_of_use(self, path: str) -> bool:
        """The file is a miss, whatever is there: the disk could not read it, or it is about to be deleted."""
        return path in self._unreadable or self._quota.is_doomed(path)

    def _add_error(self, errors: BatchErrors, error: OSError, key: OffloadKey, path: str) -> None:
        """Records the error of one file. If the disk cannot read it, the file is a miss until it is written anew."""
        errors.add(error)
        if error.errno in _BLOCK_ERRORS:
            with self._lock:
                self._bad.append(key)
                self._unreadable[path] = None
                if len(self._unreadable) > _MAX_UNREADABLE:
                    self._unreadable.popitem(last=False)

    def _write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        errors = BatchErrors(self._root)
        paths = [self._layout.path_of(key) for key in keys]
        found = self._find(keys, paths, errors)
        if here := [path for path, is_here in zip(paths, found) if is_here]:
            self._touch(here)
        new: dict[str, int] = {}
        for index, path in enumerate(paths):
            if not found[index]:
                new.setdefault(path, index)  # of a key that is given twice, the first block is written
        if not new:
            return found
        payloads = {path: self._bytes(blocks[index]) for path, index in new.items()}
        # A batch never evicts its own blocks: those found here are True in the answer.
        protected = set(paths)
        reservation = self._reserve(len(new), protected)
        published, num_unused = dict[str, int](), 0
        files = list(zip(new, reservation.temporaries, reservation.stamps_ns))
        try:
            for _ in range(_FULL_DISK_ROUNDS):
                without_room = []
                for path, temporary, stamp_ns in files:
                    bad = path in self._unreadable
                    try:
                        num_unused += not self._io.write(
                            temporary, path, keys[new[path]], payloads[path], stamp_ns, replaces=bad
                        )
                        published[path] = stamp_ns
                        self._unreadable.pop(path, None)
                    except OSError as exc:
                        errors.add(exc)
                        if exc.errno in _FULL:
                            without_room.append((path, temporary, stamp_ns))
                        num_unused += 1
                temporaries = [temporary for _, temporary, _ in without_room]
                if not without_room or not self._quota.make_disk_room(self._layout.file_bytes, temporaries, protected):
                    break
                files, num_unused = without_room, num_unused - len(without_room)
            else:
                num_unused += len(without_room)
        finally:
            self._quota.release(reservation, published, num_unused)
        if self._durable:
            self._io.sync_names(published)
        answers = [is_here or path in published for path, is_here in zip(paths, found)]
        errors.raise_unless_any(answers)
        return answers

    def _reserve(self, count: int, protected: set[str]) -> Reservation:
        try:
            return self._quota.reserve(count, self._layout.file_bytes, protected)
        except OSError as exc:
            if exc.errno not in _FULL:
                raise
        # Even the usage file may find the disk full.
        temporaries = self._staging.new_paths(1)
        self._quota.make_disk_room(self._layout.file_bytes, temporaries, protected)
        unlink_quietly(temporaries[0])
        return self._quota.reserve(count, self._layout.file_bytes, protected)

    def _touch(self, paths: Sequence[str]) -> None:
        """Records that files are used now, the last of them latest."""
        for path, stamp_ns in zip(paths, self._quota.use(paths)):
            try:
                set_used(f"{self._root}/{path}", stamp_ns)
            except (FileNotFoundError, NotADirectoryError):
                self._quota.forget(path)
            except OSError:
                pass  # a read-only file system keeps no order of use

    def _own_keys(self, paths: Iterable[str]) -> list[OffloadKey]:
        """The keys of this namespace's files, where the names have them. Files in other places than their own are
        skipped."""
        own = self._layout.directory + "/"
        named = ((path, parse_name(os.path.basename(path))) for path in paths if path.startswith(own))
        return [key for path, key in named if key is not None and self._layout.path_of(key) == path]

    def _bytes(self, block: memoryview) -> memoryview:
        size = self._layout.block_bytes
        assert block.nbytes == size, f"a block of {block.nbytes} bytes for a store of {size}"
        return block if block.ndim == 1 and block.format == "B" else block.cast("B")


class BatchErrors:
    """The errors of one batch. A bad block next to good ones is a miss; if nothing works, the store fails."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._first: OSError | None = None

    def add(self, error: OSError) -> None:
        self._first = self._first or error

    def raise_unless_any(self, answers: Sequence[bool]) -> None:
        """Raises ``StoreError`` if no key of the batch succeeded and either one raised or the root is gone."""
        if any(answers) or not answers:
            return
        if self._first is not None:
            raise StoreError(f"The store at {self._root} fails: {self._first}") from self._first
        if not os.path.isdir(self._root):
            raise StoreError(f"The store's directory {self._root} is gone.")
