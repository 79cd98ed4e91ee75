# SPDX-License-Identifier: Apache-2.0
"""Prompts whose hash ids stand for fewer tokens than a block has, cut into blocks again.

Two forms of traces have such ids. AIPerf writes one row per turn, with the new tokens of the turn alone, so that each
turn ends with a partial id. Others keep the partial last id of each turn in the prompts of later turns. An engine cuts
the whole prompt into blocks of one size. Two blocks are the same if they have the same tokens after the same prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.sim.trace import Trace, numbered

Segment = tuple[int, int]
"""An id that stands for some tokens, and their number."""


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


def join_turns(trace: Trace, delays_s: npt.NDArray[np.float64]) -> Trace:
    """Return the whole prompts of sessions, in order of arrival. ``trace`` has a row per turn, with its new tokens
    alone, and NaN as the time of a turn that arrives ``delays_s`` after the one before it.

    A prompt is all turns and answers before it, and its own turn. A trace does not know when an answer ended, so a
    delay counts from the arrival of the turn before.
    """
    size, histories, arrivals_s = trace.block_tokens, dict[int, list[Segment]](), dict[int, float]()
    times_s, inputs = trace.times_s.copy(), trace.input_tokens.copy()
    paths = []
    for turn, session in enumerate(trace.sessions.tolist()):
        history = histories.setdefault(session, [])
        new = int(inputs[turn])
        for at, name in enumerate(trace.blocks(turn).tolist()):
            history.append((name, max(min(size, new - at * size), 0)))
        history.append((-1 - 2 * turn, max(new - size * len(trace.blocks(turn)), 0)))  # tokens without an id
        inputs[turn] = sum(tokens for _, tokens in history)
        if np.isnan(times_s[turn]):
            times_s[turn] = arrivals_s.get(session, 0.0) + delays_s[turn]
        arrivals_s[session] = float(times_s[turn])
        paths.append(cut(history, size))
        history.append((-2 - 2 * turn, int(trace.output_tokens[turn])))  # nobody else has the answer's tokens
    order = np.argsort(times_s, kind="stable")
    return replace(
        trace,
        times_s=times_s[order],
        input_tokens=inputs[order],
        output_tokens=trace.output_tokens[order],
        sessions=trace.sessions[order],
        next_uses=None if trace.next_uses is None else trace.next_uses[order],
        **_flat([paths[turn] for turn in order]),
    )


def with_kept_tails(trace: Trace) -> Trace | None:
    """Return the same prompts, which keep the partial last id of earlier ones, as blocks. ``None`` if lengths do not
    fit.

    The length of an id that ended an earlier prompt is known from that prompt's length. Every other id is whole.
    """
    partial: dict[int, int] = {}
    paths = []
    for request, tokens in enumerate(trace.input_tokens.tolist()):
        path = trace.blocks(request).tolist()
        segments = [(each, partial.get(each, trace.block_tokens)) for each in path]
        last = tokens - sum(length for _, length in segments[:-1])
        if not path or not 0 < last <= trace.block_tokens:
            return None
        if last < trace.block_tokens and partial.setdefault(path[-1], last) != last:
            return None
        segments[-1] = path[-1], last
        paths.append(cut(segments, trace.block_tokens))
    return replace(trace, **_flat(paths))


def _flat(paths: Sequence[Sequence[int]]) -> dict[str, Any]:
    """``offsets`` and ``ids`` of a trace."""
    counts = np.array([len(path) for path in paths], dtype=np.int64)
    hashes = np.array([each for path in paths for each in path], dtype=np.uint64)
    return {"offsets": np.concatenate(([0], np.cumsum(counts))), "ids": numbered(hashes)}
