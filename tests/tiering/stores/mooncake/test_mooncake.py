# SPDX-License-Identifier: Apache-2.0
"""Test the store contract over a real master and donor, with and without the copy, and Mooncake's failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.jumping_clock import JumpingClock, check, compiler
from tests.mooncake_server import HAS_MOONCAKE, MooncakePool, needs_mooncake
from tests.ports import free_port
from tests.proxy import Proxy
from tests.redis_server import wait_until
from tests.tiering.stores.blocks import BLOCK_BYTES, buffers, read, succeeds, write
from tests.tiering.stores.growth import Held, check_growth, held
from tests.tiering.stores.redis.strangers import answering_server
from tests.tiering.test_spec import PAGE_BYTES, Engine, spec

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.errors import ConfigError, MissingExtraError, StoreError
from kvoffload.testing.keys import keys
from kvoffload.testing.store_contract import BlockStoreContract
from kvoffload.tiering.options import STORES, parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.mooncake.options import MooncakeOptions
from kvoffload.tiering.stores.mooncake.store import MooncakeStore
from kvoffload.tiering.stores.seal import EncryptionKey

LARGE = 1 << 20


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakePool]:
    made = MooncakePool(tmp_path_factory.mktemp("mooncake"))
    yield made
    made.stop()


@needs_mooncake
class TestMooncakeStore(BlockStoreContract):
    @pytest.fixture(autouse=True)
    def _on(self, pool: MooncakePool) -> None:
        self.pool = pool

    secret: bytes | None = None

    def make_store(self, directory: Path) -> BlockStore:
        return store_on(self.pool, self.block_bytes, directory.name, secret=self.secret)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        assert isinstance(store, MooncakeStore)
        client, name = as_client(store, key)
        value = bytearray(client.get(name))
        value[7] ^= 1
        return client.batch_remove([name], True) == [0] and client.put(name, bytes(value)) == 0


@needs_mooncake
class TestEncrypted(TestMooncakeStore):
    secret = EncryptionKey(b"a secret of the fleet")


def as_client(store: MooncakeStore, key: OffloadKey) -> tuple[Any, str]:
    """Return Mooncake's client, and the name of a block in it."""
    return store._connected(), store._name(key)


def store_on(pool: MooncakePool, block_bytes: int = BLOCK_BYTES, namespace: str = "", **options: Any) -> MooncakeStore:
    hostname = f"127.0.0.1:{free_port()}"
    return MooncakeStore(pool.master, pool.metadata, block_bytes, namespace, hostname=hostname, **options)


@needs_mooncake
@pytest.mark.parametrize("value_from", [lambda value: value[:-1], lambda value: value + b"x", lambda value: b"hello"])
def test_a_value_of_another_length_is_a_miss_and_is_deleted(
    pool: MooncakePool, value_from: Callable[[bytes], bytes]
) -> None:
    store = store_on(pool, namespace=repr(value_from))
    assert write(store, keys(1, 2)) == [True, True]
    client, name = as_client(store, keys(1)[0])
    value = client.get(name)
    assert client.batch_remove([name], True) == [0]
    assert client.put(name, value_from(value)) == 0
    assert read(store, keys(1, 2)) == [False, True]
    assert store.stats().corrupt_blocks == 1
    assert store.contains(keys(1, 2)) == [False, True]
    store.close()


@needs_mooncake
def test_two_engines_share_the_pool_and_secrets_keep_strangers_out(pool: MooncakePool) -> None:
    first, second = (store_on(pool, namespace="shared", secret=b"the fleet's own secret") for _ in range(2))
    stranger = store_on(pool, namespace="shared")
    assert write(first, keys(1)) == [True]
    assert read(second, keys(1)) == [True]
    assert stranger.contains(keys(1)) == [False]
    for store in (first, second, stranger):
        store.close()


