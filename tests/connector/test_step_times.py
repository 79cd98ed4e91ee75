# SPDX-License-Identifier: Apache-2.0
"""The steps that a recording server measures, and the costs that the simulator finds in them."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest

from kvoffload.base import StepWork
from kvoffload.config import OffloadingConfig
from kvoffload.connector.step_times import StepTimes
from kvoffload.sim import engine
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import SimConfig
from kvoffload.sim.step_costs import fit_steps
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace_files import load_trace
from kvoffload.testing.clock import ManualClock

STEP_S, TOKEN_S, DECODE_S = 0.008, 5e-5, 2e-4


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_what_steps_cost_is_found_again(is_ahead: bool, seed: int) -> None:
    """``is_ahead``: the engine decides a step before it has the results of the one before. Sometimes it idles, or
    something stalls it."""
    chance, clock = random.Random(seed), ManualClock()
    times = StepTimes(clock)
    samples: list[tuple[float, int, int]] = []
    ends = [0.0, 0.0]
    decoding = 8
    for number in range(600):
        decoding = max(decoding + chance.choice([-1, 0, 0, 1]), 1)
        prompt_tokens = chance.choice([0, 0, 0, 300, 2000])
        is_continued = chance.random() > 0.02
        if not is_continued:
            ends = [ends[-1] + 5.0] * 2
        clock.now_s = max(clock.now_s, ends[-2] if is_ahead else ends[-1])
        times.begin(StepWork(prompt_tokens + decoding, prompt_tokens, is_continued=is_continued))
        seconds = STEP_S + TOKEN_S * prompt_tokens + DECODE_S * decoding
        seconds *= chance.uniform(0.95, 1.05) * (20 if chance.random() < 0.01 else 1)
        ends.append(max(clock.now_s, ends[-1]) + seconds)
        if number % 5 == 0:
            samples += times.take()
    assert {tokens > 0 for _, tokens, _ in samples} == {True, False}
    step_s, token_s, decode_s = fit_steps(np.array(samples))
    assert token_s == pytest.approx(TOKEN_S, rel=0.1)
    for decoding in (4, 16):
        assert step_s + decode_s * decoding == pytest.approx(STEP_S + DECODE_S * decoding, rel=0.15)


def test_few_steps_show_nothing_and_no_cost_is_negative() -> None:
    assert fit_steps(np.zeros((0, 3))) == fit_steps(np.array([[1.0, 5.0, 1.0]] * 10)) == (0, 0, 0)
    falling = np.array([[1.0 / (1 + at), 0.0, float(at)] for at in range(50)])
    assert min(fit_steps(falling)) == 0 < max(fit_steps(falling))


def test_a_recorded_trace_shows_the_steps_of_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated server records what its connector sees, and steps one by one."""
    path = tmp_path / "t.jsonl"
    monkeypatch.setattr(engine, "OffloadingConfig", functools.partial(OffloadingConfig, record_trace=str(path)))
    monkeypatch.setattr(engine.Engine, "_only_decodes", lambda *_: None)
    server = SimConfig(500, 1 << 20, prefill_tokens_per_s=1 / TOKEN_S, step_s=STEP_S, decode_s=DECODE_S)
    simulate(synthesize("chat", 60, 1).whole_blocks(), server)
    recorded = load_trace(path)
    assert recorded.prefill_tokens_per_s == pytest.approx(1 / TOKEN_S, rel=0.02)
    assert recorded.step_s == pytest.approx(STEP_S, rel=0.02)
    assert recorded.decode_s == pytest.approx(DECODE_S, rel=0.1)
