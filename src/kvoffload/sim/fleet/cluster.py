# SPDX-License-Identifier: Apache-2.0
"""Replays a trace on many servers and their router, in one order of virtual time.

Each server is a ``Machine`` with a clock of its own, which serves one request at a time. Whatever happens next in time
happens first: an arrival, which the router sends to a server; a server that goes on; a server that dies or comes back.
So what servers share is at any time what they have written by then.

Limits, beside those of ``sim/driver.py``: the network knows no congestion but that of a server's own link and of the
store's; a lookup costs nothing; a router's own time is nothing.
"""

from __future__ import annotations

import gc
import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError
from kvoffload.sim.disk import Contents, Link, SimDisk, VirtualClock
from kvoffload.sim.driver import Machine, SimConfig, quantiles
from kvoffload.sim.fleet.config import FleetConfig, SharedStore
from kvoffload.sim.fleet.result import FleetResult, Outage, RequestFigures, ServerResult, total
from kvoffload.sim.fleet.routers import Asked, Fleet, Router, ServerState, router_of
from kvoffload.sim.server import Hit
from kvoffload.sim.trace import Trace

SHARED, POOL = "shared", "pool"
"""Labels of the tiers that servers share."""


def simulate_fleet(
    trace: Trace,
    config: FleetConfig,
    *,
    keys: Sequence[OffloadKey] | None = None,
    router: Router | None = None,
    on_request: Callable[[int, int, Hit, float], object] | None = None,
    progress: Callable[[], object] = lambda: None,
) -> FleetResult:
    """Replays ``trace`` on the fleet. The same input gives the same result.

    ``router`` overrides the configuration's. ``on_request`` is called with a request's index, its server, its hit and
    the time, when a server is done with it: its first token. ``progress`` is called after each request that is done.
    """
    keys = trace.keys() if keys is None else keys
    with _without_collections():
        return _Replay(trace, config, keys, router, on_request, progress).run()