@needs_mooncake
def test_no_master_is_an_error(tmp_path: Path) -> None:
    store = MooncakeStore(f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}/metadata", BLOCK_BYTES)
    with pytest.raises(StoreError, match=r"Mooncake at 127\.0\.0\.1:\d+ cannot be reached: .*refused"):
        store.contains(keys(1))
    store.close()


@needs_mooncake
@pytest.mark.parametrize("host", ["", "[::1", "port:x"])
def test_a_metadata_service_that_is_none_is_one_sentence(host: str) -> None:
    with answering_server(b"SSH-2.0-OpenSSH_9.2\r\n") as port:
        address = f"127.0.0.1:{port}"
        store = MooncakeStore(address, f"http://{host or address}/metadata", BLOCK_BYTES)
        with pytest.raises(StoreError, match=r"The metadata service of Mooncake at .* does not answer: .*"):
            store.contains(keys(1))
        store.close()


@needs_mooncake
def test_required_decides_whether_a_missing_master_stops_the_start() -> None:
    nowhere = {"master": f"127.0.0.1:{free_port()}", "metadata": f"http://127.0.0.1:{free_port()}/metadata"}
    parse_tier({"type": "mooncake", **nowhere}, BLOCK_BYTES).open_store(BLOCK_BYTES, "ns").close()
    with pytest.raises(StoreError, match="cannot be reached"):
        parse_tier({"type": "mooncake", **nowhere, "required": True}, BLOCK_BYTES).open_store(BLOCK_BYTES, "ns")


@needs_mooncake
def test_a_killed_master_costs_misses_and_its_successor_is_used(tmp_path: Path) -> None:
    pool = MooncakePool(tmp_path)
    store = store_on(pool)
    try:
        assert write(store, keys(1, 2)) == [True, True]
        pool.kill("master")
        assert not succeeds(lambda: any(read(store, keys(1, 2))))
        assert not succeeds(lambda: any(write(store, keys(3))))
        pool.start_master()
        pool.kill("donor")
        pool.start_donor()
        numbers = iter(range(10, 10_000))
        wait_until(lambda: succeeds(lambda: stores(store, keys(next(numbers)))), "the new pool has blocks")
    finally:
        store.close()
        pool.stop()


@needs_mooncake
def test_a_frozen_donor_costs_a_deadline_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")  # while it waits, the library takes a processor
    pool = MooncakePool(tmp_path)
    store = store_on(pool)
    try:
        assert write(store, keys(1)) == [True]
        pool.freeze("donor")
        outcome: list[object] = []

        def attempt() -> None:
            try:
                outcome.append(read(store, keys(1)))
            except StoreError as exc:
                outcome.append(exc)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        assert outcome == [[False]] or isinstance(outcome[0], StoreError)
        pool.thaw("donor")
        wait_until(
            lambda: succeeds(lambda: read(store, keys(1)) == [True] or write(store, keys(1)) == [True]), "it works"
        )
    finally:
        store.close()
        pool.stop()


@needs_mooncake
def test_a_pool_that_is_full_serves_what_it_has_and_takes_more_when_there_is_room(tmp_path: Path) -> None:
    size = 1 << 20
    pool = MooncakePool(tmp_path, segment_bytes=32 * size)
    store = store_on(pool, size)
    try:
        wanted = keys(*range(64))
        for key in wanted:  # the master refuses, or evicts
            succeeds(lambda key=key: write(store, [key], size) == [True])
        here = [key for key in wanted if succeeds(lambda key=key: read(store, [key], size) == [True])]
        assert 0 < len(here) < 33
        store.discard(wanted)
        wait_until(lambda: succeeds(lambda: write(store, keys(99), size) == [True]), "there is room again")
        assert read(store, keys(99), size) == [True]
    finally:
        store.close()
        pool.stop()


