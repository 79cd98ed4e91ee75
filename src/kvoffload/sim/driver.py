# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on the production managers with a virtual clock instead of bytes.

What is simulated: a device pool (``device.py``), and below it the very ``CPUOffloadingManager`` or
``TieringOffloadingManager`` that would serve, called as the connector calls it (``server.py``).

The time model is one prefill server, first come, first served::

    request waits  ->  promotions from disk  ->  load to the device  ->  prefill of the rest  ->  first token

Its limits: prefill speed does not depend on position or batch; decoding costs nothing; nobody overtakes a
request that waits for the disk; stores to host memory end with the prefill that made the blocks. So hits, bytes and
evictions are those of the real managers serving one request at a time, while times compare configurations and are
not a forecast: look at ``utilisation`` first, and beyond 0.9 believe no time at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.base import OffloadingManager, OffloadKey
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.sim.device_cache import DevicePool
from kvoffload.sim.disk import Link, SimTier, VirtualClock, VirtualMemory
from kvoffload.sim.server import Server
from kvoffload.sim.trace import Trace
from kvoffload.tiering.base import CascadeMode
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.primary import CPUPrimaryTierOffloadingManager

__all__ = ["SimConfig", "SimResult", "simulate"]


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A machine to replay a trace on. Blocks are the trace's blocks."""

    cpu_blocks: int
    block_bytes: int
    gpu_blocks: int = 0
    disk_blocks: int = 0
    policy: str = "lru"
    store_threshold: int = 1
    prefill_tokens_per_s: float = 20_000.0
    load_bytes_per_s: float = 25e9
    load_latency_s: float = 50e-6
    disk_read_bytes_per_s: float = 5e9
    disk_write_bytes_per_s: float = 3e9
    disk_latency_s: float = 200e-6
    chunk_tokens: int = 8192
    """Tokens prefilled between two offers of finished blocks."""
    max_wait_s: float = 10.0
    cascade: CascadeMode = "on_store"
    """When blocks go down to the disk."""

    def __post_init__(self) -> None:
        if self.cpu_blocks < 1:
            raise ConfigError("The primary tier must hold at least one block; give it more memory.")
        if min(self.gpu_blocks, self.disk_blocks) < 0:
            raise ConfigError("gpu_blocks and disk_blocks must not be negative.")
        speeds = self.prefill_tokens_per_s, self.load_bytes_per_s, self.disk_read_bytes_per_s
        if min(*speeds, self.disk_write_bytes_per_s, self.block_bytes, self.chunk_tokens) <= 0:
            raise ConfigError("Speeds, block_bytes and chunk_tokens must be positive.")


@dataclass(frozen=True, slots=True)
class SimResult:
    """What one replay found. Hits are blocks and tokens that a tier served, each counted for the highest tier."""

    policy: str
    gpu_blocks: int
    cpu_blocks: int
    disk_blocks: int
    cascade: CascadeMode
    requests: int
    accesses: int
    """Whole blocks asked for."""
    input_tokens: int
    gpu_hit_blocks: int
    cpu_hit_blocks: int
    disk_hit_blocks: int
    gpu_hit_tokens: int
    cpu_hit_tokens: int
    disk_hit_tokens: int
    loaded_bytes: int
    stored_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    cpu_evicted_blocks: int
    disk_evicted_blocks: int
    refused_stores: int
    disk_write_amplification: float
    """Disk writes per distinct block ever written; 0 with no writes."""
    saved_prefill_s: float
    """Prefill that host memory and disk made unnecessary."""
    prefill_s: float
    """Prefill that remained."""
    utilisation: float
    """Share of the trace's duration that the prefill server was busy or waiting for a load; at 1 it can't keep up."""
    ttft_s: dict[str, float]
    """Time to first token: mean, p50, p90, p99, max."""

    @property
    def hit_rate(self) -> float:
        return (self.gpu_hit_blocks + self.cpu_hit_blocks + self.disk_hit_blocks) / max(self.accesses, 1)

    @property
    def token_hit_rate(self) -> float:
        return (self.gpu_hit_tokens + self.cpu_hit_tokens + self.disk_hit_tokens) / max(self.input_tokens, 1)

    @property
    def offload_hit_rate(self) -> float:
        """Blocks that host memory and disk added to what the device held."""
        return (self.cpu_hit_blocks + self.disk_hit_blocks) / max(self.accesses, 1)


def simulate(
    trace: Trace,
    config: SimConfig,
    *,
    keys: Sequence[OffloadKey] | None = None,
    progress: Callable[[int], object] | None = None,
    served: Callable[[int, int, int, int], object] | None = None,
) -> SimResult:
    """Replays ``trace`` on ``config``; the same input gives the same result, to the last bit.

    ``progress`` is told the accesses done, now and then. ``served`` is told (request, blocks from the device, from
    host memory, from disk) for every request.
    """
    return _Driver(trace, config, trace.keys() if keys is None else keys, progress, served).run()


