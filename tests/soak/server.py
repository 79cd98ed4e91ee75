# SPDX-License-Identifier: Apache-2.0
"""An engine under the soak's traffic: it is asked by chance, and every token is compared."""

from __future__ import annotations

import itertools
import random
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.reference.zoo import VOCAB, random_prompts, tiny_model
from tests.soak.watch import WatchedManager, WatchedSpec

from kvoffload.config import parse_config
from kvoffload.engines.reference import Engine, EngineOptions, Request, SamplingParams, State

__all__ = ["HANG_S", "MAX_WAIT_S", "ReferenceServer", "Server", "Turn", "make_turns", "offloading"]

BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 4
"""The bytes of four tokens: layers, keys and values, tokens, KV heads, head size, float32."""
OPTIONS = EngineOptions(num_blocks=64, block_tokens=4, max_batch_tokens=64, max_requests=6)
CONVERSATIONS, TURNS, REPLY_TOKENS = 24, 4, 6
MAX_WAIT_S = 2.0
HANG_S = 120.0
"""No request may finish for so long before the run is called hung."""
LEAST_MARGIN = 1e-2
"""If the two best tokens are closer than this, the order of additions may decide. Such turns are not used."""


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: list[int]
    reply: list[int]


def make_turns(seed: int) -> list[Turn]:
    """Every turn of every conversation, with the tokens that an engine without any cache generates."""
    chance, turns = random.Random(seed), []
    with Engine(tiny_model("llama"), EngineOptions(num_blocks=512, block_tokens=4, prefix_caching=False)) as engine:
        histories = random_prompts(CONVERSATIONS, 30, 60, seed)
        for _ in range(TURNS):
            requests = [engine.add_request(each, SamplingParams(max_tokens=REPLY_TOKENS)) for each in histories]
            engine.drain()
            for request, history in zip(requests, histories, strict=True):
                if min(request.margins) >= LEAST_MARGIN:
                    turns.append(Turn(list(history), request.output_token_ids))
                history += request.output_token_ids
                history += [chance.randrange(VOCAB) for _ in range(chance.randint(4, 16))]
    return turns


@dataclass
class Served:
    """The record of an engine's served turns."""

    requests: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    aborted: int = 0
    hit_tokens: int = 0
    last_finished_s: float = field(default_factory=time.monotonic)


def offloading(root: Path, cpu_bytes: int, quota_bytes: int) -> dict[str, Any]:
    """The configuration of kvoffload: host memory, a local disk and a folder of files, each within ``quota_bytes``."""
    limits = {"timeout_s": 1.0, "drain_timeout_s": 5.0, "threads": 2, "max_bytes": quota_bytes}
    return {
        "cpu_bytes_to_use": cpu_bytes,
        "spec_name": "WatchedSpec",
        "spec_module_path": "tests.soak.watch",
        "secondary_tiers": [
            {"type": "disk", "path": str(root / "disk"), **limits},
            {"type": "fs", "path": str(root / "files"), **limits},
        ],
        "max_wait_s": MAX_WAIT_S,
    }


