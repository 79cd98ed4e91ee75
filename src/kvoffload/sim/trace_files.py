# SPDX-License-Identifier: Apache-2.0
"""Read trace files: JSON lines, plain, gzip or zstd, one request per line.

The fields distinguish three formats:

* *Mooncake* (``record_trace`` also writes it, and vLLM's and GuideLLM's benchmarks read it): ``timestamp`` in ms,
  ``input_length``, ``output_length``, ``hash_ids``, optionally ``session``, ``next_use`` (``"soon"``, ``"later"`` or
  ``"never"``), ``block_tokens``, ``story``, ``steps`` and, in the first line, ``machine``.
* *Qwen-Bailian*: ``chat_id`` and ``parent_chat_id`` (-1 for none), and ``timestamp`` in s.
* *AIPerf*: like Mooncake's, with a ``session_id`` in each line. A line contains the new tokens of one turn, and after
  the first turn, a ``delay`` in ms may replace the timestamp.

An id may name a block together with all blocks before it, or a single block. In the second case this module chains the
ids. Prompts in Mooncake's format may keep the partial last id of earlier turns (``sim/turns.py``).

A file is read once, as a stream. Each access takes 8 bytes while reading and 4 bytes afterwards.

Traces often end in the middle of a line, or with zeros: the server was killed, the disk was full, or the file was
copied while it grew. If such files were joined, such a line is in the middle. In this case, the complete lines are
used.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import math
import reprlib
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, BinaryIO, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.base import NextUse
from kvoffload.errors import MissingExtraError, reason_of
from kvoffload.sim.step_costs import fit_steps
from kvoffload.sim.trace import NO_SESSION, Trace, TraceError, numbered, parents_of
from kvoffload.sim.turns import join_turns, with_kept_tails

_MAX_LINE_BYTES = 64 << 20
_GZIP_SIZE_BYTES = 4
"""A gzip file ends with a number that may have zeros at its end."""
_MOONCAKE_TOKENS, _BAILIAN_TOKENS = 512, 16
_MOST_TORN = 8
"""A file with more torn lines, and with more than 1%, is not a trace."""
_BLOCK_SIZES = tuple(1 << power for power in range(3, 14))
_WIDEST = 1 << 64
"""Limit on ids, which are numbers of 64 bits."""
_MOST_TOKENS, _MOST_TIMESTAMP = 1 << 31, 1 << 42
"""Limits above any real prompt and trace: 2**42 milliseconds are 139 years, so times since 1970 are below."""


_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=_MOST_TOKENS)]
_Time = Annotated[float, msgspec.Meta(ge=0, lt=_MOST_TIMESTAMP)]


class Line(msgspec.Struct):
    """One line of a file. Unknown fields are ignored."""

    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[int | str]
    timestamp: _Time | None = None
    session_id: int | str | None = None
    """In AIPerf's format, where a line contains the new tokens of one turn."""
    delay: _Time = 0.0
    """In AIPerf's format: milliseconds since the previous turn, instead of a timestamp."""
    session: int | str | None = None
    next_use: str | None = None
    block_tokens: Annotated[int, msgspec.Meta(ge=1, lt=_MOST_TOKENS)] | None = None
    chat_id: int | None = None
    parent_chat_id: int | None = None
    machine: Any = None
    """In the first line: the server's configuration, written by ``record_trace``. Other programs may use this name for
    something else."""
    steps: Any = None
    """Written by ``record_trace``: some of the server's steps, each as seconds, prompt tokens and decoding requests."""
    story: Any = None
    """Written by ``record_trace``: among others, the seconds that the server expected for computing a hit's blocks."""


_MARKS = ("session_id", "chat_id")
"""The fields that AIPerf's and Qwen-Bailian's formats have in each line, and others in none."""