class _Driver:
    """The state of one replay."""

    def __init__(
        self,
        trace: Trace,
        config: SimConfig,
        keys: Sequence[OffloadKey],
        progress: Callable[[int], object] | None,
        served: Callable[[int, int, int, int], object] | None,
    ) -> None:
        self._trace, self._config, self._keys = trace, config, keys
        self._progress, self._served = progress, served
        self._clock = VirtualClock()
        self._tier: SimTier | None = None
        self._manager: OffloadingManager
        if config.disk_blocks:
            self._tier = SimTier(
                config.disk_blocks,
                config.block_bytes,
                Link(config.disk_read_bytes_per_s, config.disk_latency_s),
                Link(config.disk_write_bytes_per_s, config.disk_latency_s),
                self._clock,
            )
            primary = CPUPrimaryTierOffloadingManager(
                config.cpu_blocks, VirtualMemory(), config.policy, store_threshold=config.store_threshold
            )
            self._manager = TieringOffloadingManager(
                primary, [self._tier], max_wait_s=config.max_wait_s, cascade=[config.cascade], clock=self._clock
            )
        else:
            self._manager = CPUOffloadingManager(
                config.cpu_blocks, config.policy, store_threshold=config.store_threshold
            )
        self._hit_blocks = [0, 0, 0]
        self._hit_tokens = [0, 0, 0]
        self._ttfts = np.zeros(len(trace))
        self._busy_s = 0.0
        self._server = Server(
            trace,
            keys,
            self._manager,
            self._clock,
            prefill_tokens_per_s=config.prefill_tokens_per_s,
            chunk_tokens=config.chunk_tokens,
            block_bytes=config.block_bytes,
            load_link=Link(config.load_bytes_per_s, config.load_latency_s),
            device=DevicePool(config.gpu_blocks) if config.gpu_blocks else None,
            wait=self._wait,
        )

    def run(self) -> SimResult:
        told = 0
        for request, end in enumerate(self._trace.offsets[1:].tolist()):
            self._serve(request)
            if self._progress is not None and end - told > 20_000:
                self._progress(end)
                told = end
        self._manager.shutdown()
        return self._result()

    def _serve(self, request: int) -> None:
        arrival_s = float(self._trace.times_s[request])
        self._clock.advance_to(arrival_s)
        begin_s = self._clock.now_s
        hit = self._server.serve(request)
        self._ttfts[request] = self._clock.now_s - arrival_s
        self._busy_s += self._clock.now_s - begin_s
        parts = (hit.device, hit.host, hit.disk)
        for place, blocks in enumerate(parts):
            self._hit_blocks[place] += blocks
            self._hit_tokens[place] += blocks * self._trace.block_tokens
        if self._served is not None:
            self._served(request, *parts)

    def _wait(self) -> None:
        """Until some I/O of the disk ends."""
        end_s = self._tier.next_end_s() if self._tier is not None else None
        self._clock.advance_to(end_s if end_s is not None else self._clock.now_s + self._config.max_wait_s)

    def _result(self) -> SimResult:
        config, trace, tier = self._config, self._trace, self._tier
        stats = self._manager.get_stats()
        gpu, cpu, disk = self._hit_blocks
        written = tier.written_blocks if tier else 0
        duration_s = max(self._clock.now_s - float(trace.times_s[0]), 1e-9)
        quantiles = {f"p{share}": float(np.percentile(self._ttfts, share)) for share in (50, 90, 99)}
        promoted = tier.read_blocks if tier else 0
        return SimResult(
            policy=config.policy,
            gpu_blocks=config.gpu_blocks,
            cpu_blocks=config.cpu_blocks,
            disk_blocks=config.disk_blocks,
            cascade=config.cascade,
            requests=len(trace),
            accesses=self._server.accesses,
            input_tokens=trace.total_input_tokens,
            gpu_hit_blocks=gpu,
            cpu_hit_blocks=cpu,
            disk_hit_blocks=disk,
            gpu_hit_tokens=self._hit_tokens[0],
            cpu_hit_tokens=self._hit_tokens[1],
            disk_hit_tokens=self._hit_tokens[2],
            loaded_bytes=(cpu + disk) * config.block_bytes,
            stored_bytes=(int(stats["primary_blocks_stored",]) - promoted) * config.block_bytes,
            disk_read_bytes=promoted * config.block_bytes,
            disk_written_bytes=written * config.block_bytes,
            cpu_evicted_blocks=int(stats["primary_blocks_evicted",]),
            disk_evicted_blocks=tier.evicted_blocks if tier else 0,
            refused_stores=int(stats["primary_stores_refused",]),
            disk_write_amplification=written / len(tier.ever_written) if tier and tier.ever_written else 0.0,
            saved_prefill_s=(self._hit_tokens[1] + self._hit_tokens[2]) / config.prefill_tokens_per_s,
            prefill_s=self._server.prefill_s,
            utilisation=min(self._busy_s / duration_s, 1.0),
            ttft_s={"mean": float(self._ttfts.mean()), **quantiles, "max": float(self._ttfts.max())},
        )
