# SPDX-License-Identifier: Apache-2.0
"""Prompts whose hash ids stand for fewer tokens than a block has, cut into blocks again.

Two forms of traces have such ids. AIPerf writes one row per turn, with the new tokens of the turn alone, so that each
turn ends with a partial id. Others keep the partial last id of each turn in the prompts of later turns. An engine cuts
the whole prompt into blocks of one size. Two blocks are the same if they have the same tokens after the same prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.sim.trace import numbered

Segment = tuple[int, int]
"""An id that stands for some tokens, and their number."""


class Turn(NamedTuple):
    """A row of AIPerf: a turn's new tokens."""

    session: object
    time_ms: float | None
    """``None``: ``delay_ms`` after the session's turn before it."""
    delay_ms: float
    ids: list[int]
    input_tokens: int
    output_tokens: int


class Prompts(NamedTuple):
    """The whole prompts of a trace, in order of arrival."""

    times_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    sessions: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]


def cut(segments: Iterable[Segment], block_tokens: int) -> list[int]:
    """Return the hashes of a prompt's blocks. The last block may be partial."""
    hashes: list[int] = []
    pieces: list[str] = []
    chain = filled = 0
    for name, tokens in segments:
        begin = 0
        while begin < tokens:
            taken = min(tokens - begin, block_tokens - filled)
            pieces.append(f"{name}:{begin}:{taken}")
            begin, filled = begin + taken, filled + taken
            if filled == block_tokens:
                chain = _hash(chain, pieces)
                hashes.append(chain)
                pieces, filled = [], 0
    if pieces:
        hashes.append(_hash(chain, pieces))
    return hashes


def _hash(chain: int, pieces: Sequence[str]) -> int:
    return xxhash.xxh3_64_intdigest(f"{chain},{','.join(pieces)}".encode())


def lengths_of(ids: Sequence[int], tokens: int, block_tokens: int) -> list[Segment] | None:
    """The segments of ids that are whole but for the last one; ``None`` if the tokens do not fit."""
    last = tokens - (len(ids) - 1) * block_tokens
    if not ids or not 0 < last <= block_tokens:
        return None
    return [*((each, block_tokens) for each in ids[:-1]), (ids[-1], last)]


def join_turns(turns: Sequence[Turn], block_tokens: int) -> Prompts | int:
    """The prompts of sessions whose rows have each turn's new tokens: all turns and answers before it, and its own.
    Returns the index of a row whose ids do not fit its length, if there is one.

    A trace does not know when an answer ended, so a delay counts from the arrival of the turn before.
    """
    histories: dict[object, list[Segment]] = {}
    arrivals_ms: dict[object, float] = {}
    numbers: dict[object, int] = {}
    rows = []
    for at, turn in enumerate(turns):
        new = lengths_of(turn.ids, turn.input_tokens, block_tokens)
        if new is None:
            return at
        history = histories.setdefault(turn.session, [])
        history += new
        before_ms = arrivals_ms.get(turn.session, 0.0)
        time_ms = before_ms + turn.delay_ms if turn.time_ms is None else turn.time_ms
        arrivals_ms[turn.session] = time_ms
        session = numbers.setdefault(turn.session, len(numbers))
        rows.append((time_ms / 1e3, sum(tokens for _, tokens in history), turn.output_tokens, session, [*history]))
        history.append((-1 - at, turn.output_tokens))  # nobody else has the answer's tokens
    rows.sort(key=lambda row: row[0])
    paths = [cut(row[4], block_tokens) for row in rows]
    offsets, ids = _flat(paths)
    times, inputs, outputs, sessions = (np.array([row[at] for row in rows]) for at in range(4))
    return Prompts(times.astype(np.float64), inputs, outputs, sessions, offsets, ids)


def with_kept_tails(
    offsets: npt.NDArray[np.int64], ids: npt.NDArray[np.int32], inputs: npt.NDArray[np.int64], block_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None:
    """The offsets and ids of prompts that keep the partial last id of earlier ones. ``None`` if lengths do not fit.

    The length of an id that ended an earlier prompt is known from that prompt's length. Every other id is whole.
    """
    partial: dict[int, int] = {}
    paths = []
    for request, tokens in enumerate(inputs.tolist()):
        path = ids[offsets[request] : offsets[request + 1]].tolist()
        segments = [(each, partial.get(each, block_tokens)) for each in path]
        last = tokens - sum(length for _, length in segments[:-1])
        if not path or not 0 < last <= block_tokens:
            return None
        if last < block_tokens and partial.setdefault(path[-1], last) != last:
            return None
        segments[-1] = path[-1], last
        paths.append(cut(segments, block_tokens))
    return _flat(paths)


def _flat(paths: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    counts = np.array([len(path) for path in paths], dtype=np.int64)
    hashes = np.array([each for path in paths for each in path], dtype=np.uint64)
    return np.concatenate(([0], np.cumsum(counts))), numbered(hashes)