def load_trace(
    path: str | Path,
    block_tokens: int | None = None,
    max_requests: int | None = None,
    note: Callable[[int, Line], object] = lambda *_: None,
) -> Trace:
    """Return the trace in ``path``, or its first ``max_requests`` requests. ``note`` is called with the number and the
    content of each complete line.

    ``block_tokens`` follows from the lengths if it is not given: it is the power of two that fits every request, or the
    form's usual size (512 or 16) if several fit. Lines that were cut off are left out, and the first is named in
    ``cut_line``. Raises ``TraceError``, which names the file, the line and the field, for a file that cannot be
    replayed.
    """
    path = Path(path)
    if block_tokens is not None and block_tokens < 1:
        raise TraceError(f"{path}: block_tokens must be positive, not {block_tokens}.")
    reader = _Reader(path)
    lines = _Lines(path)
    for number, text in lines:
        if (line := reader.add(number, text)) is not None:
            note(number, line)
        if max_requests is not None and len(reader.lines) >= max_requests:
            break
    return reader.finish(block_tokens, reader.torn_line or lines.cut_line)


class _Reader:
    """Checks lines one by one and collects them in arrays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(Line)
        self._mark: str | None = None
        self._stated_tokens: int | None = None
        self._device_blocks = self._block_bytes = 0
        self._speeds = array("d")
        """Blocks per second that the recording server expected to compute."""
        self._steps = array("d")
        self._sessions_seen: dict[object, int] = {}
        self.lines = array("q")
        self.num_torn = 0
        self.torn_line: int | None = None
        """The first line that is not whole: a server that was killed while it wrote, before another one continued."""
        self._times = array("d")
        """In seconds. AIPerf's turns may lack it, which is NaN."""
        self._delays = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._sessions = array("q")
        self._next_uses = array("b")
        self._counts = array("q")
        self._hashes = array("Q")

    def add(self, number: int, text: bytes) -> Line | None:
        """Return the line, or ``None`` if it is not complete."""
        try:
            line = self._decoder.decode(text)
        except msgspec.ValidationError as exc:
            remedy = "" if text.lstrip().startswith(b"{") else "; write one JSON object in each line"
            raise self._error(number, f"{_plain(exc)}{remedy}") from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            if not self.lines or self.num_torn >= max(_MOST_TORN, len(self.lines) // 100):
                raise self._error(number, f"this is not a line of a trace: {_plain(exc)}") from exc
            self.num_torn += 1
            self.torn_line = self.torn_line or number
            return None
        if not self.lines:
            self._mark = next((name for name in _MARKS if getattr(line, name) is not None), None)
            self._stated_tokens = line.block_tokens
            self._device_blocks = _count_in(line.machine, "device_blocks")
            self._block_bytes = _count_in(line.machine, "block_bytes")
        for name in _MARKS:
            if (getattr(line, name) is not None) != (name == self._mark):
                what = "is missing" if name == self._mark else "appears"
                raise self._error(number, f"{name} {what}, unlike in the lines before; do not mix forms in one file")
        if line.next_use is not None and NextUse.named(line.next_use) is None:
            raise self._error(number, f"next_use is soon, later or never, not {line.next_use!r}")
        for weighed in line.story.get("weighed") or () if isinstance(line.story, dict) else ():
            seconds = weighed.get("computing_s") if isinstance(weighed, dict) else None
            if isinstance(seconds, float) and seconds > 0 and (blocks := _count_in(weighed, "blocks")):
                self._speeds.append(blocks / seconds)
        for step in line.steps if isinstance(line.steps, list) else ():
            if isinstance(step, list) and len(step) == 3 and all(isinstance(each, int | float) for each in step):
                self._steps.extend(step)
        self._times.append(self._time_of(number, line))
        self._delays.append(line.delay / 1e3)
        self._sessions.append(self._session_of(number, line))
        self.lines.append(number)
        self._inputs.append(line.input_length)
        self._outputs.append(line.output_length)
        self._next_uses.append(NextUse.UNKNOWN if line.next_use is None else NextUse.named(line.next_use) or 0)
        self._counts.append(len(line.hash_ids))
        hashes = [item if isinstance(item, int) else _hash(item.encode()) for item in line.hash_ids]
        try:
            ids = array("Q", hashes)
        except OverflowError as exc:
            wrong = next(item for item in hashes if not 0 <= item < _WIDEST)
            raise self._error(number, f"hash_ids must be from 0 to 2**64 - 1, not {reprlib.repr(wrong)}") from exc
        self._hashes += ids
        return line

    def _time_of(self, number: int, line: Line) -> float:
        scale = 1.0 if self._mark == "chat_id" else 1e-3
        if self._mark == "session_id":
            if line.timestamp is None and line.delay and line.session_id not in self._sessions_seen:
                raise self._error(number, "the first turn of a session has a delay and no timestamp")
        elif line.timestamp is None:
            raise self._error(number, "missing required field 'timestamp'")
        elif self._times and line.timestamp < self._times[-1] / scale - 1e-6:
            before = self._times[-1] / scale
            raise self._error(
                number, f"timestamp {line.timestamp:g} lies before that of the previous request ({before:g}); sort"
            )
        return math.nan if line.timestamp is None else line.timestamp * scale

    def _session_of(self, number: int, line: Line) -> int:
        if self._mark == "chat_id":
            if line.parent_chat_id is None:
                raise self._error(number, "parent_chat_id is missing (-1 stands for none)")
            # If the parent is not in the file, because the file's head was cut off, a new conversation begins.
            session = self._sessions_seen.get(line.parent_chat_id, len(self._sessions_seen))
            self._sessions_seen[line.chat_id] = session
            return session
        name = line.session if self._mark is None else line.session_id
        return NO_SESSION if name is None else self._sessions_seen.setdefault(name, len(self._sessions_seen))

    def finish(self, block_tokens: int | None, cut_line: int | None) -> Trace:
        if not self.lines:
            raise TraceError(f"{self._path} has no requests.")
        if not len(self._hashes):
            raise TraceError(f"{self._path}: hash_ids is empty in every line, so there is nothing to replay.")
        counts = np.frombuffer(self._counts, dtype=np.int64)
        trace = Trace(
            name=self._path.name.split(".")[0],
            block_tokens=block_tokens or self._stated_tokens or _MOONCAKE_TOKENS,
            times_s=np.frombuffer(self._times, dtype=np.float64),
            input_tokens=np.frombuffer(self._inputs, dtype=np.int64),
            output_tokens=np.frombuffer(self._outputs, dtype=np.int64),
            sessions=np.frombuffer(self._sessions, dtype=np.int64),
            offsets=np.concatenate(([0], np.cumsum(counts))),
            ids=numbered(np.frombuffer(self._hashes, dtype=np.uint64)),
            device_blocks=self._device_blocks,
            next_uses=np.frombuffer(self._next_uses, dtype=np.int8) if any(self._next_uses) else None,
            cut_line=cut_line,
        )
        stated = block_tokens or self._stated_tokens
        if self._mark == "session_id":
            self._block_tokens(trace.block_tokens, counts, trace.input_tokens)
            return join_turns(trace, np.frombuffer(self._delays, dtype=np.float64))
        if not _are_chained(trace.offsets, trace.ids):
            ends = zip(trace.offsets.tolist(), trace.offsets[1:].tolist())
            chained = [_chained(trace.ids[begin:end].tolist()) for begin, end in ends]
            trace = replace(trace, ids=numbered(np.concatenate(chained)))
        try:
            size = self._block_tokens(stated, counts, trace.input_tokens)
        except TraceError:
            kept = with_kept_tails(trace)
            if kept is None:
                raise
            trace, size = kept, trace.block_tokens
        step_s, token_s, decode_s = fit_steps(np.frombuffer(self._steps, dtype=np.float64).reshape(-1, 3))
        speed = 1 / token_s if token_s else median(self._speeds) * size if self._speeds else 0.0
        return replace(
            trace,
            block_tokens=size,
            token_bytes=self._block_bytes / size,
            prefill_tokens_per_s=speed,
            step_s=step_s,
            decode_s=decode_s,
        )

    def _block_tokens(self, stated: int | None, counts: npt.NDArray[np.int64], inputs: npt.NDArray[np.int64]) -> int:
        """Return the size of a block. A request of n ids has more than (n - 1) and fewer than (n + 1) blocks of
        tokens."""
        least = inputs / (counts + 1)
        most = np.divide(inputs, counts - 1, out=np.full(len(counts), np.inf), where=counts > 1)
        if stated is not None:
            misfits = np.flatnonzero((least >= stated) | (most <= stated))
            if len(misfits):
                at = int(misfits[0])
                raise self._error(
                    self.lines[at],
                    f"{counts[at]} hash_ids do not fit input_length {inputs[at]} with blocks of {stated} tokens",
                )
            return stated
        fitting = [size for size in _BLOCK_SIZES if float(least.max()) < size < float(most.min())]
        usual = _BAILIAN_TOKENS if self._mark == "chat_id" else _MOONCAKE_TOKENS
        if usual in fitting:
            return usual
        if len(fitting) != 1:
            why = "no power of two fits" if not fitting else f"several sizes fit ({', '.join(map(str, fitting))})"
            raise TraceError(
                f"{self._path}: the number of tokens per hash id is not clear, because {why}; give block_tokens "
                "in the file of --fleet."
            )
        return fitting[0]

    def _error(self, number: int, what: str) -> TraceError:
        return TraceError(f"{self._path}, line {number}: {what}.")


def _count_in(values: Any, name: str) -> int:
    """Return a number of a JSON object; 0 if the object is another program's, and has none."""
    found = values.get(name) if isinstance(values, dict) else None
    return max(found, 0) if isinstance(found, int) else 0


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) >> 1


