# SPDX-License-Identifier: Apache-2.0
"""Blocks as files in a directory that many hosts share: verified on every read, and still there after a restart."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError, reason_of
from kvoffload.tiering.stores.base import LossCause, StoreStats
from kvoffload.tiering.stores.direct_io import BLOCK_ERRORS, NO_SPACE
from kvoffload.tiering.stores.fs.format import MARKER, NUM_FANS, TEMPORARY_PREFIX, BlockFormat, parse_name
from kvoffload.tiering.stores.fs.io import FileIO, ReadOutcome, is_absence
from kvoffload.tiering.stores.fs.owned import NAMES_AT_ONCE, names_in
from kvoffload.tiering.stores.fs.quota import Quota, delete_oldest, seen_in, sweep
from kvoffload.tiering.stores.root import (
    Directories,
    RootedStore,
    directory_of,
    display_name,
    make_file,
    open_control,
    plain_beside,
)
from kvoffload.tiering.stores.root import gone as root_is_gone

_log = logging.getLogger(__name__)

_MAX_UNREADABLE = 65_536
_FULL_DISK_ROUNDS = 3


class FileSystemStore(RootedStore):
    """One file per block of ``block_bytes`` under ``root`` (``format`` describes the layout). Any number of processes,
    on any number of hosts, may share a root. They use no locks and do not know each other.

    A write fills a temporary file in the block's directory and then renames it. A read verifies every byte of the file,
    including the key's identity. A file that fails twice is deleted and counts as a miss. With a ``secret``, each file
    contains a message authentication code, so that nobody else can create a file that is served.

    ``max_bytes`` bounds all files under the root, of every namespace and process, headers included. It holds within a
    tenth (``quota``). The blocks that were written first are deleted first, unless they were used after they became
    old. A full disk makes room in the same way, with or without ``max_bytes``.

    A power failure may lose or tear recent blocks, and verification turns those into misses.

    Only this user may read the files under the root, regardless of the umask. With ``mode="group"`` the root's group
    may also read and write. Links under the root are never followed, and a root of another user is rejected.

    A block that the disk cannot read is a miss until it is written again. Only the constructor creates the root: if it
    disappears later, calls raise ``StoreError`` until it is back.
    """

    _tier_type = "fs"
    _needs_locks = False
    rescan_s = 600.0
    """Scans repeat because other hosts also delete. They are rare because each scan lists 256 directories, and every
    host scans."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        block_bytes: int,
        namespace: str = "",
        max_bytes: int | None = None,
        *,
        mode: Literal["private", "group"] = "private",
        secret: bytes | None = None,
    ) -> None:
        layout = BlockFormat(directory_of(namespace, secret), block_bytes, secret)
        super().__init__(root, block_bytes, max_bytes, layout.file_bytes, mode)
        self._layout = layout
        try:
            with self._directories() as opened, suppress(FileNotFoundError):
                opened.fd(layout.directory)
        except OSError as exc:
            raise ConfigError(f"{exc.filename} {exc.strerror}; remove it, or choose another directory.") from exc
        self._mark()
        self._quota = Quota(self._root, max_bytes, layout.file_bytes, self._access, layout.directory)
        self._io = FileIO(self._root, layout, self._access, self._quota)
        self._lock = threading.Lock()
        self._lost: dict[OffloadKey, LossCause] = {}
        self._num_bad = self._num_evicted = 0
        self._drops_plain = False
        # Files that the disk could not read, or that are bad and cannot be deleted, oldest first. Each stays here until
        # it is written again.
        self._unreadable: OrderedDict[str, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"FileSystemStore({self._root!r}, {self._layout.directory!r}, block_bytes={self._layout.block_bytes})"

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        errors = list[OSError]()
        with self._directories() as opened:
            return self._outcomes(self._find(opened, keys, self._paths(opened, keys, errors), errors), errors)

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        errors = list[OSError]()
        with self._directories() as opened:
            paths = self._paths(opened, keys, errors)
            found = self._find(opened, keys, paths, errors)
            here = {path for path, is_here in zip(paths, found, strict=True) if path and is_here}
            for path in here:
                self._io.mark_used(opened, path)  # it was computed again because an earlier block was missing
            published, gone = dict[str, OffloadKey](), set[str]()
            for key, path, block in zip(keys, paths, blocks, strict=True):
                is_new = path not in here and path not in published
                if path and is_new and self._publish(opened, path, key, self._bytes(block), errors, gone):
                    published[path] = key
            if published and not opened.is_in_place():
                raise StoreError(root_is_gone(self._root))
        self._look_at_disk()
        self._evicted(self._quota.keep((key, path) for path, key in published.items()), gone)
        answers = [(path in here or path in published) and path not in gone for path in paths]
        return self._outcomes(answers, errors, [path in here for path in paths])

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        answers, errors = list[bool](), list[OSError]()
        with self._directories() as opened:
            for key, path, block in zip(keys, self._paths(opened, keys, errors), blocks, strict=True):
                outcome = None
                try:
                    outcome = self._io.read(opened, path, key, self._bytes(block)) if path else None
                except OSError as exc:
                    self._add_error(errors, exc, key, path)
                answers.append(outcome is ReadOutcome.GOOD)
                if answers[-1] and self._unreadable:
                    self._unreadable.pop(path, None)
                if outcome in (ReadOutcome.BAD, ReadOutcome.STAYS):
                    with self._lock:
                        self._lost[key] = "corrupt"
                        self._num_bad += 1
                        if outcome is ReadOutcome.STAYS:
                            self._note_unreadable(path)
        return self._outcomes(answers, errors)

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        with self._directories() as opened, suppress(StoreError):
            for path in filter(None, self._paths(opened, keys, [])):
                with suppress(OSError):
                    self._io.remove(opened, path)

    def close(self) -> None:
        self._quota.close()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        with self._directories() as opened:
            self._check_directory(opened)
        yield from self._drop_plain()
        for fan in range(NUM_FANS):
            directory = f"{self._layout.directory}/{fan:02x}"
            try:
                for names in names_in(self._root, directory, self._access):
                    if unfinished := [name for name in names if name.startswith(TEMPORARY_PREFIX)]:
                        sweep(self._root, seen_in(self._root, directory, self._access, unfinished), self._access)
                    keys = self._own_keys(f"{directory}/{name}" for name in names)
                    if keys or len(names) >= NAMES_AT_ONCE:
                        yield [key for path, key in keys if path not in self._unreadable]
            except OSError as exc:
                raise StoreError(f"Scanning {self._root} failed: {reason_of(exc)}.") from exc
        if not os.path.isdir(self._root):
            raise StoreError(root_is_gone(self._root))

    def _drop_plain(self) -> Iterator[Sequence[OffloadKey]]:
        """Delete the blocks of our namespace that are not encrypted, if ``drop_plain`` was called. Hosts that still
        write such blocks lose them at each scan."""
        try:
            if not self._drops_plain:
                return
            plain = plain_beside(self._root, self._layout.directory)
        except OSError:
            return
        for directory in plain:
            num_deleted = 0
            for fan in range(NUM_FANS):
                fan_directory = f"{directory}/{fan:02x}"
                with suppress(OSError):
                    for names in names_in(self._root, fan_directory, self._access):
                        seen = seen_in(self._root, fan_directory, self._access, names)
                        num_deleted += len(delete_oldest(self._root, seen, -1, (), self._access))
                        yield ()
            if num_deleted:
                _log.warning(
                    "%d blocks in %s/%s were not encrypted. They are deleted, because encryption_key is set. Blocks of "
                    "other namespaces stay ('kvoffload store clear' deletes them).",
                    num_deleted,
                    self._root,
                    display_name(directory),
                )

    def drop_plain(self) -> None:
        self._drops_plain = True

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        if not self._lost:
            return {}
        with self._lock:
            lost, self._lost = self._lost, {}
        return lost

    def stats(self) -> StoreStats:
        return StoreStats(None, self._num_bad, self._num_evicted, self._max_bytes, self._free_bytes)

    # --------------------------------------------------------------------------------------------------- helpers

    def _mark(self) -> None:
        """Mark the root as one of files, unless the file system is read-only."""
        with suppress(OSError):
            control = open_control(self._root, self._access)
            try:
                os.close(make_file(MARKER, control, self._access))
            finally:
                os.close(control)

    def _directories(self) -> Directories:
        return Directories(self._root, self._access)

    def _check_directory(self, opened: Directories) -> None:
        """Raise ``StoreError`` if our directory was replaced with a link."""
        try:
            opened.fd(self._layout.directory)
        except OSError as exc:
            if not is_absence(exc):
                raise self._failed(exc) from exc

    def _paths(self, opened: Directories, keys: Sequence[OffloadKey], errors: list[OSError]) -> list[str]:
        """Return the file of each key, or ``""`` if its fan was replaced with a link, because nothing may be read,
        written or deleted through it. Here and below, paths are relative to the root. Raises ``StoreError``."""
        self._check_directory(opened)
        paths = [self._layout.path_of(key) for key in keys]
        strange = set[str]()
        for fan in sorted({path.rpartition("/")[0] for path in paths}):
            try:
                opened.fd(fan)
            except OSError as exc:
                if not is_absence(exc):
                    strange.add(fan)
                    errors.append(exc)
        return [path if os.path.dirname(path) not in strange else "" for path in paths] if strange else paths

    def _find(
        self, opened: Directories, keys: Sequence[OffloadKey], paths: Sequence[str], errors: list[OSError]
    ) -> list[bool]:
        """Return which files exist with the right size."""
        found = [False] * len(paths)
        for at in sorted(range(len(paths)), key=paths.__getitem__):  # so that each directory is opened once
            path = paths[at]
            try:
                found[at] = bool(path) and path not in self._unreadable and self._io.is_whole(opened, path)
            except OSError as exc:
                self._add_error(errors, exc, keys[at], path)
        return found

    def _publish(
        self,
        opened: Directories,
        path: str,
        key: OffloadKey,
        payload: memoryview,
        errors: list[OSError],
        gone: set[str],
    ) -> bool:
        """Write one block, and make room for it on a full disk. Others may use that room meanwhile. Adds the paths of
        deleted files to ``gone``."""
        for rounds_left in reversed(range(_FULL_DISK_ROUNDS)):
            try:
                self._io.write(opened, path, key, payload)
                self._unreadable.pop(path, None)
                return True
            except OSError as exc:
                is_full = exc.errno in NO_SPACE and rounds_left > 0
                if not is_full or not self._evicted(self._quota.make_room(path, self._layout.file_bytes), gone):
                    errors.append(exc)
                    break
        return False

    def _evicted(self, paths: Sequence[str], gone: set[str]) -> bool:
        """Record deleted files, also in ``gone``. Returns whether any were deleted."""
        gone.update(paths)
        with self._lock:
            self._num_evicted += len(paths)
            self._lost.update((key, "evicted") for _, key in self._own_keys(paths))
        return bool(paths)

    def _add_error(self, errors: list[OSError], error: OSError, key: OffloadKey, path: str) -> None:
        """Record the error of one file. If the disk cannot read it, the file is a miss until it is written again."""
        errors.append(error)
        if error.errno in BLOCK_ERRORS:
            with self._lock:
                self._lost[key] = "corrupt"
                self._note_unreadable(path)

    def _note_unreadable(self, path: str) -> None:
        """Record a file as unreadable. The caller holds ``_lock``."""
        self._unreadable[path] = None
        if len(self._unreadable) > _MAX_UNREADABLE:
            self._unreadable.popitem(last=False)

    def _own_keys(self, paths: Iterable[str]) -> list[tuple[str, OffloadKey]]:
        """Return the files of this namespace whose names contain their keys, with these keys. Skips files in a wrong
        directory."""
        own = self._layout.directory + "/"
        named = ((path, parse_name(os.path.basename(path))) for path in paths if path.startswith(own))
        return [(path, key) for path, key in named if key is not None and self._layout.path_of(key) == path]
