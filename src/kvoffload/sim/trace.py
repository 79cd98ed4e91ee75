# SPDX-License-Identifier: Apache-2.0
"""Request traces in memory: the blocks that each request used, and the time. They are compact arrays without tokens or
text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.base import NextUse
from kvoffload.errors import ConfigError

HOUR_S = 3600.0
NO_SESSION = -1
"""``Trace.sessions`` of a request whose session is not known."""


class TraceError(ConfigError):
    """A trace that cannot be replayed; the message names the file, the line and the field."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival. Each is a path in the tree of prefixes.

    Blocks are numbered 0 .. ``num_unique`` - 1 by first appearance, and *prefix-chained*: a number represents a block
    together with all blocks before it, so it always has the same predecessor. Request ``r`` used
    ``ids[offsets[r]:offsets[r + 1]]``, from head to tail. All arrays are read-only by convention and shared freely.
    """

    name: str
    block_tokens: int
    """Tokens per block; a request's last block may be partial."""
    times_s: npt.NDArray[np.float64]
    """Arrivals, non-decreasing, shape (requests,)."""
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    sessions: npt.NDArray[np.int64]
    """A number per conversation, or ``NO_SESSION``."""
    offsets: npt.NDArray[np.int64]
    """Shape (requests + 1,)."""
    ids: npt.NDArray[np.int32]
    """Shape (accesses,)."""
    device_blocks: int = 0
    """Size of the GPU's own cache in blocks when the trace was recorded; 0 if the trace does not contain it."""
    token_bytes: float = 0.0
    """Bytes of KV per token of the server that recorded the trace; 0 if the trace does not contain them."""
    prefill_tokens_per_s: float = 0.0
    """How fast this server computed prompts: by its steps or by its own estimates; 0 if the trace contains neither."""
    step_s: float = 0.0
    decode_s: float = 0.0
    """Seconds of each step of this server, and of each request that decodes in it; 0 if the trace does not show it."""
    next_uses: npt.NDArray[np.int8] | None = None
    """The hint of each request's client about the next use, as numbers of ``NextUse``, shape (requests,). ``None`` if
    no client gave a hint."""
    cut_line: int | None = None
    """The number of the file's first line that was cut off, and so left out."""

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}, requests={len(self)}, accesses={self.num_accesses}, unique={self.num_unique}, "
            f"block_tokens={self.block_tokens})"
        )

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.times_s)

    @property
    def num_accesses(self) -> int:
        """Blocks used, summed over requests."""
        return len(self.ids)

    @property
    def num_unique(self) -> int:
        """Different blocks: the footprint. A cache of this size never evicts."""
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    @property
    def total_input_tokens(self) -> int:
        return int(self.input_tokens.sum())

    def blocks(self, request: int) -> npt.NDArray[np.int32]:
        """Return the blocks of one request, from head to tail."""
        return self.ids[self.offsets[request] : self.offsets[request + 1]]

    @property
    def num_whole(self) -> npt.NDArray[np.int64]:
        """Return the number of whole blocks of each request's prompt, shape (requests,)."""
        return np.minimum(np.diff(self.offsets), self.input_tokens // self.block_tokens)

    def next_use(self, request: int) -> NextUse:
        return NextUse.UNKNOWN if self.next_uses is None else NextUse(int(self.next_uses[request]))

    def whole_blocks(self) -> Trace:
        """Return the same requests without their partial last blocks, which engines never offload."""
        counts = np.diff(self.offsets)
        kept = self.num_whole
        position = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], counts)
        return replace(
            self,
            offsets=np.concatenate(([0], np.cumsum(kept))),
            ids=numbered(self.ids[position < np.repeat(kept, counts)]),
        )

    def part(self, begin: int, end: int) -> Trace:
        """Return the requests from number ``begin`` to ``end`` - 1."""
        if not begin and end >= len(self):
            return self
        offsets = self.offsets[begin : end + 1]
        return replace(
            self,
            times_s=self.times_s[begin:end],
            input_tokens=self.input_tokens[begin:end],
            output_tokens=self.output_tokens[begin:end],
            sessions=self.sessions[begin:end],
            offsets=offsets - offsets[0],
            ids=numbered(self.ids[offsets[0] : offsets[-1]]),
            next_uses=None if self.next_uses is None else self.next_uses[begin:end],
        )

    @property
    def requests_per_s(self) -> float:
        """Mean rate of arrivals; infinite if all requests come at once."""
        return len(self) / self.arriving_s if self.arriving_s else float("inf")

    @property
    def arriving_s(self) -> float:
        """Seconds from the first arrival to the last one."""
        return float(self.times_s[-1] - self.times_s[0]) if len(self) else 0.0

    @property
    def is_long(self) -> bool:
        return is_long(self.arriving_s)

    def busiest_hour(self) -> Trace:
        """Return the requests of the hour that has most of them."""
        if not self.is_long:
            return self
        ends = np.searchsorted(self.times_s, self.times_s + HOUR_S)
        begin = int((ends - np.arange(len(self))).argmax())
        return self.part(begin, int(ends[begin]))

    @property
    def busiest_requests_per_s(self) -> float:
        """Mean rate of arrivals in the busiest hour."""
        return len(self.busiest_hour()) / HOUR_S if self.is_long else self.requests_per_s

    def stretched(self, factor: float) -> Trace:
        """Return the same requests arriving ``factor`` times as slowly."""
        return replace(self, times_s=self.times_s * factor)

    def at_rate(self, requests_per_s: float) -> Trace:
        """Return the same requests arriving at this mean rate; at equal distances if they arrive at once."""
        if self.requests_per_s < float("inf"):
            return self.stretched(self.requests_per_s / requests_per_s)
        return replace(self, times_s=np.arange(len(self)) / requests_per_s)

    def hashes(self) -> list[bytes]:
        """Return the hash of every block, by its number."""
        return [number.to_bytes(8, "big") for number in range(self.num_unique)]


def is_long(arriving_s: float) -> bool:
    """Return whether the busiest hour counts instead of the whole time, because requests arrive for more than an hour.
    How long a server needs to answer them does not decide: the load is the same for a slow server and a fast one."""
    return arriving_s > HOUR_S


def numbered(hashes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return the values numbered from 0 in order of first appearance."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int32)
    number[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    return number[inverse.reshape(-1)]


def parents_of(offsets: npt.NDArray[np.int64], ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the id of the block before each access in its request, or -1 for the first. Shapes: ``offsets``
    (requests + 1,), ``ids`` and the result (accesses,)."""
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    heads = offsets[:-1]
    before[heads[heads < len(ids)]] = -1
    return before
