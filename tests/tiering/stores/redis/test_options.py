# SPDX-License-Identifier: Apache-2.0
"""Test a redis tier's options: mistakes raise clear errors, and secrets appear nowhere."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port
from tests.redis_server import PATIENT_OPTIONS, RedisServer, wait_until
from tests.tiering.store_rig import is_scanned
from tests.tiering.stores.blocks import read, write

from kvoffload.base import ReqContext
from kvoffload.errors import ConfigError, StoreError
from kvoffload.specs import read_config
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import STORES, build_tier, parse_tier
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.options import RedisOptions
from kvoffload.tiering.stores.remote import without_credentials
from kvoffload.tiering.stores.secrets import read_secret
from kvoffload.tiering.tier import StoreTier

URL = "redis://127.0.0.1:1"
SEAL_KEY = "0123456789abcdef0123456789abcdef"


def parse(**options: Any) -> RedisOptions:
    parsed = parse_tier({"type": "redis", "url": URL} | options, 4096)
    assert isinstance(parsed, RedisOptions)
    return parsed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "http://x"}, "must begin with redis://"),
        ({"url": "redis://x/0?ssl_cert_reqs=none"}, "give these settings as options"),
        ({"url": "redis://x:port"}, "url of the 'redis' tier"),
        ({"url": {"path": "x"}}, '{"file": path}'),
        ({"password": {"env": "A", "file": "b"}}, "password of the 'redis' tier must be text"),
        ({"seal_key": "short"}, "16 characters"),
        ({"ttl": "soon"}, "ttl of the 'redis' tier must be a time .* 'never', not 'soon'"),
        ({"ttl": 0.5}, "must be between 1 and"),
        ({"prefix": "a{b}"}, "prefix of the 'redis' tier"),
        ({"connect_timeout_s": 0}, "connect_timeout_s of the 'redis' tier must be positive"),
        ({"window_timeout_s": -1}, "window_timeout_s"),
        ({"clustr": True}, "Did you mean 'cluster'"),
        ({"url": "unix:///run/kv.sock", "cluster": True}, "cluster=true"),
        ({"ttl": float("inf")}, "ttl of the 'redis' tier"),
        ({"ttl": 2e9}, "ttl of the 'redis' tier must be between 1 and 1000000000 seconds"),
        ({"connect_timeout_s": float("inf")}, "connect_timeout_s of the 'redis' tier must be positive, and at most"),
        ({"url": "redis://[::1/0"}, "url of the 'redis' tier is not valid"),
        ({"password": {"env": ""}}, "password of the 'redis' tier must be text"),
        ({"password": {"file": ""}}, "password of the 'redis' tier must be text"),
        ({"url": "redis://h/notanumber"}, "the number of a database"),
        ({"url": "redis://h/1/2"}, "the number of a database"),
        ({"url": "redis+sentinel://h/kv/notanumber"}, "the number of a database"),
        ({"tls_ca": "/etc/ssl/kv-ca.pem"}, "tls_ca needs a url of rediss://"),
        ({"tls_cert": "kv.pem", "url": "redis+sentinel://h/kv"}, "tls_cert needs a url of rediss://"),
        ({"tls_key": "kv.key", "url": "unix:///run/kv.sock"}, "tls_key needs a url of rediss://"),
        ({"tls_verify": False, "cluster": True}, "tls_verify: false needs a url of rediss://"),
        (
            {"sentinel_password": {"env": "UNREAD"}},
            "sentinel_username or sentinel_password needs a url of redis.sentinel",
        ),
        ({"sentinel_username": "watcher"}, "sentinel_username or sentinel_password needs a url of redis.sentinel://"),
    ],
)
def test_a_mistake_is_one_sentence(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        parse(**options)
    assert "\n" not in str(caught.value)


def test_options_of_tls_are_refused_without_it_where_the_url_is_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_URL", f"redis://:hush@127.0.0.1:{free_port()}/0")
    options = parse(url={"env": "KV_URL"}, tls_ca="/etc/ssl/kv-ca.pem")
    with pytest.raises(ConfigError, match="tls_ca needs a url of rediss://") as caught:
        options.open_store(4096, "ns")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("name", ["tls_ca", "tls_cert", "tls_key"])
def test_a_file_of_tls_that_cannot_be_read_stops_the_start(name: str, tmp_path: Path) -> None:
    files = {each: str(tmp_path / each) for each in ("tls_ca", "tls_cert", "tls_key")}
    for path in files.values():
        Path(path).touch()
    options = parse(url="rediss://h", **files)
    options.open_store(4096, "ns").close()
    Path(files[name]).unlink()
    with pytest.raises(
        ConfigError, match=f"^{name} of the 'redis' tier is {files[name]}, which cannot be read: No such file"
    ):
        options.open_store(4096, "ns")


@pytest.mark.parametrize("path", ["", "/", "/0", "/15", "/3/"])
def test_the_number_of_a_database_may_be_left_out(path: str) -> None:
    parse(url=f"redis://h{path}").open_store(4096, "ns").close()
    parse(url=f"rediss://h{path}", tls_verify=False).open_store(4096, "ns").close()


def test_what_is_left_out_has_its_default() -> None:
    options = parse()
    assert (options.connect_timeout_s, options.window_timeout_s) == (1.0, 5.0)
    assert options.tls_verify
    assert not options.required
    assert STORES.get("redis").is_persistent
    assert (options.ttl_s, parse(ttl="24h").ttl_s, parse(ttl="never").ttl_s) == (7 * 86_400, 86_400, None)


@pytest.mark.parametrize(
    "secret", [{"url": "redis://someone:hush@h:1/0"}, {"password": "hush"}, {"seal_key": "hush" + SEAL_KEY}]
)
def test_secrets_appear_nowhere(
    secret: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    options = parse(**secret)
    store = options.open_store(4096, "ns")
    texts = [repr(options), str(options), f"{options!r}", repr(store)]
    with pytest.raises(StoreError) as caught:
        store.contains(keys(1))
    store.close()
    texts += [str(caught.value), repr(caught.value), repr(caught.value.__cause__), caplog.text]
    with pytest.raises(ConfigError) as wrong:
        parse(**(secret | {"thread": 1}))
    with pytest.raises(ConfigError) as no_type:
        read_config({"cpu_bytes_to_use": 1, "secondary_tiers": [secret]})
    texts += [str(wrong.value), str(no_type.value)]
    assert not [text for text in texts if "hush" in text]


PARTS_OF_PASSWORDS = [
    "redis://engine:hu/sh@host:6379/0",
    "redis://engine:1234/hush@host:6379/0",
    "redis://engine:1234?hush@host:6379/0",
    "redis://engine:1234#hush@host:6379/0",
    "redis:engine:hush@host:6379/0",
    "redis+sentinel://engine:hu/sh@host:6379/kv/0",
    "redis+sentinel://engine:1234/hush@host:6379/kv/0",
    "unix://engine:1234/hush@/run/kv.sock",
]


@pytest.mark.parametrize("url", PARTS_OF_PASSWORDS)
def test_a_password_that_is_not_escaped_is_refused_and_no_part_of_it_is_shown(url: str) -> None:
    assert without_credentials(url) == "..."
    with pytest.raises(ConfigError, match=r"write / as %2F, \? as %3F, # as %23") as caught:
        parse(url=url)
    assert_hushed(caught.value)


@pytest.mark.parametrize("url", ["redis://engine:1234@[host:hush/0", "redis://host:hush", "redis://host:6379:hush"])
def test_a_url_that_nobody_reads_is_not_shown_in_what_caused_the_error(url: str) -> None:
    with pytest.raises(ConfigError, match="url of the 'redis' tier is not valid") as caught:
        parse(url=url)
    assert_hushed(caught.value)


def assert_hushed(error: BaseException) -> None:
    """Nothing that Python prints of ``error`` has a part of the secret, besides the lines of this test's own source."""
    shown: BaseException | None = error
    while shown is not None:
        assert not [part for part in ("hush", "hu/", "/sh", "hu[", "hu'") if part in str(shown)]
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


