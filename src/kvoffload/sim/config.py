# SPDX-License-Identifier: Apache-2.0
"""The simulated hardware: a server, a fleet of servers, the tiers that they share, and their prices."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from kvoffload.config import DEFAULTS
from kvoffload.errors import ConfigError
from kvoffload.sim.routers import router_of
from kvoffload.tiering.base import CascadeMode
from kvoffload.tiering.load_policy import LoadPolicy
from kvoffload.tiering.options import default_cascade
from kvoffload.units import format_number


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A server: its tiers, its links and the time of its steps. Blocks are the trace's blocks; 0 means no such tier.

    Raises ``ConfigError`` for a server that cannot exist.
    """

    cpu_blocks: int
    block_bytes: int
    gpu_blocks: int = 0
    """Of the GPU's own KV pool. 0: not known, so that there is always room, and nothing is found there."""
    disk_blocks: int = 0
    policy: str = DEFAULTS.eviction_policy
    store_threshold: int = DEFAULTS.store_threshold
    prefill_tokens_per_s: float = 20_000.0
    """Prompt tokens per second of one long step."""
    step_s: float = 0.0
    """Seconds of a step before any token is computed."""
    decode_s: float = 0.0
    """Seconds that each decoding request adds to a step."""
    prompt_context_s: float = 0.0
    """Seconds that a prompt token adds for each token before it (attention)."""
    decode_context_s: float = 0.0
    """Seconds that a decoding request adds for each token before its own (attention)."""
    load_bytes_per_s: float = 25e9
    load_latency_s: float = 50e-6
    disk_read_bytes_per_s: float = 5e9
    disk_write_bytes_per_s: float = 3e9
    disk_latency_s: float = 200e-6
    nodes_step_s: float = 0.0
    """Seconds of a step of an engine that spans several nodes, whose tiers answer two steps later. 0: one node."""
    chunk_tokens: int = 8192
    """The most tokens that a step computes (``max_num_batched_tokens`` in vLLM)."""
    max_requests: int = 256
    """The most requests that run side by side (``max_num_seqs`` in vLLM)."""
    engine: Literal["vllm", "reference"] = "vllm"
    """Whose scheduler is modelled. In vLLM a request finds blocks that the same step computes for another, all copies
    of a block can be found, blocks that are not full are reused first, a load starts after the step's forward pass, and
    a request is only admitted if its whole prompt fits.
    In the reference engine blocks are found from the next step on, only the first copy can be found, and loads start
    before the forward pass."""
    max_wait_s: float = DEFAULTS.max_wait_s
    """The most seconds that a request waits for promotions."""
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
            raise ConfigError("A disk requires host memory above it; give the server some.")
        costs = self.step_s, self.decode_s, self.prompt_context_s, self.decode_context_s, self.nodes_step_s
        if not all(0 <= cost < math.inf for cost in costs):
            raise ConfigError("step_s, decode_s, the context costs and nodes_step_s must not be negative.")
        speeds = self.prefill_tokens_per_s, self.load_bytes_per_s, self.disk_read_bytes_per_s
        positive = *speeds, self.disk_write_bytes_per_s, self.block_bytes, self.chunk_tokens, self.max_requests
        if min(positive) <= 0:
            raise ConfigError("Speeds, block_bytes, chunk_tokens and max_requests must be positive.")

    def prompt_seconds(self, tokens: int, pairs: float) -> float:
        """Return the seconds that prompt tokens add to a step. ``pairs``: the sum of the tokens before each of them."""
        return tokens / self.prefill_tokens_per_s + pairs * self.prompt_context_s

    def step_seconds(self, prompt_tokens: int, pairs: float, decodes: int, context: int) -> float:
        """Return the seconds of a step. ``context``: tokens of all decoding requests together."""
        decoding = decodes * self.decode_s + context * self.decode_context_s
        return self.step_s + self.prompt_seconds(prompt_tokens, pairs) + decoding

    def seconds_alone(self, tokens: int) -> float:
        """Return the seconds that a prompt takes on an idle server without hits."""
        return self.prompt_seconds(tokens, tokens * tokens / 2) + math.ceil(tokens / self.chunk_tokens) * self.step_s

    @property
    def gpu_bytes(self) -> int:
        return self.gpu_blocks * self.block_bytes

    @property
    def cpu_bytes(self) -> int:
        return self.cpu_blocks * self.block_bytes

    @property
    def disk_bytes(self) -> int:
        return self.disk_blocks * self.block_bytes

    @property
    def steps_s(self) -> float:
        """The seconds that steps add to each call of a tier: the order goes out with one step, and the answer comes
        with another."""
        return 2 * self.nodes_step_s

    @property
    def cascade_mode(self) -> CascadeMode:
        """``cascade``, or its default."""
        if self.cascade is not None:
            return self.cascade
        return default_cascade(self.disk_bytes or None, self.cpu_bytes)


