# SPDX-License-Identifier: Apache-2.0
"""The file of a recorded trace, which ``kvoffload simulate`` can replay.

It contains ids of requests, hashes of keys, lengths, times and hints of clients about the next use, but no tokens and
no text. Each line is one JSON object in the format that ``kvoffload.sim.trace_files`` calls Mooncake, with
``block_tokens``. For ``kvoffload explain``, each line also contains the request's ``story`` (``observer.py``), and the
first line contains the ``machine``. Some lines contain measured ``steps`` (``step_times.py``), which tell the simulator
what a step costs.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import secrets
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvoffload.base import NextUse
from kvoffload.errors import ConfigError

logger = logging.getLogger(__name__)

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
"""Lines are appended, so that a file that another program (such as logrotate) empties does not start with a hole. No
call waits for the reader of a pipe."""


@dataclass(slots=True)
class _Pending:
    """A request that has not finished, or whose line waits for the lines of earlier requests."""

    line: dict[str, object]
    is_finished: bool = False


class TraceRecorder:
    """Writes one line per request, in order of arrival.

    Used on one thread::

        recorder = TraceRecorder(path, block_tokens=16)
        recorder.arrived(req_id, now_s, keys, input_tokens)     # once per request, with its whole prompt's keys
        recorder.finished(req_id, output_tokens, explanation)   # once; unknown ids are ignored
        recorder.close()

    ``keys`` are the keys of the prompt's whole blocks, prefix-chained, from head to tail. The first line contains
    ``machine``. A line is written when its request and all earlier ones have finished, or by ``close``. So memory
    contains the requests that are being served, and all requests that came after the oldest of them. Times count from
    the first request's arrival.

    Each process writes to a file of its own. If another process records to ``path``, this one adds its process id to
    the name, and also a random number if that name is in use, because containers that share a volume may have equal
    process ids. A finished trace with the same name is renamed by appending the next number, such as ``.1``. A file
    that cannot be opened raises ``ConfigError``. Later errors end the recording with a warning and never reach the
    caller; an incomplete line is removed.
    """

    def __init__(self, path: str | Path, block_tokens: int, machine: dict[str, object] | None = None) -> None:
        self.block_tokens = block_tokens
        self.num_written = 0
        self._lines: deque[_Pending] = deque()
        """Lines in the order of arrival. The line of a finished request waits for earlier lines."""
        self._serving: dict[str, _Pending] = {}
        """Lines of requests that have not finished, by id, because an engine may use an id again."""
        self._first_s: float | None = None
        self._last_ms = 0.0
        self._machine = machine
        wanted = Path(os.path.expanduser(path))
        try:
            self._fd: int | None
            self._fd, self.path = _open_own(wanted)
        except OSError as exc:
            raise ConfigError(
                f"record_trace: {path} cannot be written: {exc.strerror}; choose another file, or leave it out."
            ) from exc
        if self.path != wanted:
            logger.warning("Another process may be recording to %s, so this one records to %s.", path, self.path)

    def __repr__(self) -> str:
        return f"TraceRecorder({str(self.path)!r}, written={self.num_written}, pending={len(self._lines)})"

    def arrived(
        self,
        req_id: str,
        now_s: float,
        keys: Sequence[bytes],
        input_tokens: int,
        next_use: NextUse = NextUse.UNKNOWN,
    ) -> None:
        """Record the arrival of a request. Ignores an id that is already being served."""
        if self._fd is None or req_id in self._serving:
            return
        if self._first_s is None:
            self._first_s = now_s
        self._last_ms = max(self._last_ms, round((now_s - self._first_s) * 1000, 3))
        line: dict[str, object] = {
            "timestamp": self._last_ms,
            "request_id": req_id,
            "input_length": input_tokens,
            "output_length": 0,
            "block_tokens": self.block_tokens,
            "hash_ids": [xxhash.xxh3_64_intdigest(key) >> 1 for key in keys],
        }
        if next_use is not NextUse.UNKNOWN:
            line["next_use"] = next_use.name.lower()
        if self._machine is not None:
            line["machine"], self._machine = self._machine, None
        self._serving[req_id] = pending = _Pending(line)
        self._lines.append(pending)

    def finished(
        self,
        req_id: str,
        output_tokens: int,
        explanation: dict[str, object] | None = None,
        steps: Sequence[tuple[float, int, int]] = (),
    ) -> None:
        """Record the end of a request, with the steps that were measured lately (``StepTimes``)."""
        pending = self._serving.pop(req_id, None)
        if pending is None:
            return
        if explanation is not None:
            pending.line["story"] = explanation
        if steps:
            pending.line["steps"] = steps
        pending.line["output_length"] = output_tokens
        pending.is_finished = True
        while self._lines and self._lines[0].is_finished:
            self._write(self._lines.popleft().line)

    def close(self) -> None:
        """Write the pending lines and close the file. Idempotent."""
        while self._lines:
            self._write(self._lines.popleft().line)
        self._serving.clear()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.close(fd)
            except OSError as exc:
                logger.warning("The trace in %s is incomplete: %s.", self.path, exc.strerror)

    def _write(self, line: dict[str, object]) -> None:
        if self._fd is None:
            return
        # Each line is written in one call without a buffer, so that a killed process leaves only whole lines.
        rest = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        length = len(rest)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as exc:
            logger.warning("Recording to %s ends after %d requests: %s.", self.path, self.num_written, exc.strerror)
            self._lines.clear()
            self._serving.clear()
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                os.ftruncate(fd, os.fstat(fd).st_size - (length - len(rest)))
            with contextlib.suppress(OSError):
                os.close(fd)
            return
        self.num_written += 1


def _open_own(path: Path) -> tuple[int, Path]:
    """Open an empty file that no other process records to, and return its descriptor and its path: ``path`` itself, or
    a name with this process's id."""
    own = path.with_name(f"{path.name}.pid{os.getpid()}")
    for name in (path, own):
        with contextlib.suppress(BlockingIOError):
            while (fd := _claimed(name)) is None:
                pass
            return fd, name
    unique = own.with_name(f"{own.name}-{secrets.token_hex(4)}")
    return os.open(unique, _FLAGS | os.O_EXCL, 0o600), unique


def _claimed(path: Path) -> int | None:
    """Return a descriptor of an empty file, locked until it is closed, or of a pipe or device. Returns ``None`` if an
    older trace was in the way and has been renamed.

    Raises ``BlockingIOError`` if another process has locked the file, or if the file system has no locks.
    """
    fd = os.open(path, _FLAGS, 0o600)
    is_kept = False
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise BlockingIOError(exc.errno, exc.strerror) from exc
            if not _is_at(path, fd):
                return None  # another process has renamed it meanwhile
            if os.fstat(fd).st_size:
                names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
                path.rename(next(name for name in names if not name.exists()))
                return None
            os.fchmod(fd, 0o600)  # even if it existed, because hashes and lengths reveal prompts
        is_kept = True
        return fd
    finally:
        if not is_kept:
            os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False
