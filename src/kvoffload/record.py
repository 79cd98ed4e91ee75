# SPDX-License-Identifier: Apache-2.0
"""Records what a deployment serves as a trace that ``kvoffload simulate`` can replay.

Hashes of keys, lengths and times only: no tokens, no text. One JSON object a line, the form that
``kvoffload.sim.trace_files`` calls Mooncake, with ``block_tokens``. This module lies below the connector, which feeds
it, and below the simulator, which reads what it wrote; it knows neither.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import xxhash

from kvoffload.errors import ConfigError

__all__ = ["TraceRecorder"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A request whose output is not finished, or that waits for an earlier one's."""

    line: dict[str, object]
    is_finished: bool = False


class TraceRecorder:
    """Writes one line per request, in order of arrival.

    Used on one thread::

        recorder = TraceRecorder(path, block_tokens=16)
        recorder.arrived(req_id, now_s, keys, input_tokens)     # once per request, with its whole prompt's keys
        recorder.finished(req_id, output_tokens)                # once; unknown ids are ignored
        recorder.close()

    ``keys`` are prefix-chained, head to tail; the whole blocks of the prompt. A line is written once the request and
    all before it have finished (so memory holds what is being served now), or by ``close``. Times count from the
    first request's. A file that cannot be opened raises ``ConfigError``; once open, trouble with it ends the
    recording with a warning and never disturbs the caller.
    """

    def __init__(self, path: str | Path, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens must be positive, not {block_tokens}.")
        self.path = Path(path)
        self.block_tokens = block_tokens
        self.num_written = 0
        self._pending: dict[str, _Pending] = {}
        self._first_s: float | None = None
        self._last_ms = 0.0
        try:
            # By the line, so that a killed process leaves whole lines behind.
            self._file: TextIO | None = self.path.open("w", buffering=1, encoding="ascii")
        except OSError as exc:
            raise ConfigError(f"A trace cannot be recorded to {self.path}: {exc}.") from exc

    def __repr__(self) -> str:
        return f"TraceRecorder({str(self.path)!r}, written={self.num_written}, pending={len(self._pending)})"

    def arrived(
        self, req_id: str, now_s: float, keys: Sequence[bytes], input_tokens: int, session: str | None = None
    ) -> None:
        """A request came in. A second arrival of the same id while it is being served is ignored."""
        if self._file is None or req_id in self._pending:
            return
        if self._first_s is None:
            self._first_s = now_s
        self._last_ms = max(self._last_ms, round((now_s - self._first_s) * 1000, 3))
        line: dict[str, object] = {
            "timestamp": self._last_ms,
            "input_length": input_tokens,
            "output_length": 0,
            "block_tokens": self.block_tokens,
            "hash_ids": [xxhash.xxh3_64_intdigest(key) >> 1 for key in keys],
        }
        if session is not None:
            line["session"] = session
        self._pending[req_id] = _Pending(line)

    def finished(self, req_id: str, output_tokens: int) -> None:
        pending = self._pending.get(req_id)
        if pending is None:
            return
        pending.line["output_length"] = output_tokens
        pending.is_finished = True
        while self._pending and (first := next(iter(self._pending.items())))[1].is_finished:
            del self._pending[first[0]]
            self._write(first[1].line)

    def close(self) -> None:
        """Writes what is pending and closes the file. Idempotent."""
        for pending in self._pending.values():
            self._write(pending.line)
        self._pending.clear()
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as exc:
                _logger.warning("The trace in %s is incomplete: %s.", self.path, exc)

    def _write(self, line: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self.num_written += 1
        except OSError as exc:
            _logger.warning("Recording to %s ends after %d requests: %s.", self.path, self.num_written, exc)
            self._pending.clear()
            file, self._file = self._file, None
            try:
                file.close()
            except OSError:
                pass
