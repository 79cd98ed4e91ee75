# SPDX-License-Identifier: Apache-2.0
"""Test the engine with kvoffload: real tensors and real transfers. Tokens never depend on offloading."""

from __future__ import annotations

import functools
import random
from collections.abc import Collection
from typing import Any

import pytest
import torch
from tests.engines.reference.inside import begin_step, end_step, kept_requests, num_free, pools_of, wrap_handlers
from tests.engines.reference.zoo import FAMILIES, VOCAB, random_prompts, tiny_model
from tests.sizes import by_size

from kvoffload.base import LoadStoreSpec, OffloadingHandler, TransferResult
from kvoffload.config import OffloadingConfig, parse_config
from kvoffload.connector.short_loads import ShortLoads
from kvoffload.engines.reference import Engine, EngineOptions, Request, SamplingParams, State
from kvoffload.errors import ConfigError

OPTIONS = EngineOptions(num_blocks=24, block_tokens=4, max_batch_tokens=24, max_requests=4)


def config(**more: Any) -> OffloadingConfig:
    return parse_config({"cpu_bytes_to_use": "4MiB", **more})


def chat(engine: Engine, conversations: int = 5, turns: int = 3, seed: int = 0) -> list[list[int]]:
    """Interleaved multi-turn conversations, far larger than the device's pool. Returns the tokens of every turn."""
    rng = random.Random(seed)
    histories = random_prompts(conversations, 14, 22, seed)
    outputs = []
    for _ in range(turns):
        requests = [
            (number, engine.add_request(histories[number], SamplingParams(max_tokens=4)))
            for number in rng.sample(range(conversations), conversations)
        ]
        while engine.has_requests:
            engine.step()
            engine.check_invariants()
        for number, request in requests:
            assert request.state is State.FINISHED
            outputs.append(request.output_token_ids)
            histories[number] += request.output_token_ids + [rng.randrange(VOCAB) for _ in range(rng.randint(4, 9))]
    return outputs


@functools.cache
def reference(family: str, seed: int = 0) -> list[list[int]]:
    with Engine(tiny_model(family), EngineOptions(num_blocks=512, block_tokens=4, prefix_caching=False)) as engine:
        return chat(engine, seed=seed)


def assert_nothing_leaks(engine: Engine) -> None:
    """After ``drain``: no request, job or pin is left, and every GPU block is free."""
    engine.drain()
    engine.check_invariants()
    stats = engine.get_stats()
    assert stats["jobs_in_flight",] == stats["requests_tracked",] == stats["primary_blocks_pinned",] == 0
    assert {*num_free(engine)} == {engine.options.num_blocks}
    assert not kept_requests(engine)


@pytest.mark.parametrize("factor", by_size([2], [1, 2, 4]))
@pytest.mark.parametrize("family", by_size(["llama", "mistral", "gemma3_text", "falcon_h1"], FAMILIES))
def test_tokens_are_the_same_through_eviction_and_reload(family: str, factor: int) -> None:
    with Engine(tiny_model(family), OPTIONS, config(block_size=4 * factor)) as engine:
        assert chat(engine) == reference(family)
        assert engine.counts.external_hit_tokens > 40  # how many depends on how fast the copies are
        assert_nothing_leaks(engine)
        stats = engine.get_stats()
        assert stats["load_bytes",] > 0 < stats["store_bytes",]


@pytest.mark.parametrize("policy", by_size(["arc"], ["lru", "arc"]))
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1"])
def test_tokens_are_the_same_with_a_primary_tier_that_is_too_small(family: str, policy: str) -> None:
    with Engine(
        tiny_model(family), OPTIONS, config(eviction_policy=policy, cpu_bytes_to_use=40 * 4 * 3 * 128)
    ) as engine:
        assert chat(engine) == reference(family)
        assert engine.get_stats()["primary_blocks_evicted",] > 0
        assert_nothing_leaks(engine)


