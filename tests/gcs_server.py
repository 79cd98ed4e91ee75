# SPDX-License-Identifier: Apache-2.0
"""Run fake-gcs-server, an emulator of Google's storage, on this machine for one test, behind TLS.

The emulator accepts uploads only through Google's JSON interface, but obstore uploads through the XML interface. So
requests pass through a translator, which converts uploads, including their conditions, and forwards all other requests
unchanged. The emulator itself stores, compares, finds, lists and deletes. ``KVOFFLOAD_GCS_SERVER`` names its program.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from tests.authority import Authority
from tests.ports import free_port
from tests.redis_server import PATIENCE_S, wait_until

BUCKET = "kv-fleet"


def program() -> str | None:
    return os.environ.get("KVOFFLOAD_GCS_SERVER")


class GcsServer:
    """One emulator with one bucket. ``config`` and ``ca`` contain a client's settings."""

    def __init__(self, directory: Path) -> None:
        name = program()
        assert name is not None
        authority = Authority(directory)
        self.ca = authority.ca
        self._port, port = free_port(), free_port()
        words = [name, "-scheme=http", "-host=127.0.0.1", f"-port={self._port}", "-backend=memory"]
        words.append(f"-public-host=127.0.0.1:{self._port}")
        self._log = directory / "gcs.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(words, cwd=directory, stdout=log, stderr=subprocess.STDOUT)
        wait_until(self._has_bucket, "the emulator has a bucket")

        class Translator(_Translator):
            emulator = self._port

        self._server = _Server(("127.0.0.1", port), Translator)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.server)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.config = {"base_url": f"https://127.0.0.1:{port}", "bearer_token": "a-token-of-the-fleet"}

    def _has_bucket(self) -> bool:
        assert self._process.poll() is None, self._log.read_text(errors="replace")
        try:
            status, _, _ = _ask(self._port, "POST", "/storage/v1/b?project=test", json.dumps({"name": BUCKET}).encode())
        except OSError:
            return False
        return status in (200, 409)

    def get(self, name: str) -> bytes:
        status, _, value = _ask(self._port, "GET", f"/storage/v1/b/{BUCKET}/o/{quote(name, safe='')}?alt=media")
        assert status == 200, value
        return value

    def put(self, name: str, value: bytes) -> None:
        status, _, answer = _upload(self._port, BUCKET, name, value)
        assert status == 200, answer

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._process.kill()
        self._process.wait(PATIENCE_S)


def _ask(
    port: int, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
) -> tuple[int, list[tuple[str, str]], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, {"Content-Type": kind} if body is not None else {})
        answer = connection.getresponse()
        return answer.status, answer.getheaders(), answer.read()
    finally:
        connection.close()


def _upload(
    port: int, bucket: str, name: str, value: bytes, condition: str = ""
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Upload in two parts, because the emulator checks the condition only then."""
    border = os.urandom(16).hex().encode()
    meta = b"Content-Type: application/json\r\n\r\n" + json.dumps({"name": name}).encode()
    parts = (meta, b"Content-Type: application/octet-stream\r\n\r\n" + value)
    body = b"".join(b"--%s\r\n%s\r\n" % (border, part) for part in parts) + b"--%s--\r\n" % border
    path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{condition}"
    return _ask(port, "POST", path, body, f"multipart/related; boundary={border.decode()}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect because they do not trust the certificate."""


class _Translator(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    emulator: int

    def do_GET(self) -> None:
        self._answer(*_ask(self.emulator, self.command, self.path))

    do_HEAD = do_DELETE = do_GET

    def do_PUT(self) -> None:
        value = self.rfile.read(int(self.headers["Content-Length"]))
        bucket, _, name = unquote(self.path.partition("?")[0]).lstrip("/").partition("/")
        generation = self.headers.get("x-goog-if-generation-match")
        condition = "" if generation is None else f"&ifGenerationMatch={generation}"
        status, _, body = _upload(self.emulator, bucket, name, value, condition)
        found = json.loads(body) if status == 200 else {}
        headers = [("ETag", f'"{found["etag"]}"'), ("x-goog-generation", found["generation"])] if found else []
        self._answer(status, headers, b"" if found else body)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        own = ("content-length", "connection", "transfer-encoding", "date", "server")
        for name, value in headers:
            if name.lower() not in own or (self.command == "HEAD" and name.lower() == "content-length"):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
