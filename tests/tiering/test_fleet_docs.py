# SPDX-License-Identifier: Apache-2.0
"""The recipes of ``docs/fleet.md`` are valid, and the access rule of
``docs/security.md`` is enough for a store and for no more."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from tests.redis_server import PATIENT, RedisServer
from tests.tiering.stores.blocks import BLOCK_BYTES, read, write

from kvoffload.config import parse_config
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tiers
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.connector import Access

DOCS = Path(__file__).parents[2] / "docs"
FLEET, SECURITY = (DOCS / "fleet.md").read_text(), (DOCS / "security.md").read_text()


def test_the_recipes_are_valid() -> None:
    recipes = re.findall(r"^```json\n(.*?)^```", FLEET, re.MULTILINE | re.DOTALL)
    configs = [config for recipe in recipes if "kv_connector" not in (config := json.loads(recipe))]  # that is vLLM's
    assert configs
    for config in configs:
        assert parse_tiers(parse_config(config).secondary_tiers, 1 << 20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path)
    yield made
    made.stop()


def test_the_access_rule_is_enough_and_no_more(server: RedisServer) -> None:
    (rule,) = re.findall(r"^    (ACL SETUSER .*?)\n\n", SECURITY, re.MULTILINE | re.DOTALL)
    with server.client() as client:
        client.execute_command(*rule.replace("\\\n", " ").split())
    own = {"username": "fleet-a", "password": "PASSWORD"}
    store = RedisStore(f"{server.url}/0", BLOCK_BYTES, prefix="fleet-a", timeouts=PATIENT, access=Access(**own))
    assert write(store, keys(1, 2)) == [True, True]
    assert read(store, keys(1, 2)) == [True, True]
    assert store.contains(keys(2, 3)) == [True, False]
    store.touch(keys(1))
    store.discard(keys(1))
    assert store.contains(keys(1)) == [False]
    store.close()
    with server.client(**own) as stranger:
        for command in (("GET", "fleet-b:x"), ("FLUSHALL",), ("KEYS", "*"), ("SCAN", "0"), ("CONFIG", "GET", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                stranger.execute_command(*command)
