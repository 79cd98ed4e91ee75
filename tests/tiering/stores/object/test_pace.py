# SPDX-License-Identifier: Apache-2.0
"""Test a service that answers SlowDown, and a service that permits neither deletions nor conditions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.tiering.stores.blocks import BLOCK_BYTES, read, write

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.object.client import Deadlines
from kvoffload.tiering.stores.object.pace import Pace
from kvoffload.tiering.stores.object.store import ObjectStore

CONFIG = {"access_key_id": "id", "secret_access_key": "hush", "region": "r"}
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Service:
    """Objects in memory. Answers SlowDown while it has more than ``most`` requests, and refuses deletions and
    conditions."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.objects: dict[str, bytes] = {}
        self.num_running = self.num_answered = self.num_refused = 0
        self.lock = threading.Lock()
        self.is_crowded = threading.Event()
        self.frozen_paths: set[str] | None = None
        """Paths that were asked for since the service froze."""
        self.go_on = threading.Event()


@contextmanager
def serving(service: Service) -> Iterator[dict[str, str]]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, code: int, body: bytes = b"", length: int | None = None) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            self.wfile.write(body)

        def handle_one(self, call: Callable[[bytes], None]) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if service.frozen_paths is not None:
                service.frozen_paths.add(self.path)
                service.go_on.wait(120)
                self.close_connection = True
                return
            with service.lock:
                service.num_running += 1
                is_refused = service.num_running > service.most
                service.num_answered += not is_refused
                service.num_refused += is_refused
            try:
                service.is_crowded.wait(0.005)  # so that requests meet
                if is_refused:
                    self.answer(503, b"" if self.command == "HEAD" else SLOW_DOWN)
                else:
                    call(body)
            finally:
                with service.lock:
                    service.num_running -= 1

        def do_PUT(self) -> None:
            def put(body: bytes) -> None:
                if self.headers.get("If-None-Match") or self.headers.get("If-Match"):
                    self.answer(501, b"<Error><Code>NotImplemented</Code></Error>")
                    return
                service.objects[self.path] = body
                self.answer(200)

            self.handle_one(put)

        def do_GET(self) -> None:
            def get(_: bytes) -> None:
                found = service.objects.get(self.path)
                if found is None:
                    self.answer(404)
                else:
                    self.answer(200, b"" if self.command == "HEAD" else found, len(found))

            self.handle_one(get)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            self.handle_one(lambda _: self.answer(403, b"<Error><Code>AccessDenied</Code></Error>"))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield CONFIG | {"endpoint": f"http://127.0.0.1:{server.server_address[1]}"}
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_service_without_conditional_writes_stores_blocks() -> None:
    with serving(Service(most=100)) as config:
        store = ObjectStore("s3://bucket/kv", BLOCK_BYTES, config=config)
        for wanted in (keys(1), keys(1, 2)):
            assert write(store, wanted) == [True] * len(wanted)
            assert read(store, wanted) == [True] * len(wanted)
        store.close()


def test_fewer_requests_are_in_flight_after_a_slow_down() -> None:
    service = Service(most=3)
    with serving(service) as config:
        store = ObjectStore("s3://bucket/kv", BLOCK_BYTES, config=config, requests=24)
        shares = []
        for batch in range(12):
            service.num_answered = service.num_refused = 0
            wanted = keys(*range(100 * batch, 100 * batch + 24))
            try:
                store.write(wanted, [memoryview(block_of(key, BLOCK_BYTES)) for key in wanted])
            except StoreError:
                pass
            shares.append(service.num_refused / max(service.num_answered + service.num_refused, 1))
        store.close()
    assert sum(shares[4:]) / len(shares[4:]) < 0.35, "with 24 requests in flight three quarters and more are refused"


def test_requests_that_wait_for_their_turn_do_not_wait_for_one_deadline_after_the_other() -> None:
    """A service that asked to slow down freezes. Each batch ends with the deadline of its first request."""
    service = Service(most=0)
    with serving(service) as config:
        store = ObjectStore("s3://bucket/kv", BLOCK_BYTES, config=config, requests=8, deadlines=Deadlines(30.0, 0.5))
        for number in range(8):
            with pytest.raises(StoreError):
                store.contains(keys(number))
        service.frozen_paths = set()
        with pytest.raises(StoreError):
            store.contains(keys(*range(100, 108)))
        store.close()
        blocks = {path for path in service.frozen_paths if path.rpartition("/")[2]}
        service.go_on.set()
    assert len({path for path in blocks if "kv/" in path}) == 1


def test_a_bad_block_that_nobody_may_delete_is_absent_until_it_is_written_over() -> None:
    service = Service(most=100)
    wanted = keys(1, 2)
    blocks = [memoryview(block_of(key, BLOCK_BYTES)) for key in wanted]
    with serving(service) as config:
        store = ObjectStore("s3://bucket/kv", BLOCK_BYTES, config=config)
        assert store.write(wanted, blocks) == [True, True]
        (bad,) = [name for name in service.objects if name.endswith(wanted[0].hex())]
        service.objects[bad] = bytes(len(service.objects[bad]))
        assert read(store, wanted) == [False, True]
        assert store.contains(wanted) == [False, True]
        assert store.write(wanted, blocks) == [True, True]
        assert store.contains(wanted) == [True, True]
        assert read(store, wanted) == [True, True]
        store.close()


def test_a_pace_is_halved_once_for_requests_in_flight_together_and_grows_again() -> None:
    pace = Pace(16)
    with pace.turn(), pace.turn():
        began = pace.num_slowed
        pace.slow_down(began)
        pace.slow_down(began)
    assert pace.limit == 8
    for _ in range(10):
        pace.slow_down(pace.num_slowed)
    assert pace.limit == 1
    for _ in range(200):
        pace.go_on()
    assert pace.limit == 16
