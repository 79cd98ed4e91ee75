# SPDX-License-Identifier: Apache-2.0
"""The figures of a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.sim.config import FleetConfig, Prices, SimConfig
from kvoffload.sim.trace import HOUR_S, is_long

DEVICE, HOST = "device", "host"
"""The names of the GPU's own cache and of host memory among the tiers."""
SATURATED = 0.9
"""The utilisation above which times only say that a server is too slow."""
MOST_BEHIND = 0.05
"""How long a queue may last after the last arrival, divided by the time from the first arrival to the last."""


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The figures of one server."""

    requests: int
    accesses: int
    """Whole prompt blocks that its requests asked for."""
    hit_blocks: dict[str, int]
    """By tier: ``device``, ``host``, ``disk``, ``pool``, ``shared``. A block that several tiers have counts as a hit of
    the highest one."""
    busy_s: float
    """Seconds of the steps that computed prompts, or in which a request waited for room."""
    busiest_hour_s: float
    """The part of ``busy_s`` in the busiest hour, to within five minutes."""
    prefill_s: float
    """Seconds that prompts added to steps."""
    computed_tokens: int
    preemptions: int
    loaded_blocks: int
    """Blocks and states loaded to the device."""
    stored_blocks: int
    """Blocks stored from the device to host memory."""
    cpu_evicted_blocks: int
    disk_evicted_blocks: int
    declined_blocks: int
    """Blocks below host memory that requests found and did not load, because computing them was faster."""
    refused_stores: int
    read_blocks: dict[str, int]
    """By tier below host memory, as ``written_blocks``."""
    written_blocks: dict[str, int]


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of a simulation, of one server or of many."""

    config: FleetConfig
    servers: tuple[ServerResult, ...]
    requests: int
    input_tokens: int
    block_tokens: int
    duration_s: float
    """From the first arrival to the last token."""
    arriving_s: float
    """From the first arrival to the last arrival."""
    answering_s: float
    """From the first arrival to the last first token."""
    longest_prompt_s: float
    """The longest prompt would take so many seconds on an idle server without hits."""
    ttft_s: dict[str, float]
    """Time to first token: mean, p50, p90, p99, max."""
    handover_s: dict[str, float]
    """With prefill apart: from a request's first token to when the decoding server has its KV."""
    stored_blocks: int
    """Blocks in the shared tier at the end."""

    @property
    def server(self) -> SimConfig:
        """Each of the servers."""
        return self.config.server

    # Hits, of the servers that prefill.

    @property
    def _prefilling(self) -> tuple[ServerResult, ...]:
        return self.servers[: self.config.prefill_servers or None]

    @property
    def hit_blocks(self) -> Counter[str]:
        """By tier."""
        return sum((Counter(server.hit_blocks) for server in self._prefilling), Counter())

    @property
    def disk_hit_blocks(self) -> int:
        """Of all tiers below host memory."""
        hits = self.hit_blocks
        return hits.total() - hits[DEVICE] - hits[HOST]

    @property
    def accesses(self) -> int:
        return sum(server.accesses for server in self._prefilling)

    @property
    def hit_rate(self) -> float:
        return self.hit_blocks.total() / max(self.accesses, 1)

    @property
    def hit_tokens(self) -> int:
        return self.hit_blocks.total() * self.block_tokens

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / max(self.input_tokens, 1)

    @property
    def handed_over(self) -> float:
        """With prefill apart: the share of whole prompt blocks that decoding servers found."""
        decoding = self.servers[self.config.prefill_servers :] if self.config.prefill_servers else ()
        found = sum(sum(server.hit_blocks.values()) for server in decoding)
        return found / max(sum(server.accesses for server in decoding), 1)

    # Work, of all servers.

    def sum_of(self, name: str) -> Any:
        """Return the sum of a field of ``ServerResult`` over all servers."""
        return sum(getattr(server, name) for server in self.servers)

    def cost_per_million_tokens(self, prices: Prices) -> float:
        """Return the cost of a million prompt tokens, whether computed or found."""
        return prices.of_fleet(self.config) * self.duration_s / 3600 / max(self.input_tokens / 1e6, 1e-9)

    @property
    def utilisation(self) -> float:
        """The share of the time in which the busiest server computed prompts, or had requests waiting for room.

        The time ends with the last first token: after that a server only decodes, however much it was behind. It
        includes a gap after the last arrival. If all requests arrive at once, it ends with the last token. If requests
        arrive for more than an hour, the busiest hour counts, because a quiet day would hide an hour in which a server
        is overloaded.
        """
        if is_long(self.arriving_s):
            return min(max(server.busiest_hour_s for server in self.servers) / HOUR_S, 1.0)
        seconds = max(self.answering_s, self.arriving_s * self.requests / max(self.requests - 1, 1))
        seconds = seconds if self.arriving_s else self.duration_s
        return min(max(server.busy_s for server in self.servers) / max(seconds, 1e-9), 1.0)

    @property
    def lateness(self) -> float:
        """Seconds from the last arrival to the last first token, divided by the seconds that are allowed. Allowed are a
        twentieth of the time from the first arrival to the last (of an hour at most), and the time of the longest
        prompt alone. If the load grows to the end, this exceeds 1 before servers are busy most of the time."""
        allowed_s = MOST_BEHIND * min(self.arriving_s, HOUR_S) + self.longest_prompt_s
        return max(self.answering_s - self.arriving_s, 0.0) / max(allowed_s, 1e-9)

    @property
    def is_overloaded(self) -> bool:
        """Whether a server is busy for too long or behind, so that times only show that there is too little of it.
        Requests that all arrive at once have no rate to keep up with."""
        return self.arriving_s > 0 and (self.utilisation > SATURATED or self.lateness > 1)


def quantiles(seconds: npt.ArrayLike) -> dict[str, float]:
    """Mean, p50, p90, p99 and max; empty for nothing."""
    values = np.asarray(seconds)
    if not len(values):
        return {}
    found = {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)}
    return {"mean": float(values.mean()), **found, "max": float(values.max())}
