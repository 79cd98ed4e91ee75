# SPDX-License-Identifier: Apache-2.0
"""Test a model with attention and recurrent states: possible ends of hits, stored blocks, and a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.reference.inside import begin_step, end_step, pools_of, tables_of, take_reports
from tests.engines.reference.zoo import VOCAB, greedy, random_prompts, tiny_model
from transformers.cache_utils import Cache

from kvoffload.config import parse_config
from kvoffload.engines.reference import Engine, EngineOptions, Request, SamplingParams, State, build_random_model
from kvoffload.engines.reference.layout import engine_layout, kv_shape
from kvoffload.engines.reference.models import use_paged_attention
from kvoffload.engines.reference.states import PagedMixer, StateViews
from kvoffload.errors import LayoutError

OPTIONS = EngineOptions(num_blocks=24, block_tokens=4, max_batch_tokens=24, max_requests=4)
SAMPLING = SamplingParams(max_tokens=6)
MIB = {"cpu_bytes_to_use": "4MiB"}


def serve(engine: Engine, prompt: list[int], sampling: SamplingParams = SAMPLING) -> Request:
    """Alone, with nothing on the device."""
    engine.drain()
    engine.reset_cache(offloaded=False)
    request = engine.add_request(prompt, sampling)
    engine.drain()
    engine.check_invariants()
    return request


def test_a_hit_ends_where_a_state_was_kept_and_nowhere_else() -> None:
    (prompt,) = random_prompts(1, 46, 46)
    with Engine(tiny_model("falcon_h1"), OPTIONS, parse_config(MIB)) as engine:
        first = serve(engine, prompt)
        whole = prompt + first.output_token_ids
        # Chunks of 24 tokens: states at 24 and 44, and at 48 in decoding. Twelve blocks of attention.
        assert engine.get_stats()["store_blocks", "single_state"] == 3
        assert engine.get_stats()["store_blocks", "full_attention"] == 12
        for shared, hit in ((23, 0), (24, 24), (43, 24), (44, 44), (47, 44), (50, 48)):
            other = [*whole[:shared], (whole[shared] + 1) % VOCAB, 1, 2]
            request = serve(engine, other, SamplingParams(max_tokens=4))
            assert (request.external_hit_tokens, request.device_hit_tokens) == (hit, 0), shared
            assert request.output_token_ids == greedy(tiny_model("falcon_h1"), other, 4)[0]


def test_another_requests_state_changes_the_tokens() -> None:
    """So that equal tokens mean right states."""
    prompts = random_prompts(2, 41, 41)
    with Engine(tiny_model("falcon_h1"), OPTIONS, parse_config(MIB)) as engine:
        expected = [serve(engine, prompt).output_token_ids for prompt in prompts]
        for spoil in (False, True):
            engine.drain()
            engine.reset_cache(offloaded=False)
            requests = [engine.add_request(prompt, SAMPLING) for prompt in prompts]
            assert begin_step(engine) == 0
            assert {request.state for request in requests} == {State.LOADING}
            end_step(engine)
            while any(request.state is State.LOADING for request in requests):  # nothing runs before both have loaded
                take_reports(engine)
            assert all(request.num_computed_tokens == 40 for request in requests)
            if spoil:
                blocks = [tables_of(engine)[request.request_id][1][9] for request in requests]
                states = pools_of(engine)[1]
                states[blocks] = states[blocks[::-1]]
            engine.drain()
            assert ([request.output_token_ids for request in requests] == expected) == (not spoil)


def test_states_come_back_from_a_disk_after_a_restart(tmp_path: Path) -> None:
    prompts = random_prompts(3, 30, 60, seed=4)
    page = max(group.page_bytes for group in layout().groups)
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": 24 * page,  # less than two prompts, so that host memory evicts
        "spec_name": "TieringOffloadingSpec",
        "load_policy": "always",
        "secondary_tiers": [{"type": "disk", "path": str(tmp_path / "kv"), "max_bytes": "16MiB"}],
    }
    expected = [greedy(tiny_model("falcon_h1"), prompt, 6)[0] for prompt in prompts]
    for restarted in (False, True):
        with Engine(tiny_model("falcon_h1"), OPTIONS, parse_config(extra)) as engine:
            for turn in range(2):
                requests = [serve(engine, prompt) for prompt in prompts]
                assert [request.output_token_ids for request in requests] == expected
                if turn or restarted:
                    full = [len(prompt) // 4 * 4 - 4 * (len(prompt) % 4 == 0) for prompt in prompts]
                    hits = [request.external_hit_tokens for request in requests]
                    # The state of a prompt whose length is a multiple of the block is one token too long for it.
                    assert all(hit == most for hit, most, p in zip(hits, full, prompts, strict=True) if len(p) % 4)
            stats = engine.get_stats()
            assert stats["primary_blocks_evicted",] > 0 < stats["tier_blocks_loaded", "disk"]
            assert stats["load_blocks", "single_state"] > 0


def layout() -> Any:
    return engine_layout(kv_shape(tiny_model("falcon_h1").config), 4, torch.float32, {})


def test_a_page_of_states_has_all_layers_and_each_part_in_its_own_dtype() -> None:
    shape = kv_shape(tiny_model("falcon_h1").config).states
    assert shape is not None
    # Three layers: three heads of 16 x 8 in float32, and 48 + 2 * 8 channels of 4 columns.
    assert shape.page_bytes(torch.float32) == 3 * (3 * 16 * 8 * 4 + 64 * 4 * 4)
    assert shape.page_bytes(torch.bfloat16) == 3 * (3 * 16 * 8 * 4 + 64 * 4 * 2)
    assert [group.kind.value for group in layout().groups] == ["full_attention", "single_state"]
    pool = torch.zeros(5, shape.page_bytes(torch.bfloat16), dtype=torch.int8)
    views = StateViews(pool, shape, torch.bfloat16)
    views.recurrent[3] = 1.5
    views.convolution[3] = 2.5
    views.carry(3, 1, 2)
    assert pool[[0, 2, 4]].eq(0).all() and pool[3].ne(0).sum() > 0
    assert views.recurrent[1, 2].eq(1.5).all() and views.convolution[1, 2].eq(2.5).all()
    assert views.recurrent[1, :2].eq(0).all()
    views.carry(None, 3, 2)
    assert views.recurrent[3, 2].eq(0).all() and views.recurrent[3, 1].eq(1.5).all()


def test_mixers_are_wrapped_once() -> None:
    model = use_paged_attention(use_paged_attention(tiny_model("falcon_h1")))
    assert sum(isinstance(module, PagedMixer) for module in model.modules()) == 3


def test_versions_of_transformers_with_other_caches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Cache, "get_recurrent_state")
    with pytest.raises(LayoutError, match="need a newer transformers"):
        use_paged_attention(tiny_model("falcon_h1"))


def test_a_random_hybrid_is_the_same_for_the_same_arguments() -> None:
    sizes: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 2, "vocab": 128}
    (prompt,) = random_prompts(1, 40, 40)
    answers = []
    for seed in (0, 0, 1):
        with Engine(build_random_model("hybrid", **sizes, seed=seed), OPTIONS) as engine:
            answers.append(engine.generate([prompt], SAMPLING)[0])
    assert answers[0] == answers[1] != answers[2]
