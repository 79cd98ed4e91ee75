# SPDX-License-Identifier: Apache-2.0
"""The root of a store on disk: its directories, the modes of new files, and the accepted owners of existing files.
Links are never followed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import quote, unquote

from kvoffload.cpu.memory_limits import mount_type, room_of
from kvoffload.errors import ConfigError, StoreError, reason_of, suggest
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.in_time import in_time
from kvoffload.tiering.stores.seal import encrypts, secret_id
from kvoffload.tiering.stores.shared import bytes_of, outcomes
from kvoffload.units import printable

_log = logging.getLogger(__name__)

CONTROL_DIR = ".kvoffload"

_FILE_OF_TYPE = {"disk": "slabs", "fs": "files"}
"""A file in the control directory that only a tier of this type creates."""

_LOCAL_TYPES = frozenset(
    (
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs", "nilfs2"),
        *("tmpfs", "ramfs", "devtmpfs", "overlay", "aufs", "ecryptfs", "fuse.fuse-overlayfs"),
        *("vfat", "msdos", "exfat", "ntfs", "ntfs3", "fuseblk", "hfs", "hfsplus"),
        "hugetlbfs",  # which is rejected by itself
    )
)
"""Types of file systems that only one host mounts at a time."""

_SYSTEM = "/"
_MOUNTS = ("/mnt", "/media", "/run/media")
"""Directories in which disks are usually mounted."""
_FSTAB = "/etc/fstab"

_ANSWER_S = 5.0
"""Time limit for a file system to resolve a path."""
_LOOK_S = 10.0
"""Seconds until a disk's free space is measured again."""
_MOST_DIRECTORIES = 32
_LONGEST_DIRECTORY = 200
_DEFAULT_DIRECTORY = "="
_SEALED = "#"
"""Separator before the key's id; it occurs nowhere else in a directory's name."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags to open a file under a root: never follow a link, and never wait for the other end of a pipe."""


def directory_of(namespace: str, secret: bytes | None = None) -> str:
    """Return the safe directory name of a namespace. A very long name is cut and ends in a digest. Each ``secret`` that
    seals blocks has its own directory, so that stores that could not read each other's blocks do not delete them as
    bad."""
    name = quote(namespace, safe=" ,+@=:")
    if name.startswith((".", "=")):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > _LONGEST_DIRECTORY:
        digest = hashlib.blake2b(namespace.encode(), digest_size=16).hexdigest()
        name = f"{name[: _LONGEST_DIRECTORY - 40].rpartition('%')[0] or name[: _LONGEST_DIRECTORY - 40]}~~{digest}"
    return (name or _DEFAULT_DIRECTORY) + (f"{_SEALED}{secret_id(secret)}" if secret else "")


def plain_beside(root: str, directory: str) -> list[str]:
    """Return the directories of the same namespace whose blocks are not known to be encrypted. Empty unless the blocks
    of ``directory`` are encrypted. Raises ``OSError``."""
    if not encrypts(seal_of(directory)):
        return []
    namespace = directory.partition(_SEALED)[0]
    return [
        name for name in os.listdir(root) if name.partition(_SEALED)[0] == namespace and not encrypts(seal_of(name))
    ]


def namespace_of(directory: str) -> str:
    """Return the namespace of a directory, for people. A long name stays cut, and a sealed directory also shows its
    key's id."""
    return "" if directory == _DEFAULT_DIRECTORY else unquote(directory)


def seal_of(directory: str) -> str:
    """Return the ``secret_id`` of the secret that seals a directory's blocks; empty without one."""
    return directory.partition(_SEALED)[2]


@dataclass(slots=True)
class NamespaceUsage:
    """The use of disk space by one namespace. Times are nanoseconds since 1970, or 0 without a block."""

    directory: str
    num_blocks: int = 0
    size_bytes: int = 0
    """Bytes on the disk."""
    oldest_use_ns: int = 0
    last_use_ns: int = 0

    @property
    def name(self) -> str:
        return display_name(self.directory)

    def add_use(self, used_ns: int) -> None:
        self.oldest_use_ns = min(self.oldest_use_ns or used_ns, used_ns)
        self.last_use_ns = max(self.last_use_ns, used_ns)


def display_name(directory: str) -> str:
    """Return the namespace of a directory for people, ``(default)`` for the unnamed one."""
    return printable(namespace_of(directory)) or "(default)"


