# SPDX-License-Identifier: Apache-2.0
"""Test that failures of an object store are misses, end by their deadline, leave nothing behind, and are temporary."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import obstore.store
import pytest
from tests.jumping_clock import JumpingClock, check, compiler
from tests.ports import free_port
from tests.proxy import Proxy
from tests.redis_server import wait_until
from tests.s3_server import BUCKET, S3Server
from tests.tiering.stores.blocks import BLOCK_BYTES, UNTOUCHED, buffers, read, succeeds, write
from tests.tiering.stores.growth import Held, check_growth, held
from tests.tiering.stores.object.inside import path_of, put, wrap_client

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.object.store import ObjectStore

OpenStore = Callable[..., ObjectStore]

SOON_S = 0.5
"""A deadline that a test waits for. Where an answer is expected, the deadline is long."""


@pytest.fixture
def proxy(shared_s3: S3Server) -> Iterator[Proxy]:
    made = Proxy(shared_s3.port)
    yield made
    made.close()


def test_a_refused_connection_is_one_sentence(shared_s3: S3Server, open_store: OpenStore) -> None:
    nowhere = {"endpoint": f"http://127.0.0.1:{free_port()}"}
    store = open_store(shared_s3, "refused", config=nowhere)
    for call in (
        lambda: store.contains(keys(1)),
        lambda: write(store, keys(1)),
        lambda: read(store, keys(1)),
        store.check,
    ):
        with pytest.raises(StoreError, match="The object store s3://kv-fleet/refused fails: ") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert "hush" not in str(caught.value)


def test_a_proxy_of_the_environment_is_named(
    shared_s3: S3Server, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://me:hunter2@127.0.0.1:1")
    store = open_store(shared_s3, "proxied")
    with pytest.raises(StoreError, match=r"through the proxy http://127\.0\.0\.1:1 \(HTTP_PROXY") as caught:
        store.contains(keys(1))
    assert "hunter2" not in str(caught.value)


def test_a_bucket_that_is_not_there_is_told_by_a_write_and_by_the_check(
    shared_s3: S3Server, open_store: OpenStore
) -> None:
    store = open_store(shared_s3, "x", bucket="no-such-bucket")
    assert store.contains(keys(1)) == [False]  # a missing block and a missing bucket look the same
    with pytest.raises(StoreError, match="no-such-bucket"):
        store.check()
    with pytest.raises(StoreError, match="no-such-bucket"):
        write(store, keys(1))


def test_a_frozen_server_costs_a_deadline_and_touches_no_buffer_later(s3: S3Server, open_store: OpenStore) -> None:
    patient = open_store(s3, "frozen")
    store = open_store(s3, "frozen", request_s=SOON_S)
    assert write(patient, keys(1, 2)) == [True, True]
    s3.freeze()
    targets = buffers(2)
    with pytest.raises(StoreError):
        store.read_into(keys(1, 2), targets)
    with pytest.raises(StoreError):
        write(store, keys(3))
    s3.thaw()
    assert read(patient, keys(1, 2)) == [True, True]
    assert all(bytes(target) == UNTOUCHED * BLOCK_BYTES for target in targets)
    wait_until(lambda: succeeds(lambda: read(store, keys(1, 2)) == [True, True]), "the store works again")


@pytest.mark.parametrize("does", ["contains", "read", "write"])
def test_a_frozen_server_costs_a_large_batch_one_deadline(
    s3: S3Server, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    store, wanted, call = (
        open_store(s3, "batch", request_s=SOON_S),
        keys(*range(256)),
        "get" if does == "read" else "head",
    )
    begun, original = list[Any](), getattr(obstore, call)

    def counted(*what: Any, **more: Any) -> Any:
        begun.append(what)
        return original(*what, **more)

    monkeypatch.setattr(obstore, call, counted)
    s3.freeze()
    with pytest.raises(StoreError):
        {"contains": store.contains, "read": partial(read, store), "write": partial(write, store)}[does](wanted)
    assert 0 < len(begun) <= 16  # as many as there are threads, and none after these
    s3.thaw()


@pytest.mark.parametrize("way", ["stall", "cut"])
def test_a_stop_in_the_middle_of_an_object(shared_s3: S3Server, proxy: Proxy, open_store: OpenStore, way: str) -> None:
    large = 1 << 20
    direct = open_store(shared_s3, f"middle-{way}", large)
    assert write(direct, keys(1), large) == [True]
    store = open_store(
        shared_s3,
        f"middle-{way}",
        large,
        request_s=SOON_S if way == "stall" else 60.0,
        config={"endpoint": f"http://127.0.0.1:{proxy.port}"},
    )
    (proxy.stall_after if way == "stall" else proxy.cut_after)(large // 2)
    targets = buffers(1, large)
    with pytest.raises(StoreError):
        store.read_into(keys(1), targets)
    assert bytes(targets[0]) == UNTOUCHED * large
    assert store.stats().corrupt_blocks == 0  # missing data proves nothing
    proxy.heal()
    wait_until(lambda: succeeds(lambda: read(store, keys(1), large) == [True]), "the store works again")


def test_a_server_that_drips_is_left_at_the_deadline_and_read_by_who_waits(
    shared_s3: S3Server, proxy: Proxy, open_store: OpenStore
) -> None:
    size, through = 1 << 18, {"endpoint": f"http://127.0.0.1:{proxy.port}"}
    patient = open_store(shared_s3, "drips", size, config=through)
    hasty = open_store(shared_s3, "drips", size, request_s=SOON_S, config=through)
    assert write(patient, keys(1), size) == [True]
    proxy.throttle(2 * size // 3)
    targets = buffers(1, size)
    with pytest.raises(StoreError):
        hasty.read_into(keys(1), targets)
    assert read(patient, keys(1), size) == [True]
    assert bytes(targets[0]) == UNTOUCHED * size
    proxy.heal()
    wait_until(lambda: succeeds(lambda: read(hasty, keys(1), size) == [True]), "the store works again")


@pytest.mark.skipif(
    not os.environ.get("KVOFFLOAD_S3_SERVER"), reason="moto is never full; `make test-remote` has SeaweedFS"
)
def test_a_full_server_refuses_writes_and_reads_on(s3: S3Server, open_store: OpenStore) -> None:
    store, number = open_store(s3, "full"), itertools.count(10)
    assert write(store, keys(1, 2)) == [True, True]
    s3.kill()
    s3.start("-volume.minFreeSpace=100")
    wait_until(lambda: not succeeds(lambda: any(write(store, keys(next(number))))), "the server takes no more")
    assert read(store, keys(1, 2)) == [True, True]
    s3.kill()
    s3.start()
    wait_until(lambda: succeeds(lambda: write(store, keys(next(number))) == [True]), "there is room again")
    assert read(store, keys(1, 2)) == [True, True]


def test_failures_leave_no_sockets_threads_or_memory(shared_s3: S3Server, open_store: OpenStore) -> None:
    store = open_store(shared_s3, "failures", config={"endpoint": f"http://127.0.0.1:{free_port()}"})
    wanted, targets = keys(*range(8)), buffers(8)

    def fail(times: int) -> Held:
        for _ in range(times):
            with pytest.raises(StoreError):
                store.read_into(wanted, targets)
        return held()

    check_growth(fail(10), fail(30))


def test_killed_restarted_and_used_again(s3: S3Server, open_store: OpenStore) -> None:
    store = open_store(s3, "killed")
    assert write(store, keys(1)) == [True]
    s3.kill()
    with pytest.raises(StoreError):
        read(store, keys(1))
    s3.start()
    assert read(store, keys(1)) in ([False], [True])  # moto forgets, SeaweedFS does not
    assert write(store, keys(1, 2)) == [True, True]
    assert read(store, keys(1, 2)) == [True, True]


@pytest.mark.parametrize("secret", [None, b"the fleet's own secret"])
@pytest.mark.parametrize(
    ("name", "value_from"),
    [
        ("short", lambda value: value[:-1]),
        ("long", lambda value: value + b"x"),
        ("empty", lambda value: b""),
        ("altered", lambda value: value[:9] + bytes([value[9] ^ 1]) + value[10:]),
        ("seal", lambda value: value[:-1] + bytes([value[-1] ^ 1])),
    ],
)
def test_a_wrong_object_is_a_miss_is_deleted_and_written_anew(
    shared_s3: S3Server,
    open_store: OpenStore,
    secret: bytes | None,
    name: str,
    value_from: Callable[[bytes], bytes],
) -> None:
    prefix = f"wrong-{name}-{bool(secret)}"
    store = open_store(shared_s3, prefix, secret=secret)
    wanted = keys(1, 2, 3)
    assert write(store, wanted) == [True] * 3
    (path,) = (path for path in shared_s3.names(prefix) if path.endswith(wanted[1].hex()))
    shared_s3.put(path, value_from(shared_s3.get(path)))
    assert read(store, wanted) == [True, False, True]
    assert store.stats().corrupt_blocks == 1
    assert store.take_lost() == {wanted[1]: "corrupt"}
    assert store.contains(wanted) == [True, False, True]
    assert write(store, wanted) == [True] * 3
    assert read(store, wanted) == [True] * 3


def test_a_panic_of_the_client_fails_in_words(
    shared_s3: S3Server, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(shared_s3, "panic")
    with pytest.raises(BaseException, match="prefix") as panic:
        obstore.store.from_url("s3://bucket/x", config={"timeout": "5s"})
    assert not isinstance(panic.value, Exception)

    def panics(*what: Any, **more: Any) -> Any:
        raise panic.value

    for call in ("head", "list", "delete"):
        monkeypatch.setattr(obstore, call, panics)
    for use in (
        lambda: store.contains(keys(1)),
        lambda: store.discard(keys(1)),
        store.check,
    ):
        with pytest.raises(StoreError, match="The object store s3://kv-fleet/panic fails: "):
            use()


def test_what_a_lifecycle_rule_removed_is_a_miss(shared_s3: S3Server, open_store: OpenStore) -> None:
    store = open_store(shared_s3, "lifecycle")
    write(store, keys(1, 2))
    for path in shared_s3.names("lifecycle"):
        if path.endswith(keys(1)[0].hex()):
            shared_s3.delete(path)
    assert read(store, keys(1, 2)) == [False, True]
    assert store.stats().corrupt_blocks == 0


@pytest.mark.skipif("KVOFFLOAD_S3_SERVER" in os.environ, reason="SeaweedFS has no archive; `make test` has moto")
def test_what_a_lifecycle_rule_archived_is_a_miss_and_is_written_again(
    shared_s3: S3Server, open_store: OpenStore
) -> None:
    """Its size can be asked, but it cannot be read."""
    store = open_store(shared_s3, "archive")
    write(store, keys(1, 2))
    (path,) = [path for path in shared_s3.names("archive") if path.endswith(keys(1)[0].hex())]
    shared_s3.archive(path)
    assert store.contains(keys(1)) == [True]
    assert read(store, keys(1)) == [False], "a miss, and the store works"
    assert read(store, keys(2)) == [True]
    assert write(store, keys(1)) == [True]
    assert read(store, keys(1, 2)) == [True, True]


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
def test_a_wall_clock_that_jumps_costs_misses_until_it_is_right(shared_s3: S3Server, tmp_path: Path) -> None:
    """A service refuses signatures of another day (moto does not). Nothing hangs, and nothing else is wrong."""
    options = {"type": "object", "url": f"s3://{BUCKET}/clock", "config": shared_s3.config, "request_timeout_s": 30}
    check(JumpingClock(tmp_path).run_client(options))


def test_who_lacks_the_secret_cannot_make_a_block(shared_s3: S3Server, open_store: OpenStore) -> None:
    ours = open_store(shared_s3, "keyed", secret=b"ours, and ours alone")
    theirs = open_store(shared_s3, "keyed", secret=b"made up by somebody")
    write(theirs, keys(1))
    assert ours.contains(keys(1)) == [False]
    write(ours, keys(1))
    mine, other = (path_of(store, keys(1)[0]) for store in (ours, theirs))
    shared_s3.put(f"keyed/{mine}", shared_s3.get(f"keyed/{other}"))
    assert read(ours, keys(1)) == [False]


def test_a_batch_is_read_side_by_side(shared_s3: S3Server, open_store: OpenStore) -> None:
    store = open_store(shared_s3, "many", requests=8)
    wanted = keys(*range(40))
    assert store.batch_blocks == 8
    assert write(store, wanted) == [True] * 40
    assert read(store, wanted) == [True] * 40
    assert store.contains(keys(*range(20, 60))) == [True] * 20 + [False] * 20


class Counting:
    """obstore, which counts uploads by path. ``fails``: they fail. After each question it calls ``asked``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.uploads: list[str] = []
        self.fails = False
        self.asked: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def head(self, *what: Any) -> Any:
        try:
            return self._inner.head(*what)
        finally:
            self.asked()

    def put(self, objects: Any, path: str, *what: Any, **how: Any) -> Any:
        if self.fails:
            raise OSError("no upload today")
        self.uploads.append(path)
        return self._inner.put(objects, path, *what, **how)


