# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on the production managers with a virtual clock instead of bytes.

It simulates the device's cache (``device_cache.py``). Below it runs a real ``CPUOffloadingManager`` or
``TieringOffloadingManager``, called as the connector calls it (``server.py``).

The time model is one prefill server, first come, first served::

    request waits  ->  promotions from disk  ->  load to the device  ->  prefill of the rest  ->  first token

Its limits: prefill speed does not depend on position or batch. Decoding costs nothing. No request overtakes one that
waits for the disk. Stores to host memory end with the prefill that computed the blocks.

So hits, bytes and evictions are those of the real managers serving one request at a time. Times only compare
configurations; they are no forecast. Above a ``utilisation`` of 0.9 they mean nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.config import DEFAULTS
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUOffloadingManager, CPUPrimaryTierOffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.sim.device_cache import DeviceCache
from kvoffload.sim.disk import Contents, Link, SimDisk, VirtualClock, VirtualMemory
from kvoffload.sim.server import Hit, Server, finish
from kvoffload.sim.trace import Trace
from kvoffload.tiering.base import CascadeMode
from kvoffload.tiering.load_policy import BlockWorth, LoadPolicy
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.options import default_cascade

DEVICE, HOST = "device", "host"
"""Names of the tiers that are not secondary, in counts of hits."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The machine that a trace is replayed on. Blocks are the trace's blocks; 0 of them means no such tier.

    Raises ``ConfigError`` for a machine that cannot exist.
    """

    cpu_blocks: int
    block_bytes: int
    gpu_blocks: int = 0
    disk_blocks: int = 0
    policy: str = DEFAULTS.eviction_policy
    store_threshold: int = DEFAULTS.store_threshold
    prefill_tokens_per_s: float = 20_000.0
    load_bytes_per_s: float = 25e9
    load_latency_s: float = 50e-6
    disk_read_bytes_per_s: float = 5e9
    disk_write_bytes_per_s: float = 3e9
    disk_latency_s: float = 200e-6
    disk_slow: tuple[tuple[float, float, float], ...] = ()
    """Times in which others read from the disk too: (begin_s, end_s, share of the reading speed that is left)."""
    nodes_step_s: float = 0.0
    """Seconds of a step of an engine that spans several nodes, whose tiers answer two steps later; 0: of one node."""
    chunk_tokens: int = 8192
    """Tokens prefilled between two offers of computed blocks."""
    max_wait_s: float = DEFAULTS.max_wait_s
    """Seconds a request waits for promotions at most."""
    load_policy: LoadPolicy = DEFAULTS.load_policy
    """Which hits on disk are loaded."""
    cascade: CascadeMode | None = None
    """When blocks are written to the disk. Default: as in serving, by the sizes of disk and host memory."""
    state_slots: int = 0
    """Blocks that the model's recurrent state takes in a tier; 0 for models with attention alone."""

    def __post_init__(self) -> None:
        if min(self.cpu_blocks, self.gpu_blocks, self.disk_blocks, self.state_slots) < 0:
            raise ConfigError("cpu_blocks, gpu_blocks, disk_blocks and state_slots must not be negative.")
        if self.disk_blocks and not self.cpu_blocks:
            raise ConfigError("A disk needs host memory above it; give it some.")
        speeds = self.prefill_tokens_per_s, self.load_bytes_per_s, self.disk_read_bytes_per_s
        if not 0 <= self.nodes_step_s < math.inf:
            raise ConfigError("nodes_step_s must not be negative.")
        if min(*speeds, self.disk_write_bytes_per_s, self.block_bytes, self.chunk_tokens) <= 0:
            raise ConfigError("Speeds, block_bytes and chunk_tokens must be positive.")

    @property
    def steps_s(self) -> float:
        """What steps add to each call of a tier: the order goes out with one, and the answer comes with another."""
        return 2 * self.nodes_step_s

    @property
    def cascade_mode(self) -> CascadeMode:
        """``cascade``, or its default."""
        if self.cascade is not None:
            return self.cascade
        disk_bytes = self.disk_blocks * self.block_bytes
        return default_cascade(disk_bytes or None, self.cpu_blocks * self.block_bytes)


USUAL = SimConfig(cpu_blocks=0, block_bytes=1)
"""Has the defaults, for the command line."""


