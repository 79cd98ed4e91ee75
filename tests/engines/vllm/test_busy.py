# SPDX-License-Identifier: Apache-2.0
"""A saturated server over tiers that read ahead, and that break in the middle, answers as vLLM alone does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import redis_server
from tests.engines.greedy import Baseline
from tests.engines.models import SmallModel
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.prompts import BLOCK_BYTES
from tests.engines.vllm.test_serving import assert_idle
from tests.sizes import by_size

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

REQUESTS = by_size(quick=300, thorough=2000)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[redis_server.RedisServer]:
    place = tmp_path / "redis"
    place.mkdir()
    server = redis_server.RedisServer(place)
    try:
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("tiers", ["disk", "redis", "disk and redis"])
@pytest.mark.parametrize("policy", ["cost", "always"])
def test_a_saturated_server_whose_tiers_break(
    llama: SmallModel,
    llama_baseline: Baseline,
    tmp_path: Path,
    redis: redis_server.RedisServer,
    tiers: str,
    policy: str,
) -> None:
    secondary: list[dict[str, Any]] = []
    broken: dict[str, Any] = {}
    if "disk" in tiers:
        secondary.append({"type": "disk", "path": str(tmp_path / "kv"), "max_bytes": "256MiB"})
        broken["remove"] = str(tmp_path / "kv")
    if "redis" in tiers:
        secondary.append({"type": "redis", "url": redis.url} | redis_server.PATIENT_OPTIONS)
        broken["kill"] = redis.pid
    extra = {"cpu_bytes_to_use": 80 * BLOCK_BYTES, "secondary_tiers": secondary, "load_policy": policy}
    seen = run_child("saturated", 1400, model=llama.path, extra=extra, requests=REQUESTS, **broken)

    answers = seen["answers"]
    assert 0.85 * REQUESTS <= len(answers) <= REQUESTS
    expected = [(name, tokens, llama_baseline.tokens(name)) for name, tokens in answers]
    judged = [(name, tokens, right[:4]) for name, tokens, right in expected if right is not None]
    assert len(judged) > 0.7 * len(answers)
    assert [(name, tokens) for name, tokens, right in judged if tokens != right] == []
    assert seen["most_queued"] > 50
    whole = seen["metrics"]["whole"]
    assert sum(count for name, count in whole.items() if name.startswith("tier_hit_tokens|")) > 0
    assert whole["promotions|ok"] > 0, "nothing was read from a tier"
    assert_idle(seen["idle"])
