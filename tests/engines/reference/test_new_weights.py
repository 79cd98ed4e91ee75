# SPDX-License-Identifier: Apache-2.0
"""Test weights that are replaced in place, and a reset: earlier blocks are found in no tier."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engines.reference.zoo import random_prompts, tiny_model

from kvoffload.config import OffloadingConfig, parse_config
from kvoffload.engines.reference import Engine, EngineOptions, SamplingParams

OPTIONS = EngineOptions(num_blocks=64, block_tokens=4)
PROMPTS = random_prompts(2, 60, 60)
TIERS = ("disk", "fs", "memory")


def config(root: Path, tier: str = "disk", **more: Any) -> OffloadingConfig:
    options = {"type": tier, "cascade": "on_store", "timeout_s": 120.0, "drain_timeout_s": 120.0}
    options |= {} if tier == "memory" else {"path": str(root / "blocks"), "max_bytes": "64MiB"}
    return parse_config(
        {
            "cpu_bytes_to_use": "4MiB",
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [options],
            "load_policy": "always",
            "max_wait_s": 120.0,
            **more,
        }
    )


class Server:
    """An engine whose weights can be replaced. They are made from ``seed``."""

    def __init__(self, offloading: OffloadingConfig | None, family: str = "llama", seed: int = 0) -> None:
        self.family = family
        self.model = tiny_model(family, seed)
        self.engine = Engine(self.model, OPTIONS, offloading)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.shutdown()

    def replace_weights(self, seed: int) -> None:
        with torch.no_grad():
            for old, new in zip(self.model.parameters(), tiny_model(self.family, seed).parameters(), strict=True):
                old.copy_(new)

    def answers(self) -> tuple[list[list[int]], int]:
        """Tokens, and how many tokens of the prompts came from host memory and tiers."""
        self.engine.reset_cache(offloaded=False)
        requests = [self.engine.add_request(prompt, SamplingParams(max_tokens=6)) for prompt in PROMPTS]
        self.engine.drain()
        self.engine.check_invariants()
        return [request.output_token_ids for request in requests], sum(each.external_hit_tokens for each in requests)

    def resets(self) -> dict[str, float]:
        return {sample[1]: count for sample, count in self.engine.get_stats().items() if sample[0] == "cache_resets"}


@functools.cache
def expected(seed: int, family: str = "llama") -> list[list[int]]:
    with Server(None, family, seed) as server:
        return server.answers()[0]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("tier", TIERS)
def test_after_a_reset_no_token_comes_from_the_old_weights(tier: str, family: str, tmp_path: Path) -> None:
    assert expected(0, family) != expected(1, family)
    with Server(config(tmp_path, tier), family) as server:
        assert server.answers() == (expected(0, family), 0)
        server.replace_weights(1)
        assert server.answers()[0] != expected(1, family)  # without a reset they would
        server.engine.reset_cache()
        assert server.answers() == (expected(1, family), 0)
        tokens, hits = server.answers()
        assert tokens == expected(1, family)
        assert hits > 0
        assert server.resets() == {"own": 1}


def test_requests_that_run_at_a_reset_leave_nothing_to_later_ones(tmp_path: Path) -> None:
    with Server(config(tmp_path)) as server:
        running = [server.engine.add_request(prompt, SamplingParams(max_tokens=40)) for prompt in PROMPTS]
        for _ in range(8):
            server.engine.step()
        assert not any(request.is_done for request in running)
        server.replace_weights(1)
        server.engine.reset_cache()
        # They go on upon blocks of the old weights.
        server.engine.drain()
        assert server.answers() == (expected(1), 0)


def test_tiers_keep_their_blocks_where_resets_are_not_about_them(tmp_path: Path) -> None:
    with Server(config(tmp_path, reset_tiers=False)) as server:
        server.answers()
        server.engine.reset_cache()
        tokens, hits = server.answers()
        assert tokens == expected(0)
        assert hits > 0
        assert server.resets() == {"kept": 1}


def test_after_a_restart_the_blocks_of_the_original_weights_are_found_again(tmp_path: Path) -> None:
    with Server(config(tmp_path)) as server:
        server.answers()
        server.replace_weights(1)
        server.engine.reset_cache()
        server.answers()
    with Server(config(tmp_path)) as server:
        tokens, hits = server.answers()
        assert tokens == expected(0)
        assert hits > 0


def test_a_restart_with_a_name_finds_what_was_stored_under_it(tmp_path: Path) -> None:
    name = tmp_path / "version"
    name.write_text("one")
    by_file = config(tmp_path, weights_version={"file": str(name)})
    with Server(by_file) as server:
        server.answers()
        server.replace_weights(1)
        name.write_text("two\n")
        server.engine.reset_cache()
        server.answers()
        assert server.resets() == {"named": 1}
    # The reference engine names the weights that it starts with; so the restarted one replaces them as well.
    with Server(by_file) as server:
        server.replace_weights(1)
        tokens, hits = server.answers()
        assert tokens == expected(1)
        assert hits > 0
    with Server(config(tmp_path, weights_version="two")) as server:
        server.replace_weights(1)
        assert server.answers() == (tokens, hits)
        # A name that says nothing new is none of the new weights.
        server.replace_weights(2)
        server.engine.reset_cache()
        assert server.answers() == (expected(2), 0)
        assert server.resets() == {"own": 1}


def test_two_servers_that_name_their_weights_share_a_tier_across_a_reset(tmp_path: Path) -> None:
    name = tmp_path / "version"
    name.write_text("one")
    by_file = config(tmp_path, weights_version={"file": str(name)})
    with Server(by_file) as first, Server(by_file) as second:
        first.answers()
        name.write_text("two")
        for server in (first, second):
            server.replace_weights(1)
            server.engine.reset_cache()
        assert first.answers() == (expected(1), 0)
        first.engine.drain()
        second.answers()  # a neighbour's new block is found within a second
        tokens, hits = second.answers()
        assert tokens == expected(1)
        assert hits > 0


def test_what_a_request_computes_by_old_and_new_weights_is_found_by_nobody(tmp_path: Path) -> None:
    """A request that runs across the reset continues with KV of the old weights.

    By their hashes, the blocks that it fills after the reset would match blocks that other requests compute with the
    new weights.
    """

    def answer(server: Server, tokens: list[int]) -> list[int]:
        request = server.engine.add_request(tokens, SamplingParams(max_tokens=6))
        server.engine.drain()
        return request.output_token_ids

    with Server(config(tmp_path)) as server, Server(None, seed=1) as right:
        across = server.engine.add_request(PROMPTS[0], SamplingParams(max_tokens=24))
        while len(across.output_token_ids) < 4:
            server.engine.step()
        server.replace_weights(1)
        server.engine.reset_cache()
        server.engine.drain()
        longer = [*PROMPTS[0], *across.output_token_ids]
        for tokens in (PROMPTS[0], longer, longer):
            assert answer(server, tokens) == answer(right, tokens)
            server.engine.check_invariants()