def test_a_secret_that_is_no_text_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_bytes(b"\xff\xfehush")
    monkeypatch.setitem(os.environb, b"KV_BYTES", b"\xff\xfehush")
    for secret in ({"file": str(tmp_path / "password")}, {"env": "KV_BYTES"}):
        with pytest.raises(ConfigError, match=r"password of the 'redis' tier is .*, which is not UTF-8") as caught:
            parse(password=secret).open_store(4096, "ns")
        assert_hushed(caught.value)
    with pytest.raises(ConfigError, match="password of the 'redis' tier contains a character"):
        parse(password={"file": "a\0b"}).open_store(4096, "ns")


def test_a_url_for_people() -> None:
    assert without_credentials("rediss://user:pw@host:6380/0?x=pw") == "rediss://host:6380/0"
    assert without_credentials("redis://host") == "redis://host"
    assert without_credentials("unix:///run/redis.sock?db=1") == "unix:///run/redis.sock"
    assert without_credentials("unix://user:pw@/run/redis.sock") == "unix:///run/redis.sock"
    assert without_credentials("redis://[pw") == "..."


def test_secrets_come_from_files_and_the_environment(
    start_server: Callable[..., RedisServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(requirepass="hush")
    (tmp_path / "password").write_text("hush\n")
    monkeypatch.setenv("KV_URL", f"redis://:hush@127.0.0.1:{server.port}")
    monkeypatch.setenv("KV_SEAL", SEAL_KEY)
    patient = partial(parse, **PATIENT_OPTIONS)
    by_file = patient(url=server.url, password={"file": str(tmp_path / "password")}, seal_key={"env": "KV_SEAL"})
    by_env = patient(url={"env": "KV_URL"}, seal_key=SEAL_KEY)
    first, second = by_file.open_store(4096, "ns"), by_env.open_store(4096, "ns")
    assert write(first, keys(1)) == [True]
    assert read(second, keys(1)) == [True]
    first.close()
    second.close()
    assert "hush" not in repr(by_env)
    assert read_secret("plain", "it") == "plain"


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        ({"env": "KVOFFLOAD_UNSET"}, "environment variable KVOFFLOAD_UNSET, which is not set"),
        ({"file": "/nowhere/secret"}, "read from /nowhere/secret, which cannot be read: No such file"),
    ],
)
@pytest.mark.parametrize("name", ["url", "password", "seal_key"])
def test_a_secret_that_is_not_there_is_one_sentence_when_it_is_read(
    name: str, secret: dict[str, str], text: str
) -> None:
    options = parse(**{name: secret})  # nothing is read yet: workers need no secrets
    with pytest.raises(ConfigError, match=f"{name} of the 'redis' tier is .*{text}"):
        options.open_store(4096, "ns")


