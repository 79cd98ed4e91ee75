# SPDX-License-Identifier: Apache-2.0
"""Test the engine alone: its logits and tokens equal those of transformers, however requests are cut, mixed and
preempted."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.engines.reference.zoo import FAMILIES, greedy, random_prompts, tiny_model

from kvoffload.engines.reference import Engine, EngineOptions, Request, SamplingParams, State, build_random_model
from kvoffload.engines.reference.runner import ModelRunner
from kvoffload.errors import ConfigError

STEPS = 6


@pytest.fixture
def logits_by_request(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """Every row of logits the engine chose a token from."""
    rows: dict[str, list[torch.Tensor]] = {}
    compute = ModelRunner.compute

    def spy(self, scheduled):  # type: ignore[no-untyped-def]
        logits = compute(self, scheduled)
        for each, row in zip([each for each in scheduled if each.yields_token], logits, strict=True):
            rows.setdefault(each.request.request_id, []).append(row.clone())
        return logits

    monkeypatch.setattr(ModelRunner, "compute", spy)
    return rows


def run(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[Request]:
    requests = [engine.add_request(prompt, sampling, request_id=str(i)) for i, prompt in enumerate(prompts)]
    while engine.has_requests:
        engine.step()
        engine.check_invariants()
    return requests


@functools.cache
def alone(family: str) -> tuple[list[list[int]], list[tuple[list[int], torch.Tensor]]]:
    """Return prompts, and the answers of transformers to each of them."""
    prompts = random_prompts(4, 3, 50, seed=1)
    prompts.append(prompts[0] + prompts[1][:5])  # shares a prefix
    return prompts, [greedy(tiny_model(family), prompt, STEPS) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            EngineOptions(num_blocks=64, block_tokens=4, max_batch_tokens=512),
            marks=pytest.mark.long,
            id="whole prompts",
        ),
        EngineOptions(num_blocks=64, block_tokens=4, max_batch_tokens=7, max_requests=4),
        EngineOptions(num_blocks=17, block_tokens=4, max_batch_tokens=32),
    ],
    ids=["whole prompts", "chunks", "preemption"],
)
def test_logits_are_those_of_transformers(
    family: str, options: EngineOptions, logits_by_request: dict[str, list[torch.Tensor]]
) -> None:
    prompts, expected = alone(family)
    with Engine(tiny_model(family), options) as engine:
        requests = run(engine, prompts, SamplingParams(max_tokens=STEPS))
        assert (engine.counts.preemptions > 0) == (options.num_blocks == 17)
    for request, (tokens, logits) in zip(requests, expected, strict=True):
        assert request.output_token_ids == tokens
        torch.testing.assert_close(torch.stack(logits_by_request[request.request_id]), logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_finds_its_first_on_the_device(family: str) -> None:
    prompt = random_prompts(1, 41, 41, seed=2)[0]
    with Engine(tiny_model(family), EngineOptions(num_blocks=64, block_tokens=4, max_batch_tokens=16)) as engine:
        first = run(engine, [prompt], SamplingParams(max_tokens=8))[0]
        second_prompt = prompt + first.output_token_ids + [3, 5, 7]
        second = run(engine, [second_prompt], SamplingParams(max_tokens=STEPS))[0]
    assert second.device_hit_tokens == (41 + 8 - 1) // 4 * 4
    assert second.output_token_ids == greedy(tiny_model(family), second_prompt, STEPS)[0]


def test_no_prefix_caching_and_other_salts_share_nothing() -> None:
    prompt = random_prompts(1, 33, 33)[0]
    with Engine(tiny_model("llama"), EngineOptions(num_blocks=64, block_tokens=4, prefix_caching=False)) as engine:
        run(engine, [prompt], SamplingParams())
        assert run(engine, [prompt], SamplingParams())[0].device_hit_tokens == 0
    with Engine(tiny_model("llama"), EngineOptions(num_blocks=64, block_tokens=4)) as engine:
        for salt, hit in (("", 0), ("a", 0), ("a", 32), ("b", 0), ("", 32)):
            request = engine.add_request(prompt, cache_salt=salt)
            engine.drain()
            assert request.device_hit_tokens == hit
        engine.reset_cache()
        assert run(engine, [prompt], SamplingParams())[0].device_hit_tokens == 0


def test_abort_at_each_stage_gives_the_blocks_back() -> None:
    prompts = random_prompts(3, 40, 40)
    with Engine(tiny_model("llama"), EngineOptions(num_blocks=32, block_tokens=4, max_batch_tokens=16)) as engine:
        requests = [engine.add_request(prompt, SamplingParams(max_tokens=20)) for prompt in prompts]
        engine.abort(requests[2].request_id)  # before it was ever scheduled
        engine.step()
        engine.abort(requests[0].request_id)  # in the middle of its prompt
        engine.check_invariants()
        while len(requests[1].output_token_ids) < 3:
            engine.step()
        engine.abort(requests[1].request_id)
        engine.abort("never was")
        engine.check_invariants()
        assert not engine.has_requests
        assert {request.state for request in requests} == {State.ABORTED}


def test_a_caller_s_mistakes_are_sentences() -> None:
    with pytest.raises(ConfigError, match="num_blocks must be at least 1"):
        EngineOptions(num_blocks=0)
    with pytest.raises(ConfigError, match="max_tokens must be at least 1"):
        SamplingParams(max_tokens=0)
    with Engine(tiny_model("llama"), EngineOptions(num_blocks=4, block_tokens=4)) as engine:
        with pytest.raises(ConfigError, match="can never fit"):
            engine.add_request([1] * 10, SamplingParams(max_tokens=8))
        with pytest.raises(ConfigError, match="at least one token"):
            engine.add_request([])
        engine.add_request([1] * 10, SamplingParams(max_tokens=7), request_id="x")
        with pytest.raises(ConfigError, match="already"):
            engine.add_request([1], request_id="x")
        engine.drain()


def test_random_models_are_the_same_for_the_same_seed() -> None:
    def make(seed: int) -> Engine:
        return Engine(build_random_model(layers=1, hidden=32, heads=4, vocab=64, seed=seed))

    first, again, other = make(0), make(0), make(1)
    assert first.layout.identity == again.layout.identity != other.layout.identity
    prompt = random_prompts(1, 20, 20)[0]
    prompt = [token % 64 for token in prompt]
    assert first.generate([prompt]) == again.generate([prompt]) != other.generate([prompt])
