# SPDX-License-Identifier: Apache-2.0
"""Test the proxy of ``deploy/`` in front of two servers that are not vLLM, with clients that disconnect."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

PROGRAM = Path(__file__).parents[2] / "deploy" / "prefill-decode" / "proxy.py"


class Upstream(ThreadingHTTPServer):
    """A server that answers ``/whole`` when ``may_answer`` is set, and streams on ``/stream`` forever.

    ``left`` is set when its client has disconnected.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.forget()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def forget(self) -> None:
        self.may_answer, self.left, self.asked = threading.Event(), threading.Event(), list[dict[str, Any]]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Upstream

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.connection.settimeout(0.05)
        while self.path == "/whole" and not self.server.may_answer.is_set():
            try:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    self.server.left.set()
                    return
            except TimeoutError:
                pass
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.wfile.write(b"data\n")
            while self.path == "/stream" and not self.server.may_answer.wait(0.02):
                self.wfile.write(b"data\n")
        except OSError:
            self.server.left.set()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Upstream, Upstream]]:
    servers = Upstream(), Upstream()
    yield servers
    for server in servers:
        server.may_answer.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def servers(started: tuple[Upstream, Upstream]) -> tuple[Upstream, Upstream]:
    """Return the servers for prefill, which may answer, and for decoding."""
    for server in started:
        server.forget()
    started[0].may_answer.set()
    return started


@pytest.fixture(scope="module")
def proxy(started: tuple[Upstream, Upstream], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port, path = free_port(), tmp_path_factory.mktemp("proxy") / "log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *(server.url for server in started), str(port)], stderr=log
        )
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    assert process.poll() is None
                    time.sleep(0.02)
            yield port
        finally:
            process.terminate()
            process.wait()
    assert "Traceback" not in path.read_text()


def ask(port: int, path: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps({"prompt": "a", "max_tokens": 9, "stream_options": {}}))
    return connection


def test_the_answer_of_decode_after_one_token_of_prefill(proxy: int, servers: tuple[Upstream, Upstream]) -> None:
    prefill, decode = servers
    decode.may_answer.set()
    assert ask(proxy, "/whole").getresponse().read() == b"data\n"
    assert prefill.asked == [{"prompt": "a", "max_tokens": 1, "stream": False}]
    assert decode.asked == [{"prompt": "a", "max_tokens": 9, "stream_options": {}}]


@pytest.mark.parametrize("path", ["/stream", "/whole"])
def test_decode_stops_when_the_client_leaves(path: str, proxy: int, servers: tuple[Upstream, Upstream]) -> None:
    _, decode = servers
    connection = ask(proxy, path)
    if path == "/stream":
        answer = connection.getresponse()
        assert answer.read1(1) == b"d"
        answer.close()
    else:
        while not decode.asked:
            time.sleep(0.02)
    connection.close()
    assert decode.left.wait(60)


def test_a_decode_that_does_not_answer_is_said(proxy: int, servers: tuple[Upstream, Upstream]) -> None:
    servers[1].server_close()  # permanently, because this test is the last one
    servers[1].shutdown()
    assert ask(proxy, "/whole").getresponse().status == 502
