# SPDX-License-Identifier: Apache-2.0
"""Records the requests a deployment serves as a trace that ``kvoffload simulate`` can replay.

The trace has ids of requests, hashes of keys, lengths, times and what clients say of their next use; no tokens, no
text. It is one JSON object a line, in the format that ``kvoffload.sim.trace_files`` calls Mooncake, with
``block_tokens``. Each line also has the request's ``story`` (``explanations.py``), and the first one the ``machine``,
for ``kvoffload explain``.
Scheduler thread only.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import xxhash

from kvoffload.base import NextUse, OffloadingManager
from kvoffload.config import EngineLayout, OffloadingConfig
from kvoffload.connector.engine import EngineRequest
from kvoffload.connector.epochs import Epoch
from kvoffload.connector.explanations import Explanation, Explanations
from kvoffload.connector.groups import GroupGeometry, finest_of
from kvoffload.connector.jobs import JobRecord
from kvoffload.connector.requests import RequestOffloadState
from kvoffload.errors import ConfigError
from kvoffload.units import parse_bytes

__all__ = ["RequestRecording", "TraceRecorder", "Watch"]

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
        if block_tokens < 1:
            raise ConfigError(f"block_tokens must be positive, not {block_tokens}.")
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
        session: str | None = None,
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
        if session is not None:
            line["session"] = session
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


Watch = Callable[[EngineRequest], Callable[[Explanation], None] | None]
"""Asked of each request that arrives: what to call with its explanation when it has ended. ``None``: it is not to
be explained. Scheduler thread."""


class RequestRecording:
    """Feeds a ``TraceRecorder`` and a ``Watch`` with the scheduler side's requests and their explanations.

    With neither it does nothing. ``path`` may contain ``{pid}``, for engines that run several schedulers. The
    trace has the blocks of the group with the smallest ones. The file is created at once, so that a path that cannot be
    written is a ``ConfigError`` before any request is served. Later failures end the recording with one line in the
    log, and disturb no step.
    """

    def __init__(
        self,
        path: str | None,
        manager: OffloadingManager,
        geometry: Sequence[GroupGeometry],
        layout: EngineLayout,
        config: OffloadingConfig,
        clock: Callable[[], float] = time.monotonic,
        watch: Watch | None = None,
    ) -> None:
        self._geometry = geometry
        self._finest = finest_of(geometry)
        self._recorder: TraceRecorder | None = None
        """``None`` once the recording has ended, too; so is ``_watch``."""
        self._watch = watch
        self._watched: dict[RequestOffloadState, Callable[[Explanation], None]] = {}
        if path:
            path = path.replace("{pid}", str(os.getpid()))
            self._recorder = TraceRecorder(path, self._finest.block_tokens, _machine(geometry, layout, config))
        self._clock = clock
        block_bytes = layout.block_bytes(layout.block_size_factor(config))
        self._explanations = Explanations(manager, geometry, layout.num_slots(config), block_bytes, clock)

    def __repr__(self) -> str:
        return f"RequestRecording({self._recorder})"

    def arrived(self, state: RequestOffloadState) -> None:
        self._guard(self._arrived, state)

    def _arrived(self, state: RequestOffloadState) -> None:
        tell = self._watch(state.request) if self._watch is not None else None
        if tell is not None:
            self._watched[state] = tell
        elif self._recorder is None:
            return
        state.extend_keys(self._geometry)
        self._explanations.begin(state)
        if self._recorder is not None:
            prompt_tokens = state.request.num_prompt_tokens
            keys = state.groups[self._finest.index].keys[: prompt_tokens // self._finest.block_tokens]
            context = state.context
            self._recorder.arrived(context.req_id, self._clock(), keys, prompt_tokens, next_use=context.next_use)

    def deferred(self, state: RequestOffloadState, waits_for: str) -> None:
        self._guard(self._explanations.deferred, state, waits_for)

    def answered(self, state: RequestOffloadState) -> None:
        self._guard(self._explanations.answered, state)

    def admitted(self, state: RequestOffloadState, hits: dict[str, int]) -> None:
        """The request has GPU blocks. ``hits``: the tokens to load, by tier."""
        self._guard(self._explanations.admitted, state, hits)

    def reset(self, ended: Epoch) -> None:
        self._guard(self._explanations.reset, ended)

    def load_ended(self, job: JobRecord) -> None:
        self._guard(self._explanations.load_ended, job.request, job.success, job.num_bytes)

    def store_failed(self, job: JobRecord) -> None:
        self._guard(self._explanations.store_failed, job.keys)

    def finished(self, state: RequestOffloadState, most_tokens: int, has_no_room: bool) -> None:
        """The request ended. Of it, ``most_tokens`` could be stored, and ``has_no_room`` says whether some found no
        room."""
        self._guard(self._finished, state, most_tokens, has_no_room)

    def _finished(self, state: RequestOffloadState, most_tokens: int, has_no_room: bool) -> None:
        explanation = self._explanations.end(state, most_tokens, has_no_room)
        tell = self._watched.pop(state, None)
        if tell is not None and explanation is not None:
            tell(explanation)
        if self._recorder is not None:
            output_tokens = max(state.request.num_tokens - state.request.num_prompt_tokens, 0)
            line = explanation.as_json() if explanation is not None and explanation.found else None
            self._recorder.finished(state.context.req_id, output_tokens, line)

    def close(self) -> None:
        """Writes the requests that have not finished, too. Idempotent, and never raises."""
        recorder, self._recorder = self._recorder, None
        self._watch = None
        self._watched.clear()
        try:
            if recorder is not None:
                recorder.close()
        except Exception:
            logger.exception("The trace could not be closed.")

    def _guard(self, call: Callable[..., None], *args: object) -> None:
        if self._recorder is None and self._watch is None:
            return
        try:
            call(*args)
        except Exception:
            logger.exception("Recording or tracing requests failed; it ends here, and serving goes on.")
            self.close()


def _machine(geometry: Sequence[GroupGeometry], layout: EngineLayout, config: OffloadingConfig) -> dict[str, object]:
    """What ``kvoffload explain`` must know of the configuration. No paths and no addresses."""
    finest = finest_of(geometry).block_tokens
    slots = sum(finest / group.block_tokens for group in geometry)
    return {
        "block_bytes": round(layout.block_bytes(layout.block_size_factor(config)) * slots),
        "cpu_bytes": config.cpu_bytes,
        "policy": config.eviction_policy,
        "store_threshold": config.store_threshold,
        "load_policy": config.load_policy,
        "device_blocks": None if layout.device_tokens is None else layout.device_tokens // finest,
        "tiers": [
            {
                "type": tier.get("type"),
                "max_bytes": parse_bytes(tier["max_bytes"]) if tier.get("max_bytes") is not None else None,
                "cascade": tier.get("cascade", "on_store" if tier.get("offload_policy") == "request_level" else None),
            }
            for tier in config.secondary_tiers
        ],
    }
