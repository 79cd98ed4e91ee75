# SPDX-License-Identifier: Apache-2.0
"""Test the store contract over a server that speaks S3, with checksums and with keyed seals."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.s3_server import BUCKET, S3Server

from kvoffload.base import OffloadKey
from kvoffload.testing.store_contract import BlockStoreContract, block_of
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.object import ObjectStore
from kvoffload.tiering.stores.object.client import Deadlines
from kvoffload.tiering.stores.seal import EncryptionKey


class TestObjectStore(BlockStoreContract):
    has_scan = False
    secret: bytes | None = None

    @pytest.fixture(autouse=True)
    def _on(self, shared_s3: S3Server) -> None:
        self.server = shared_s3

    def make_store(self, directory: Path) -> BlockStore:
        return ObjectStore(
            f"s3://{BUCKET}/{directory.name}/kv",
            self.block_bytes,
            "ns",
            config=self.server.config,
            secret=self.secret,
            deadlines=Deadlines(30.0, 60.0),
        )

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        (name,) = (name for name in self.server.names(directory.name) if name.endswith("/" + key.hex()))
        value = bytearray(self.server.get(name))
        value[7] ^= 1
        self.server.put(name, bytes(value))
        return True


@pytest.mark.long
class TestKeyed(TestObjectStore):
    secret = b"a secret of the fleet"


@pytest.mark.long
class TestEncrypted(TestObjectStore):
    secret = EncryptionKey(b"a secret of the fleet")

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        for name in self.server.names(directory.name):
            assert block_of(key, self.block_bytes)[:64] not in self.server.get(name)
        return super().corrupt(store, directory, key)
