# SPDX-License-Identifier: Apache-2.0
"""Redis over TLS: certificates are checked unless that is turned off, and the bytes are the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.authority import Authority
from tests.redis_server import PATIENT, RedisCluster, RedisServer, wait_until
from tests.tiering.stores.blocks import read, succeeds, write

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.testing.store_contract import BlockStoreContract
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.connector import Access

pytestmark = [
    pytest.mark.tls,
    pytest.mark.skipif(
        not os.environ.get("KVOFFLOAD_REDIS_SERVER"), reason="needs a server with TLS; `make test-remote` brings one"
    ),
]

LARGE = 3 << 20


def redis_options(authority: Authority, **more: str) -> dict[str, str]:
    """Return the options of a server that accepts only TLS."""
    own = {"tls-cert-file": authority.server, "tls-key-file": authority.server, "tls-ca-cert-file": authority.ca}
    return own | more


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_server(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Asks clients for no certificate. Its plain port stays open for the side door."""
    server = start_tls(tmp_path_factory.mktemp("tls"), authority, tls_auth_clients="no")
    yield server
    server.stop()


def start_tls(directory: Path, authority: Authority, **more: str) -> RedisServer:
    from tests.ports import free_port

    port = free_port()
    server = RedisServer(directory, **redis_options(authority, tls_port=str(port), **more))
    server.url = f"rediss://127.0.0.1:{port}"
    return server


class TestOverTls(BlockStoreContract):
    has_scan = False

    @pytest.fixture(autouse=True)
    def _on(self, tls_server: RedisServer, authority: Authority) -> None:
        self.url, self.ca = tls_server.url, authority.ca

    def make_store(self, directory: Path) -> BlockStore:
        return RedisStore(self.url, self.block_bytes, str(directory), timeouts=PATIENT, access=Access(tls_ca=self.ca))

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)


OpenStore = Callable[..., RedisStore]


def test_blocks_of_many_records(tls_server: RedisServer, authority: Authority, open_store: OpenStore) -> None:
    store = open_store(tls_server.url, LARGE, tls_ca=authority.ca)
    assert write(store, keys(1, 2), LARGE) == [True, True]
    assert read(store, keys(1, 2), LARGE) == [True, True]


def test_an_unknown_authority_is_refused(tls_server: RedisServer, tmp_path: Path, open_store: OpenStore) -> None:
    stranger = Authority(tmp_path / "stranger")
    for options in ({}, {"tls_ca": stranger.ca}):
        with pytest.raises(StoreError, match=r"certificate verify failed") as caught:
            open_store(tls_server.url, **options).contains(keys(1))
        assert "\n" not in str(caught.value)
    assert open_store(tls_server.url, tls_verify=False).contains(keys(1)) == [False]


def test_a_certificate_for_another_name_is_refused(tmp_path: Path, open_store: OpenStore) -> None:
    other = Authority(tmp_path / "other", "kv.example.com")
    server = start_tls(tmp_path, other, tls_auth_clients="no")
    try:
        with pytest.raises(StoreError, match="IP address mismatch"):
            open_store(server.url, tls_ca=other.ca).contains(keys(1))
    finally:
        server.stop()


def test_a_client_shows_its_certificate(authority: Authority, tmp_path: Path, open_store: OpenStore) -> None:
    server = start_tls(tmp_path, authority, tls_auth_clients="yes")
    try:
        with pytest.raises(StoreError):
            open_store(server.url, tls_ca=authority.ca).contains(keys(1))
        shown = {"tls_ca": authority.ca, "tls_cert": authority.client, "tls_key": authority.client}
        assert write(open_store(server.url, **shown), keys(1)) == [True]
    finally:
        server.stop()


def test_required_refuses_a_wrong_certificate_at_the_start(tls_server: RedisServer) -> None:
    options: dict[str, Any] = {"type": "redis", "url": tls_server.url, "required": True}
    with pytest.raises(StoreError, match="certificate verify failed"):
        parse_tier(options).open_store(4096, "ns")


def test_plain_text_to_a_tls_port(tls_server: RedisServer, open_store: OpenStore) -> None:
    with pytest.raises(StoreError):
        open_store(tls_server.url.replace("rediss", "redis")).contains(keys(1))


def test_a_frozen_server_costs_a_deadline(authority: Authority, tmp_path: Path, open_store: OpenStore) -> None:
    server = start_tls(tmp_path, authority, tls_auth_clients="no")
    try:
        store = open_store(server.url, LARGE, tls_ca=authority.ca, window_s=0.5)
        patient = open_store(server.url, LARGE, tls_ca=authority.ca)
        assert write(patient, keys(1), LARGE) == [True]
        wait_until(lambda: succeeds(lambda: store.contains(keys(1)) == [True]), "the store is connected")
        server.freeze()
        for call in (read, write):
            with pytest.raises(StoreError):
                call(store, keys(1), LARGE)
        server.thaw()
        assert read(patient, keys(1), LARGE) == [True]
    finally:
        server.stop()


def test_a_cluster_over_tls(authority: Authority, tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path, tls_authority=redis_options(authority, tls_auth_clients="no"))
    try:
        store = RedisStore(cluster.url, 4096, cluster=True, timeouts=PATIENT, access=Access(tls_ca=authority.ca))
        wanted = keys(*range(30))
        assert write(store, wanted) == [True] * 30
        assert read(store, wanted) == [True] * 30
        store.close()
    finally:
        cluster.stop()
