# SPDX-License-Identifier: Apache-2.0
"""The quota of a root: when a process may create another slab, and when it gives one away.

A process that finds no room for another slab posts a request: an empty file in the control directory, whose name
contains all information. It holds a lock on the file, which the kernel releases when the process dies. A process with
more slabs gives it one. No process waits for another.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvoffload.cpu.memory_limits import available_bytes, check_pool, memory_file_system
from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.disk.directory import (
    SlabDirectory,
    SlabSeen,
    is_unused,
    namespaces_in,
    remove_slabs,
    root_lock,
    slabs_in,
    sweep,
    try_remove,
)
from kvoffload.tiering.stores.disk.file import TOO_MANY_FILES, SlabFile, SlabRefused, most_slabs
from kvoffload.tiering.stores.disk.format import SlabFormat
from kvoffload.tiering.stores.disk.open_slab import Slab
from kvoffload.tiering.stores.disk.slabs import Slabs
from kvoffload.tiering.stores.root import (
    SAFE,
    Access,
    display_name,
    make_file,
    open_control,
    plain_beside,
    try_lock,
)

_log = logging.getLogger(__name__)

_LEAST_SHARE = 8
"""The rest of a quota gets its own slab if it is at least one in this many slots of a whole slab."""
_FREE_SHARE = 5
"""Without a quota, one in this many bytes of the disk stays free. The kubelet evicts pods of a node whose disk has less
than 10% free, or less than 15% where images share it, and others write there as well."""
_UNBOUNDED = 1 << 62
_MOST_QUOTAS = 2
"""Limit on the open slabs of a group, in quotas. Members may have different quotas, or may lower theirs."""
_GROW_S = 1.0
"""Seconds to wait before trying again, after a quota or disk had no room for a slab."""
_WANT_S = 10.0
"""Seconds for which a process asks others for a slab after it found no room."""
_STALE_S = 5.0
"""Seconds after which an unrenewed request is ignored: its process is stopped, and would not take a slab."""
_GIVEN_S = 5.0
"""Seconds for which a slab that was given away is reserved for others."""
_NAME = re.compile(r"want-(\d{1,6})-([0-9a-f]{16})-([0-9a-f]{16})")


class Quota:
    """The quota ``max_bytes`` for the slabs of all namespaces and processes of a root; ``None`` means four fifths of
    the disk. Any thread may call ``grow``; only one thread at a time may call the other methods."""

    def __init__(self, directory: SlabDirectory, slabs: Slabs, layout: SlabFormat, max_bytes: int | None) -> None:
        self._directory = directory
        self._slabs = slabs
        self._layout = layout
        self._max_bytes = max_bytes
        self._root = directory.root
        self._access = directory.access
        self._identity = layout.digest.hex()[:16]
        self._is_memory = memory_file_system(self._root) is not None
        self._lock = threading.Lock()
        """Lock of the thread that creates a slab."""
        self.making = ""
        """The name of a slab that is being created."""
        self.not_before_s = 0.0
        """Time before which no slab is created."""
        self.is_retired = False
        """Whether nothing is written here again, so that any process that asks gets a slab."""
        self._error: OSError | None = None
        self._wants_until_s = 0.0
        self._request = PostedRequest(self._root, self._identity, self._access)
        self.drops_plain = False
        self._plain_in_use = set[str]()
        """Directories for which a warning was logged, because a process writes unencrypted blocks there."""
        self._answered: dict[str, tuple[int, float]] = {}
        """Processes that we gave a slab: the number of slabs that each had then, and the time until which it may take
        the slab."""

    def grow(self, errors: list[OSError]) -> bool:
        """Create a slab if there is room, and return whether free slots exist now. One thread creates the slab; others
        wait for it, but not if it hangs. Adds to ``errors`` the reason why no slab exists at all."""
        if time.monotonic() >= self.not_before_s and self._try_to_grow():
            return True
        if self._error is not None and not self._slabs.num_slots:
            errors.append(self._error)
        return False

    def shrink(self) -> bool:
        """Remove our slabs above the quota, the one with the oldest uses first. Returns whether the quota holds. Does
        not wait for the root's lock, or for other processes to remove their slabs. Raises ``OSError``."""
        while excess := self._excess_bytes():
            too_many = list[Slab]()
            for slab in self._slabs.own_by_age():
                if excess > 0:
                    too_many.append(slab)
                    excess -= self._layout.slab_bytes(slab.file.num_slots)
            if not too_many:
                return False
            self._slabs.drop(too_many, "evicted")
            for slab in too_many:
                self._directory.remove(slab.file.name)
            _log.info("Removed %d slabs at %s, because they exceed the quota.", len(too_many), self._root)
        return excess is not None

    def share(self) -> None:
        """Ask for a slab if we lack room, and give one to a process that asks and has fewer than we do; a retired store
        gives one to any process. Raises ``OSError``."""
        now_s = time.monotonic()
        num_own = sum(slab.is_own for slab in self._slabs.snapshot())
        if now_s < self._wants_until_s:
            self._request.post(num_own)
        else:
            self._request.withdraw()
        self._answered = {process: answer for process, answer in self._answered.items() if now_s < answer[1]}
        for theirs in requests_of_others(self._root, self._access, self._request.process):
            is_answered = self._answered.get(theirs.process, (-1, 0.0))[0] == theirs.num_slabs
            if is_answered or num_own <= (0 if self.is_retired else theirs.num_slabs + 1):
                continue
            slab = self._slabs.own_by_age()[0]
            if not self._slabs.give(slab):
                continue  # a call is using it: try again at the next poll
            num_own -= 1
            self._answered[theirs.process] = theirs.num_slabs, now_s + _GIVEN_S
            if theirs.identity == self._identity:
                slab.given_until_s = now_s + _GIVEN_S
                slab.file.write_changes(slab.changes + 1)  # includes changes that were not announced
                slab.file.unlock()
            else:
                self._slabs.drop([slab], "evicted")
                self._directory.remove(slab.file.name)

    def drop_plain(self) -> None:
        """Remove the unencrypted blocks of our namespace once no process uses them, if ``drops_plain`` is set. Raises
        ``OSError``."""
        if not self.drops_plain or not (plain := plain_beside(self._root, self._directory.name)):
            return
        with root_lock(self._root, self._access) as is_locked:
            if not is_locked:
                return  # the next call tries again
            for directory in plain:
                num_removed, is_used = 0, False
                for _, dir_fd in namespaces_in(self._root, self._access, directory):
                    if is_used := not is_unused(dir_fd):
                        continue
                    num_removed = sum(try_remove(slab.name, dir_fd) for slab in slabs_in(dir_fd))
                if num_removed:
                    _log.warning(
                        "%d slabs in %s/%s were not encrypted. They are removed, because encryption_key is set. "
                        "Blocks of other namespaces stay ('kvoffload store clear' removes them).",
                        num_removed,
                        self._root,
                        display_name(directory),
                    )
                if is_used and directory not in self._plain_in_use:
                    self._plain_in_use.add(directory)
                    _log.warning(
                        "Another process writes blocks to %s/%s that are not encrypted: they are removed once it ends.",
                        self._root,
                        display_name(directory),
                    )

    def check_share(self, file: SlabFile) -> None:
        """Raise ``SlabRefused`` if the open slabs and ``file`` are far above the quota, in a root that a group shares.

        A slab needs memory for its table in every process that opens it. A member could create files without content
        that claim any number of slots. The space that files use does not show this, because file systems compress, and
        some do not preallocate. May raise ``OSError``.
        """
        if not self._access.is_group:
            return
        open_bytes = sum(self._layout.slab_bytes(slab.file.num_slots) for slab in self._slabs.snapshot())
        most_bytes = _MOST_QUOTAS * (self._max_bytes or _disk_bytes(self._root))
        if open_bytes + self._layout.slab_bytes(file.num_slots) > most_bytes:
            raise SlabRefused(f"with {file.name}, the group's open slabs would exceed twice the quota")

    def close(self) -> None:
        self._request.withdraw()

    def _try_to_grow(self) -> bool:
        if self._lock.acquire(timeout=_GROW_S):
            try:
                if self._slabs.num_free:
                    return True
                # The store's thread sees the new slab before we register it, and must not mistake it for a neighbour's.
                self.making = secrets.token_hex(8)
                file = self._make_slab(self.making)
                self._error = None
                if file is not None:
                    self._slabs.register(file, is_own=True)
                    return True
                self._wants_until_s = time.monotonic() + _WANT_S
            except BlockingIOError:
                return False  # this is unrelated to the quota, so the next write tries again
            except OSError as exc:
                self._error = exc
                if exc.errno in TOO_MANY_FILES:
                    self._slabs.note_limit(exc)
            finally:
                self.making = ""
                self._lock.release()
        self.not_before_s = time.monotonic() + _GROW_S
        return False

    def _make_slab(self, name: str) -> SlabFile | None:
        """Create a slab, locked; return ``None`` if the quota has no room for it. Raises ``BlockingIOError`` if another
        process is creating one, and ``OSError``, also for a full disk."""
        with self._directory.duplicate() as fd, root_lock(self._root, self._access) as is_locked:
            if not is_locked:
                raise BlockingIOError(errno.EAGAIN, "another process is creating a slab", self._root)
            wanted_slots = self._layout.slots_per_slab(self._max_bytes or _disk_bytes(self._root), most_slabs())
            wanted_bytes = self._layout.slab_bytes(wanted_slots)
            room_bytes, free_bytes = self._room_bytes(), _free_bytes(self._root)
            if (lacking_bytes := wanted_bytes - min(room_bytes, free_bytes)) > 0:
                room_bytes += self._remove_unused(lacking_bytes)
                free_bytes = _free_bytes(self._root)
            if self._is_memory and (available := available_bytes()) is not None:
                room_bytes = min(room_bytes, available)  # with more, the kernel would kill a process
            least_slots = max(1, wanted_slots // _LEAST_SHARE)
            if self._layout.slots_in(room_bytes) < least_slots:
                return None
            num_slots = min(wanted_slots, self._layout.slots_in(min(room_bytes, free_bytes)))
            if num_slots < least_slots:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._root)
            return SlabFile.create(name, self._layout, num_slots, fd, self._access)

    def _excess_bytes(self) -> int | None:
        """Remove unused and unfinished slabs, and return the root's excess over its quota; ``None`` if another process
        has the root's lock. Raises ``OSError``."""
        with root_lock(self._root, self._access) as is_locked:
            if not is_locked:
                return None
            excess = -self._room_bytes()
            if self._max_bytes is None:
                return 0
            return max(0, excess - self._remove_unused(excess)) if excess > 0 else 0

    # With the root's lock.

    def _room_bytes(self) -> int:
        used_bytes = 0
        for _, dir_fd in namespaces_in(self._root, self._access, own=self._directory.name):
            if sweep(dir_fd, slabs := self._directory.listings.slabs(dir_fd)):
                slabs = slabs_in(dir_fd)
            used_bytes += sum(slab.num_bytes for slab in slabs)
        if self._max_bytes is not None:
            return self._max_bytes - used_bytes
        return _free_bytes(self._root) - _disk_bytes(self._root) // _FREE_SHARE

    def _remove_unused(self, num_bytes: int) -> int:
        """Remove unused slabs, the oldest first: slabs of namespaces without a process, and untrusted slabs of our own.
        Returns the freed bytes."""
        unused = list[tuple[str, SlabSeen]]()
        for name, dir_fd in namespaces_in(self._root, self._access, own=self._directory.name):
            if name == self._directory.name:
                seen = self._directory.listings.slabs(dir_fd)
                unused += [(name, slab) for slab in seen if slab.name in self._slabs.quarantined]
            elif is_unused(dir_fd):
                unused += [(name, slab) for slab in slabs_in(dir_fd)]
        unused.sort(key=lambda one: one[1].used_ns)
        return remove_slabs(self._root, self._access, unused, num_bytes)