def test_a_short_secret_in_a_file_is_refused_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_SEAL", "short")
    with pytest.raises(ConfigError, match="16 characters"):
        parse(seal_key={"env": "KV_SEAL"}).open_store(4096, "ns")


def test_required_decides_whether_a_missing_server_stops_the_start() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    view = memoryview(bytearray(4 * 4096)).cast("B", (4, 4096))
    with pytest.raises(StoreError, match="refused") as caught:
        build_tier({"type": "redis", "url": url, "required": True}, view, "ns")
    assert "\n" not in str(caught.value)
    tier = build_tier({"type": "redis", "url": url}, view, "ns")
    assert isinstance(tier, StoreTier)
    tier.shutdown()


def test_required_with_a_server_starts(shared_server: RedisServer) -> None:
    store = parse(**PATIENT_OPTIONS, url=shared_server.url, required=True).open_store(4096, "ns")
    assert isinstance(store, RedisStore)
    assert str(shared_server.port) in repr(store)
    store.close()


def test_an_exclusive_tier_finds_the_blocks_of_an_earlier_process(shared_server: RedisServer) -> None:
    """The server is not scanned, so an unknown block may exist."""
    options = {"type": "redis", "url": shared_server.url, "prefix": "exclusive", "exclusive": True, **PATIENT_OPTIONS}
    store = parse_tier(options, 4096).open_store(4096, "ns")
    assert write(store, keys(1)) == [True]
    store.close()
    tier = build_tier(options, memoryview(bytearray(4 * 4096)).cast("B", (4, 4096)), "ns")
    assert isinstance(tier, StoreTier)
    answers: list[bool | None] = []

    def has_begun() -> bool:
        tier.on_schedule_end()
        return is_scanned(tier)

    wait_until(has_begun, "what a tier does at its start has ended")

    def is_found() -> bool:
        answers.append(tier.lookup(keys(1)[0], ReqContext("r")))
        tier.on_schedule_end()
        return answers[-1] is not None

    wait_until(is_found, "the server has answered")
    assert answers[-1] is True
    tier.shutdown()


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_a_socket_file_is_a_way_to_a_server_too(start_server: Callable[..., RedisServer], tmp_path: Path) -> None:
    start_server(unixsocket=str(tmp_path / "kv.sock"))
    wait_until(lambda: listens(tmp_path / "kv.sock"), "the server listens at the file, which it makes after the port")
    store = parse(url=f"unix://{tmp_path}/kv.sock").open_store(4096, "ns")
    assert write(store, keys(1)) == [True]
    assert read(store, keys(1)) == [True]
    store.close()


def test_a_server_with_another_key_harms_no_block(shared_server: RedisServer) -> None:
    (key,) = keys(1)

    def opened(*given: str) -> Any:
        return parse(**PATIENT_OPTIONS, url=shared_server.url, seal_key=list(given)).open_store(4096, "mistyped")

    block, other = bytes(4096), SEAL_KEY.upper()
    for given, answer in (([SEAL_KEY], False), ([other], False), ([other, SEAL_KEY], True)):
        store = opened(*given)
        assert store.contains([key]) == [answer]
        assert store.write([key], [memoryview(block)]) == [True]
        if given == [other]:
            store.discard([key])
        store.close()