@needs_mooncake
def test_a_killed_donor_costs_its_blocks_and_another_is_used(tmp_path: Path) -> None:
    pool = MooncakePool(tmp_path)
    store = store_on(pool)
    try:
        assert write(store, keys(1, 2)) == [True, True]
        pool.kill("donor")
        assert not succeeds(lambda: any(read(store, keys(1, 2))))
        pool.start_donor()
        numbers = iter(range(10, 10_000))
        wait_until(lambda: succeeds(lambda: stores(store, keys(next(numbers)))), "the other donor has blocks")
    finally:
        store.close()
        pool.stop()


class Linked(NamedTuple):
    pool: MooncakePool
    link: Proxy
    """Between the donor's memory and ``store``."""
    store: MooncakeStore
    """Of large blocks. That of ``keys(1)`` is in the pool."""


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Linked]:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")  # the library's own deadline, else 30 s
    pool = MooncakePool(tmp_path, lease_s=600)
    try:
        # Clients take the donor's address of another interface.
        with closing(Proxy(pool.data_port, host="")) as link, closing(store_through(link, pool)) as store:
            yield Linked(pool, link, store)
    finally:
        pool.stop()


def store_through(link: Proxy, pool: MooncakePool) -> MooncakeStore:
    """Return a store that reaches the pool through the link.

    A donor publishes its own port again some time after it is ready. A store that learns this port keeps it and
    bypasses the link. In this case, another store is tried. It writes its own name, because a block that exists is not
    sent.
    """
    for namespace in map(str, range(10)):
        pool.data_port = link.port
        store = store_on(pool, LARGE, namespace)
        wait_until(
            lambda store=store: succeeds(lambda: write(store, keys(1), LARGE) == [True]), "the block is in the pool"
        )
        if link.num_connections:
            return store
        store.close()
    raise AssertionError("no store goes through the link")


