# SPDX-License-Identifier: Apache-2.0
"""Test an object tier's options: mistakes raise clear errors, and secrets appear nowhere."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port
from tests.redis_server import wait_until
from tests.s3_server import BUCKET, S3Server
from tests.tiering.store_rig import is_scanned
from tests.tiering.stores.blocks import read, write

from kvoffload.base import ReqContext
from kvoffload.errors import ConfigError, MissingExtraError, StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import STORES, build_tier, parse_tier
from kvoffload.tiering.stores.object.client import Deadlines, open_client
from kvoffload.tiering.stores.object.options import ObjectOptions
from kvoffload.tiering.tier import StoreTier

URL = "s3://bucket/prefix"


def parse(**options: Any) -> ObjectOptions:
    parsed = parse_tier({"type": "object", "url": URL} | options, 4096)
    assert isinstance(parsed, ObjectOptions)
    return parsed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "http://x/y"}, "s3://bucket/prefix"),
        ({"url": "s3:///y"}, "s3://bucket/prefix"),
        ({"url": "s3://id:hush@bucket/y"}, "no credentials"),
        ({"url": "s3://bucket/y?a=b"}, "no credentials or settings"),
        ({"url": "s3://bucket/team#1/p"}, "has a '#', which would end its prefix"),
        ({"url": "s3://bucket/team#"}, "has a '#', which would end its prefix"),
        ({"url": "s3://id:hush/x@bucket/y"}, "no credentials"),
        ({"url": "s3://[::1/p"}, "s3://bucket/prefix"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s of the 'object' tier must be positive, and at most"),
        ({"requests": 0}, "requests of the 'object' tier"),
        ({"request_timeout_s": 0}, "request_timeout_s of the 'object' tier"),
        ({"config": {"regoin": "x"}}, "config of the 'object' tier .* contains .*'regoin'"),
        ({"config": {"allow_http": "hush"}}, "allow_http of the 'object' tier must be 'true' or 'false'"),
        (
            {"config": {"allow_http": "false", "endpoint": "http://host"}},
            "allow_http of the 'object' tier is false, but",
        ),
        ({"config": {"proxy_url": "http://id:hush@host"}}, "obstore rejects the config of the 'object' tier"),
        ({"config": {"skip_signature": True}}, "of the .object. tier must be"),
        ({"config": {"region": None}}, "of the .object. tier must be"),
        ({"config": {"secret_access_key": {"nev": "x"}}}, '{"env": name}'),
        (
            {"tls_ca": "/nowhere/ca.pem"},
            "tls_ca of the 'object' tier is /nowhere/ca.pem, which cannot be read: No such file",
        ),
        ({"seal_key": "short"}, "16 characters"),
        ({"ttl": "24h"}, "Unknown key 'ttl'"),
    ],
)
def test_a_mistake_is_one_sentence(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        parse(**options)
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("credentials", ["id:hush@", "id:1/hush@", "", "id:hu@sh@"])
def test_credentials_in_an_endpoint_are_not_shown(credentials: str) -> None:
    endpoint = f"http://{credentials}127.0.0.1:{free_port()}/?sig=hush"
    store = parse(config={"endpoint": endpoint, "skip_signature": "true"}).open_store(4096, "ns")
    with pytest.raises(StoreError) as caught:
        store.contains(keys(1))
    assert "hu" not in str(caught.value)
    store.close()


def test_an_endpoint_of_the_environment_may_use_http(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", nowhere)
    store = parse(config={"skip_signature": "true"}).open_store(4096, "ns")
    with pytest.raises(StoreError, match=f"HEAD {nowhere}"):  # it was contacted, although it does not use TLS
        store.contains(keys(1))
    store.close()
    with pytest.raises(ConfigError, match="allow_http of the 'object' tier is false, but"):
        parse(config={"allow_http": "false"})
    parse(config={"allow_http": "false", "endpoint": "https://host"})


@pytest.mark.parametrize("value", [True, None, 5, {"file": "x"}])
def test_a_setting_that_is_no_text_is_refused_before_obstore_sees_it(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"region must be text, not {type(value).__name__}"):
        open_client(URL, {"region": value}, Deadlines(), None)


@pytest.mark.parametrize(
    "options",
    [
        {"config": {"unsigned_payload": "hush"}},
        {"url": "az://c/p", "config": {"account_name": "a", "access_key": "hush!!"}},
        {"url": "gs://c/p", "config": {"service_account_key": "hush"}},
    ],
)
def test_what_the_client_says_of_a_setting_is_not_shown(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="obstore rejects the config") as caught:
        parse(**options)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "config"),
    [
        ("az://container/prefix", {"account_name": "someone", "account_key": {"env": "KV_UNSET"}}),
        ("gs://bucket/prefix", {"service_account_key": {"env": "KV_UNSET"}}),
        (URL, {"access_key_id": "someone", "secret_access_key": {"env": "KV_UNSET"}}),
    ],
)
def test_a_secret_of_any_cloud_is_read_when_the_store_is_opened(url: str, config: dict[str, Any]) -> None:
    options = parse(url=url, config=config)
    with pytest.raises(ConfigError, match="environment variable KV_UNSET, which is not set"):
        options.open_store(4096, "ns")


def test_it_is_persistent_and_secrets_appear_nowhere() -> None:
    assert STORES.get("object").is_persistent
    options = parse(config={"access_key_id": "me", "secret_access_key": "hush"})
    store = options.open_store(4096, "ns")
    assert "hush" not in repr(options) + repr(store) + str(options)
    store.close()


@pytest.mark.parametrize("url", ["gs://bucket/prefix", "az://container/prefix"])
def test_other_clouds_are_opened_without_asking_them(url: str) -> None:
    config = (
        {"account_name": "someone", "account_key": "aHVzaA=="} if url.startswith("az") else {"skip_signature": "true"}
    )
    store = parse(url=url, config=config).open_store(4096, "ns")
    assert url in repr(store)
    store.close()


def test_secrets_come_from_files_and_the_environment(
    shared_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("hush\n")
    monkeypatch.setenv("KV_ID", "someone")
    own = {"access_key_id": {"env": "KV_ID"}, "secret_access_key": {"file": str(tmp_path / "secret")}}
    options = parse(url=f"s3://{BUCKET}/options", config=shared_s3.config | own, required=True)
    store = options.open_store(4096, "ns")
    assert write(store, keys(1)) == [True]
    assert read(store, keys(1)) == [True]
    store.close()


def test_required_decides_whether_a_missing_bucket_stops_the_start(shared_s3: S3Server) -> None:
    options: dict[str, Any] = {"url": "s3://no-such-bucket/x", "config": shared_s3.config}
    parse(**options).open_store(4096, "ns").close()
    with pytest.raises(StoreError, match="The object store s3://no-such-bucket/x fails") as caught:
        parse(**options, required=True).open_store(4096, "ns")
    assert "\n" not in str(caught.value)


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "obstore" or name.startswith("obstore."):
            raise ImportError(f"No module named {name!r}")
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match="pip install 'obstore>="):
        parse()


def test_an_obstore_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("obstore.__version__", "0.10.1")
    with pytest.raises(MissingExtraError, match=r"pip install .obstore>=0\.11. .obstore 0\.10\.1 is too old"):
        parse()


def test_an_exclusive_tier_finds_the_blocks_of_an_earlier_process(shared_s3: S3Server) -> None:
    """The bucket is not listed, so an unknown block may exist."""
    options = {"type": "object", "url": f"s3://{BUCKET}/exclusive", "config": shared_s3.config, "exclusive": True}
    options |= {"connect_timeout_s": 30, "request_timeout_s": 60}
    store = parse_tier(options, 4096).open_store(4096, "ns")
    assert write(store, keys(1)) == [True]
    store.close()
    tier = build_tier(options, memoryview(bytearray(4 * 4096)).cast("B", (4, 4096)), "ns")
    assert isinstance(tier, StoreTier)
    answers: list[bool | None] = []

    def is_found() -> bool:
        tier.on_schedule_end()
        answers.append(tier.lookup(keys(1)[0], ReqContext("r")) if is_scanned(tier) else None)
        return answers[-1] is not None

    wait_until(is_found, "the service has answered")
    assert answers[-1] is True
    tier.shutdown()