class Server(ABC):
    """An engine under traffic. Every turn is asked by chance, a few requests at a time."""

    quotas_bytes: tuple[int, ...]
    """Quotas of each disk tier, from far too small to large enough."""
    rss_share = 1.05
    """The factor by which memory may differ between the second third of a run and the last."""

    def __init__(self, root: Path, turns: list[Turn], chance: random.Random, quota_bytes: int) -> None:
        self.root, self.turns, self.chance = root, turns, chance
        self.served = Served()
        self.longest_wait_s = 0.0
        self.num_waits = 0
        self.exceptions: list[str] = []
        self._active: dict[str, Turn] = {}
        self._ids = itertools.count()
        self._start(quota_bytes)
        self._manager: WatchedManager = WatchedSpec.manager

    @abstractmethod
    def _start(self, quota_bytes: int) -> None: ...

    @abstractmethod
    def _add(self, name: str, turn: Turn) -> None: ...

    @abstractmethod
    def _step(self) -> list[tuple[str, list[int], int]]:
        """Make one step.

        Returns the finished turns: names, generated tokens, and the number of tokens from offloaded blocks.
        """

    @abstractmethod
    def _end_request(self, name: str) -> None: ...

    @abstractmethod
    def reset(self, *, device: bool, offloaded: bool) -> None:
        """Empties the device's prefix cache, kvoffload's, or both."""

    @abstractmethod
    def _drain(self) -> dict[str, float]:
        """Serve the remaining turns. Returns the counts that must be zero afterwards."""

    @abstractmethod
    def _shutdown(self) -> None: ...

    def step(self, *, asks: bool = True) -> None:
        while asks and len(self._active) < 8:
            name, turn = f"{next(self._ids)}", self.chance.choice(self.turns)
            self._active[name] = turn
            self._add(name, turn)
        for name, tokens, hit_tokens in self._step():
            turn = self._active.pop(name)
            self.served.requests += 1
            self.served.last_finished_s = time.monotonic()
            self.served.tokens += len(tokens)
            self.served.hit_tokens += hit_tokens
            if tokens != turn.reply:
                self.served.wrong.append(f"{tokens} for {turn.reply}")

    def restart(self, quota_bytes: int) -> None:
        for name in list(self._active):
            self._abort(name)
        self._stop()
        self._start(quota_bytes)
        self._manager = WatchedSpec.manager

    def abort_one(self) -> None:
        if self._active:
            self._abort(self.chance.choice(sorted(self._active)))

    def _abort(self, name: str) -> None:
        del self._active[name]
        self._end_request(name)
        self.served.aborted += 1

    def end(self) -> None:
        """Serve the remaining turns and stop. Afterwards nothing is tracked, in flight or pinned."""
        deadline_s = time.monotonic() + HANG_S / 2
        while self._active:
            if time.monotonic() > deadline_s:
                self.exceptions.append("requests were left")
                break
            self.step(asks=False)
        # An idle engine does not wait for calls that hang. They return by themselves, and give their blocks back then.
        while any((left := self._drain()).values()) and time.monotonic() < deadline_s:
            self.step(asks=False)
        self.exceptions += [f"{count} {what} were left" for what, count in left.items() if count]
        self._stop()

    def _stop(self) -> None:
        self._shutdown()
        self.longest_wait_s = max(self.longest_wait_s, self._manager.longest_wait_s)
        self.num_waits += self._manager.num_waits
        self.exceptions += self._manager.exceptions


class ReferenceServer(Server):
    quotas_bytes = tuple(blocks * (BLOCK_BYTES + 128) + (64 << 10) for blocks in (60, 250, 600))

    def _start(self, quota_bytes: int) -> None:
        config = parse_config(offloading(self.root, 120 * BLOCK_BYTES, quota_bytes))
        self._engine = Engine(tiny_model("llama"), OPTIONS, config)
        self._requests: dict[str, Request] = {}

    def _add(self, name: str, turn: Turn) -> None:
        sampling = SamplingParams(max_tokens=len(turn.reply))
        self._requests[name] = self._engine.add_request(turn.prompt, sampling, request_id=name)

    def _step(self) -> list[tuple[str, list[int], int]]:
        finished = self._engine.step()
        for request in finished:
            del self._requests[request.request_id]
        return [(each.request_id, each.output_token_ids, each.external_hit_tokens) for each in finished]

    def _end_request(self, name: str) -> None:
        self._engine.abort(name)
        assert self._requests.pop(name).state is State.ABORTED

    def reset(self, *, device: bool, offloaded: bool) -> None:
        self._engine.reset_cache(device=device, offloaded=offloaded)

    def _drain(self) -> dict[str, float]:
        self._engine.drain()
        self._engine.check_invariants()
        stats = self._engine.get_stats()
        return {name: stats[name,] for name in ("jobs_in_flight", "requests_tracked", "primary_blocks_pinned")}

    def _shutdown(self) -> None:
        self._engine.shutdown()