@dataclass(frozen=True, slots=True)
class SimResult:
    """The figures of one replay. A block that several tiers have counts as a hit of the highest one."""

    policy: str
    gpu_blocks: int
    cpu_blocks: int
    disk_blocks: int
    cascade: CascadeMode
    requests: int
    accesses: int
    """Whole blocks that requests asked for."""
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
    declined_blocks: int
    """Blocks on disk that requests found there and did not load, because computing them was faster."""
    refused_stores: int
    saved_prefill_s: float
    """Prefill time that host memory and disk saved."""
    prefill_s: float
    """Prefill time that remained."""
    utilisation: float
    """Share of the trace's duration in which the server was busy or waiting for a load. At 1 it cannot keep up."""
    ttft_s: dict[str, float]
    """Time to first token: mean, p50, p90, p99, max."""

    @property
    def hit_rate(self) -> float:
        return (self.gpu_hit_blocks + self.cpu_hit_blocks + self.disk_hit_blocks) / max(self.accesses, 1)

    @property
    def token_hit_rate(self) -> float:
        return (self.gpu_hit_tokens + self.cpu_hit_tokens + self.disk_hit_tokens) / max(self.input_tokens, 1)


def simulate(
    trace: Trace,
    config: SimConfig,
    *,
    keys: Sequence[OffloadKey] | None = None,
    on_request: Callable[[int, Hit, float], object] = lambda *_: None,
) -> SimResult:
    """Replays ``trace`` on ``config``. The same input gives the same result, to the last bit.

    ``keys``: ``trace.keys()``, to share it between replays. ``on_request`` is called after each request with its index,
    its hit and its seconds to the first token.
    """
    machine = Machine(trace, config, trace.keys() if keys is None else keys)
    clock, server, disk = machine.clock, machine.server, machine.disk
    ttfts_s = np.zeros(len(trace))
    for request, arrival_s in enumerate(trace.times_s.tolist()):
        clock.advance_to(arrival_s)
        hit = finish(machine.steps(request), clock)
        ttfts_s[request] = clock.now_s - arrival_s
        on_request(request, hit, float(ttfts_s[request]))
    machine.manager.shutdown()  # what is in flight is lost
    stats, hits, block_bytes = machine.manager.get_stats(), machine.hit_blocks, config.block_bytes
    gpu_hits, cpu_hits = hits[DEVICE], hits[HOST]
    disk_hits = hits.total() - gpu_hits - cpu_hits
    written, promoted = (disk.written_blocks, disk.read_blocks) if disk else (0, 0)
    duration_s = max(clock.now_s - float(trace.times_s[0]), 1e-9)
    return SimResult(
        policy=config.policy,
        gpu_blocks=config.gpu_blocks,
        cpu_blocks=config.cpu_blocks,
        disk_blocks=config.disk_blocks,
        cascade=config.cascade_mode,
        requests=len(trace),
        accesses=server.accesses,
        input_tokens=trace.total_input_tokens,
        gpu_hit_blocks=gpu_hits,
        cpu_hit_blocks=cpu_hits,
        disk_hit_blocks=disk_hits,
        gpu_hit_tokens=gpu_hits * trace.block_tokens,
        cpu_hit_tokens=cpu_hits * trace.block_tokens,
        disk_hit_tokens=disk_hits * trace.block_tokens,
        loaded_bytes=server.loaded * block_bytes,
        stored_bytes=(int(stats["primary_blocks_stored",]) - promoted) * block_bytes,
        disk_read_bytes=promoted * block_bytes,
        disk_written_bytes=written * block_bytes,
        cpu_evicted_blocks=int(stats["primary_blocks_evicted",]),
        disk_evicted_blocks=disk.contents.index.num_evicted if disk else 0,
        declined_blocks=sum(int(count) for sample, count in stats.items() if sample[0] == "tier_declined_blocks"),
        refused_stores=int(stats["primary_stores_refused",]),
        saved_prefill_s=(cpu_hits + disk_hits) * trace.block_tokens / config.prefill_tokens_per_s,
        prefill_s=server.prefill_s,
        utilisation=min(machine.busy_s / duration_s, 1.0),
        ttft_s=quantiles(ttfts_s),
    )


class _NoTiers(CPUOffloadingManager):
    """What an engine without offloading has below its device: it accepts every block and keeps none."""

    def __init__(self) -> None:
        super().__init__(1, "lru")

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, give_way: Callable[[int], object] | None = None
    ) -> PrepareStoreOutput | None:
        return PrepareStoreOutput([], CPULoadStoreSpec(()), [])


