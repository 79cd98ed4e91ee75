# SPDX-License-Identifier: Apache-2.0
"""Read trace files: JSON lines, plain, gzip or zstd, one request per line.

The fields distinguish three formats:

* *Mooncake* (``record_trace`` also writes it): ``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids``
  that are prefix-chained, optionally ``session``, ``next_use`` (``"soon"``, ``"later"`` or ``"never"``),
  ``block_tokens``, ``story`` and, in the first line, ``machine``.
* *Qwen-Bailian*: ``chat_id`` and ``parent_chat_id`` (-1 for none), ``timestamp`` in s, and ``hash_ids`` that name
  single blocks. This module chains them.
* *AIPerf*: like Mooncake's, with a ``session_id`` in each line. A line contains the new tokens of one turn, and after
  the first turn, a ``delay`` in ms may replace the timestamp.

Prompts in Mooncake's format may keep the partial last id of earlier turns (``sim/turns.py``).

A file is read once, as a stream. Each access takes 8 bytes while reading and 4 bytes afterwards.

Traces often end in the middle of a line, or with zeros: the server was killed, the disk was full, or the file was
copied while it grew. If such files were joined, such a line is in the middle. In this case, the complete lines are
used.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import importlib
import io
import reprlib
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.base import NextUse
from kvoffload.errors import MissingExtraError, reason_of
from kvoffload.sim.trace import NO_SESSION, Trace, TraceError, numbered, parents_of
from kvoffload.sim.turns import Turn, join_turns, with_kept_tails

_MAX_LINE_BYTES = 64 << 20
_ZEROS_AT_ONCE = 1 << 20
_GZIP_SIZE_BYTES = 4
"""A gzip file ends with a number that may have zeros at its end."""
_MOONCAKE_TOKENS, _BAILIAN_TOKENS = 512, 16
_MOST_TORN = 8
"""A file with more torn lines, and with more than 1%, is not a trace."""
_BLOCK_SIZES = tuple(1 << power for power in range(3, 14))
_WIDEST = 1 << 64
"""Limit on ids, which are numbers of 64 bits."""
_MOST_TOKENS, _MOST_TIMESTAMP = 1 << 31, 1 << 40
"""Limits above any real prompt and trace: 2**40 milliseconds are 34 years."""


class _Line(msgspec.Struct):
    """One line of a file. Unknown fields are ignored."""

    input_length: int
    output_length: int
    hash_ids: list[int | str]
    timestamp: float | None = None
    session_id: int | str | None = None
    """In AIPerf's format, where a line contains the new tokens of one turn."""
    delay: float = 0.0
    """In AIPerf's format: milliseconds since the previous turn, instead of a timestamp."""
    session: int | str | None = None
    next_use: str | None = None
    block_tokens: int | None = None
    chat_id: int | None = None
    parent_chat_id: int | None = None
    machine: Any = None
    """In the first line: the server's configuration, written by ``record_trace``. Other programs may use this name for
    something else."""
    story: Any = None
    """Written by ``record_trace``: among others, the seconds that the server expected for computing a hit's blocks."""


def load_trace(path: str | Path, block_tokens: int | None = None, max_requests: int | None = None) -> Trace:
    """Return the trace in ``path``, or its first ``max_requests`` requests.

    ``block_tokens`` follows from the lengths if it is not given: it is the power of two that fits every request, or the
    form's usual size (512 or 16) if several fit. Lines that were cut off are left out, and the first is named in
    ``cut_line``. Raises ``TraceError``, which names the file, the line and the field, for a file that cannot be
    replayed.
    """
    path = Path(path)
    if block_tokens is not None and block_tokens < 1:
        raise TraceError(f"{path}: block_tokens must be positive, not {block_tokens}.")
    reader = _Reader(path)
    lines = Lines(path)
    for number, text in lines:
        reader.add(number, text)
        if max_requests is not None and len(reader.lines) >= max_requests:
            break
    return reader.finish(block_tokens, reader.torn_line or lines.cut_line)