def test_what_is_there_is_not_uploaded(shared_s3: S3Server, open_store: OpenStore) -> None:
    store = open_store(shared_s3, "again")
    client = wrap_client(store, Counting)
    assert write(store, keys(1, 2)) == [True, True]
    assert write(store, keys(1, 2, 3)) == [True, True, True]
    assert sorted(client.uploads) == sorted(path_of(store, key) for key in keys(1, 2, 3))
    store.discard(keys(2))
    assert write(store, keys(1, 2)) == [True, True]  # nothing remembers that it was there
    assert client.uploads[-1] == path_of(store, keys(2)[0])
    assert read(store, keys(1, 2, 3)) == [True, True, True]


def test_blocks_that_are_there_hide_no_failure_of_the_others(shared_s3: S3Server, open_store: OpenStore) -> None:
    store = open_store(shared_s3, "hidden")
    assert write(store, keys(1)) == [True]
    client = wrap_client(store, Counting)
    client.fails = True
    assert write(store, keys(1)) == [True]
    with pytest.raises(StoreError, match="no upload today"):
        write(store, keys(1, 2))


def test_an_object_of_another_length_is_replaced(shared_s3: S3Server, open_store: OpenStore) -> None:
    store = open_store(shared_s3, "replaced")
    put(store, keys(1)[0], b"short")
    assert store.contains(keys(1)) == [False]
    assert write(store, keys(1)) == [True]
    assert read(store, keys(1)) == [True]


def test_a_block_that_a_reader_evicts_once_a_writer_has_found_it_is_lost_after_the_write(
    shared_s3: S3Server, open_store: OpenStore
) -> None:
    """It is reported as lost when it is gone, so that no write that found it before is announced later."""
    store = open_store(shared_s3, "evicted")
    path = path_of(store, keys(1)[0])
    put(store, keys(1)[0], bytes(BLOCK_BYTES + 16))  # as long as the block, and not it
    client = wrap_client(store, Counting)
    lost_before: list[object] = []

    def evict() -> None:
        client.asked = lambda: None
        assert read(store, keys(1)) == [False]

    discard = store.discard

    def slow(wanted: Any) -> None:
        lost_before.append(store.take_lost())
        discard(wanted)

    client.asked, store.discard = evict, slow  # type: ignore[method-assign]
    assert write(store, keys(1)) == [True]
    assert client.uploads == []
    assert lost_before == [{}]
    assert store.take_lost() == {keys(1)[0]: "corrupt"}
    assert write(store, keys(1)) == [True]
    assert client.uploads == [path]
    assert read(store, keys(1)) == [True]
