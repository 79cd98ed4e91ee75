# SPDX-License-Identifier: Apache-2.0
"""Several engines that share one store: what one computed the others hit, what differs never mixes, and a store that is
lost costs misses until it is back."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.mooncake_server import MooncakePool
from tests.redis_server import RedisServer, wait_until
from tests.s3_server import BUCKET, S3Server
from tests.tiering.test_spec import PAGE_BYTES, Engine, layout, spec

from kvoffload.base import ReqContext
from kvoffload.config import GroupKind, KVGroupLayout
from kvoffload.testing.keys import keys

NAMES = keys(1, 2, 3, 4)


def blocks_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (len(NAMES), PAGE_BYTES), dtype=torch.uint8, generator=torch.manual_seed(seed))


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakePool]:
    made = MooncakePool(tmp_path_factory.mktemp("mooncake"))
    yield made
    made.stop()


needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="needs Mooncake's client; `make test-remote` brings it"
)


@pytest.fixture(params=["redis", "object", pytest.param("mooncake", marks=needs_mooncake)])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The options of a tier that all engines of a test share."""
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        return {"type": "redis", "url": server.url, "prefix": tmp_path.name, "seal_key": "0123456789abcdef"}
    if request.param == "mooncake":
        pool = request.getfixturevalue("pool")
        # It has no directories: a secret of one's own keeps the tests apart.
        known = {"type": "mooncake", "master": pool.master, "metadata": pool.metadata}
        return known | {"seal_key": f"0123456789abcdef-{tmp_path.name}"}
    s3 = request.getfixturevalue("s3_server")
    return {"type": "object", "url": f"s3://{BUCKET}/{tmp_path.name}", "config": s3.config, "request_timeout_s": 60}


def test_what_one_engine_computed_another_hits(tier: dict[str, Any]) -> None:
    blocks = blocks_of(1)
    first, second = Engine(spec(tier, max_wait_s=60)), Engine(spec(tier, max_wait_s=60))
    first.store(NAMES, blocks)
    wait_until(lambda: stored(first) == len(NAMES), "the first engine's blocks are in the store")
    assert second.find(NAMES) == len(NAMES)
    assert torch.equal(second.load(NAMES), blocks)
    first.stop()
    second.stop()
    third = Engine(spec(tier, max_wait_s=60))  # after a restart of all of them
    assert third.find(NAMES) == len(NAMES)
    assert torch.equal(third.load(NAMES), blocks)
    third.stop()


def stored(engine: Engine) -> float:
    engine.manager.on_schedule_end()
    return sum(value for (name, *_), value in engine.manager.get_stats().items() if name == "tier_blocks_stored")


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": {"model": "another"}},
        {"identity": {"model": "m", "dtype": "fp8"}},
        {"num_ranks": 2, "num_processes": 3},
        {"hash_block_tokens": 8},
        {"groups": (KVGroupLayout(GroupKind.FULL_ATTENTION, 32, PAGE_BYTES),)},
        {"groups": (KVGroupLayout(GroupKind.FULL_ATTENTION, 16, 2 * PAGE_BYTES),)},
    ],
)
def test_engines_that_differ_never_mix(tier: dict[str, Any], changes: dict[str, Any]) -> None:
    first = Engine(spec(tier))
    first.store(NAMES, blocks_of(2))
    wait_until(lambda: stored(first) == len(NAMES), "the blocks are in the store")
    same = Engine(spec(tier, max_wait_s=60))
    assert same.find(NAMES) == len(NAMES)
    same.stop()
    manager = spec(tier, of=layout(**changes), max_wait_s=60).get_manager()
    first.stop()
    request = ReqContext("other")
    manager.on_new_request(request)
    answers: list[bool | None] = [None]

    def answered() -> bool:
        answers[:] = manager.lookup_prefix(NAMES, request)
        manager.on_schedule_end()
        return None not in answers

    wait_until(answered, "the other engine has its answer")
    assert answers[0] is False
    manager.on_request_finished(request)
    manager.shutdown()


def test_engines_under_load_share_a_store_and_survive_its_restart(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    tier = {"type": "redis", "url": server.url, "threads": 2, "window_timeout_s": 30.0}
    engines = [Engine(spec(tier, max_wait_s=60)) for _ in range(2)]
    try:
        blocks = blocks_of(3)
        engines[0].store(NAMES, blocks)
        wait_until(lambda: stored(engines[0]) == len(NAMES), "the blocks are in the store")
        assert engines[1].find(NAMES) == len(NAMES)
        assert torch.equal(engines[1].load(NAMES), blocks)
        server.kill()
        unknown = keys(11, 12)
        for engine in engines:
            assert engine.find(unknown) == 0  # a miss, and no exception
        server.start()
        names, more = keys(21, 22, 23, 24), blocks_of(4)
        engines[0].store(names, more)

        def used_again() -> bool:
            engines[0].manager.on_schedule_end()
            with server.client() as client:
                return bool(client.dbsize())

        # The breaker of writes lets a probe through now and then: each further store is one.
        number = 100
        while not used_again():
            engines[0].store(keys(number), more[:1])
            number += 1
            assert number < 4000
            time.sleep(0.05)
    finally:
        for engine in engines:
            engine.stop()
        server.stop()
    left = {thread.name for thread in threading.enumerate() if thread.name.startswith("kvoffload-")}
    assert left <= {"kvoffload-compile"}  # once in a process, and for all that follow