class _Reader:
    """Checks lines one by one and collects them in arrays."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(_Line)
        self._is_bailian = False
        self._stated_tokens: int | None = None
        self._device_blocks = self._block_bytes = 0
        self._speeds = array("d")
        """Blocks per second that the recording server expected to compute."""
        self._sessions_seen: dict[object, int] = {}
        self.lines = array("q")
        self.num_torn = 0
        self.torn_line: int | None = None
        """The first line that is not whole: a server that was killed while it wrote, before another one continued."""
        self._times = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._sessions = array("q")
        self._next_uses = array("b")
        self._counts = array("q")
        self._hashes = array("Q")
        self._turns: list[Turn] = []
        """The lines of AIPerf's format, instead of all other attributes."""

    def add(self, number: int, text: bytes) -> None:
        try:
            line = self._decoder.decode(text)
        except msgspec.ValidationError as exc:
            raise self._error(number, _plain(exc)) from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            if not self.lines or self.num_torn >= max(_MOST_TORN, len(self.lines) // 100):
                raise self._error(number, not_a_line(exc)) from exc
            self.num_torn += 1
            self.torn_line = self.torn_line or number
            return
        if line.session_id is not None or self._turns:
            self._add_turn(number, line)
            return
        if line.timestamp is None:
            raise self._error(number, "missing required field 'timestamp'")
        self._check(number, line, line.timestamp)
        if not self.lines:
            self._is_bailian = line.chat_id is not None
            self._stated_tokens = line.block_tokens
            self._device_blocks = _count_in(line.machine, "device_blocks")
            self._block_bytes = _count_in(line.machine, "block_bytes")
        for weighed in line.story.get("weighed") or () if isinstance(line.story, dict) else ():
            seconds = weighed.get("computing_s") if isinstance(weighed, dict) else None
            if isinstance(seconds, float) and seconds > 0 and (blocks := _count_in(weighed, "blocks")):
                self._speeds.append(blocks / seconds)
        scale = 1.0 if self._is_bailian else 1e-3
        self.lines.append(number)
        self._times.append(line.timestamp * scale)
        self._inputs.append(line.input_length)
        self._outputs.append(line.output_length)
        self._sessions.append(self._session_of(number, line))
        self._next_uses.append(NextUse.UNKNOWN if line.next_use is None else NextUse.named(line.next_use) or 0)
        self._counts.append(len(line.hash_ids))
        hashes = [item if isinstance(item, int) else _hash(item.encode()) for item in line.hash_ids]
        try:
            ids = array("Q", hashes)
        except OverflowError as exc:
            wrong = next(item for item in hashes if not 0 <= item < _WIDEST)
            raise self._error(number, f"hash_ids must be from 0 to 2**64 - 1, not {reprlib.repr(wrong)}") from exc
        self._hashes += array("Q", _chained(hashes)) if self._is_bailian else ids

    def _add_turn(self, number: int, line: _Line) -> None:
        """Add a line of AIPerf's format."""
        if line.session_id is None or (self.lines and not self._turns):
            raise self._error(number, "session_id is not in every line; do not mix forms in one file")
        if line.timestamp is None and not any(turn.session == line.session_id for turn in self._turns[-1:]):
            known = line.session_id in self._sessions_seen
            if not known and line.delay:
                raise self._error(number, "the first turn of a session has a delay and no timestamp")
        for value in (line.timestamp or 0.0, line.delay):
            if not 0 <= value < _MOST_TIMESTAMP:
                raise self._error(number, f"timestamp and delay must be 0 or later, not {value:g}")
        for value in (line.input_length, line.output_length):
            if not 0 <= value < _MOST_TOKENS:
                raise self._error(number, f"lengths must be numbers of tokens, not {reprlib.repr(value)}")
        self._sessions_seen[line.session_id] = 0
        self.lines.append(number)
        self._stated_tokens = self._stated_tokens or line.block_tokens
        ids = [item if isinstance(item, int) else _hash(item.encode()) for item in line.hash_ids]
        self._turns.append(
            Turn(line.session_id, line.timestamp, line.delay, ids, line.input_length, line.output_length)
        )

    def _joined(self, block_tokens: int, cut_line: int | None) -> Trace:
        joined = join_turns(self._turns, block_tokens)
        if isinstance(joined, int):
            turn = self._turns[joined]
            raise self._error(
                self.lines[joined],
                f"{len(turn.ids)} hash_ids do not fit input_length {turn.input_tokens} with blocks of {block_tokens} "
                "tokens",
            )
        name = self._path.name.split(".")[0]
        return Trace(name=name, block_tokens=block_tokens, cut_line=cut_line, **joined._asdict())

    def _check(self, number: int, line: _Line, timestamp: float) -> None:
        if not 0 <= timestamp < _MOST_TIMESTAMP:
            raise self._error(number, f"timestamp must be 0 or later, not {timestamp:g}")
        for field in ("input_length", "output_length", "block_tokens"):
            value = getattr(line, field)
            if value is not None and not 0 <= value < _MOST_TOKENS:
                raise self._error(number, f"{field} must be a number of tokens, not {reprlib.repr(value)}")
        if line.next_use is not None and NextUse.named(line.next_use) is None:
            raise self._error(number, f"next_use is soon, later or never, not {line.next_use!r}")
        if line.block_tokens is not None and line.block_tokens < 1:
            raise self._error(number, f"block_tokens must be positive, not {line.block_tokens}")
        if self.lines:
            if (line.chat_id is not None) != self._is_bailian:
                missing = "chat_id is missing" if self._is_bailian else "chat_id appears"
                raise self._error(number, f"{missing}, unlike in the lines before; do not mix forms in one file")
            before = self._times[-1] * (1.0 if self._is_bailian else 1e3)
            if timestamp < before - 1e-6:
                raise self._error(
                    number, f"timestamp {timestamp:g} lies before that of the previous request ({before:g}); sort"
                )

    def _session_of(self, number: int, line: _Line) -> int:
        if self._is_bailian:
            if line.parent_chat_id is None:
                raise self._error(number, "parent_chat_id is missing (-1 stands for none)")
            # If the parent is not in the file, because the file's head was cut off, a new conversation begins.
            session = self._sessions_seen.get(line.parent_chat_id, len(self._sessions_seen))
            self._sessions_seen[cast(int, line.chat_id)] = session
            return session
        if line.session is None:
            return NO_SESSION
        return self._sessions_seen.setdefault(line.session, len(self._sessions_seen))

    def finish(self, block_tokens: int | None, cut_line: int | None) -> Trace:
        if not self.lines:
            raise TraceError(f"{self._path} has no requests.")
        if self._turns:
            return self._joined(block_tokens or self._stated_tokens or _MOONCAKE_TOKENS, cut_line)
        counts = np.frombuffer(self._counts, dtype=np.int64)
        inputs = np.frombuffer(self._inputs, dtype=np.int64)
        if not len(self._hashes):
            raise TraceError(f"{self._path}: hash_ids is empty in every line, so there is nothing to replay.")
        offsets = np.concatenate(([0], np.cumsum(counts)))
        ids = numbered(np.frombuffer(self._hashes, dtype=np.uint64))
        self._check_chained(offsets, ids)
        stated = block_tokens or self._stated_tokens
        try:
            size = self._block_tokens(stated, counts, inputs)
        except TraceError:
            size = stated or _MOONCAKE_TOKENS
            kept = with_kept_tails(offsets, ids, inputs, size)
            if kept is None:
                raise
            offsets, ids = kept
        return Trace(
            name=self._path.name.split(".")[0],
            block_tokens=size,
            times_s=np.frombuffer(self._times, dtype=np.float64),
            input_tokens=inputs,
            output_tokens=np.frombuffer(self._outputs, dtype=np.int64),
            sessions=np.frombuffer(self._sessions, dtype=np.int64),
            offsets=offsets,
            ids=ids,
            device_blocks=self._device_blocks,
            token_bytes=self._block_bytes / size,
            prefill_tokens_per_s=median(self._speeds) * size if self._speeds else 0.0,
            next_uses=np.frombuffer(self._next_uses, dtype=np.int8) if any(self._next_uses) else None,
            cut_line=cut_line,
        )

    def _check_chained(self, offsets: npt.NDArray[np.int64], ids: npt.NDArray[np.int32]) -> None:
        before = parents_of(offsets, ids)
        expected = np.empty(int(ids.max()) + 1, dtype=np.int32)
        # Assigned backwards: the last of several writes to an index remains, which is the first appearance.
        expected[ids[::-1]] = before[::-1]
        wrong = np.flatnonzero(expected[ids] != before)
        if len(wrong):
            request = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
            index = int(wrong[0] - offsets[request])
            raise self._error(
                self.lines[request],
                f"hash_ids[{index}] has another predecessor than where it first appeared, so the ids are not "
                "prefix-chained; number a block together with all blocks before it",
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
        usual = _BAILIAN_TOKENS if self._is_bailian else _MOONCAKE_TOKENS
        if usual in fitting:
            return usual
        if len(fitting) != 1:
            why = "no power of two fits" if not fitting else f"several sizes fit ({', '.join(map(str, fitting))})"
            raise TraceError(
                f"{self._path}: tokens per hash id are not clear, {why}; give block_tokens in the file of --fleet."
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


def _chained(hashes: list[int]) -> list[int]:
    chain, out = 0, []
    for item in hashes:
        chain = _hash(b"%d,%d" % (chain, item))
        out.append(chain)
    return out


def _plain(exc: Exception) -> str:
    """Return msgspec's message, with the field's name instead of its JSON path."""
    return str(exc).replace("`", "'").replace("$.", "").replace("Object missing", "missing").replace(" - at ", " in ")


def not_a_line(exc: Exception) -> str:
    return f"this is not a line of a trace: {_plain(exc)}"


class Lines:
    """The lines of a file that are not blank, with their numbers from 1. A last line that was cut off is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cut_line: int | None = None
        """The number of the last line if it was cut off, once all lines have been read."""

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        path, number = self._path, 0
        damage: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)  # gzip raises any of them
        with contextlib.ExitStack() as stack:
            try:
                file: BinaryIO = stack.enter_context(path.open("rb"))
                magic = file.read(4)
                is_gzip = magic[:2] == b"\x1f\x8b"
                stream = raw = _without_zeros(file, _GZIP_SIZE_BYTES if is_gzip else 0)
                has_zeros = raw is not file
                if is_gzip:
                    stream = cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=raw)))
                elif magic == b"\x28\xb5\x2f\xfd":
                    zstandard = _zstandard(path)
                    damage = (*damage, zstandard.ZstdError)
                    reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
                    stream = cast(BinaryIO, stack.enter_context(io.BufferedReader(reader, 1 << 20)))
                while text := stream.readline(_MAX_LINE_BYTES):
                    number += 1
                    if number == 1:
                        if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                            raise TraceError(f"{path} is UTF-16: save it as UTF-8.")
                        text = text.removeprefix(codecs.BOM_UTF8)
                    if len(text) == _MAX_LINE_BYTES:
                        raise TraceError(f"{path}, line {number}: longer than {_MAX_LINE_BYTES >> 20} MiB; no trace.")
                    if text[-1:] != b"\n":
                        has_zeros = False
                        if number > 1 and not _is_json(text):
                            self.cut_line = number
                            return
                    if not text.isspace():
                        yield number, text
                if has_zeros and stream is raw:
                    self.cut_line = number + 1
            except damage as exc:
                if isinstance(exc, EOFError) and number:  # the end of a gzip file is missing
                    self.cut_line = number + 1
                    return
                raise TraceError(f"{path} cannot be read: {reason_of(exc)}.") from exc


class _Part(io.RawIOBase):
    """The first ``num_bytes`` of a file."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        self._file, self._left = file, num_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self._file.read(min(len(buffer), self._left))
        buffer[: len(found)] = found
        self._left -= len(found)
        return len(found)


def _without_zeros(file: BinaryIO, kept: int) -> BinaryIO:
    """Return ``file`` from its beginning, without the zeros at its end except ``kept`` of them: the file system had
    extended it before a power failure."""
    size = end = file.seek(0, io.SEEK_END)
    while end:
        start = max(0, end - _ZEROS_AT_ONCE)
        file.seek(start)
        content = file.read(end - start).rstrip(b"\0")
        end = start + len(content)
        if content:
            break
    file.seek(0)
    if end + kept >= size:
        return file
    return cast(BinaryIO, io.BufferedReader(_Part(file, end + kept), _ZEROS_AT_ONCE))


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
