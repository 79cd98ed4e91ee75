# SPDX-License-Identifier: Apache-2.0
"""Measure how long an engine's steps take, for the trace of its requests. Scheduler thread only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvoffload.base import StepWork


class _Step(NamedTuple):
    begin_s: float
    prompt_tokens: int
    decoding: int


class StepTimes:
    """Keeps the newest measured step that computed prompts, and the newest one that only decoded.

    The time of a step shows in the interval to the next step or, if an engine decides one step ahead of its results, in
    the interval after that. So it is the longer of the two, and it counts only if the engine did not idle and if the
    steps before and after it computed no more prompt tokens.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[_Step] = deque(maxlen=3)
        """The last steps without a pause between them."""
        self._measured: dict[bool, tuple[float, int, int]] = {}

    def begin(self, work: StepWork) -> None:
        """Note a step, which has just been decided."""
        now_s = self._clock()
        if not work.is_continued:
            self._steps.clear()
        elif len(self._steps) == 3:
            before, step, after = self._steps
            if step.prompt_tokens >= max(before.prompt_tokens, after.prompt_tokens):
                seconds = max(after.begin_s - step.begin_s, now_s - after.begin_s)
                self._measured[step.prompt_tokens > 0] = round(seconds, 6), step.prompt_tokens, step.decoding
        self._steps.append(_Step(now_s, work.prompt_tokens, work.tokens - work.prompt_tokens))

    def take(self) -> list[tuple[float, int, int]]:
        """Return the steps measured since the last call, as seconds, prompt tokens and decoding requests."""
        found, self._measured = [*self._measured.values()], {}
        return found