def check_memory(root: str, max_bytes: int | None, beside_bytes: int = 0) -> None:
    """Raise ``ConfigError`` if ``root`` is on a memory file system that cannot hold slabs of ``max_bytes``, while
    something else needs ``beside_bytes`` more of memory. May raise ``OSError``. Existing slabs have their memory
    already. If ``root`` does not exist, this checks the nearest existing directory above it."""
    existing = existing_directory(root)
    kind = memory_file_system(existing)
    if kind == "hugetlbfs":
        raise ConfigError(f"{root} is on hugetlbfs, whose files cannot be written to; choose a directory on a tmpfs.")
    if kind is None or max_bytes is None:
        return
    used_bytes = 0
    for _, dir_fd in namespaces_in(root, Access("group")) if existing == root else ():
        used_bytes += sum(slab.num_bytes for slab in slabs_in(dir_fd))
    check_pool(max_bytes, used_bytes, existing, beside_bytes)


def existing_directory(path: str) -> str:
    """Return ``path``, or the nearest directory above it that exists."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def _free_bytes(root: str) -> int:
    """Return the bytes of the disk that two more files may use."""
    disk = os.statvfs(root)
    if not disk.f_blocks:  # a tmpfs without a size
        return _UNBOUNDED
    return disk.f_frsize * (disk.f_bavail - 2)  # each in whole blocks


def _disk_bytes(root: str) -> int:
    disk = os.statvfs(root)
    return disk.f_frsize * disk.f_blocks


@dataclass(frozen=True, slots=True)
class Request:
    """A process's request for a slab. ``num_slabs`` is the number that the process has. ``identity`` represents
    namespace and block size."""

    num_slabs: int
    identity: str
    process: str

    @property
    def name(self) -> str:
        return f"want-{self.num_slabs}-{self.identity}-{self.process}"


class PostedRequest:
    """This process's own request. For one thread at a time."""

    def __init__(self, root: str, identity: str, access: Access) -> None:
        self.process = secrets.token_hex(8)
        self._root = root
        self._identity = identity
        self._access = access
        self._fd = -1
        self._name = ""

    def post(self, num_slabs: int) -> None:
        """Post a request, or renew the one that is posted. Raises ``OSError``."""
        if self._fd >= 0:
            if not os.fstat(self._fd).st_nlink:
                self.withdraw()  # removed as a dead process's request before it was locked
            else:
                os.utime(self._fd)
        name = Request(num_slabs, self._identity, self.process).name
        if name == self._name:
            return
        control = open_control(self._root, self._access)
        try:
            if self._fd >= 0:
                os.rename(self._name, name, src_dir_fd=control, dst_dir_fd=control)
            else:
                self._fd = make_file(name, control, self._access, os.O_EXCL)
                try_lock(self._fd)
            self._name = name
        finally:
            os.close(control)

    def withdraw(self) -> None:
        if self._fd < 0:
            return
        try:
            control = open_control(self._root, self._access)
            try:
                os.unlink(self._name, dir_fd=control)
            finally:
                os.close(control)
        except OSError:
            pass  # the root is gone, or another process removed it as a dead one's
        os.close(self._fd)
        self._fd, self._name = -1, ""


def requests_of_others(root: str, access: Access, own_process: str) -> Iterator[Request]:
    """Return the requests of running processes. Removes requests of dead processes. Raises ``OSError``."""
    control = open_control(root, access)
    try:
        for name in os.listdir(control):
            match = _NAME.fullmatch(name)
            if match is None or match[3] == own_process:
                continue
            try:
                fd = os.open(name, os.O_RDWR | SAFE, dir_fd=control)
            except OSError:
                continue  # withdrawn, or not accessible
            try:
                status = os.fstat(fd)
                if not access.admits(status):
                    continue
                if try_lock(fd):
                    os.unlink(name, dir_fd=control)
                elif abs(time.time() - status.st_mtime) < _STALE_S:
                    yield Request(int(match[1]), match[2], match[3])
            except OSError:
                continue
            finally:
                os.close(fd)
    finally:
        os.close(control)
