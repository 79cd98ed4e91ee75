# SPDX-License-Identifier: Apache-2.0
"""Test two vLLM servers that share one store (Valkey, an object store, Mooncake, a pool in memory).

Each server hits blocks that the other one computed, with the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.greedy import Baseline
from tests.engines.models import SmallModel
from tests.engines.vllm.prompts import long_prompts
from tests.engines.vllm.server import Server, ask, client_of, judge
from tests.memory_files import memory_directory

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


SEAL_KEY = "0123456789abcdef"


@pytest.fixture(params=["redis", "object", "mooncake", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The options of a tier that both servers share: over a real server of this machine, or in its memory."""
    if request.param == "disk":
        with memory_directory() as pool:
            yield {"type": "disk", "path": str(pool / "kv"), "max_bytes": "256MiB"}
        return
    place = tmp_path / "store"
    place.mkdir()
    shared = {"type": request.param, "required": True, "seal_key": SEAL_KEY}
    server: Any
    if request.param == "redis":
        from tests import redis_server

        server = redis_server.RedisServer(place)
        own = redis_server.PATIENT_OPTIONS | {"url": server.url}
    elif request.param == "object":
        pytest.importorskip("obstore", reason="make test-vllm brings it")
        from tests import s3_server

        server = s3_server.S3Server(place)
        own = s3_server.PATIENT | {"url": f"s3://{s3_server.BUCKET}/fleet", "config": server.config}
    else:
        pytest.importorskip("mooncake.store", reason="needs its client and Debian's libibverbs1", exc_type=ImportError)
        from tests.mooncake_server import MooncakePool

        server = MooncakePool(place)
        own = {"master": server.master, "metadata": server.metadata}
    yield shared | own
    server.stop()


@pytest.fixture
def fleet(llama: SmallModel, tier: dict[str, Any], tmp_path: Path) -> Iterator[tuple[Server, Server]]:
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


def test_what_one_server_computed_the_other_hits(
    tier: dict[str, Any], fleet: tuple[Server, Server], llama_baseline: Baseline
) -> None:
    from tests.redis_server import wait_until

    (first, second), kind = fleet, tier["type"]
    prompts = long_prompts(4)
    one, other = (client_of(server.url) for server in (first, second))
    try:
        computed = {prompt.name: ask(one, prompt) for prompt in prompts}
        # Idle engines make no steps, so an occasional small request moves blocks that wait to be written.
        filler = iter(long_prompts(200, 40)[8:])

        def is_stored() -> bool:
            ask(one, next(filler))
            return first.metrics().get(f"tier_blocks_stored|{kind}", 0) >= 4 * 31

        wait_until(is_stored, "the first server's blocks are in the store")
        if kind == "disk":
            num_bytes = first.metrics()[f"tier_bytes|{kind}"]

            def is_seen() -> bool:
                ask(other, next(filler))
                return second.metrics().get(f"tier_bytes|{kind}", 0) >= num_bytes

            wait_until(is_seen, "the second server knows of them")
        shared = {prompt.name: ask(other, prompt) for prompt in prompts}
        metrics = second.metrics()
        judge(first, one, llama_baseline, computed)
        judge(second, other, llama_baseline, shared)
    finally:
        one.close()
        other.close()
    assert all(cached == 992 for _, cached in shared.values())
    assert metrics[f"tier_blocks_loaded|{kind}"] >= 4 * 31
    assert metrics.get(f"tier_corrupt_blocks|{kind}", 0) == 0  # a counter is exported once it counts
    assert metrics[f"tier_healthy|{kind}"] == 1
