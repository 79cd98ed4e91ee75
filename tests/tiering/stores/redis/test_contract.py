# SPDX-License-Identifier: Apache-2.0
"""Test the store contract over real servers: a single one, with keyed seals, as a tier of a cluster, and under
wrappers."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from tests.redis_server import PATIENT, RedisCluster, RedisServer

from kvoffload.base import OffloadKey
from kvoffload.testing.store_contract import BlockStoreContract, block_of
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.seal import EncryptionKey
from kvoffload.tiering.stores.wrappers import Checksummed, StoreWrapper


class TestRedisStore(BlockStoreContract):
    has_scan = False
    secret: bytes | None = None

    @pytest.fixture(autouse=True)
    def _on(self, shared_server: RedisServer) -> None:
        self.url = shared_server.url

    def make_store(self, directory: Path) -> BlockStore:
        # Its own prefix shows the library's client which names belong to this test.
        known = {"ttl_s": 600, "prefix": directory.name, "secret": self.secret, "timeouts": PATIENT}
        return RedisStore(self.url, self.block_bytes, "ns", **known)

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        with redis.Redis.from_url(self.url) as client:
            (name,) = client.scan_iter(f"{directory.name}:*:{key.hex()}", count=1000)
            value = bytearray(client.get(name))
            value[7] ^= 1
            return bool(client.set(name, bytes(value)))


class TestKeyed(TestRedisStore):
    secret = b"a secret of the fleet"


class TestEncrypted(TestRedisStore):
    secret = EncryptionKey(b"a secret of the fleet")

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        with redis.Redis.from_url(self.url) as client:
            for name in client.scan_iter(f"{directory.name}:*", count=1000):
                assert block_of(key, self.block_bytes)[:64] not in client.get(name)
        return super().corrupt(store, directory, key)


class TestCluster(BlockStoreContract):
    has_scan = False

    @pytest.fixture(autouse=True)
    def _on(self, shared_cluster: RedisCluster) -> None:
        self.url = shared_cluster.url

    def make_store(self, directory: Path) -> BlockStore:
        return RedisStore(self.url, self.block_bytes, str(directory), cluster=True, timeouts=PATIENT)

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)


class TestUnderWrappers(TestRedisStore):
    def make_store(self, directory: Path) -> BlockStore:
        inner = RedisStore(self.url, self.block_bytes + Checksummed.OVERHEAD_BYTES, str(directory), timeouts=PATIENT)
        return StoreWrapper(Checksummed(inner))

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        return False
