# SPDX-License-Identifier: Apache-2.0
"""Two vLLM servers on two ports share one Valkey: what one computed the other hits, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.harness import Baseline
from tests.engines.vllm.models import SmallModel
from tests.engines.vllm.prompts import long_prompts
from tests.engines.vllm.server import Server, ask, judge

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture
def fleet(llama: SmallModel, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    from tests.redis_server import RedisServer

    valkey = RedisServer(tmp_path)
    tier = {"type": "redis", "url": valkey.url, "required": True, "seal_key": "0123456789abcdef"}
    servers: list[Server] = []
    try:
        for name in ("first", "second"):
            place = tmp_path / name
            place.mkdir()
            extra: dict[str, Any] = {
                "spec_name": "TieringOffloadingSpec",
                "secondary_tiers": [tier],
                "load_policy": "always",
                "max_wait_s": 60.0,
            }
            servers.append(Server(llama.path, place, **extra))
        for server in servers:
            server.wait_until_ready()
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.stop()
        valkey.stop()


def test_what_one_server_computed_the_other_hits(fleet: tuple[Server, Server], llama_baseline: Baseline) -> None:
    import openai
    from tests.redis_server import wait_until

    first, second = fleet
    prompts = long_prompts(4)
    one, other = (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) for server in (first, second)
    )
    try:
        computed = {prompt.name: ask(one, prompt) for prompt in prompts}
        # Idle engines take no steps, so a small request now and then moves what waits to be written.
        filler = iter(long_prompts(200, 40)[8:])

        def is_stored() -> bool:
            ask(one, next(filler))
            return first.metrics()["tier_blocks_stored|redis"] >= 4 * 31

        wait_until(is_stored, "the first server's blocks are in Valkey")
        shared = {prompt.name: ask(other, prompt) for prompt in prompts}
        metrics = second.metrics()
        judge(first, one, llama_baseline, computed)
        judge(second, other, llama_baseline, shared)
    finally:
        one.close()
        other.close()
    assert all(cached == 992 for _, cached in shared.values())
    assert metrics["tier_blocks_loaded|redis"] >= 4 * 31
    assert metrics.get("tier_corrupt_blocks|redis", 0) == 0  # a counter is exported once it counts
    assert metrics["tier_healthy|redis"] == 1
