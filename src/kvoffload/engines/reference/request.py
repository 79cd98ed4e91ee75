# SPDX-License-Identifier: Apache-2.0
"""A generation request: the client's parameters and the request's progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvoffload.connector import BlockIds
from kvoffload.engines.reference.hashing import extend_block_hashes, root_hash
from kvoffload.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The condition to stop. The engine always chooses the most likely token."""

    max_tokens: int = 16

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {self.max_tokens}.")


class State(Enum):
    WAITING = "waiting"
    """Has no GPU blocks."""
    LOADING = "loading"
    """Has GPU blocks that a load is filling, and computes nothing meanwhile."""
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Request:
    """Implements ``connector.EngineRequest``. The engine's scheduler owns it; clients only read it.

    The keys and values of its first ``num_computed_tokens`` tokens are on the GPU.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    block_tokens: int
    cache_salt: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    state: State = State.WAITING
    tokens: list[int] = field(init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    device_hit_tokens: int = 0
    """Number of tokens found in the GPU's prefix cache at the first admission."""
    external_hit_tokens: int = 0
    """Number of further tokens found in offloaded blocks at the first admission."""
    margins: list[float] = field(default_factory=list, init=False)
    """For each generated token: the best logit minus the second best."""
    top_logits: list[float] = field(default_factory=list, init=False)
    """For each generated token: the best logit."""
    arrival_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    _root: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_token_ids)
        self._root = root_hash(self.cache_salt)
        extend_block_hashes(self.block_hashes, self._root, self.tokens, self.block_tokens)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.state.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_done(self) -> bool:
        return self.state in (State.FINISHED, State.ABORTED)

    @property
    def time_to_first_token_s(self) -> float:
        assert self.first_token_s is not None, f"{self!r} has no token yet"
        return self.first_token_s - self.arrival_s

    def append(self, token: int, top_logit: float, margin: float) -> bool:
        """Append the next token, and return whether it is the last."""
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()
        self.tokens.append(token)
        self.top_logits.append(top_logit)
        self.margins.append(margin)
        extend_block_hashes(self.block_hashes, self._root, self.tokens, self.block_tokens)
        return self.num_tokens - self.num_prompt_tokens >= self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request in one step."""

    request: Request
    num_computed_tokens: int
    """Number of tokens computed before the step."""
    num_tokens: int
    """Number of tokens to compute in the step."""
    block_ids: BlockIds
    """The request's whole block tables, by group."""

    @property
    def yields_token(self) -> bool:
        return self.num_computed_tokens + self.num_tokens == self.request.num_tokens