@contextmanager
def _without_collections() -> Iterator[None]:
    """A collection visits all blocks of all servers. A replay makes no cycles, and a router of one's own must not."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_Kind = Literal["death", "return", "step"]


@dataclass(slots=True)
class _Member:
    """One server of the fleet, over its lives."""

    machine: Machine
    disk: Contents | None
    state: ServerState = field(default_factory=ServerState)
    queue: deque[int] = field(default_factory=deque)
    running: tuple[int, Generator[float, None, Hit]] | None = None
    life: int = 0
    requests: int = 0
    past: list[ServerResult] = field(default_factory=list)
    """Of the lives before."""
    shares: list[tuple[float, float]] = field(default_factory=list)
    """(time, share of the prompt that was hit), of each request: only for servers that die."""


class _Replay:
    def __init__(
        self,
        trace: Trace,
        config: FleetConfig,
        keys: Sequence[OffloadKey],
        router: Router | None,
        on_request: Callable[[int, int, Hit, float], object] | None,
        progress: Callable[[], object],
    ) -> None:
        self._trace, self._config, self._keys = trace, config, keys
        self._num_whole = trace.num_whole
        self._on_request, self._progress = on_request, progress
        stages = 2 if config.prefill_servers else 1
        self._routers = [router or router_of(config.router) for _ in range(stages)]
        self._store = _Store(config.shared) if config.shared else None
        self._pools = [_Store(config.pool) for _ in range(config.machines)] if config.pool else []
        self._members: list[_Member] = []
        for number in range(config.servers):
            disk = Contents(config.server.disk_blocks) if config.server.disk_blocks else None
            self._members.append(_Member(self._machine(number, disk), disk))
        states = [member.state for member in self._members]
        cut = config.prefill_servers
        self._parts = [(0, Fleet(states[:cut])), (cut, Fleet(states[cut:]))] if cut else [(0, Fleet(states))]
        self._heap: list[tuple[float, int, _Kind, int, int]] = []
        self._order = 0
        self._ttfts = np.zeros(len(trace))
        self._found = np.zeros(len(trace), dtype=np.int64)
        self._first_token_s = np.full(len(trace), -1.0)
        self._handovers: list[float] = []
        self._mortal = {death.server for death in config.deaths}
        self._end_s = 0.0
        self._stranded: list[tuple[int, int]] = []
        """(request, stage) of those that came while no server lived."""

    def _machine(self, number: int, disk: Contents | None) -> Machine:
        config = self._config.server

        def shared(clock: VirtualClock) -> list[SimDisk]:
            stores = []
            if self._pools:
                stores.append((POOL, self._pools[number // self._config.servers_per_machine]))
            if self._store is not None:
                stores.append((SHARED, self._store))
            return [store.tier(label, config, clock) for label, store in stores]

        return Machine(self._trace, config, self._keys, contents=disk, shared=shared)

    # ----------------------------------------------------------------------------------------------- time

    def run(self) -> FleetResult:
        for number, death in enumerate(self._config.deaths):
            self._push(death.at_s, "death", number)
            self._push(death.back_s, "return", number)
        times = self._trace.times_s.tolist()
        for request, time_s in enumerate(times):
            self._run_until(time_s)
            self._arrive(request, time_s, stage=0)
        self._run_until(float("inf"))
        for member in self._members:
            member.machine.manager.shutdown()
        return self._result()

    def _push(self, time_s: float, kind: _Kind, number: int, life: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._heap, (time_s, self._order, kind, number, life))

    def _run_until(self, end_s: float) -> None:
        """Does what happens up to ``end_s``, in order."""
        while self._heap and self._heap[0][0] <= end_s:
            time_s, _, kind, number, life = heapq.heappop(self._heap)
            if kind == "step":
                if self._members[number].life == life:
                    self._step(number, time_s, end_s)
            elif kind == "death":
                self._die(self._config.deaths[number].server, time_s)
            else:
                self._return(self._config.deaths[number].server, time_s)

    def _step(self, number: int, time_s: float, end_s: float) -> None:
        """The server goes on, as long as nothing else comes first."""
        member, cut = self._members[number], self._config.prefill_servers
        while True:
            member.machine.clock.advance_to(time_s)
            if member.running is None:
                request = member.queue.popleft()
                member.running = request, member.machine.steps(request, 1 if number < cut else None)
            request, steps = member.running
            try:
                time_s = max(next(steps), time_s)
            except StopIteration as end:
                member.running = None
                self._finish(number, request, end.value, time_s)
                if not member.queue:
                    return
            if time_s > end_s or (self._heap and self._heap[0][0] <= time_s):
                self._push(time_s, "step", number, member.life)
                return

    # ------------------------------------------------------------------------------------------- requests

    def _asked(self, request: int, time_s: float) -> Asked:
        trace = self._trace
        tokens = int(trace.input_tokens[request])
        numbers = trace.blocks(request)[: self._num_whole[request]].tolist()
        return Asked(time_s, tokens, int(trace.sessions[request]), [self._keys[number] for number in numbers])

    def _arrive(self, request: int, time_s: float, stage: int) -> None:
        first, fleet = self._parts[stage]
        if not any(server.is_alive for server in fleet.servers):
            self._stranded.append((request, stage))
            return
        asked = self._asked(request, time_s)
        chosen = self._routers[stage](asked, fleet)
        if not (0 <= chosen < len(fleet.servers) and fleet.servers[chosen].is_alive):
            raise ConfigError(f"The router chose server {chosen!r}, which is not one that is alive.")
        number = first + chosen
        member = self._members[number]
        member.state.requests += 1
        member.state.tokens += asked.tokens
        member.queue.append(request)
        if member.running is None and len(member.queue) == 1:
            self._push(time_s, "step", number, member.life)

    def _finish(self, number: int, request: int, hit: Hit, time_s: float) -> None:
        member = self._members[number]
        self._leave(member, request)
        member.requests += 1
        self._end_s = max(self._end_s, time_s)
        is_first = self._first_token_s[request] < 0
        if is_first:
            self._first_token_s[request] = time_s
            self._ttfts[request] = time_s - float(self._trace.times_s[request])
            self._found[request] = hit.blocks
        else:
            self._handovers.append(time_s - float(self._first_token_s[request]))
        if number in self._mortal:
            member.shares.append((time_s, hit.blocks / max(int(self._num_whole[request]), 1)))
        if self._on_request is not None:
            self._on_request(request, number, hit, time_s)
        if is_first and self._config.prefill_servers:
            self._arrive(request, time_s, stage=1)
        else:
            self._progress()

    def _leave(self, member: _Member, request: int) -> None:
        member.state.requests -= 1
        member.state.tokens -= int(self._trace.input_tokens[request])

    # -------------------------------------------------------------------------------------- death and return

    def _die(self, number: int, time_s: float) -> None:
        member = self._members[number]
        member.state.is_alive = False
        member.life += 1
        left = [*([member.running[0]] if member.running else []), *member.queue]
        member.machine.clock.advance_to(time_s)
        if member.running:
            member.running[1].close()
        member.machine.die()
        member.past.append(self._server_result(member))
        member.running, member.requests = None, 0
        member.queue.clear()
        for request in left:
            self._leave(member, request)
            is_decoding = bool(self._config.prefill_servers) and self._first_token_s[request] >= 0
            self._arrive(request, time_s, stage=int(is_decoding))

    def _return(self, number: int, time_s: float) -> None:
        member = self._members[number]
        member.machine = self._machine(number, member.disk)
        member.machine.clock.advance_to(time_s)
        member.state.is_alive = True
        stranded, self._stranded = self._stranded, []
        for request, stage in stranded:
            self._arrive(request, time_s, stage)

    # --------------------------------------------------------------------------------------------- figures

    def _server_result(self, member: _Member) -> ServerResult:
        machine, block_bytes = member.machine, self._config.server.block_bytes
        return ServerResult(
            requests=member.requests,
            accesses=machine.server.accesses,
            hit_blocks=dict(machine.hit_blocks),
            busy_s=machine.busy_s,
            prefill_s=machine.server.prefill_s,
            read_bytes={tier.tier_type: tier.read_blocks * block_bytes for tier in machine.tiers},
            written_bytes={tier.tier_type: tier.written_blocks * block_bytes for tier in machine.tiers},
        )

    def _result(self) -> FleetResult:
        trace = self._trace
        servers = tuple(total([*member.past, self._server_result(member)]) for member in self._members)
        index = self._store.contents.index if self._store else None
        return FleetResult(
            config=self._config,
            servers=servers,
            requests=len(trace),
            input_tokens=trace.total_input_tokens,
            block_tokens=trace.block_tokens,
            duration_s=max(self._end_s - float(trace.times_s[0]), 1e-9) if len(trace) else 0.0,
            prefill_s=sum(server.prefill_s for server in servers),
            ttft_s=quantiles(self._ttfts),
            handover_s=quantiles(self._handovers),
            stored_blocks=index.num_stored - index.num_evicted if index else 0,
            outages=tuple(self._outages()),
        )

    def _outages(self) -> Iterator[Outage]:
        trace, config = self._trace, self._config
        figures = RequestFigures(trace.times_s, self._ttfts, self._num_whole, self._found)
        for number, at_s, back_s in config.deaths:
            yield figures.outage(f"server {number}", at_s, back_s, self._members[number].shares)
        for label, store in ((SHARED, config.shared), (POOL, config.pool)):
            for begin_s, end_s in store.away if store is not None else ():
                yield figures.outage(label, begin_s, end_s)


class _Store:
    """What is shared: the contents, and the links of the store itself."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self.contents = Contents(store.blocks, store.ttl_s, is_shared=True)
        self._read, self._write = (Link(store.store_bytes_per_s, store.latency_s) for _ in range(2))

    def tier(self, label: str, config: SimConfig, clock: VirtualClock) -> SimDisk:
        """A server's way to it."""
        store = self._store
        own = [Link(store.server_bytes_per_s, store.latency_s) for _ in range(2)]
        return SimDisk(
            self.contents,
            config.block_bytes,
            [own[0], self._read],
            [own[1], self._write],
            clock,
            label=label,
            away=store.away,
            deadline_s=config.max_wait_s,
            steps_s=config.steps_s,
        )
