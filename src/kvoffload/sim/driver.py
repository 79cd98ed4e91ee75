# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on the production managers with a virtual clock instead of bytes.

What is simulated: a device pool that keeps prefixes in order of last use, and below it the very
``CPUOffloadingManager`` or ``TieringOffloadingManager`` that would serve, called as the connector calls it: whole
blocks only, the last token never part of a hit, hits touched and loaded, what was computed offered chunk by chunk in
portions that find room, the whole prefix touched at the end. ``tests/integration/test_simulator_agrees.py`` compares
it with the reference engine and the connector, block for block.

The time model is one prefill server, first come, first served::

    request waits  ->  promotions from disk  ->  load to the device  ->  prefill of the rest  ->  first token

Its limits: prefill speed does not depend on position or batch; decoding costs nothing; nobody overtakes a
request that waits for the disk; stores to host memory end with the prefill that made the blocks. So hits, bytes and
evictions are those of the real managers serving one request at a time, while times compare configurations and are
not a forecast: look at ``utilisation`` first, and beyond 0.9 believe no time at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.base import OffloadingManager, OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.sim.tier import Link, SimTier, VirtualClock, VirtualMemory
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
        self._device = CPUOffloadingManager(config.gpu_blocks, "lru") if config.gpu_blocks else None
        self._load_link = Link(config.load_bytes_per_s, config.load_latency_s)
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
        self._busy_s = self._prefill_s = 0.0
        self._accesses = 0

    def run(self) -> SimResult:
        offsets = self._trace.offsets.tolist()
        told = 0
        for request, (start, end) in enumerate(itertools.pairwise(offsets)):
            self._serve(request, start, end)
            if self._progress is not None and end - told > 20_000:
                self._progress(end)
                told = end
        self._manager.shutdown()
        return self._result()

    def _serve(self, request: int, start: int, end: int) -> None:
        trace, config, clock = self._trace, self._config, self._clock
        prompt = int(trace.input_tokens[request])
        whole = min(end - start, prompt // trace.block_tokens)
        path = [self._keys[number] for number in trace.ids[start : start + whole].tolist()]
        usable = min(whole, max(prompt - 1, 0) // trace.block_tokens)
        arrival_s = float(trace.times_s[request])
        clock.advance_to(arrival_s)
        begin_s = clock.now_s
        context = ReqContext(str(request))
        self._manager.on_new_request(context)
        on_device = self._found_on_device(path[:usable], context)
        in_host, hit = self._found_below(path[on_device:usable], context)
        loaded = path[on_device : on_device + hit]
        if loaded:
            self._manager.prepare_load(loaded, context)
            clock.advance_to(self._load_link.book(clock.now_s, len(loaded) * config.block_bytes))
        total_hit = on_device + hit
        if total_hit:
            self._manager.touch(path[:total_hit], context)
        if loaded:
            self._manager.complete_load(loaded, context)
        decoded_blocks = (prompt + int(trace.output_tokens[request]) - 1) // trace.block_tokens - whole
        self._prefill(prompt - total_hit * trace.block_tokens, path, total_hit, context, decoded_blocks)
        if self._device is not None:
            self._keep_on_device(self._device, path, context)
        # The portions were stored head first, each more recent than the one before: the head must outlive the tail.
        if path:
            self._manager.touch(path, context)
        self._manager.on_request_finished(context)
        self._ttfts[request] = clock.now_s - arrival_s
        self._busy_s += clock.now_s - begin_s
        self._accesses += whole
        parts = (on_device, min(in_host, hit), hit - min(in_host, hit))
        for place, blocks in enumerate(parts):
            self._hit_blocks[place] += blocks
            self._hit_tokens[place] += blocks * trace.block_tokens
        if self._served is not None:
            self._served(request, *parts)

    def _found_on_device(self, path: list[OffloadKey], context: ReqContext) -> int:
        if self._device is None:
            return 0
        answers = self._device.lookup_prefix(path, context)
        return sum(answer is True for answer in answers)

    def _found_below(self, path: list[OffloadKey], context: ReqContext) -> tuple[int, int]:
        """(blocks that host memory had at once, length of the hit once everything has come up)."""
        answers = self._manager.lookup_prefix(path, context)
        in_host = next((at for at, answer in enumerate(answers) if answer is not True), len(answers))
        while None in answers:
            self._manager.on_schedule_end()
            end_s = self._tier.next_end_s() if self._tier is not None else None
            self._clock.advance_to(end_s if end_s is not None else self._clock.now_s + self._config.max_wait_s)
            answers = self._manager.lookup_prefix(path, context)
        self._manager.on_schedule_end()
        return in_host, sum(answer is True for answer in answers)

    def _prefill(
        self, tokens: int, path: list[OffloadKey], first: int, context: ReqContext, decoded_blocks: int
    ) -> None:
        """Computes what was no hit, and offers the blocks of each chunk when it is done; what was refused then, again
        whenever the request has filled another of its ``decoded_blocks``."""
        config, clock = self._config, self._clock
        step = max(config.chunk_tokens // self._trace.block_tokens, 1)
        begin_s, seconds = clock.now_s, tokens / config.prefill_tokens_per_s
        offers = _Offers(self._manager, path, first, context)
        for stop in range(first + step, len(path) + step, step):
            computed = (min(stop, len(path)) - first) * self._trace.block_tokens
            clock.advance_to(begin_s + min(seconds, computed / config.prefill_tokens_per_s))
            offers.offer(stop)
            self._manager.on_schedule_end()
        clock.advance_to(begin_s + seconds)
        for _ in range(decoded_blocks):
            if offers.is_done:
                break
            offers.offer(len(path))
            self._manager.on_schedule_end()
        self._prefill_s += seconds

    def _keep_on_device(self, device: CPUOffloadingManager, path: list[OffloadKey], context: ReqContext) -> None:
        fitting = path[: device.num_blocks]
        device.touch(fitting)
        reserved = device.prepare_store(fitting, context)
        assert reserved is not None, "nothing on the simulated device is ever pinned"
        device.complete_store(reserved.keys_to_store, context)
        device.touch(fitting)

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
            accesses=self._accesses,
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
            prefill_s=self._prefill_s,
            utilisation=min(self._busy_s / duration_s, 1.0),
            ttft_s={"mean": float(self._ttfts.mean()), **quantiles, "max": float(self._ttfts.max())},
        )


class _Offers:
    """One request's offers for store, by the connector's rule (``StoreOffers`` there, which an import from here would
    turn upside down): a refused portion is cut to a quarter, an accepted one lets the next be four times larger, one
    refused after an accepted one waits for the next offer, and a request that evicts its own blocks stops.

    A store ends before the next offer, as one does that takes less than a step.
    """

    def __init__(self, manager: OffloadingManager, path: list[OffloadKey], first: int, context: ReqContext) -> None:
        self._manager, self._path, self._context = manager, path, context
        self._cursor = first
        self._portion = len(path)
        self._eats_itself = False

    @property
    def is_done(self) -> bool:
        return self._eats_itself or self._cursor >= len(self._path)

    def offer(self, stop: int) -> None:
        """Offers the blocks before ``stop`` that were not taken yet."""
        stored: list[OffloadKey] = []
        stop = min(stop, len(self._path))
        while not self._eats_itself and self._cursor < stop:
            keys = self._path[self._cursor : min(self._cursor + self._portion, stop)]
            output = self._manager.prepare_store(keys, self._context)
            if output is None:
                self._portion = max(len(keys) // 4, 1)
                if stored or len(keys) == 1:
                    break
                continue
            self._portion *= 4
            self._cursor += len(keys)
            stored += output.keys_to_store
            self._eats_itself = not set(self._path).isdisjoint(output.evicted_keys)
        if stored:
            self._manager.complete_store(stored, self._context)
