# SPDX-License-Identifier: Apache-2.0
"""Test the store contract and failures over fake-gcs-server, an emulator of Google's storage, through TLS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.gcs_server import BUCKET, GcsServer, program
from tests.tiering.stores.blocks import write
from tests.tiering.stores.object.service_contract import ServiceContract

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.object import ObjectStore
from kvoffload.tiering.stores.object.client import Deadlines

pytestmark = pytest.mark.skipif(program() is None, reason="needs fake-gcs-server; `make test-remote` brings it")


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    server = GcsServer(tmp_path_factory.mktemp("google"))
    yield server
    server.stop()


def open_store(google: GcsServer, prefix: str, block_bytes: int = 4096, bucket: str = BUCKET) -> ObjectStore:
    url, deadlines = f"gs://{bucket}/{prefix}", Deadlines(30.0, 60.0)
    return ObjectStore(url, block_bytes, config=google.config, deadlines=deadlines, tls_ca=google.ca)


class TestGoogle(ServiceContract):
    @pytest.fixture(autouse=True)
    def _on(self, google: GcsServer) -> None:
        self.server = google

    def open_store(self, prefix: str, block_bytes: int) -> ObjectStore:
        return open_store(self.server, prefix, block_bytes)


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