@needs_mooncake
def test_a_donor_that_drips_is_waited_for_as_long_as_bytes_come(linked: Linked) -> None:
    """A read takes twice the library's deadline for progress.

    If the machine stalls for that long, the library rightly gives up, and the next read succeeds.
    """
    linked.link.throttle(LARGE // 2)
    wait_until(lambda: succeeds(lambda: read(linked.store, keys(1), LARGE) == [True]), "a read that drips has ended")


@needs_mooncake
@pytest.mark.parametrize("way", ["stalls", "is cut", "dies"])
def test_a_transfer_that_ends_in_the_middle_is_a_miss_and_touches_no_slot_later(linked: Linked, way: str) -> None:
    pool, link, store = linked
    slots = np.zeros((1, LARGE), np.uint8)
    (link.cut_after if way == "is cut" else link.stall_after)(LARGE // 2)
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(reads(store, memoryview(slots[0]))))
    thread.start()
    if way == "dies":
        wait_until(lambda: link.is_stalling, "half of it has come")
        pool.kill("donor")
        link.cut_after(0)  # data that it had sent before does not matter
    thread.join()
    assert outcome == [False]
    found = slots.copy()
    link.heal()
    if way == "dies":
        pool.start_donor()
    numbers = iter(range(10, 10_000))
    wait_until(lambda: succeeds(lambda: stores(store, keys(next(numbers)), LARGE)), "the store works again")
    assert (slots == found).all()
    assert store.stats().corrupt_blocks == 0  # missing data proves nothing


def reads(store: BlockStore, slot: memoryview) -> bool:
    return succeeds(lambda: store.read_into(keys(1), [slot]) == [True])


@needs_mooncake
def test_use_leaves_no_sockets_threads_or_memory(pool: MooncakePool) -> None:
    store = store_on(pool, LARGE, namespace="use")

    def use(times: int) -> Held:
        for _ in range(times):
            assert write(store, keys(1, 2), LARGE) == [True, True]
            assert read(store, keys(1, 2, 3), LARGE) == [True, True, False]
            store.discard(keys(1, 2))
        return held()

    check_growth(use(20), use(60))
    store.close()


@needs_mooncake
def test_failures_leave_no_sockets_threads_or_memory() -> None:
    store = MooncakeStore(f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}/metadata", BLOCK_BYTES)

    def fail(times: int) -> Held:
        for _ in range(times):
            with pytest.raises(StoreError):
                store.read_into(keys(1), buffers(1))
        return held()

    check_growth(fail(30), fail(100))
    store.close()


@needs_mooncake
@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_a_wall_clock_that_jumps_in_all_of_the_pool_costs_misses_at_most(tmp_path: Path) -> None:
    clock = JumpingClock(tmp_path)
    pool = MooncakePool(tmp_path, environment=clock.environment)
    try:
        check(clock.run_client({"type": "mooncake", "master": pool.master, "metadata": pool.metadata}))
    finally:
        pool.stop()


def stores(store: BlockStore, wanted: list[OffloadKey], block_bytes: int = BLOCK_BYTES) -> bool:
    return write(store, wanted, block_bytes) == [True] and read(store, wanted, block_bytes) == [True]


@needs_mooncake
@pytest.mark.parametrize("who", ["master", "donor"])
def test_a_frozen_part_of_the_pool_costs_an_engine_misses_and_no_slot(tmp_path: Path, who: str) -> None:
    pool = MooncakePool(tmp_path)
    tier = {"type": "mooncake", "master": pool.master, "metadata": pool.metadata}
    engines = [Engine(spec(tier, max_wait_s=1.0)) for _ in range(2)]
    first, second = engines
    try:
        first.store(keys(1, 2), torch.ones((2, PAGE_BYTES), dtype=torch.uint8))
        wait_until(lambda: number_stored(first) == 2, "the blocks are in the pool")
        pool.freeze(who)
        for engine in engines:  # one of them has a client already, the other has none yet
            assert engine.find(keys(8, 9)) == 0  # neither waits for the library
        assert second.find(keys(1, 2)) == 0
        second.store(keys(3, 4), torch.ones((2, PAGE_BYTES), dtype=torch.uint8))
        pool.thaw(who)
        every_slot = keys(*range(100, 108))
        for engine in engines:
            wait_until(lambda engine=engine: has_room(engine, every_slot), "all eight slots can be used")
    finally:
        for engine in engines:
            engine.stop()
        pool.stop()


def number_stored(engine: Engine) -> float:
    engine.manager.on_schedule_end()
    return sum(value for (name, *_), value in engine.manager.get_stats().items() if name == "tier_blocks_stored")


def has_room(engine: Engine, wanted: list[OffloadKey]) -> bool:
    """Whether nothing holds a slot. Takes all of them, and gives them back."""
    engine.manager.on_schedule_end()
    request = ReqContext("all")
    engine.manager.on_new_request(request)
    output = engine.manager.prepare_store(wanted, request)
    if output is not None:
        engine.manager.complete_store(wanted, request, success=False)
    engine.manager.on_request_finished(request)
    return output is not None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"master": ""}, "master of the 'mooncake' tier is empty"),
        ({"metadata": ""}, "metadata of the 'mooncake' tier is empty"),
        ({"protocol": "udp"}, "protocol"),
        ({"seal_key": "short"}, "16 characters"),
        ({"segment_bytes": "many"}, "segment_bytes of the 'mooncake' tier"),
    ],
)
def test_a_mistake_is_one_sentence(options: dict[str, Any], text: str) -> None:
    if text.startswith("segment_bytes") and not HAS_MOONCAKE:
        pytest.skip("needs Mooncake's client")
    known = {"type": "mooncake", "master": "host:1", "metadata": "http://host/metadata"}
    with pytest.raises(ConfigError, match=text):
        parse_tier(known | options, 4096)


def test_without_the_client_the_extra_is_named() -> None:
    if HAS_MOONCAKE:
        pytest.skip("the client is here")
    with pytest.raises(MissingExtraError, match="pip install mooncake-transfer-engine"):
        parse_tier({"type": "mooncake", "master": "host:1", "metadata": "http://host/metadata"}, 4096)
    assert STORES.get("mooncake") is MooncakeOptions
