# SPDX-License-Identifier: Apache-2.0
"""What a fleet is: its servers, what they share, and what fails when."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvoffload.errors import ConfigError
from kvoffload.sim.driver import SimConfig
from kvoffload.sim.fleet.routers import router_of

__all__ = ["Death", "FleetConfig", "SharedStore"]


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A store that servers share: a Redis, an object store, or the memory of one machine."""

    blocks: int
    server_bytes_per_s: float = 3.125e9
    """Of a server's link, in each direction. The default is 25 Gbit/s."""
    store_bytes_per_s: float = 12.5e9
    """Of the store's own, in each direction. The default is 100 Gbit/s."""
    latency_s: float = 0.5e-3
    ttl_s: float = float("inf")
    """Seconds after its write at which a block is gone."""
    away: tuple[tuple[float, float], ...] = ()
    """Times in which it cannot be reached: (begin_s, end_s)."""

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ConfigError("A shared tier needs room for a block.")
        if min(self.server_bytes_per_s, self.store_bytes_per_s, self.ttl_s) <= 0 or self.latency_s < 0:
            raise ConfigError("Speeds and ttl of a shared tier must be positive, and its latency not negative.")


class Death(NamedTuple):
    """A server that dies at ``at_s`` and is back at ``back_s``, with nothing in memory and what is on its disk. Its
    requests are sent again to others."""

    server: int
    at_s: float
    back_s: float


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The servers of a fleet. Raises ``ConfigError`` for a fleet that cannot exist."""

    server: SimConfig
    """Each of them."""
    servers: int = 1
    router: str = "round-robin"
    shared: SharedStore | None = None
    """One for all."""
    pool: SharedStore | None = None
    """One for each ``servers_per_machine`` servers."""
    servers_per_machine: int = 1
    prefill_servers: int = 0
    """Servers, the first ones, that only prefill: the others then decode, and find the KV in what is shared. 0: each
    server does both."""
    deaths: tuple[Death, ...] = ()
    event_delay_s: float = 0.0
    """Seconds until a router knows of an event."""
    event_loss: float = 0.0
    """Share of messages of events, one for each request of a server, that never arrive."""
    seed: int = 0

    @property
    def machines(self) -> int:
        """That many its servers share, the last one perhaps with fewer of them."""
        return -(-self.servers // self.servers_per_machine)

    def __post_init__(self) -> None:
        if self.servers < 1 or self.servers_per_machine < 1:
            raise ConfigError("A fleet has at least one server.")
        if (self.shared or self.pool) and not self.server.cpu_blocks:
            raise ConfigError("A shared tier needs host memory above it; give the servers some.")
        if self.prefill_servers and not 0 < self.prefill_servers < self.servers:
            raise ConfigError("Prefill apart needs at least one server to prefill, and one to decode.")
        if self.prefill_servers and not (self.shared or self.pool):
            raise ConfigError("Prefill apart needs a shared tier, through which the KV goes.")
        if not 0 <= self.event_loss <= 1 or self.event_delay_s < 0:
            raise ConfigError("The loss of events is a share, and their delay not negative.")
        router_of(self.router)
        for death in self.deaths:
            if not 0 <= death.server < self.servers or not death.at_s < death.back_s:
                raise ConfigError(f"{death} names no server from 0 to {self.servers - 1}, or ends before it begins.")
        ordered = sorted(self.deaths, key=lambda death: (death.server, death.at_s))
        for one, other in pairwise(ordered):
            if one.server == other.server and other.at_s <= one.back_s:
                raise ConfigError(f"{other} begins before server {one.server} is back from the one before.")