def find_directory(namespace: str, known: Sequence[str], root: str) -> str:
    """Return the one of the ``known`` directories for a namespace, given by its name or as ``ls`` shows it. Raises
    ``ConfigError`` if ``root`` does not contain it."""
    if (directory := directory_of(namespace)) in known:
        return directory
    names = [display_name(directory) for directory in known]
    if namespace in names:
        return known[names.index(namespace)]
    raise ConfigError(f"{root} has no namespace {namespace!r}.{suggest(namespace, names)}")


@dataclass(frozen=True, slots=True)
class Access:
    """Modes of new files and directories, regardless of the umask, and accepted owners of existing ones.

    In ``"private"`` mode everything belongs to ``owner``, the user id that the file system gives to our files. On
    mounts that map ids, it differs from our own id. In ``"group"`` mode new files inherit the group of their directory,
    and any owner is accepted.
    """

    mode: Literal["private", "group"] = "private"
    owner: int = -1
    """User id of the owner; -1 means our own effective user id."""

    @property
    def is_group(self) -> bool:
        return self.mode == "group"

    @property
    def directory_mode(self) -> int:
        return 0o2770 if self.is_group else 0o700

    @property
    def file_mode(self) -> int:
        return 0o660 if self.is_group else 0o600

    def admits(self, status: os.stat_result) -> bool:
        """Return whether a file with this owner may be used."""
        return self.is_group or status.st_uid == (os.geteuid() if self.owner < 0 else self.owner)


PRIVATE = Access()
ANYBODYS = Access("group")


def check_root(root: str, mode: Literal["private", "group"], *, needs_locks: bool = True) -> Access:
    """Create ``root`` and its control directory if they are absent. Raises ``ConfigError`` if either cannot be used, or
    if the store ``needs_locks`` and the file system does not support them."""
    access = Access(mode)
    try:
        if not _is_directory(root):
            if lacks_mount(root):
                _log.warning(f"kvoffload creates {root} on the system's disk. {MOUNT_IT}")
            os.makedirs(os.path.dirname(root), exist_ok=True)
            make_directory(root, access)
    except OSError as exc:
        reason = in_the_way_of(root) or exc.strerror
        raise ConfigError(
            f"The store's directory {root} cannot be created: {reason}; create it for this user, or choose another one."
        ) from exc
    check_locks(root, needs_locks)
    check_owner(root, access)
    if needs_locks and (found := mount_type(root)) and found not in _LOCAL_TYPES:
        raise ConfigError(
            f"{root} is on a file system of type {found}, whose locks may not reach other hosts, so that two hosts "
            "would write over each other's blocks; use a tier of type 'fs' there, or choose a directory on a local "
            "disk."
        )
    control = os.path.join(root, CONTROL_DIR)
    try:
        make_directory(control, access)
    except OSError as exc:
        if not os.path.lexists(control):
            if exc.errno == errno.EROFS:
                return access
            raise ConfigError(f"{control} cannot be created: {exc.strerror}; check the permissions of {root}.") from exc
    return check_control(root, mode)


def nearest(path: str) -> Path:
    """Return ``path``, or the nearest place above it that exists. A link exists even if it leads nowhere."""
    absolute = Path(path).absolute()
    # ``Path.exists`` raises if this user may not look.
    return next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))


def in_the_way_of(path: str) -> str | None:
    """Return the obstacle at the directory ``path``, or at one above it: a file or a dangling link. ``None`` without
    one."""
    place = nearest(path)
    if os.path.isdir(place):
        return None
    if os.path.islink(place) and not os.path.exists(place):
        return f"{place} is a link to {os.readlink(place)}, which does not exist"
    return f"{place} is a file"


MOUNT_IT = "If it belongs on another disk, mount this disk before you start the server."


def lacks_mount(path: str) -> bool:
    """Return whether ``path`` does not exist, would be created on the system's disk, and looks like a directory on
    another disk: it is in a directory for mounts or a mount point of ``/etc/fstab``, or a new directory in ``/``."""
    absolute, place = Path(path).absolute(), nearest(path)
    try:
        if place == absolute or os.stat(place).st_dev != os.stat(_SYSTEM).st_dev:
            return False
    except OSError:
        return False
    mounts = list(_MOUNTS)
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path(_FSTAB).read_text(errors="replace").splitlines()]
        mounts += [row[1] for row in rows if len(row) > 1 and row[0][0] != "#" and row[1] not in ("/", "none", "swap")]
    return place == Path(_SYSTEM) or any(Path(mount) in (absolute, *absolute.parents) for mount in mounts)


