# SPDX-License-Identifier: Apache-2.0
"""The requests of the fake engine: tokens, hashes of their prefixes, and status."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tests.fakes.device import chain_hash

__all__ = ["FakeRequest", "Scheduling", "Status"]


class Scheduling(Enum):
    """When an engine learns the token that a step generates."""

    SYNCHRONOUS = "before the next step is scheduled"
    ASYNCHRONOUS = "after the next step was scheduled; the last token is expected, as with a limit on new tokens"
    ASYNCHRONOUS_STOP = "after the next step was scheduled, also the last token: one step too many is computed"


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class FakeRequest:
    """A prompt and the tokens generated after it. Satisfies ``EngineRequest``, which does not show hidden tokens."""

    request_id: str
    tokens: list[int]
    max_new_tokens: int
    hash_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    num_prompt_tokens: int = 0
    num_hidden: int = 0
    """Trailing tokens that are on the device, and that the engine's scheduler has not received yet."""
    all_hashes: list[bytes] = field(default_factory=list)
    status: Status = Status.WAITING
    tables: list[list[int]] = field(default_factory=list)
    """GPU blocks by group. Empty while it has none."""
    computed_tokens: int = 0
    valid_tokens: int = 0
    """While loading: tokens that are on the device even if the load fails."""
    table_is_new: bool = True
    is_complete: bool = False
    """All its tokens are generated. It ends when the scheduler has received the last one."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.extend_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) - self.num_hidden

    @property
    def block_hashes(self) -> list[bytes]:
        return self.all_hashes[: self.num_tokens // self.hash_tokens]

    @property
    def has_blocks(self) -> bool:
        return any(self.tables)

    def extend_hashes(self) -> None:
        step = self.hash_tokens
        for n in range(len(self.all_hashes), len(self.tokens) // step):
            parent = self.all_hashes[-1] if self.all_hashes else b""
            self.all_hashes.append(chain_hash(parent, self.tokens[n * step : (n + 1) * step]))

    def prefix_hash(self, num_tokens: int) -> bytes:
        """Return the hash of the first ``num_tokens`` tokens: the block hash, if a block ends there."""
        full, rest = divmod(num_tokens, self.hash_tokens)
        parent = self.all_hashes[full - 1] if full else b""
        return chain_hash(parent, self.tokens[num_tokens - rest : num_tokens]) if rest else parent
