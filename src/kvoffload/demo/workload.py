# SPDX-License-Identifier: Apache-2.0
"""A chat workload of several conversations. The prompt of a turn is the conversation so far plus a new message."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvoffload.engines.reference.engine import Engine
from kvoffload.engines.reference.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class ChatWorkload:
    """The messages and their order, which depend only on these numbers. Sizes are in tokens.

    All conversations start with the same system prompt. In each round, every conversation has one turn, in random
    order, so that a varying number of other turns is served between two turns of a conversation.
    """

    conversations: int = 12
    turns: int = 4
    system_tokens: int = 64
    message_tokens: int = 160
    reply_tokens: int = 16
    users: int = 2
    """The number of turns served at the same time."""
    vocab: int = 4096
    seed: int = 0
    document_tokens: int = 0
    """The length of the document with which each conversation starts, after the system prompt."""

    @property
    def longest_tokens(self) -> int:
        """The length of a conversation at its end."""
        beginning = self.system_tokens + self.document_tokens
        return beginning + self.turns * (self.message_tokens + self.reply_tokens)

    @property
    def num_turns(self) -> int:
        return self.conversations * self.turns

    def order(self) -> list[int]:
        """Return the conversation of each turn, round by round."""
        rng = random.Random(f"order {self.seed}")
        return [
            number for _ in range(self.turns) for number in rng.sample(range(self.conversations), self.conversations)
        ]

    def beginning(self, conversation: int) -> list[int]:
        """Return the system prompt and the conversation's document."""
        return self._words("system", self.system_tokens) + self._words(f"document {conversation}", self.document_tokens)

    def message(self, conversation: int, turn: int) -> list[int]:
        """Return the user's message in this turn, which is counted from 0."""
        return self._words(f"message {conversation} {turn}", self.message_tokens)

    def _words(self, what: str, count: int) -> list[int]:
        rng = random.Random(f"{what} {self.seed}")
        return [rng.randrange(self.vocab) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as it was served."""

    conversation: int
    turn: int
    tokens: tuple[int, ...]
    """The tokens of the reply."""
    margins: tuple[float, ...]
    """For each token of the reply, the difference between its logit and the second-best logit."""
    top_logits: tuple[float, ...]
    """The logit of each token of the reply."""
    prompt_tokens: int
    device_hit_tokens: int
    external_hit_tokens: int
    time_to_first_token_s: float


class Chat:
    """Serves the workload with greedy sampling, one round at a time."""

    def __init__(
        self, engine: Engine, workload: ChatWorkload, on_turn: Callable[[Turn], None] = lambda _: None
    ) -> None:
        """``on_turn`` is called with each turn when it ends."""
        self._engine = engine
        self._workload = workload
        self._on_turn = on_turn
        self._histories = [workload.beginning(number) for number in range(workload.conversations)]
        self._order = workload.order()
        self._served: list[Turn] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns served so far, sorted by conversation and turn."""
        return tuple(sorted(self._served, key=lambda turn: (turn.conversation, turn.turn)))

    def serve_round(self) -> None:
        """Serve the next turn of every conversation, in a closed loop: ``users`` turns at a time."""
        sampling = SamplingParams(max_tokens=self._workload.reply_tokens)
        round_ = len(self._served) // self._workload.conversations
        queue = self._order[round_ * self._workload.conversations :][: self._workload.conversations]
        active: dict[int, Request] = {}
        while queue or active:
            while queue and len(active) < self._workload.users:
                number = queue.pop(0)
                self._histories[number] += self._workload.message(number, round_)
                active[number] = self._engine.add_request(self._histories[number], sampling)
            self._engine.step()
            for number in [number for number, request in active.items() if request.is_done]:
                turn = _turn(number, round_, active.pop(number))
                self._histories[number] += turn.tokens
                self._served.append(turn)
                self._on_turn(turn)
        self._engine.drain()


def _turn(conversation: int, turn: int, request: Request) -> Turn:
    return Turn(
        conversation,
        turn,
        tuple(request.output_token_ids),
        tuple(request.margins),
        tuple(request.top_logits),
        request.num_prompt_tokens,
        request.device_hit_tokens,
        request.external_hit_tokens,
        request.time_to_first_token_s,
    )