class Machine:
    """One server: its device cache, host memory, the tiers below, and a clock of its own.

    ``contents`` is what its disk holds at first, by default nothing. ``shared`` makes the tiers below the disk, over
    the machine's clock.
    """

    def __init__(
        self,
        trace: Trace,
        config: SimConfig,
        keys: Sequence[OffloadKey],
        *,
        contents: Contents | None = None,
        shared: Callable[[VirtualClock], Sequence[SimDisk]] = lambda _: (),
    ) -> None:
        self.config = config
        self.clock = VirtualClock()
        self.disk: SimDisk | None = None
        if config.disk_blocks:
            self.disk = SimDisk(
                contents or Contents(config.disk_blocks),
                config.block_bytes,
                [Link(config.disk_read_bytes_per_s, config.disk_latency_s, slow=config.disk_slow)],
                [Link(config.disk_write_bytes_per_s, config.disk_latency_s)],
                self.clock,
                steps_s=config.steps_s,
            )
        self.shared = tuple(shared(self.clock))
        self.tiers = (*([self.disk] if self.disk else []), *self.shared)
        self.manager: OffloadingManager
        cascade: list[CascadeMode] = [config.cascade_mode] if self.disk else []
        cascade += ["on_store"] * len(self.shared)
        if self.tiers:
            self.manager = TieringOffloadingManager(
                CPUPrimaryTierOffloadingManager(
                    config.cpu_blocks, VirtualMemory(), config.policy, store_threshold=config.store_threshold
                ),
                self.tiers,
                max_wait_s=config.max_wait_s,
                cascade=cascade,
                # Without tokens nothing is weighed.
                block_worth=BlockWorth(
                    config.block_bytes,
                    (trace.block_tokens, *[0] * config.state_slots) if config.load_policy == "cost" else (),
                ),
                clock=self.clock,
            )
        elif config.cpu_blocks:
            self.manager = CPUOffloadingManager(
                config.cpu_blocks, config.policy, store_threshold=config.store_threshold
            )
        else:
            self.manager = _NoTiers()
        # A pool that has room for everything never evicts, however large it is said to be.
        tokens = (trace.input_tokens + trace.output_tokens).sum()
        everything = (int(tokens) // trace.block_tokens + 2 * len(trace)) * (1 + config.state_slots)
        device = DeviceCache(min(config.gpu_blocks, everything)) if config.gpu_blocks else None
        self.server = Server(
            trace,
            keys,
            self.manager,
            self.clock,
            cpu_blocks=config.cpu_blocks,
            prefill_tokens_per_s=config.prefill_tokens_per_s,
            chunk_tokens=config.chunk_tokens,
            block_bytes=config.block_bytes,
            load_link=Link(config.load_bytes_per_s, config.load_latency_s),
            device=device,
            wait=self._wait,
            state_slots=config.state_slots,
        )
        self.busy_s = 0.0
        self.hit_blocks: Counter[str] = Counter()
        """By tier: "device", "host", and the labels of those below."""

    def steps(self, request: int, output: int | None = None) -> Generator[float, None, Hit]:
        """Serves one request, whose arrival the clock has reached. Gives the times to go on at, not before now.
        ``output`` as in ``Server.steps``."""
        begin_s = self.clock.now_s
        try:
            hit = yield from self.server.steps(request, output)
        finally:
            self.busy_s += self.clock.now_s - begin_s
        for tier, num_blocks in ((DEVICE, hit.device), (HOST, hit.host), *hit.below.items()):
            self.hit_blocks[tier] += num_blocks
        return hit

    def _wait(self) -> float:
        """The end of the next job of a tier."""
        ends = [end_s for tier in self.tiers if (end_s := tier.next_end_s()) is not None]
        return min(ends) if ends else self.clock.now_s + self.config.max_wait_s

    def die(self) -> None:
        """Loses what is in memory and in flight. Nothing more is written."""
        for tier in self.tiers:
            tier.shutdown()


def quantiles(seconds: npt.ArrayLike) -> dict[str, float]:
    """Mean, p50, p90, p99 and max; empty for nothing."""
    values = np.asarray(seconds)
    if not len(values):
        return {}
    found = {f"p{share}": float(np.percentile(values, share)) for share in (50, 90, 99)}
    return {"mean": float(values.mean()), **found, "max": float(values.max())}
