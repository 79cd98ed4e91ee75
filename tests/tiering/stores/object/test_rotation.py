# SPDX-License-Identifier: Apache-2.0
"""Credentials that are replaced while the server runs: tokens of minutes, keys and authorities in files."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.authority import Authority
from tests.s3_server import BUCKET, PATIENT, USER, S3Server
from tests.tiering.stores.blocks import BLOCK_BYTES, read, write

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.object.client import Client, Deadlines

OpenTier = Callable[..., BlockStore]


_OF_SIGNATURES = ("host", "authorization", "x-amz-security-token", "x-amz-date", "x-amz-content-sha256")


class Gate(ThreadingHTTPServer):
    """Passes requests on to a real server if they have the session token of the moment, as AWS does.

    A token that has expired is answered with 400, and its text is repeated in the body.
    """

    def __init__(self, server: S3Server, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.server, self.token, self.num_rejected = server, token, 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Request(BaseHTTPRequestHandler):
    server: Gate
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        token = self.headers.get("x-amz-security-token", "")
        if token == self.server.token:
            onward = http.client.HTTPConnection("127.0.0.1", self.server.server.port, timeout=60)
            onward.request(self.command, self.path, body, self._signed_again(body))
            answer = onward.getresponse()
            status, headers, content = answer.status, answer.getheaders(), answer.read()
            onward.close()
        else:
            self.server.num_rejected += 1
            text = f"<Code>ExpiredToken</Code><Message>It has expired.</Message><Token-0>{token}</Token-0>"
            status, headers, content = 400, [], f"<Error>{text}</Error>".encode()
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length", str(len(content)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _signed_again(self, body: bytes) -> dict[str, str]:
        """Return the headers of this request without the session token, which the real server did not give out."""
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_SIGNATURES}
        request = AWSRequest(self.command, f"{self.server.server.endpoint}{self.path}", headers, body)
        S3SigV4Auth(Credentials(USER["access_key_id"], USER["secret_access_key"]), "s3", USER["region"]).add_auth(
            request
        )
        return dict(request.headers.items())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass

    def log_message(self, *what: object) -> None:
        pass


@pytest.fixture
def gate(shared_s3: S3Server) -> Iterator[Gate]:
    gate = Gate(shared_s3, "token-1")
    yield gate
    gate.shutdown()
    gate.server_close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("token-1\n")
    return path


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[OpenTier]:
    opened: list[BlockStore] = []

    def make(endpoint: str, config: dict[str, object], **options: object) -> BlockStore:
        tier = {"type": "object", "url": f"s3://{BUCKET}/rotation"} | PATIENT | options
        tier["config"] = USER | {"endpoint": endpoint} | config
        opened.append(parse_tier(tier, BLOCK_BYTES).open_store(BLOCK_BYTES, str(tmp_path)))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.mark.parametrize("first", ["contains", "write", "read", "discard", "check"])
def test_a_session_token_that_expires_is_read_again_by_whatever_comes_first(
    first: str, gate: Gate, token_file: Path, open_tier: OpenTier
) -> None:
    store = open_tier(gate.endpoint, {"session_token": {"file": str(token_file)}})
    calls = {
        "contains": lambda: store.contains(keys(1, 2, 3)) == [True, True, False],
        "write": lambda: write(store, keys(4)) == [True],
        "read": lambda: read(store, keys(1, 2, 3)) == [True, True, False],
        "discard": lambda: store.discard(keys(1)) is None,
        "check": lambda: store.check() is None,  # type: ignore[attr-defined]
    }
    assert write(store, keys(1, 2)) == [True, True]
    gate.token = "token-2"
    token_file.write_text("token-2\n")
    assert calls[first]()
    num_rejected = gate.num_rejected
    assert num_rejected > 0
    assert read(store, keys(2)) == [True]
    assert gate.num_rejected == num_rejected, "the new token stays"


def test_until_there_is_a_new_one_each_batch_fails_with_the_services_own_reason(
    gate: Gate, token_file: Path, open_tier: OpenTier
) -> None:
    store = open_tier(gate.endpoint, {"session_token": {"file": str(token_file)}})
    assert write(store, keys(1)) == [True]
    gate.token = "token-2"
    for call in (
        lambda: store.contains(keys(1)),
        lambda: write(store, keys(1)),
        lambda: read(store, keys(1)),
        lambda: store.discard(keys(1)),
        store.check,  # type: ignore[attr-defined]
    ):
        with pytest.raises(StoreError, match=r"\(ExpiredToken\)") as caught:
            call()
        assert "token-1" not in str(caught.value)
        assert "\n" not in str(caught.value)
    token_file.unlink()  # as in the middle of a rotation
    with pytest.raises(StoreError, match="ExpiredToken"):
        read(store, keys(1))
    token_file.write_text("token-2\n")
    assert read(store, keys(1)) == [True]


def test_an_authority_that_is_replaced_is_read_again(tmp_path: Path, open_tier: OpenTier) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    (tmp_path / "s3").mkdir()
    server = S3Server(tmp_path / "s3", new)
    try:
        ca = shutil.copy(old.ca, tmp_path / "ca.pem")
        store = open_tier(server.endpoint, {}, tls_ca=str(ca))
        with pytest.raises(StoreError):
            write(store, keys(1))
        shutil.copy(new.ca, ca)
        assert write(store, keys(1)) == [True]
        assert read(store, keys(1)) == [True]
    finally:
        server.stop()


def test_a_service_account_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "account.json"

    def make_account(name: str) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        account = {"private_key": pem.decode(), "private_key_id": name, "client_email": f"{name}@example.com"}
        path.write_text(json.dumps(account | {"disable_oauth": False, "gcs_base_url": "https://127.0.0.1:1"}))

    make_account("first")
    client = Client("gs://bucket/prefix", {"service_account_path": str(path)}, Deadlines(), None)
    first = client.bucket
    assert not client.renew(first)
    make_account("second")
    assert client.renew(first)
    assert client.bucket is not first
    assert client.renew(first), "another request that failed with the old one"
    second = client.bucket
    path.write_text("half a fi")
    assert not client.renew(second)
    assert client.bucket is second
