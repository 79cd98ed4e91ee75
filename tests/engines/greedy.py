# SPDX-License-Identifier: Apache-2.0
"""Prompts, and the greedy answers of an engine without kvoffload, with which answers with kvoffload are compared."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.engines.models import VOCAB

NEW_TOKENS = 16
SHARP_GAP = 2e-4
"""The least margin of a usable prompt, in log probability. Rounding is around 1e-6 and grows with the order in which
batches are summed, so closer prompts cannot serve as an oracle."""


@dataclass(frozen=True)
class Prompt:
    name: str
    token_ids: tuple[int, ...]
    new_tokens: int = NEW_TOKENS


def random_tokens(seed: int, length: int) -> tuple[int, ...]:
    """Without token ids 0, 1 and the last one, which mean something."""
    rng = random.Random(seed)
    return tuple(rng.randrange(2, VOCAB - 1) for _ in range(length))


class Baseline:
    """Greedy answers of an engine alone, by prompt name: the ``tokens`` and the smallest ``gap``."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._tokens = {name: each["tokens"] for name, each in answers.items() if each["gap"] >= SHARP_GAP}
        assert len(self._tokens) >= 0.85 * len(answers), "the random model's choices are too close to ties"

    def wrong(self, answers: dict[str, list[int]]) -> list[str]:
        """Names of the prompts that were answered differently; asks that most of the answers could be judged."""
        judged = [name for name in answers if name in self._tokens]
        assert len(judged) >= 0.7 * len(answers), f"only {len(judged)} of {len(answers)} answers can be judged"
        return [name for name in judged if answers[name] != self._tokens[name]]

    def tokens(self, name: str) -> list[int] | None:
        return self._tokens.get(name)
