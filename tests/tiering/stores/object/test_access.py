# SPDX-License-Identifier: Apache-2.0
"""Objects over TLS with an authority of one's own, and with keys that the server does not know."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore.store
import pytest
from tests.authority import Authority
from tests.s3_server import BUCKET, PATIENT, S3Server
from tests.tiering.stores.blocks import BLOCK_BYTES, read, write

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.object import ObjectStore

OpenStore = Callable[..., ObjectStore]
checks_keys = pytest.mark.skipif(
    not os.environ.get("KVOFFLOAD_S3_SERVER"),
    reason="moto takes any key; `make test-remote` brings a server that does not",
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_s3(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("tls"), authority)
    yield server
    server.stop()


def test_with_its_authority_a_server_is_trusted(tls_s3: S3Server, authority: Authority, open_store: OpenStore) -> None:
    store = open_store(tls_s3, "tls", tls_ca=authority.ca)
    assert write(store, keys(1, 2)) == [True, True]
    assert read(store, keys(1, 2, 3)) == [True, True, False]


def test_an_unknown_authority_is_refused(tls_s3: S3Server, tmp_path: Path, open_store: OpenStore) -> None:
    stranger = Authority(tmp_path / "stranger")
    for options in ({}, {"tls_ca": stranger.ca}):
        store = open_store(tls_s3, "stranger", **options)
        for call in (
            store.check,
            lambda store=store: store.contains(keys(1)),
            lambda store=store: write(store, keys(1)),
        ):
            with pytest.raises(StoreError, match="The object store s3://kv-fleet/stranger fails: ") as caught:
                call()
            assert "\n" not in str(caught.value)
    assert not tls_s3.names("stranger")


def test_a_frozen_server_costs_a_deadline(authority: Authority, tmp_path: Path, open_store: OpenStore) -> None:
    server = S3Server(tmp_path, authority)
    try:
        hasty, patient = (open_store(server, "frozen", tls_ca=authority.ca, request_s=s) for s in (0.5, 60.0))
        assert write(patient, keys(1)) == [True]
        server.freeze()
        for call in (read, write):
            with pytest.raises(StoreError):
                call(hasty, keys(1))
        server.thaw()
        assert read(patient, keys(1)) == [True]
    finally:
        server.stop()


@pytest.mark.parametrize(
    "named",
    [
        {"config": "endpoint"},
        {"config": "endpoint_url"},
        {"config": "aws_endpoint_url"},
        {"environment": "AWS_ENDPOINT"},
        {"environment": "AWS_ENDPOINT_URL"},
        {"environment": "AWS_ENDPOINT_URL_S3"},
    ],
)
@pytest.mark.parametrize("more", [{}, {"allow_http": "true", "aws_unsigned_payload": "true"}])
def test_an_endpoint_without_tls_is_used_by_whatever_name_it_is_given(
    shared_s3: S3Server, monkeypatch: pytest.MonkeyPatch, named: dict[str, str], more: dict[str, str]
) -> None:
    config = {name: value for name, value in shared_s3.config.items() if name != "endpoint"} | more
    if name := named.get("config"):
        config[name] = shared_s3.endpoint
    else:
        monkeypatch.setenv(named["environment"], shared_s3.endpoint)
    options = {"type": "object", "url": f"s3://{BUCKET}/named", "config": config, "required": True} | PATIENT
    store = parse_tier(options, BLOCK_BYTES).open_store(BLOCK_BYTES, str((named, more)))
    assert write(store, keys(1)) == [True]
    assert read(store, keys(1)) == [True]
    store.close()


def test_an_endpoint_that_is_not_used_allows_nothing(
    tls_s3: S3Server, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere")
    given: list[dict[str, Any]] = []
    original = obstore.store.from_url
    monkeypatch.setattr(obstore.store, "from_url", lambda *url, **more: given.append(more) or original(*url, **more))
    ObjectStore(f"s3://{BUCKET}/tls-only", BLOCK_BYTES, config=tls_s3.config, tls_ca=authority.ca).close()
    assert [options["client_options"]["allow_http"] for options in given] == [False]


def test_required_refuses_an_unknown_authority_at_the_start(tls_s3: S3Server) -> None:
    options: dict[str, Any] = {"type": "object", "url": f"s3://{BUCKET}/x", "config": tls_s3.config, "required": True}
    with pytest.raises(StoreError):
        parse_tier(options).open_store(4096, "ns")


@checks_keys
@pytest.mark.parametrize("wrong", [{"secret_access_key": "guessed"}, {"access_key_id": "stranger"}])
def test_a_wrong_key_is_one_sentence_without_the_key(
    shared_s3: S3Server, open_store: OpenStore, wrong: dict[str, str]
) -> None:
    store = open_store(shared_s3, "wrong", config=wrong)
    for call in (
        store.check,
        lambda: store.contains(keys(1)),
        lambda: write(store, keys(1)),
        lambda: read(store, keys(1)),
    ):
        with pytest.raises(StoreError, match="The object store s3://kv-fleet/wrong fails: ") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert "guessed" not in str(caught.value)
