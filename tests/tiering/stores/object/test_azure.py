# SPDX-License-Identifier: Apache-2.0
"""Test the store contract and failures over Azurite, which speaks Azure's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.azure_server import CONTAINER, AzureServer, program
from tests.tiering.stores.blocks import write
from tests.tiering.stores.object.service_contract import ServiceContract

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.object import ObjectStore
from kvoffload.tiering.stores.object.client import Deadlines

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


class TestAzure(ServiceContract):
    @pytest.fixture(autouse=True)
    def _on(self, azure: AzureServer) -> None:
        self.server = azure

    def open_store(self, prefix: str, block_bytes: int) -> ObjectStore:
        return open_store(self.server, prefix, block_bytes)


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
