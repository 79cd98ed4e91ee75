# SPDX-License-Identifier: Apache-2.0
"""The file of a recorded trace, which ``kvoffload simulate`` can replay.

It has ids of requests, hashes of keys, lengths, times and what clients say of their next use; no tokens, no text. It
is one JSON object a line, in the format that ``kvoffload.sim.trace_files`` calls Mooncake, with ``block_tokens``. Each
line also has the request's ``story`` (``observer.py``), and the first one the ``machine``, for ``kvoffload explain``.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import xxhash

from kvoffload.base import NextUse
from kvoffload.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A request that has not finished, or whose line waits for those of earlier requests."""

    line: dict[str, object]
    is_finished: bool = False


class TraceRecorder:
    """Writes one line per request, in order of arrival.

    Used on one thread::

        recorder = TraceRecorder(path, block_tokens=16)
        recorder.arrived(req_id, now_s, keys, input_tokens)     # once per request, with its whole prompt's keys
        recorder.finished(req_id, output_tokens, explanation)   # once; unknown ids are ignored
        recorder.close()

    ``keys`` are those of the prompt's whole blocks, prefix-chained, head to tail. The first line has ``machine``. A
    line is written when the request and all before it have finished, or by ``close``; so memory holds the
    requests that are being served, and those that came after the oldest of them. Times count from the first request's.
    A trace that exists by this name, of the process before, gets the next number behind its name, such as ``.1``.
    A file that cannot be opened raises ``ConfigError``. Later errors end the recording with a warning and never reach
    the caller.
    """

    def __init__(self, path: str | Path, block_tokens: int, machine: dict[str, object] | None = None) -> None:
        self.path = Path(path)
        self.block_tokens = block_tokens
        self.num_written = 0
        self._lines: deque[_Pending] = deque()
        """In the order of arrival. Lines of finished requests wait for those before them."""
        self._serving: dict[str, _Pending] = {}
        """Lines of requests that have not finished, by id: an engine may use an id again."""
        self._first_s: float | None = None
        self._last_ms = 0.0
        self._machine = machine
        try:
            _keep_older(self.path)
            # Buffered by the line, so that a killed process leaves whole lines.
            self._file: TextIO | None = open(  # noqa: SIM115 - closed by ``close``
                self.path, "w", buffering=1, encoding="ascii", opener=_open_private
            )
        except OSError as exc:
            raise ConfigError(f"A trace cannot be recorded to {self.path}: {exc}.") from exc

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
        """A request arrived. A second arrival of an id that is being served is ignored."""
        if self._file is None or req_id in self._serving:
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

    def finished(self, req_id: str, output_tokens: int, explanation: dict[str, object] | None = None) -> None:
        pending = self._serving.pop(req_id, None)
        if pending is None:
            return
        if explanation is not None:
            pending.line["story"] = explanation
        pending.line["output_length"] = output_tokens
        pending.is_finished = True
        while self._lines and self._lines[0].is_finished:
            self._write(self._lines.popleft().line)

    def close(self) -> None:
        """Writes what is pending and closes the file. Idempotent."""
        while self._lines:
            self._write(self._lines.popleft().line)
        self._serving.clear()
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as exc:
                logger.warning("The trace in %s is incomplete: %s.", self.path, exc)

    def _write(self, line: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self.num_written += 1
        except OSError as exc:
            logger.warning("Recording to %s ends after %d requests: %s.", self.path, self.num_written, exc)
            self._lines.clear()
            self._serving.clear()
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:
                pass


def _keep_older(path: Path) -> None:
    """Renames a file at ``path`` that has something in it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    if stat.S_ISREG(found.st_mode) and found.st_size:
        names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


def _open_private(path: str, flags: int) -> int:
    """A descriptor of a file that its owner alone may read, also if it exists: hashes and lengths tell what prompts
    were. A pipe or a device stays as it is."""
    descriptor = os.open(path, flags, 0o600)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