@pytest.mark.parametrize("more", [{"store_threshold": 2}, {"offload_prompt_only": True}])
def test_tokens_are_the_same_with_options(more: dict[str, Any]) -> None:
    with Engine(tiny_model("llama"), OPTIONS, config(**more)) as engine:
        assert chat(engine) == reference("llama")
        assert_nothing_leaks(engine)


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_preemption_goes_together_with_offloading(family: str) -> None:
    prompts = random_prompts(6, 30, 44, seed=3)
    sampling = SamplingParams(max_tokens=16)
    with Engine(tiny_model(family), EngineOptions(num_blocks=256, block_tokens=4)) as engine:
        expected = engine.generate(prompts, sampling)
    with Engine(tiny_model(family), OPTIONS, config()) as engine:
        assert engine.generate(prompts, sampling) == expected
        assert engine.counts.preemptions
        assert_nothing_leaks(engine)


class Flaky(OffloadingHandler):
    """A real handler whose transfers fail now and then. A failing load first overwrites its GPU blocks with garbage."""

    def __init__(self, inner: OffloadingHandler, engine: Engine, rng: random.Random, share: float) -> None:
        self._inner, self._engine, self._rng, self._share = inner, engine, rng, share
        self._doomed: dict[int, tuple[LoadStoreSpec, LoadStoreSpec]] = {}
        self.failures = 0

    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        if self._rng.random() < self._share:
            self._doomed[job_id] = spec
        self._inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        return [self._spoil(result) for result in self._inner.get_finished()]

    def _spoil(self, result: TransferResult) -> TransferResult:
        spec = self._doomed.pop(result.job_id, None)
        if spec is None:
            return result
        self.failures += 1
        destination = spec[1]
        if destination.medium() == "GPU":
            position = 0
            for pool, size in zip(pools_of(self._engine), destination.group_sizes, strict=True):  # type: ignore[attr-defined]
                for block in destination.block_ids[position : position + size]:  # type: ignore[attr-defined]
                    pool[int(block)] = 7.0
                position += size
        return TransferResult(result.job_id, False)

    def wait(self, job_ids: Collection[int]) -> None:
        self._inner.wait(job_ids)

    def shutdown(self) -> None:
        self._inner.shutdown()


@pytest.mark.parametrize("family", by_size(["gemma3_text"], ["llama", "gemma3_text", "falcon_h1"]))
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_tokens_are_the_same_when_transfers_fail(family: str, share: float) -> None:
    with Engine(tiny_model(family), OPTIONS, config()) as engine:
        # With share 1.0 every load fails, and no store.
        shares = {("CPU", "GPU"): share, ("GPU", "CPU"): share if share < 1 else 0.0}
        flaky = wrap_handlers(engine, lambda media, handler: Flaky(handler, engine, random.Random(3), shares[media]))
        assert chat(engine) == reference(family)
        assert flaky["CPU", "GPU"].failures
        assert engine.counts.failed_loads
        assert_nothing_leaks(engine)
        stats = engine.get_stats()
        assert stats["load_jobs", "failed"] == flaky["CPU", "GPU"].failures


@pytest.mark.parametrize(
    ("family", "seed"), [*(("gemma3_text", seed) for seed in range(by_size(1, 4))), ("falcon_h1", 0)]
)
def test_aborts_and_resets_at_random_leave_tokens_and_books_right(family: str, seed: int) -> None:
    rng = random.Random(seed)
    prompts = random_prompts(4, 20, 50, seed=5)
    sampling = SamplingParams(max_tokens=6)
    with Engine(tiny_model(family), EngineOptions(num_blocks=512, block_tokens=4)) as engine:
        expected = engine.generate(prompts, sampling)
    aborted_while_loading = 0
    with Engine(tiny_model(family), OPTIONS, config(block_size=8)) as engine:
        alive: dict[str, tuple[int, Request]] = {}
        for _ in range(by_size(100, 400)):
            action = rng.random()
            if action < 0.3 and len(alive) < 6:
                which = rng.randrange(len(prompts))
                request = engine.add_request(prompts[which], sampling)
                alive[request.request_id] = (which, request)
            elif action < 0.4 and alive:
                _, request = alive.pop(rng.choice(sorted(alive)))
                aborted_while_loading += request.state is State.LOADING
                engine.abort(request.request_id)
            elif action < 0.45:
                engine.reset_cache(device=rng.random() < 0.8, offloaded=rng.random() < 0.3)
            for request in engine.step():
                which, _ = alive.pop(request.request_id)
                assert request.output_token_ids == expected[which]
            engine.check_invariants()
        assert engine.get_stats()["load_jobs", "ok"]
        assert_nothing_leaks(engine)