def _is_directory(path: str) -> bool:
    """Return whether ``path`` is a directory. Raises ``OSError`` if a broken disk does not answer. ``os.path.isdir``
    would return ``False``, and making the existing mount point would then fail."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_control(root: str, mode: Literal["private", "group"]) -> Access:
    """Return the access to a root with a control directory. Raises ``ConfigError`` if that is a link or belongs to
    another user."""
    control = os.path.join(root, CONTROL_DIR)
    try:
        status = os.lstat(control)
    except OSError as exc:
        raise ConfigError(f"{control} cannot be used: {exc.strerror}; choose another directory.") from exc
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{control} is a link or a file, not a directory; remove it, or choose another directory.")
    access = Access(mode)
    if not access.admits(status) and status.st_uid != _owner_of_ours(root):
        raise ConfigError(
            f"{control} belongs to user {status.st_uid}; choose another directory, or share this one by setting "
            "mode='group' for all its users."
        )
    return Access(mode, status.st_uid)


def check_owner(root: str, access: Access) -> None:
    """Raise ``ConfigError`` if the root belongs to another user, who could replace everything in it. Roots of the
    administrator are accepted, because mount points and volumes often belong to root."""
    status = os.stat(root)
    if status.st_uid and not access.admits(status) and status.st_uid != _owner_of_ours(root):
        raise ConfigError(
            f"{root} belongs to user {status.st_uid}: name a directory in it, which kvoffload then creates, "
            "or share this one by setting mode='group' for all its users."
        )


def access_to(root: str) -> Access:
    """Return the access to an existing root, in the mode of its control directory. Raises ``ConfigError``."""
    shared = stat.S_ISGID | stat.S_IRWXG
    is_group = os.lstat(os.path.join(root, CONTROL_DIR)).st_mode & shared == shared
    check_owner(root, Access("group" if is_group else "private"))
    return check_control(root, "group" if is_group else "private")


class RootedStore(BlockStore):
    """The common part of the stores in a directory: their options, their outcomes, and a root, which is created only
    here.

    ``least_bytes`` is the part of ``max_bytes`` that one block uses. Raises ``ConfigError``.
    """

    _tier_type: ClassVar[str]
    """The only tier type whose files the root may contain."""
    _needs_locks: ClassVar[bool]

    def __init__(
        self,
        root: str | os.PathLike[str],
        block_bytes: int,
        max_bytes: int | None,
        least_bytes: int,
        mode: Literal["private", "group"],
    ) -> None:
        if mode not in ("private", "group"):
            raise ConfigError(f"mode must be 'private' or 'group', not {mode!r}.")
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, not {block_bytes}.")
        if max_bytes is not None and max_bytes < least_bytes:
            raise ConfigError(f"max_bytes={max_bytes} has no room for one block, which takes {least_bytes} bytes.")
        self._root = os.path.abspath(os.fspath(root))
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._access = check_root(self._root, mode, needs_locks=self._needs_locks)
        _roots.add(os.path.realpath(self._root))
        check_type(self._root, self._tier_type)
        self._free_bytes: int | None = None
        self._next_look_s = 0.0
        self._look_at_disk()

    @abstractmethod
    def drop_plain(self) -> None:
        """Remove the blocks of this namespace that are not encrypted, now or soon, and any that are found later."""

    def _look_at_disk(self) -> None:
        """Measure the disk's free space from time to time. For threads that do I/O: ``stats`` does none."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            with contextlib.suppress(OSError):
                room = room_of(self._root)
                self._free_bytes = None if room is None else room.free_bytes

    def _bytes(self, block: memoryview) -> memoryview:
        return bytes_of(block, self._block_bytes)

    def _outcomes(self, answers: list[bool], errors: Sequence[OSError], was_here: Sequence[bool] = ()) -> list[bool]:
        """Return the ``answers`` of a batch in which these ``errors`` happened. A missing root also counts as an error.
        Raises ``StoreError`` if all blocks failed, ignoring those that ``was_here`` marks as already present."""
        if not errors and any(answers):
            return answers
        failures = [self._failed(error) for error in errors[:1]]
        if answers and not errors and not os.path.isdir(self._root):
            failures.append(StoreError(gone(self._root)))
        return outcomes(answers, failures, [at for at, here in enumerate(was_here) if here] if failures else ())

    def _failed(self, error: OSError) -> StoreError:
        path = error.filename if isinstance(error.filename, str) else ""
        place = f"{path}: " if path.startswith(f"{self._root}/") else ""
        failure = StoreError(f"The store at {self._root} fails: {place}{reason_of(error).rstrip('.')}.")
        failure.__cause__ = error
        return failure


