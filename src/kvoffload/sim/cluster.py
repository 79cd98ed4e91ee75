# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on one server or on many, in one order of virtual time.

Each server is an ``Engine`` over its tiers, with a clock of its own. Events happen in order of time: an arrival, which
the router sends to a server, and the end of a step. So shared tiers contain at any time the blocks that servers
have written by then.

Limits, in addition to the limits of the engine model (``docs/design/0007-simulator.md``): only a server's own link and
the store's link can be congested; a lookup and a router take no time.
"""

from __future__ import annotations

import gc
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvoffload.base import OffloadingManager
from kvoffload.cpu.manager import CPUOffloadingManager, CPUPrimaryTierOffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.sim.config import FleetConfig, SharedStore, SimConfig
from kvoffload.sim.disk import Contents, Link, SimDisk, VirtualClock, VirtualMemory
from kvoffload.sim.engine import Engine, Hits
from kvoffload.sim.result import DEVICE, HOST, Result, ServerResult, quantiles
from kvoffload.sim.routers import Asked, Fleet, Router, ServerState, router_of
from kvoffload.sim.trace import Trace
from kvoffload.tiering.base import CascadeMode
from kvoffload.tiering.load_policy import BlockWorth
from kvoffload.tiering.manager import TieringOffloadingManager

SHARED, POOL = "shared", "pool"
"""Labels of the tiers that servers share."""
_CHECKS = 32
"""How often a replay asks whether it is hopeless."""


def simulate(
    trace: Trace,
    config: SimConfig | FleetConfig,
    *,
    hashes: Sequence[bytes] | None = None,
    router: Router | None = None,
    on_request: Callable[[int, int, Hits, float], object] | None = None,
    progress: Callable[[], object] = lambda: None,
    is_hopeless: Callable[[Result], bool] | None = None,
) -> Result:
    """Replay ``trace`` on a server or on a fleet. The same input gives the same result, to the last bit.

    ``hashes``: ``trace.hashes()``, to share it between replays. ``router`` overrides the configuration's.
    ``on_request`` is called with a request's number, its server, its hits and the time when it has its first token.
    ``progress`` is called after each request. ``is_hopeless`` gets the result so far from time to time while requests
    arrive, and ends the replay by ``True``. Each time in such a result is the least that it can become.
    """
    fleet = FleetConfig(config) if isinstance(config, SimConfig) else config
    with _without_collections():
        replay = _Replay(trace, fleet, trace.hashes() if hashes is None else hashes, router, on_request, progress)
        return replay.run(is_hopeless)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turn garbage collection off, because a collection visits all blocks of all servers. A replay makes no cycles, and
    a router of one's own must not."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Machine:
    """One server: an engine, host memory, the tiers below, and a clock of its own.

    ``shared`` makes the tiers below the disk, over the machine's clock.
    """

    def __init__(
        self,
        trace: Trace,
        config: SimConfig,
        hashes: Sequence[bytes],
        *,
        shared: Callable[[VirtualClock], Sequence[SimDisk]] = lambda _: (),
        on_first_token: Callable[[int, Hits], object] = lambda *_: None,
        on_end: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.config = config
        self.clock = VirtualClock()
        self.disk: SimDisk | None = None
        if config.disk_blocks:
            self.disk = SimDisk(
                Contents(config.disk_blocks),
                config.block_bytes,
                [Link(config.disk_read_bytes_per_s, config.disk_latency_s)],
                [Link(config.disk_write_bytes_per_s, config.disk_latency_s)],
                self.clock,
                steps_s=config.steps_s,
            )
        shared_tiers = tuple(shared(self.clock))
        self.tiers = (*([self.disk] if self.disk else []), *shared_tiers)
        self.manager = self._manager(trace, len(shared_tiers))
        self.engine = Engine(
            trace,
            hashes,
            config,
            self.manager,
            self.clock,
            next_tier_end_s=self._next_tier_end_s,
            on_first_token=on_first_token,
            on_end=on_end,
        )
        self.state = ServerState()
        self.step_end_s = -1.0
        """When its step is planned to end, or -1. Entries of the heap with another time are out of date."""
        self.requests = 0
        self.hits: Hits = Counter({DEVICE: 0, HOST: 0})
        """Of these requests, which have their first token."""

    def _manager(self, trace: Trace, num_shared: int) -> OffloadingManager | None:
        config = self.config
        if not config.cpu_blocks:
            return None
        if not self.tiers:
            return CPUOffloadingManager(config.cpu_blocks, config.policy, store_threshold=config.store_threshold)
        cascade: list[CascadeMode] = [config.cascade_mode] if self.disk else []
        return TieringOffloadingManager(
            CPUPrimaryTierOffloadingManager(
                config.cpu_blocks, VirtualMemory(), config.policy, store_threshold=config.store_threshold
            ),
            self.tiers,
            max_wait_s=config.max_wait_s,
            cascade=[*cascade, *["on_store"] * num_shared],  # type: ignore[list-item]
            # Without tokens nothing is weighed.
            block_worth=BlockWorth(
                config.block_bytes,
                (trace.block_tokens, *[0] * config.state_slots) if config.load_policy == "cost" else (),
            ),
            clock=self.clock,
        )

    def _next_tier_end_s(self) -> float | None:
        ends = [end_s for tier in self.tiers if (end_s := tier.next_end_s()) is not None]
        return min(ends) if ends else None

    def result(self) -> ServerResult:
        """Return the figures of the machine so far."""
        engine, stats = self.engine, self.manager.get_stats() if self.manager else {}
        read = {tier.tier_type: tier.read_blocks for tier in self.tiers}
        return ServerResult(
            requests=self.requests,
            accesses=engine.accesses,
            hit_blocks=dict(self.hits),
            busy_s=engine.busy_s,
            busiest_hour_s=engine.busiest_hour_s,
            prefill_s=engine.prefill_s,
            computed_tokens=engine.computed_tokens,
            preemptions=engine.preemptions,
            loaded_blocks=engine.loaded,
            stored_blocks=int(stats.get(("primary_blocks_stored",), 0)) - sum(read.values()),
            cpu_evicted_blocks=int(stats.get(("primary_blocks_evicted",), 0)),
            disk_evicted_blocks=self.disk.contents.index.num_evicted if self.disk else 0,
            declined_blocks=sum(int(n) for sample, n in stats.items() if sample[0] == "tier_declined_blocks"),
            refused_stores=int(stats.get(("primary_stores_refused",), 0)),
            read_blocks=read,
            written_blocks={tier.tier_type: tier.written_blocks for tier in self.tiers},
        )


class _Replay:
    def __init__(
        self,
        trace: Trace,
        config: FleetConfig,
        hashes: Sequence[bytes],
        router: Router | None,
        on_request: Callable[[int, int, Hits, float], object] | None,
        progress: Callable[[], object],
    ) -> None:
        self._trace, self._config, self._hashes = trace, config, hashes
        self._num_whole = trace.num_whole
        self._on_request, self._progress = on_request, progress
        stages = 2 if config.prefill_servers else 1
        self._routers = [router or router_of(config.router) for _ in range(stages)]
        self._store = _Store(config.shared) if config.shared else None
        self._pools = [_Store(config.pool) for _ in range(config.machines)] if config.pool else []
        self._machines = [self._machine(number) for number in range(config.servers)]
        states = [machine.state for machine in self._machines]
        cut = config.prefill_servers
        self._parts = [(0, Fleet(states[:cut])), (cut, Fleet(states[cut:]))] if cut else [(0, Fleet(states))]
        self._heap: list[tuple[float, int, int]] = []
        """The ends of steps: (time, order, server)."""
        self._order = 0
        self._ttfts = np.zeros(len(trace))
        self._first_token_s = np.full(len(trace), -1.0)
        self._handovers: list[float] = []
        self._end_s = 0.0

    def _machine(self, number: int) -> Machine:
        config = self._config.server

        def shared(clock: VirtualClock) -> list[SimDisk]:
            stores = []
            if self._pools:
                stores.append((POOL, self._pools[number // self._config.servers_per_machine]))
            if self._store is not None:
                stores.append((SHARED, self._store))
            return [store.tier(label, config, clock) for label, store in stores]

        return Machine(
            self._trace,
            config,
            self._hashes,
            shared=shared,
            on_first_token=lambda request, hits: self._first_token(number, request, hits),
            on_end=lambda _: self._note_end(number),
        )

    # ----------------------------------------------------------------------------------------------- time

    def run(self, is_hopeless: Callable[[Result], bool] | None) -> Result:
        times_s = self._trace.times_s.tolist()
        checked = {(len(times_s) - 1) * at // _CHECKS for at in range(1, _CHECKS + 1)} if is_hopeless else ()
        for request, now_s in enumerate(times_s):
            self._run_until(now_s)
            self._arrive(request, now_s, stage=0)
            if request in checked and is_hopeless is not None and is_hopeless(self._result(now_s)):
                break
        else:
            now_s = float("inf")
            self._run_until(now_s)
        for machine in self._machines:
            if machine.manager is not None:
                machine.manager.shutdown()
        return self._result(now_s)

    def _run_until(self, end_s: float) -> None:
        """Run the steps that end before ``end_s``, in order."""
        while self._heap and self._heap[0][0] < end_s:
            time_s, _, number = heapq.heappop(self._heap)
            if self._machines[number].step_end_s == time_s:
                self._machines[number].step_end_s = -1.0
                self._step(number, time_s, end_s)

    def _step(self, number: int, time_s: float, end_s: float) -> None:
        """End the server's step, and the next ones, as long as nothing else comes first."""
        engine, clock = self._machines[number].engine, self._machines[number].clock
        while True:
            clock.advance_to(time_s)
            if engine.is_stepping:
                engine.end()
            next_s = engine.begin()
            if next_s is None:
                return
            time_s = next_s
            if time_s >= end_s or (self._heap and self._heap[0][0] <= time_s):
                self._plan(number, time_s)
                return

    def _plan(self, number: int, time_s: float) -> None:
        self._machines[number].step_end_s = time_s
        self._order += 1
        heapq.heappush(self._heap, (time_s, self._order, number))

    # ------------------------------------------------------------------------------------------- requests

    def _asked(self, request: int, time_s: float) -> Asked:
        trace = self._trace
        tokens = int(trace.input_tokens[request])
        numbers = trace.blocks(request)[: self._num_whole[request]].tolist()
        return Asked(time_s, tokens, int(trace.sessions[request]), [self._hashes[number] for number in numbers])

    def _arrive(self, request: int, time_s: float, stage: int) -> None:
        first, fleet = self._parts[stage]
        chosen = 0
        if len(fleet.servers) > 1:
            chosen = self._routers[stage](self._asked(request, time_s), fleet)
            if not 0 <= chosen < len(fleet.servers):
                raise ConfigError(f"The router chose server {chosen!r}, which does not exist.")
        number = first + chosen
        machine = self._machines[number]
        machine.state.requests += 1
        machine.state.tokens += int(self._trace.input_tokens[request])
        engine = machine.engine
        engine.add(request, 1 if number < self._config.prefill_servers else None)
        if not engine.is_stepping:
            self._plan(number, time_s)
        elif (sooner_s := engine.interrupt(time_s)) is not None:
            self._plan(number, sooner_s)

    def _first_token(self, number: int, request: int, hits: Hits) -> None:
        machine = self._machines[number]
        time_s = machine.clock.now_s
        machine.state.requests -= 1
        machine.state.tokens -= int(self._trace.input_tokens[request])
        machine.requests += 1
        for tier, blocks in hits.items():
            machine.hits[tier] += blocks
        is_first = self._first_token_s[request] < 0
        if is_first:
            self._first_token_s[request] = time_s
            self._ttfts[request] = time_s - float(self._trace.times_s[request])
        elif self._config.prefill_servers:
            self._handovers.append(time_s - float(self._first_token_s[request]))
        if self._on_request is not None:
            self._on_request(request, number, hits, time_s)
        if is_first and self._config.prefill_servers:
            self._arrive(request, time_s, stage=1)
        else:
            self._progress()

    def _note_end(self, number: int) -> None:
        self._end_s = max(self._end_s, self._machines[number].clock.now_s)

    # --------------------------------------------------------------------------------------------- figures

    def _result(self, now_s: float) -> Result:
        """Return the result so far. A request without its first token gets it now, and so does one that has not
        arrived, at once."""
        trace, ttfts_s, answered_s = self._trace, self._ttfts, float(self._first_token_s.max(initial=0.0))
        waiting = (self._first_token_s < 0) & (trace.times_s <= now_s)
        if waiting.any():
            ttfts_s, answered_s = np.where(waiting, now_s - trace.times_s, ttfts_s), now_s
        servers = tuple(machine.result() for machine in self._machines)
        index = self._store.contents.index if self._store else None
        begin_s = float(trace.times_s[0]) if len(trace) else 0.0
        return Result(
            config=self._config,
            servers=servers,
            requests=len(trace),
            input_tokens=trace.total_input_tokens,
            block_tokens=trace.block_tokens,
            duration_s=max(self._end_s - begin_s, 1e-9) if len(trace) else 0.0,
            arriving_s=trace.arriving_s,
            answering_s=max(answered_s - begin_s, 0.0),
            longest_prompt_s=self._config.server.seconds_alone(int(trace.input_tokens.max(initial=0))),
            ttft_s=quantiles(ttfts_s),
            handover_s=quantiles(self._handovers),
            stored_blocks=index.num_stored - index.num_evicted if index else 0,
        )


class _Store:
    """A shared tier: its contents, and the links of the store itself."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self.contents = Contents(store.blocks, store.ttl_s, is_shared=True)
        self._read, self._write = (Link(store.store_bytes_per_s, store.latency_s) for _ in range(2))

    def tier(self, label: str, config: SimConfig, clock: VirtualClock) -> SimDisk:
        """Return a server's tier over this store."""
        store = self._store
        own = [Link(store.server_bytes_per_s, store.latency_s) for _ in range(2)]
        return SimDisk(
            self.contents,
            config.block_bytes,
            [own[0], self._read],
            [own[1], self._write],
            clock,
            label=label,
            steps_s=config.steps_s,
        )
