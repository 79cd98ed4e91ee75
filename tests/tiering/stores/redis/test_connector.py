# SPDX-License-Identifier: Apache-2.0
"""Test the parts of a URL, and the certificates that a connection trusts."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.authority import Authority

from kvoffload.errors import ConfigError
from kvoffload.tiering.stores.redis.connector import Access, Address, Connector, Timeouts, _tls, address_of, parse_url


@pytest.mark.parametrize(
    ("url", "address", "user", "database"),
    [
        ("redis://kv", Address("kv", 6379), (None, None), 0),
        ("redis://", Address("localhost", 6379), (None, None), 0),
        ("rediss://kv:1/", Address("kv", 1), (None, None), 0),
        ("redis://kv:/7/", Address("kv", 6379), (None, None), 7),
        ("redis://[fe80::1]:1/3", Address("fe80::1", 1), (None, None), 3),
        ("redis://:pw@kv", Address("kv", 6379), (None, "pw"), 0),
        ("redis://me:p%2Fw%40%C3%A4:@kv:2/1", Address("kv", 2), ("me", "p/w@\xe4:"), 1),
        ("redis://me:p[w@kv", Address("kv", 6379), ("me", "p[w"), 0),
        ("unix:///run/kv%20.sock", Address("/run/kv .sock", 0), (None, None), 0),
        ("unix://me:pw@/kv.sock?db=2", Address("/kv.sock", 0), ("me", "pw"), 2),
    ],
)
def test_a_url_in_its_parts(url: str, address: Address, user: tuple[str | None, str | None], database: int) -> None:
    parsed = parse_url(url)
    assert parsed.addresses == (address,)
    assert (parsed.username, parsed.password) == user
    assert (parsed.database, parsed.service) == (database, "")
    assert parsed.has_tls is url.startswith("rediss")


@pytest.mark.parametrize(
    "url",
    [
        "unix://host/kv.sock",
        "unix://",
        "redis://a,b",
        "redis://[::1",
        "redis://a:99999999",
        "redis://a:0",
        "redis://a:b:c",
    ],
)
def test_a_url_that_cannot_be_read_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url of the 'redis' tier is not valid"):
        parse_url(url)


def test_a_socket_file_has_no_other_settings_in_its_url() -> None:
    with pytest.raises(ConfigError, match="give other settings as options") as caught:
        parse_url("unix:///kv.sock?password=hush")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("port", [0, -1, 1 << 16])
def test_a_server_that_another_one_names_has_a_port(port: int) -> None:
    """0 would be the path of a socket file."""
    with pytest.raises(ValueError, match="not a port"):
        address_of("/run/other.sock", port)


def test_the_authority_that_is_named_is_the_only_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = _tls(Access(tls_ca=authority.ca))
    assert len(context.get_ca_certs()) == 1
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)


def test_whether_the_certificate_is_checked() -> None:
    context = _tls(Access(tls_verify=False))
    assert (context.check_hostname, context.verify_mode) == (False, ssl.CERT_NONE)


def test_a_key_needs_its_certificate() -> None:
    with pytest.raises(ConfigError, match="tls_key needs its tls_cert"):
        Connector("rediss://kv", Timeouts(), Access(tls_key="kv.key"))


def test_tls_has_the_time_of_a_connection_however_many_addresses_a_name_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, context = Authority(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.server)

    def serve() -> None:
        peer, _ = listener.accept()
        time.sleep(0.3)
        with suppress(OSError), context.wrap_socket(peer, server_side=True) as served:
            served.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=serve)
        thread.start()
        access = Access(tls_ca=authority.ca)
        connector = Connector(f"rediss://127.0.0.1:{port}", Timeouts(connect_s=30.0), access)
        addresses = socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses * 600)
        connector.connect(connector.address).close()
        thread.join()


def test_an_encrypted_key_is_an_error_and_no_question_at_the_terminal(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    made, key = Authority(tmp_path / "made"), tmp_path / "key.pem"
    plain = load_pem_private_key(Path(made.client).read_bytes(), None)
    key.write_bytes(plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"hush")))
    with pytest.raises(ConnectionError, match="tls_key of the 'redis' tier is encrypted; use a key without"):
        _tls(Access(tls_cert=made.client, tls_key=str(key)))
