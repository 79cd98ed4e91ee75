# SPDX-License-Identifier: Apache-2.0
"""Other hosts on a network mount, each a process with its own store on the real files.

The differences of such a host are inserted between the store and its file system: locks that exclude nobody, a clock
that is minutes off, and a cache of names and attributes that is seconds old. As on NFS, a host sees its own changes at
once, and opening a file or a directory asks the server.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.forks import Fork

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats
from kvoffload.tiering.stores.fs import FileSystemStore

__all__ = ["Host"]


class Host(BlockStore):
    """The store of another host on ``root``. ``skew_s``: how far its clock is ahead. ``stamps_files``: so are the times
    of the files that it writes, as where clients and not the server set them. ``cache_s``: how old the names and
    attributes may be that it sees. Any thread may call it; one call is made at a time."""

    def __init__(
        self,
        root: Path,
        block_bytes: int,
        *,
        skew_s: float = 0,
        stamps_files: bool = False,
        cache_s: float = 0,
        **options: Any,
    ) -> None:
        self._fork = Fork(serve, str(root), block_bytes, skew_s, stamps_files, cache_s, options)
        self._lock = threading.Lock()
        self.answer()

    def begin(self, call: str, *arguments: object) -> None:
        """Starts a call. ``answer`` waits for its end."""
        self._fork.pipe.send((call, arguments))

    def answer(self) -> Any:
        outcome = self._fork.pipe.recv()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def ask(self, call: str, *arguments: object) -> Any:
        with self._lock:
            self.begin(call, *arguments)
            return self.answer()

    def stop(self) -> None:
        self._fork.stop()

    def go_on(self) -> None:
        self._fork.go_on()

    def kill(self) -> None:
        self._fork.kill()

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self.ask("contains", list(keys))

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        return self.ask("write", list(keys), [bytes(block) for block in blocks])

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        answers, contents = self.ask("read", list(keys))
        for answer, content, block in zip(answers, contents, blocks, strict=True):
            if answer:
                block[:] = content
        return answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self.ask("discard", list(keys))

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        return iter(self.ask("scan"))

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.ask("touch", list(keys))

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        return self.ask("take_lost")

    def stats(self) -> StoreStats:
        return self.ask("stats")

    def close(self) -> None:
        if self._fork.is_alive:
            self.ask("close")
            self._fork.end()


# --------------------------------------------------------------------------------------------------- the other process


def serve(
    pipe: Connection,
    root: str,
    block_bytes: int,
    skew_s: float,
    stamps_files: bool,
    cache_s: float,
    options: dict[str, Any],
) -> None:
    fcntl.flock = lambda fd, operation: None  # type: ignore[assignment]
    _skew_clock(skew_s, stamps_files)
    if cache_s:
        _AttributeCache(cache_s).install()

    def open_store() -> FileSystemStore:
        return FileSystemStore(root, block_bytes, **options)

    store = open_store()

    def write(keys: list[OffloadKey], blocks: list[bytes]) -> list[bool]:
        return store.write(keys, [memoryview(block) for block in blocks])

    def write_singly(keys: list[OffloadKey], blocks: list[bytes]) -> list[bool]:
        return [store.write([key], [memoryview(block)])[0] for key, block in zip(keys, blocks, strict=True)]

    def read(keys: list[OffloadKey]) -> tuple[list[bool], list[bytes]]:
        buffers = [bytearray(block_bytes) for _ in keys]
        return store.read_into(keys, [memoryview(buffer) for buffer in buffers]), [bytes(each) for each in buffers]

    def reopen(times: int) -> None:
        """Open other stores while one is working, as engines that start and end do."""
        for _ in range(times):
            open_store().close()

    own: dict[str, Callable[..., Any]] = {
        "write": write,
        "write_singly": write_singly,
        "read": read,
        "scan": lambda: [list(batch) for batch in store.scan()],
        "reopen": reopen,
    }
    pipe.send(None)
    while True:
        try:
            call, arguments = pipe.recv()
        except EOFError:
            return
        try:
            outcome = (own.get(call) or getattr(store, call))(*arguments)
        except (StoreError, OSError) as exc:
            outcome = StoreError(str(exc))
        pipe.send(outcome)
        if call == "close":
            return


def _skew_clock(skew_s: float, stamps_files: bool) -> None:
    now_s, now_ns = time.time, time.time_ns
    time.time = lambda: now_s() + skew_s
    time.time_ns = lambda: now_ns() + int(skew_s * 1e9)
    if not stamps_files:
        return
    real_writev, real_open = os.writev, os.open

    def stamp(fd: int) -> None:
        os.utime(fd, ns=(time.time_ns(), time.time_ns()))

    def writev(fd: int, buffers: list[memoryview]) -> int:
        moved = real_writev(fd, buffers)
        stamp(fd)
        return moved

    def open_(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd = real_open(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            stamp(fd)
        return fd

    os.writev, os.open = writev, open_  # type: ignore[assignment]


class _AttributeCache:
    """Answers of ``stat``, ``lstat``, ``listdir`` and ``scandir`` that are up to ``ttl_s`` old, absence included. What
    this process changes itself it sees at once."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._known: dict[tuple[str, str], tuple[float, Any]] = {}
        self._lstat, self._stat, self._listdir = os.lstat, os.stat, os.listdir

    def install(self) -> None:
        os.lstat = self._cached("lstat", self._lstat)  # type: ignore[assignment]
        os.stat = self._cached("stat", self._stat)  # type: ignore[assignment]
        os.listdir = self._cached("listdir", self._listdir)  # type: ignore[assignment]
        os.scandir = lambda path=".": _Listing(self, path)  # type: ignore[assignment,misc,return-value]
        for name in ("unlink", "rename", "mkdir", "rmdir", "open"):
            setattr(os, name, self._changing(getattr(os, name)))

    def _cached(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, **options: Any) -> Any:
            if not isinstance(path, (str, os.PathLike)) or options.get("dir_fd") is not None:
                return real(path, **options)
            follows = options.get("follow_symlinks", True)
            name = (kind if follows else "lstat", os.path.abspath(os.fspath(path)))
            known = self._known.get(name)
            if known is None or time.monotonic() > known[0]:
                try:
                    answer = real(path, **options)
                except OSError as exc:
                    answer = exc
                self._known[name] = known = (time.monotonic() + self._ttl_s, answer)
            if isinstance(known[1], OSError):
                raise OSError(known[1].errno, known[1].strerror, known[1].filename)
            return known[1]

        return call

    def _changing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            outcome = real(path, *arguments, **options)
            # To open a directory asks the server, to open a file tells nothing of its name.
            is_open = real.__name__ in ("open", "open_")
            changes = not is_open or arguments[0] & (os.O_CREAT | os.O_DIRECTORY)
            for changed in (path, *arguments) if changes else ():
                if isinstance(changed, str):
                    self._forget(os.path.abspath(changed))
            return outcome

        return call

    def _forget(self, path: str) -> None:
        for kind in ("lstat", "stat", "listdir"):
            self._known.pop((kind, path), None)
            self._known.pop((kind, os.path.dirname(path)), None)


class _Listing:
    """``os.scandir`` through the cache: the attributes of entries may also be old."""

    def __init__(self, cache: _AttributeCache, path: str | int) -> None:
        self._top = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
        self._names = os.listdir(path)  # opening a directory asks the server whether it has changed
        self._cache = cache

    def __enter__(self) -> Iterator[_Entry]:
        return iter(self)

    def __exit__(self, *exc_info: object) -> None:
        pass

    def __iter__(self) -> Iterator[_Entry]:
        return (_Entry(name, f"{self._top}/{name}") for name in self._names)


class _Entry:
    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks) if follow_symlinks else os.lstat(self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self.stat(follow_symlinks=follow_symlinks).st_mode)
