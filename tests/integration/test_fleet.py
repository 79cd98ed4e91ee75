# SPDX-License-Identifier: Apache-2.0
"""Test several engines that share one store.

Each engine hits blocks that another one computed, different blocks never mix, and a lost store costs only misses until
it is back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests import redis_server, s3_server
from tests.mooncake_server import MooncakePool, needs_mooncake
from tests.redis_server import RedisServer, wait_until
from tests.s3_server import BUCKET, S3Server
from tests.sizes import IS_THOROUGH
from tests.tiering.test_spec import PAGE_BYTES, Engine, layout, spec

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.config import GroupKind, KVGroupLayout
from kvoffload.testing.keys import keys

NAMES = keys(1, 2, 3, 4)


def blocks_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (len(NAMES), PAGE_BYTES), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def shared_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakePool]:
    made = MooncakePool(tmp_path_factory.mktemp("mooncake"))
    yield made
    made.stop()


@pytest.fixture(params=["redis", "object", pytest.param("mooncake", marks=needs_mooncake)])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return the options of a tier that all engines of a test share."""
    if request.param == "redis":
        server = request.getfixturevalue("shared_redis")
        own = {"type": "redis", "url": server.url, "prefix": tmp_path.name, "seal_key": "0123456789abcdef"}
        return redis_server.PATIENT_OPTIONS | own
    if request.param == "mooncake":
        pool = request.getfixturevalue("pool")
        # It uses no directories, so each test has its own secret to keep the tests apart.
        known = {"type": "mooncake", "master": pool.master, "metadata": pool.metadata}
        return known | {"seal_key": f"0123456789abcdef-{tmp_path.name}"}
    s3 = request.getfixturevalue("shared_s3")
    return s3_server.PATIENT | {"type": "object", "url": f"s3://{BUCKET}/{tmp_path.name}", "config": s3.config}


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
        {"num_ranks": 2, "num_processes": 3, "instance_id": f"fleet-{os.getpid()}"},
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
    other = layout(**changes)
    # Shared memory keeps its name until all processes of the engine have it.
    made, *ranks = [spec(tier, of=other, max_wait_s=60) for _ in range(other.num_processes)]
    manager = made.get_manager()
    assert [rank.region.num_blocks for rank in ranks] == [made.num_blocks] * len(ranks)
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
    for each in (made, *ranks):
        each.shutdown()


class Mortal(NamedTuple):
    """A store for a single test that ends it."""

    tier: dict[str, Any]
    kill: Callable[[], None]
    start: Callable[[], None]


MOTO_ENDS_SLOWLY = pytest.mark.skipif(
    not (os.environ.get("KVOFFLOAD_S3_SERVER") or IS_THOROUGH), reason="`make test-remote` has SeaweedFS"
)


@pytest.fixture(
    params=[
        "redis",
        pytest.param("object", marks=MOTO_ENDS_SLOWLY),
        pytest.param("mooncake", marks=needs_mooncake),
    ]
)
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mortal]:
    server: Any
    if request.param == "redis":
        server = RedisServer(tmp_path)
        yield Mortal(redis_server.PATIENT_OPTIONS | {"type": "redis", "url": server.url}, server.kill, server.start)
    elif request.param == "object":
        server = S3Server(tmp_path)
        options = {"type": "object", "url": f"s3://{BUCKET}/load", "config": server.config, "request_timeout_s": 30}
        yield Mortal(options, server.kill, server.start)
    else:
        server = MooncakePool(tmp_path)

        def start() -> None:
            server.start_master()
            server.kill("donor")  # it does not join another master
            server.start_donor()

        options = {"type": "mooncake", "master": server.master, "metadata": server.metadata}
        yield Mortal(options, lambda: server.kill("master"), start)
    server.stop()


class Busy:
    """An engine in its own thread that stores prefix after prefix, and asks for the prefixes of another engine."""

    def __init__(self, number: int, tier: dict[str, Any]) -> None:
        self.number = number
        self.rounds = self.hits = 0
        self.failure: BaseException | None = None
        self._tier = tier
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def begin(self, other: Busy) -> None:
        self._other = other
        self._thread.start()

    def end(self) -> None:
        self._ends.set()
        self._thread.join()
        assert self.failure is None, self.failure

    def _run(self) -> None:
        try:
            # There is also room for blocks that a hanging call keeps from the others.
            engine = Engine(spec(self._tier, cpu_bytes_to_use=256 * PAGE_BYTES, max_wait_s=5.0))
            while not self._ends.is_set():
                engine.store(*self._prefix(self.number, self.rounds))
                wait_until(lambda: not is_busy(engine), "the prefix is written, or dropped")
                self.rounds += 1
                self._ask(engine, self._other.rounds - 1)
                engine.manager.on_request_finished(engine.request)
                engine.request = ReqContext(f"r{self.rounds}")
                engine.manager.on_new_request(engine.request)
            engine.stop()
        except BaseException as exc:  # noqa: BLE001 - the test raises it
            self.failure = exc

    def _ask(self, engine: Engine, last: int) -> None:
        names, blocks = self._prefix(self._other.number, last)
        if found := engine.find(names):
            assert torch.equal(engine.load(names[:found]), blocks[:found]), "a wrong block was served"
            self.hits += 1

    @staticmethod
    def _prefix(engine: int, number: int) -> tuple[list[OffloadKey], torch.Tensor]:
        first = 1_000_000 * (engine + 1) + len(NAMES) * number
        return keys(*range(first, first + len(NAMES))), blocks_of(first)


def is_busy(engine: Engine) -> bool:
    engine.manager.on_schedule_end()
    return engine.manager.has_pending_work()


def test_engines_under_load_share_a_store_and_survive_its_restart(mortal: Mortal) -> None:
    engines = [Busy(number, mortal.tier | {"threads": 2}) for number in range(2)]

    def each_hits_again() -> bool:
        assert not any(engine.failure for engine in engines)
        return all(engine.hits > hits for engine, hits in zip(engines, before, strict=True))

    for engine, other in zip(engines, engines[::-1], strict=True):
        engine.begin(other)
    try:
        before = [0, 0]
        wait_until(each_hits_again, "each engine has what the other computed")
        mortal.kill()  # while they write and read
        rounds = [engine.rounds for engine in engines]
        wait_until(lambda: all(e.rounds > n + 1 for e, n in zip(engines, rounds, strict=True)), "both go on without it")
        before = [engine.hits for engine in engines]
        mortal.start()
        wait_until(each_hits_again, "it is used again by both")
    finally:
        for engine in engines:
            engine.end()
    left = {thread.name for thread in threading.enumerate() if thread.name.startswith("kvoffload-")}
    assert left <= {"kvoffload-compile"}  # once in a process, and for all that follow