@pytest.mark.parametrize("within_step", [False, True])
def test_a_request_aborted_while_it_loads_leaves_its_blocks_to_others(
    within_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShortLoads, "fits", lambda *_: within_step)
    prompts = random_prompts(3, 60, 60, seed=6)
    with Engine(tiny_model("llama"), OPTIONS, config()) as engine:
        expected = engine.generate(prompts, SamplingParams(max_tokens=4))
        engine.drain()
        for _ in range(5):
            engine.reset_cache(offloaded=False)
            request = engine.add_request(prompts[0], SamplingParams(max_tokens=4))
            begin_step(engine)
            assert request.state is (State.RUNNING if within_step else State.LOADING)
            engine.abort(request.request_id)
            engine.check_invariants()
            end_step(engine)
            # These take the blocks the aborted load may still be writing.
            assert engine.generate(prompts[1:], SamplingParams(max_tokens=4)) == expected[1:]
        assert_nothing_leaks(engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_on_a_gpu(family: str) -> None:
    big = EngineOptions(num_blocks=512, block_tokens=4, prefix_caching=False)
    with Engine(tiny_model(family).to("cuda"), big) as engine:
        expected = chat(engine)
    with Engine(tiny_model(family).to("cuda"), OPTIONS, config(block_size=8)) as engine:
        assert chat(engine) == expected
        assert engine.counts.external_hit_tokens > 40  # how many depends on how fast the copies are
        assert_nothing_leaks(engine)


def test_nothing_is_found_after_a_reset() -> None:
    prompt = random_prompts(1, 60, 60)[0]
    with Engine(tiny_model("llama"), OPTIONS, config()) as engine:
        for reset_offloaded in (False, True):
            engine.generate([prompt])
            engine.drain()
            engine.reset_cache(offloaded=reset_offloaded)
            request = engine.add_request(prompt)
            engine.drain()
            assert request.device_hit_tokens == 0
            assert (request.external_hit_tokens > 0) == (not reset_offloaded)


def test_bad_sizes_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        Engine(tiny_model("llama"), OPTIONS, config(block_size=6))
    with pytest.raises(ConfigError, match="prefix_caching"):
        Engine(tiny_model("llama"), EngineOptions(prefix_caching=False), config())
    with pytest.raises(ConfigError, match=r"Unknown .*policy"):
        Engine(tiny_model("llama"), OPTIONS, config(eviction_policy="lur"))


# -------------------------------------------------------------------------------------------- loads within the step


def steps_to_first_token(engine: Engine, prompt: list[int]) -> int:
    """While three other requests decode."""
    for other in random_prompts(3, 5, 5, seed=9):
        engine.add_request([*other, len(engine._requests)], SamplingParams(max_tokens=40))
    for _ in range(5):
        engine.step()
    request, steps = engine.add_request(prompt, SamplingParams(max_tokens=1)), 0
    while not request.is_done:
        engine.step()
        steps += 1
    engine.drain()
    return steps


def test_a_hit_in_host_memory_takes_as_many_steps_as_one_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortLoads, "fits", lambda self, *_: self._is_on)
    (prompt,) = random_prompts(1, 60, 60)
    options = EngineOptions(num_blocks=96, block_tokens=4, max_batch_tokens=24, max_requests=4)
    with Engine(tiny_model("llama"), options, config()) as engine:
        computed, on_device = steps_to_first_token(engine, prompt), steps_to_first_token(engine, prompt)
        engine.reset_cache(offloaded=False)
        assert steps_to_first_token(engine, prompt) == on_device == 1 < computed
        assert engine.counts.external_hit_tokens >= 56
        assert_nothing_leaks(engine)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_tokens_are_the_same_when_loads_within_steps_fail(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortLoads, "fits", lambda self, *_: self._is_on)
    monkeypatch.setattr(ShortLoads, "failed", lambda self: None)  # an engine gives up after the first
    with Engine(tiny_model(family), OPTIONS, config()) as engine:
        rng = random.Random(5)
        wrap_handlers(engine, lambda _, handler: Flaky(handler, engine, rng, 0.3))
        assert chat(engine) == reference(family)
        assert engine.counts.failed_loads
        assert_nothing_leaks(engine)
