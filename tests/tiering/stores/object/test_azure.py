# SPDX-License-Identifier: Apache-2.0
"""The store contract and bad days over Azurite, which speaks Azure's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.azure_server import CONTAINER, AzureServer, program
from tests.tiering.stores.blocks import read, write

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.testing.store_contract import BlockStoreContract
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.object import ObjectStore
from kvoffload.tiering.stores.object.store import Deadlines

pytestmark = pytest.mark.skipif(program() is None, reason="needs Azurite; `make test-remote` brings it")


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    server = AzureServer(tmp_path_factory.mktemp("azure"))
    yield server
    server.stop()


def open_store(azure: AzureServer, prefix: str, block_bytes: int = 4096, **changes: str) -> ObjectStore:
    container = changes.pop("container", CONTAINER)
    config = azure.config | changes
    return ObjectStore(f"az://{container}/{prefix}", block_bytes, config=config, deadlines=Deadlines(30.0, 60.0))


class TestAzure(BlockStoreContract):
    @pytest.fixture(autouse=True)
    def _on(self, azure: AzureServer) -> None:
        self.server = azure

    def make_store(self, directory: Path) -> BlockStore:
        return open_store(self.server, directory.name, self.block_bytes)

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        assert isinstance(store, ObjectStore)
        name = f"{directory.name}/{store._path(key)}"
        value = bytearray(self.server.get(name))
        value[7] ^= 1
        self.server.put(name, bytes(value))
        return True


def test_a_block_that_is_there_is_not_written_again(azure: AzureServer) -> None:
    store = open_store(azure, "once")
    assert write(store, keys(1)) == [True]
    name = f"once/{store._path(keys(1)[0])}"
    azure.put(name, b"another program's value")
    assert write(store, keys(1)) == [True]  # If-None-Match
    assert azure.get(name) == b"another program's value"
    assert read(store, keys(1)) == [False]
    assert write(store, keys(1)) == [True]
    assert read(store, keys(1)) == [True]
    store.close()


def test_a_wrong_account_key_is_one_sentence_without_the_key(azure: AzureServer) -> None:
    store = open_store(azure, "wrong", account_key="aHVzaGh1c2g=")
    for call in (store.check, lambda: store.contains(keys(1)), lambda: write(store, keys(1))):
        with pytest.raises(StoreError, match=r"The object store az://kv-fleet/wrong fails: .*") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert "aHVzaGh1c2g" not in str(caught.value)
    store.close()


def test_a_container_that_is_not_there_is_told_by_a_write_and_at_the_start(azure: AzureServer) -> None:
    store = open_store(azure, "x", container="no-such-container")
    assert store.contains(keys(1)) == [False]
    with pytest.raises(StoreError, match="no-such-container"):
        write(store, keys(1))
    store.close()
    options: dict[str, Any] = {"type": "object", "url": "az://no-such-container/x", "config": azure.config}
    with pytest.raises(StoreError, match="no-such-container"):
        parse_tier(options | {"required": True}, 4096).open_store(4096, "ns")
