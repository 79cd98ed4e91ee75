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

    @property
    def longest_tokens(self) -> int:
        """The length of a conversation at its end."""
        return self.system_tokens + self.turns * (self.message_tokens + self.reply_tokens)

    @property
    def num_turns(self) -> int:
        return self.conversations * self.turns

    def order(self) -> list[int]:
        """Return the conversation of each turn, round by round."""
        rng = random.Random(f"order {self.seed}")
        return [
            number for _ in range(self.turns) for number in rng.sample(range(self.conversations), self.conversations)
        ]

    def system_prompt(self) -> list[int]:
        return self._words("system", self.system_tokens)

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


def run_chat(engine: Engine, workload: ChatWorkload, on_turn: Callable[[Turn], None] = lambda _: None) -> list[Turn]:
    """Serve the workload with greedy sampling, and return its turns, sorted by conversation and turn.

    This is a closed loop of ``users`` turns: the next turn arrives when another one has ended. ``on_turn`` is called
    with each turn when it ends.
    """
    sampling = SamplingParams(max_tokens=workload.reply_tokens)
    histories = [workload.system_prompt() for _ in range(workload.conversations)]
    turn_of = [0] * workload.conversations
    queue = workload.order()
    active: dict[int, Request] = {}
    served = []
    while queue or active:
        while queue and len(active) < workload.users and queue[0] not in active:
            number = queue.pop(0)
            histories[number] += workload.message(number, turn_of[number])
            active[number] = engine.add_request(histories[number], sampling)
        engine.step()
        for number in [number for number, request in active.items() if request.is_done]:
            turn = _turn(number, turn_of[number], active.pop(number))
            histories[number] += turn.tokens
            turn_of[number] += 1
            served.append(turn)
            on_turn(turn)
    engine.drain()
    return sorted(served, key=lambda turn: (turn.conversation, turn.turn))


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