USUAL = SimConfig(cpu_blocks=0, block_bytes=1)
"""Has the defaults, for the command line."""


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

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ConfigError("A shared tier needs room for a block.")
        positive = self.server_bytes_per_s, self.store_bytes_per_s, self.ttl_s
        if not all(value > 0 for value in positive) or not 0 <= self.latency_s < math.inf:
            raise ConfigError("Speeds and ttl of a shared tier must be positive, and its latency not negative.")


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
    """The number of servers, the first ones, that only prefill. The others decode, and find the KV in a shared tier.
    0: each server does both."""

    @property
    def total_blocks(self) -> int:
        """Of all tiers of all servers."""
        server = self.server
        blocks = self.servers * (server.gpu_blocks + server.cpu_blocks + server.disk_blocks)
        blocks += self.pool.blocks * self.machines if self.pool else 0
        return blocks + (self.shared.blocks if self.shared else 0)

    @property
    def machines(self) -> int:
        """Machines that the servers share; the last one may have fewer of them."""
        return -(-self.servers // self.servers_per_machine)

    def __post_init__(self) -> None:
        if self.servers < 1 or self.servers_per_machine < 1:
            raise ConfigError("A fleet must have at least one server.")
        if (self.shared or self.pool) and not self.server.cpu_blocks:
            raise ConfigError("A shared tier requires host memory above it; give the servers some.")
        if self.prefill_servers and not 0 < self.prefill_servers < self.servers:
            raise ConfigError("Separate prefill requires at least one server to prefill, and one to decode.")
        if self.prefill_servers and not (self.shared or self.pool):
            raise ConfigError("Separate prefill requires a shared tier, which passes the KV on.")
        router_of(self.router)


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of an hour. Only their ratios decide. Raises ``ConfigError`` for negative prices."""

    server: float = 10.0
    cpu: float = 0.004
    """Per GiB, like ``disk`` and ``shared``."""
    disk: float = 0.0001
    shared: float = 0.005
    link: float = 0.05
    """Per GB/s of each server's link to shared tiers."""
    currency: str = ""

    def __post_init__(self) -> None:
        prices = [price for name, price in asdict(self).items() if name != "currency"]
        if not all(isinstance(price, (int, float)) and math.isfinite(price) and price >= 0 for price in prices):
            raise ConfigError("Prices must be finite numbers, and not negative.")
        if len(str(self.currency)) > 8 or not str(self.currency).isprintable():
            raise ConfigError("currency of prices must be a short name such as EUR.")

    @property
    def unit(self) -> str:
        """The currency, or the word *price*."""
        return self.currency or "price"

    def show(self, price: float) -> str:
        """Return a price with its currency."""
        return f"{format_number(price)} {self.currency}".rstrip()

    def of_tiers(self, server: SimConfig) -> float:
        """Return the price of one server's host memory and disk."""
        return (server.cpu_bytes * self.cpu + server.disk_bytes * self.disk) / 2**30

    def of_fleet(self, config: FleetConfig) -> float:
        gib = config.server.block_bytes / 2**30
        total = config.servers * (self.server + self.of_tiers(config.server))
        if config.shared is not None:
            total += gib * config.shared.blocks * self.shared
            total += config.servers * config.shared.server_bytes_per_s / 1e9 * self.link
        if config.pool is not None:
            total += gib * config.pool.blocks * self.cpu * config.machines
        return total