def is_mount(root: str) -> bool:
    """Return whether ``root`` is a mount point, or a link to one, which ``os.path.ismount`` does not detect."""
    return os.path.ismount(os.path.realpath(root))


def check_there(root: str, was_mount: bool) -> None:
    """Raise ``FileNotFoundError`` if ``root`` or its mount is gone. The root is never created again, and nothing is
    written to a mount point without its mount, because that may be the system's own disk."""
    if not os.path.isdir(root) or (was_mount and not is_mount(root)):
        raise FileNotFoundError(gone(root))


def gone(root: str) -> str:
    return f"The store's directory {root} is gone, and the engine does not make it again: mount it, or make it."


def check_type(root: str, own: str) -> None:
    """Raise ``ConfigError`` if a tier of another type than ``own`` uses ``root``, because neither counts the other's
    files."""
    for other, name in _FILE_OF_TYPE.items():
        if other != own and os.path.lexists(os.path.join(root, CONTROL_DIR, name)):
            raise ConfigError(f"{root} belongs to a tier of type {other!r}; choose another directory.")


def check_locks(root: str, needs_locks: bool = True) -> None:
    """Raise ``ConfigError`` if ``root`` cannot be opened, or if locks are needed and its file system does not support
    them."""
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(
            f"{root} cannot be opened ({exc.strerror}); run as its owner, or choose another directory."
        ) from exc
    try:
        if needs_locks:
            try_lock(fd)
    except OSError as exc:
        raise ConfigError(
            f"The file system of {root} does not support locks ({exc.strerror}); choose a directory on a local disk."
        ) from exc
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Lock ``fd``. Returns ``False`` if another process has the lock. Raises ``OSError`` if the file system does not
    support locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_under(roots: Iterable[str], process: str) -> Iterator[tuple[int, str]]:
    """Yield the descriptors of a process that are open under ``roots``, with their paths."""
    within = tuple(f"{root}/" for root in roots)
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/{process}/fd/{fd}")
                if f"{path}/".startswith(within):
                    yield int(fd), path


def _is_locked(process: str, fd: int) -> bool:
    """Return whether a process holds a lock on its descriptor ``fd``. Raises ``OSError``."""
    return "\nlock:" in _text(f"/proc/{process}/fdinfo/{fd}")


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def _leave_to_parent() -> None:
    """Leave all locks to the parent after a fork. A child inherits its parent's open files, and would keep their locks.
    So in the child, each descriptor under a root that is locked or belongs to a store becomes an empty file that cannot
    be written. Other files, such as a log, stay open."""
    if not _roots:
        return
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for fd, path in list(_open_under(_roots, "self")):
        if _HELD.search(path) or stat.S_ISDIR(os.fstat(fd).st_mode) or _is_locked("self", fd):
            os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


_HELD = re.compile(rf"/{re.escape(CONTROL_DIR)}/|/[0-9a-z-]+\.(slab|table)( \(deleted\))?$")
"""Files that a store keeps open besides directories. The system appends a note to the name of a deleted file."""
_roots: set[str] = set()
"""Roots of this process's stores."""
os.register_at_fork(after_in_child=_leave_to_parent)


def make_directory(path: str, access: Access) -> None:
    """Create one directory unless it exists; an existing one keeps its mode. Raises ``OSError``."""
    try:
        os.mkdir(path, access.directory_mode & 0o777)
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):  # a network mount's stale cache: another host created it
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise
        return
    if access.is_group:  # mkdir applies the umask, and cannot set the set-group-id bit
        fd = os.open(path, _OPEN_DIRECTORY)
        try:
            os.fchmod(fd, access.directory_mode)
        finally:
            os.close(fd)