def _are_chained(offsets: npt.NDArray[np.int64], ids: npt.NDArray[np.int32]) -> bool:
    """Return whether each id has the same predecessor wherever it appears."""
    before = parents_of(offsets, ids)
    first = np.empty(int(ids.max()) + 1, dtype=np.int32)
    first[ids] = before
    return bool((first[ids] == before).all())


def _chained(ids: list[int]) -> npt.NDArray[np.uint64]:
    """Return a hash for each id, together with all ids before it."""
    chain, out = 0, []
    for item in ids:
        chain = _hash(b"%d,%d" % (chain, item))
        out.append(chain)
    return np.array(out, dtype=np.uint64)


def _plain(exc: Exception) -> str:
    """Return msgspec's message, with the field's name instead of its JSON path."""
    return str(exc).replace("`", "'").replace("$.", "").replace("Object missing", "missing").replace(" - at ", " in ")


class _Lines:
    """The lines of a file that are not blank, with their numbers from 1. A last line that was cut off is left out, and
    so are zeros at the end: the file system had extended the file before a power failure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cut_line: int | None = None
        """The number of the last line if it was cut off, once all lines have been read."""

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        path, number = self._path, 0
        damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)  # gzip raises any of them
        try:
            with path.open("rb") as file:
                stream, magic = cast(BinaryIO, file), file.peek(4)
                if magic[:2] == b"\x1f\x8b":
                    stream = cast(BinaryIO, gzip.GzipFile(fileobj=_without_zeros(stream, _GZIP_SIZE_BYTES)))
                elif magic[:4] == b"\x28\xb5\x2f\xfd":
                    zstandard = _zstandard(path)
                    damage = (*damage, zstandard.ZstdError)
                    content = _without_zeros(stream, 0)
                    reader = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
                    stream = cast(BinaryIO, io.BufferedReader(reader, 1 << 20))
                while text := stream.readline(_MAX_LINE_BYTES):
                    number += 1
                    if number == 1:
                        if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                            raise TraceError(f"{path} is UTF-16: save it as UTF-8.")
                        text = text.removeprefix(codecs.BOM_UTF8)
                    if text[-1:] != b"\n":
                        text = text.rstrip(b"\0")
                        if len(text) == _MAX_LINE_BYTES:
                            raise TraceError(
                                f"{path}, line {number}: this line is longer than {_MAX_LINE_BYTES >> 20} MiB, "
                                "so this is not a trace."
                            )
                        if number > 1 and not _is_json(text):
                            self.cut_line = number
                            return
                    if not text.isspace():
                        yield number, text
        except damage as exc:
            if isinstance(exc, EOFError) and number:  # the end of a gzip file is missing
                self.cut_line = number + 1
                return
            raise TraceError(
                f"The trace {path} cannot be read: {reason_of(exc)}; check its path, or whether the file is complete."
            ) from exc


def _without_zeros(file: BinaryIO, kept: int) -> io.BytesIO:
    """Return the content of a compressed file, with at most ``kept`` of the zeros at its end."""
    content = file.read()
    return io.BytesIO(content[: len(content.rstrip(b"\0")) + kept])


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _zstandard(path: Path) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as exc:
        raise MissingExtraError(
            f"{path} is zstd-compressed, which needs kvoffload's extra 'sim': pip install zstandard."
        ) from exc
