# SPDX-License-Identifier: Apache-2.0
"""The store contract and bad days over fake-gcs-server, an emulator of Google's storage, through TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gcs_server import BUCKET, GcsServer, program
from tests.tiering.stores.blocks import read, write

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.testing.store_contract import BlockStoreContract
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.object import ObjectStore
from kvoffload.tiering.stores.object.store import Deadlines

pytestmark = pytest.mark.skipif(program() is None, reason="needs fake-gcs-server; `make test-remote` brings it")


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    server = GcsServer(tmp_path_factory.mktemp("google"))
    yield server
    server.stop()


def open_store(google: GcsServer, prefix: str, block_bytes: int = 4096, bucket: str = BUCKET) -> ObjectStore:
    url, deadlines = f"gs://{bucket}/{prefix}", Deadlines(30.0, 60.0)
    return ObjectStore(url, block_bytes, config=google.config, deadlines=deadlines, tls_ca=google.ca)


class TestGoogle(BlockStoreContract):
    @pytest.fixture(autouse=True)
    def _on(self, google: GcsServer) -> None:
        self.server = google

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


def test_a_block_that_is_there_is_not_written_again(google: GcsServer) -> None:
    store = open_store(google, "once")
    assert write(store, keys(1)) == [True]
    name = f"once/{store._path(keys(1)[0])}"
    google.put(name, b"another program's value")
    assert write(store, keys(1)) == [True]  # the generation of what is not there is 0
    assert google.get(name) == b"another program's value"
    assert read(store, keys(1)) == [False]
    assert write(store, keys(1)) == [True]
    assert read(store, keys(1)) == [True]
    store.close()


def test_a_bucket_that_is_not_there_is_told_by_a_write_and_at_the_start(google: GcsServer) -> None:
    store = open_store(google, "x", bucket="no-such-bucket")
    assert store.contains(keys(1)) == [False]
    with pytest.raises(StoreError, match="The object store gs://no-such-bucket/x fails: ") as caught:
        write(store, keys(1))
    assert "\n" not in str(caught.value)
    assert google.config["bearer_token"] not in str(caught.value)
    store.close()
    options: dict[str, Any] = {"type": "object", "url": "gs://no-such-bucket/x", "tls_ca": google.ca}
    options |= {"config": google.config, "required": True}
    with pytest.raises(StoreError, match="no-such-bucket"):
        parse_tier(options, 4096).open_store(4096, "ns")


def test_an_unknown_authority_is_refused(google: GcsServer) -> None:
    options: dict[str, Any] = {"type": "object", "url": f"gs://{BUCKET}/x", "config": google.config, "required": True}
    with pytest.raises(StoreError, match="The object store gs://kv-fleet/x fails: "):
        parse_tier(options, 4096).open_store(4096, "ns")