def make_file(name: str, dir_fd: int, access: Access, flags: int = 0) -> int:
    """Open a file for reading and writing, create it if it is absent, and return its descriptor. Raises ``OSError``."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | SAFE | flags, access.file_mode, dir_fd=dir_fd)
    if access.is_group:
        with contextlib.suppress(PermissionError):  # another process's file, which has the mode already
            os.fchmod(fd, access.file_mode)  # the umask removed bits
    return fd


class Directories:
    """Directories below a root, each opened one step at a time, so that no link is followed, even one that is created
    meanwhile. A context, which closes them at its end. For one thread.

    A path through the descriptor of an open directory still names that directory if its own path changes.
    """

    def __init__(self, root: str, access: Access) -> None:
        self._root = root
        self._access = access
        self._open: dict[str, int] = {}

    def __enter__(self) -> Directories:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def is_in_place(self) -> bool:
        """Return whether the open root is still the directory at its path."""
        try:
            return os.path.samestat(os.stat(self._root), os.fstat(self.fd("")))
        except OSError:
            return False

    def path(self, path: str) -> str:
        """Return a path through an open directory for ``path``, which is relative to the root. Raises ``OSError`` as
        ``fd`` does."""
        directory, _, name = path.rpartition("/")
        return f"/proc/self/fd/{self.fd(directory)}/{name}"

    def fd(self, directory: str) -> int:
        """Return the descriptor of a directory. Later calls of ``path`` or ``fd`` may close it when they open others.
        Raises ``OSError``: ``FileNotFoundError`` if it does not exist, ``PermissionError`` (EPERM) if it is a link or
        belongs to another user."""
        if (fd := self._open.get(directory)) is not None:
            return fd
        if not directory:
            fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            above, _, name = directory.rpartition("/")
            try:
                fd = os.open(f"/proc/self/fd/{self.fd(above)}/{name}", _OPEN_DIRECTORY)
            except OSError as exc:
                if exc.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise self._refused(directory) from exc
                raise
            if not self._access.admits(os.fstat(fd)):
                os.close(fd)
                raise self._refused(directory)
        if len(self._open) >= _MOST_DIRECTORIES:  # the root and the directories that were used last stay open
            oldest = next(known for known in self._open if known and not directory.startswith(f"{known}/"))
            os.close(self._open.pop(oldest))
        self._open[directory] = fd
        return fd

    def _refused(self, directory: str) -> OSError:
        return PermissionError(errno.EPERM, "is not a directory of ours", f"{self._root}/{directory}")


def open_control(root: str, access: Access) -> int:
    """Open the control directory, never through a link, and return its descriptor. Raises ``OSError`` if it is absent
    or not ours."""
    path = os.path.join(root, CONTROL_DIR)
    fd = os.open(path, _OPEN_DIRECTORY)
    if not access.admits(os.fstat(fd)):
        os.close(fd)
        raise PermissionError(errno.EPERM, "belongs to another user", path)
    return fd


def open_directory(name: str, dir_fd: int) -> int:
    """Open a directory in another, never through a link, and return its descriptor. Raises ``OSError``."""
    return os.open(name, _OPEN_DIRECTORY, dir_fd=dir_fd)


def _owner_of_ours(root: str) -> int:
    """Return the owner of a directory that we create under ``root``; -1 if we cannot create one."""
    path = os.path.join(root, f"{CONTROL_DIR}-{secrets.token_hex(8)}")
    try:
        os.mkdir(path, 0o700)
        try:
            return os.lstat(path).st_uid
        finally:
            os.rmdir(path)
    except OSError:
        return -1


def check_apart(one: str, other: str, what: str) -> None:
    """Raise ``ConfigError`` if one directory is the other or contains it, also through links and bind mounts. If a path
    hangs, both are compared as text."""
    lineages = in_time([partial(_lineage, path) for path in (one, other)], _ANSWER_S)
    found = [each for each in lineages if not isinstance(each, BaseException)]
    first, second = found if len(found) == len(lineages) else map(_as_written, (one, other))
    for (path, own), (outer, above) in ((first, second), (second, first)):
        if own[-1] == above[-1]:
            same = path if path == outer else f"{path}, which is {outer} by a bind mount"
            raise ConfigError(f"{what} the directory {same}; give each one of its own, or drop one.")
        if above[-1] in own:
            raise ConfigError(f"{what} directories inside each other: {path} is in {outer}; move one of them.")


def _lineage(path: str) -> tuple[str, list[object]]:
    """Return the real path, and the identities of it and each directory above it, from the root on. An identity is
    device and inode, or the name for a directory that does not exist."""
    real = os.path.realpath(path)
    found: list[object] = []
    at, known = "/", True
    for name in ("", *real.strip("/").split("/")):
        at = os.path.join(at, name)
        try:
            status = os.stat(at) if known else None
        except OSError:
            status = None
        known = status is not None
        found.append((status.st_dev, status.st_ino) if status is not None else (found[-1] if found else None, name))
    return real, found


def _as_written(path: str) -> tuple[str, list[object]]:
    absolute = os.path.abspath(path)
    return absolute, [tuple(absolute.split("/")[:depth]) for depth in range(1, absolute.count("/") + 2)]
