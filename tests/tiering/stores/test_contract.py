# SPDX-License-Identifier: Apache-2.0
"""Every store and every wrapper under the one contract."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.memory_files import memory_directory

from kvoffload.base import OffloadKey
from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import BlockStoreContract, block_of
from kvoffload.testing.stores import FaultyStore, GatedStore
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.format import ENTRY_BYTES, PAYLOAD_SUFFIX, TABLE_SUFFIX, SlabFormat
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import BlockFormat
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.root import directory_of
from kvoffload.tiering.stores.seal import EncryptionKey, seal_bytes_of
from kvoffload.tiering.stores.striped import Striped
from kvoffload.tiering.stores.wrappers import Checksummed, Rotating, StoreWrapper

ENCRYPTION = EncryptionKey(b"the fleet's encryption key")
SECRET = b"the fleet's own secret"


class TestMemoryStore(BlockStoreContract):
    def make_store(self, directory: Path) -> BlockStore:
        return MemoryStore(self.block_bytes)

    def test_a_write_evicts_none_of_its_own_blocks(self) -> None:
        store, (old, other, new) = MemoryStore(self.block_bytes, 2 * self.block_bytes), keys_of(1, 2, 3)
        data = [memoryview(block_of(key, self.block_bytes)) for key in (old, other, new)]
        assert store.write([old, other], data[:2]) == [True, True]
        assert store.write([new, old], [data[2], data[0]]) == [True, True]
        assert store.take_lost() == {other: "evicted"}
        assert store.contains([old, other, new]) == [True, False, True]


class TestFileSystemStore(BlockStoreContract):
    namespace = ""

    def make_store(self, directory: Path) -> BlockStore:
        return FileSystemStore(directory, self.block_bytes, self.namespace, max_bytes=1 << 30)

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        path = directory / BlockFormat(directory_of(self.namespace), self.block_bytes).path_of(key)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return True


class TestFileSystemStoreDirect(TestFileSystemStore):
    block_bytes = 1 << 16
    namespace = "org/model ü"


class TestFileSystemStoreSealed(TestFileSystemStore):
    def make_store(self, directory: Path) -> BlockStore:
        return FileSystemStore(directory, self.block_bytes, self.namespace, max_bytes=1 << 30, secret=SECRET)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        layout = BlockFormat(directory_of(self.namespace, SECRET), self.block_bytes)
        forged = bytes(self.block_bytes)
        path = directory / layout.path_of(key)
        path.write_bytes(b"".join(layout.sealed(layout.identity(key), memoryview(forged))))
        return True


class TestFileSystemStoreEncrypted(TestFileSystemStore):
    block_bytes = 1 << 16

    def make_store(self, directory: Path) -> BlockStore:
        return FileSystemStore(directory, self.block_bytes, self.namespace, max_bytes=1 << 30, secret=ENCRYPTION)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        path = directory / BlockFormat(directory_of(self.namespace, ENCRYPTION), self.block_bytes).path_of(key)
        data = bytearray(path.read_bytes())
        assert block_of(key, self.block_bytes)[:64] not in data
        data[-1] ^= 1
        path.write_bytes(data)
        return True


class TestDiskStore(BlockStoreContract):
    """Blocks that are not whole pages, which use the page cache."""

    namespace = ""

    def make_store(self, directory: Path) -> BlockStore:
        return DiskStore(directory, self.block_bytes, self.namespace, max_bytes=1 << 24)

    def reopen(self, directory: Path) -> BlockStore | None:
        return self.make_store(directory)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        block = block_of(key, self.block_bytes)
        for path in directory.rglob("*" + PAYLOAD_SUFFIX):
            if (at := path.read_bytes().find(block)) >= 0:
                with path.open("r+b") as file:
                    file.seek(at + self.block_bytes - 1)
                    file.write(bytes([block[-1] ^ 1]))
                return True
        return False


class TestDiskStoreDirect(TestDiskStore):
    block_bytes = 1 << 14
    namespace = "org/model ü"


class TestDiskStoreSealed(TestDiskStore):
    def make_store(self, directory: Path) -> BlockStore:
        return DiskStore(directory, self.block_bytes, self.namespace, max_bytes=1 << 24, secret=SECRET)


class TestDiskStoreEncrypted(TestDiskStore):
    block_bytes = 1 << 14

    def make_store(self, directory: Path) -> BlockStore:
        return DiskStore(directory, self.block_bytes, self.namespace, max_bytes=1 << 24, secret=ENCRYPTION)

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        layout = SlabFormat(directory_of(self.namespace, ENCRYPTION), self.block_bytes, ENCRYPTION)
        for path in directory.rglob("*" + TABLE_SUFFIX):
            table = path.read_bytes()
            if (at := table.find(layout.hashed(key).probe)) >= 0:
                num_slots = layout.parse_header(table[:4096])
                assert num_slots is not None
                begin = (at - layout.entries_at(num_slots)) // ENTRY_BYTES * self.block_bytes
                with path.with_suffix(PAYLOAD_SUFFIX).open("r+b") as file:
                    content = file.read()
                    assert block_of(key, self.block_bytes)[:64] not in content
                    file.seek(begin)
                    file.write(bytes([content[begin] ^ 1]))
                return True
        return False


class TestRotatingDisk(TestDiskStore):
    """The older key has no blocks, so everything works as with one key."""

    def make_store(self, directory: Path) -> BlockStore:
        stores = [
            DiskStore(directory, self.block_bytes, max_bytes=1 << 24, secret=secret)
            for secret in (SECRET, b"older" * 4)
        ]
        return Rotating(stores[0], stores[1:])


class TestRotatingFiles(TestFileSystemStore):
    """All that is read was written under the older key."""

    def make_store(self, directory: Path) -> BlockStore:
        newer = FileSystemStore(directory, self.block_bytes, max_bytes=1 << 30, secret=ENCRYPTION)
        older = FileSystemStore(directory, self.block_bytes, max_bytes=1 << 30)
        rotating = Rotating(newer, [older])
        rotating.write = older.write  # type: ignore[method-assign]
        return rotating


class TestStripedDisks(TestDiskStore):
    def make_store(self, directory: Path) -> BlockStore:
        return Striped([DiskStore(directory / str(number), self.block_bytes, max_bytes=1 << 22) for number in range(3)])

    def reopen(self, directory: Path) -> BlockStore | None:
        """Reopen the store with the disks in another order, and one more disk."""
        return Striped(
            [DiskStore(directory / str(number), self.block_bytes, max_bytes=1 << 22) for number in (2, 3, 0, 1)]
        )


class TestStripedDisksEncrypted(TestDiskStoreEncrypted):
    """Each disk also has an older key."""

    def make_store(self, directory: Path) -> BlockStore:
        def rotating(root: Path) -> BlockStore:
            stores = [
                DiskStore(root, self.block_bytes, max_bytes=1 << 22, secret=secret) for secret in (ENCRYPTION, SECRET)
            ]
            return Rotating(stores[0], stores[1:])

        return Striped([rotating(directory / str(number)) for number in range(2)])


class TestStripedMemory(BlockStoreContract):
    """A striped store of stores that do not know their keys."""

    def make_store(self, directory: Path) -> BlockStore:
        return Striped([MemoryStore(self.block_bytes) for _ in range(2)])


class TestDiskStoreInMemory(TestDiskStore):
    """A pool in ``/dev/shm``, which is mapped."""

    @pytest.fixture(autouse=True)
    def in_memory(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        with memory_directory() as path:
            monkeypatch.setattr(tempfile, "tempdir", str(path))
            yield


class TestDiskStoreEncryptedInMemory(TestDiskStoreInMemory):
    def make_store(self, directory: Path) -> BlockStore:
        return DiskStore(directory, self.block_bytes, self.namespace, max_bytes=1 << 24, secret=ENCRYPTION)

    corrupt = TestDiskStoreEncrypted.corrupt


class TestDiskStoreThatIsFull(TestDiskStore):
    """Every block that is written evicts another one, of an earlier test or of this one."""

    def make_store(self, directory: Path) -> BlockStore:
        return DiskStore(directory, self.block_bytes, max_bytes=1 << 20)


class TestChecksummed(BlockStoreContract):
    def make_store(self, directory: Path) -> BlockStore:
        return Checksummed(MemoryStore(self.block_bytes + Checksummed.OVERHEAD_BYTES))

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        assert isinstance(store, Checksummed)
        # Another block's bytes, whole and sound, under this key.
        inner, (other,) = store.inner, keys_of(3)
        buffer = bytearray(self.block_bytes + store.overhead_bytes)
        inner.read_into([other], [memoryview(buffer)])
        inner.discard([key])
        return inner.write([key], [memoryview(buffer)]) == [True]

    def test_a_bad_block_that_cannot_be_discarded_costs_the_good_ones_nothing(self) -> None:
        class KeepsAll(MemoryStore):
            def discard(self, keys: Sequence[OffloadKey]) -> None:
                raise StoreError("not permitted")

        inner = KeepsAll(self.block_bytes + Checksummed.OVERHEAD_BYTES)
        store, (bad, good) = Checksummed(inner), keys_of(1, 2)
        inner.write([bad], [memoryview(bytes(self.block_bytes + Checksummed.OVERHEAD_BYTES))])
        store.write([good], [memoryview(block_of(good, self.block_bytes))])
        targets = [memoryview(bytearray(self.block_bytes)) for _ in range(2)]
        assert store.read_into([bad, good], targets) == [False, True]
        assert bytes(targets[1]) == block_of(good, self.block_bytes)
        assert store.stats().corrupt_blocks == 1
        assert store.take_lost() == {bad: "corrupt"}

    def test_a_bad_block_is_lost_once_it_is_deleted(self) -> None:
        """Or a write in between, which finds it there, would be announced after its loss."""
        lost_before = []

        class Watched(MemoryStore):
            def discard(self, keys: Sequence[OffloadKey]) -> None:
                lost_before.append(store.take_lost())
                super().discard(keys)

        inner = Watched(self.block_bytes + Checksummed.OVERHEAD_BYTES)
        store, (bad,) = Checksummed(inner), keys_of(1)
        inner.write([bad], [memoryview(bytes(self.block_bytes + Checksummed.OVERHEAD_BYTES))])
        assert store.read_into([bad], [memoryview(bytearray(self.block_bytes))]) == [False]
        assert lost_before == [{}]
        assert store.take_lost() == {bad: "corrupt"}


class TestChecksummedOfANamespace(TestChecksummed):
    namespace = "org/model ü"
    secret: bytes | None = None

    def make_store(self, directory: Path) -> BlockStore:
        inner = MemoryStore(self.block_bytes + seal_bytes_of(self.secret))
        return Checksummed(inner, namespace=self.namespace, secret=self.secret)

    @pytest.mark.parametrize("other", ["org/model", ""])
    def test_what_another_namespace_wrote_is_a_miss(self, other: str) -> None:
        store, (key,) = self.make_store(Path()), keys_of(1)
        assert isinstance(store, Checksummed)
        block = block_of(key, self.block_bytes)
        store.write([key], [memoryview(block)])
        again = Checksummed(store.inner, namespace=self.namespace, secret=self.secret)
        target = memoryview(bytearray(self.block_bytes))
        assert again.read_into([key], [target]) == [True]
        assert target == block
        stranger = Checksummed(store.inner, namespace=other, secret=self.secret)
        assert stranger.read_into([key], [target]) == [False]
        assert stranger.take_lost() == {key: "corrupt"}


class TestChecksummedWithEncryption(TestChecksummedOfANamespace):
    secret = ENCRYPTION


class TestStack(TestFileSystemStore):
    """Wrappers on wrappers on files."""

    def make_store(self, directory: Path) -> BlockStore:
        files = FileSystemStore(directory, self.block_bytes + Checksummed.OVERHEAD_BYTES)
        return StoreWrapper(Checksummed(files))

    def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
        return False


class TestStoreWrapper(BlockStoreContract):
    def make_store(self, directory: Path) -> BlockStore:
        return StoreWrapper(MemoryStore(self.block_bytes))


class TestTestingWrappers(BlockStoreContract):
    def make_store(self, directory: Path) -> BlockStore:
        return FaultyStore(GatedStore(MemoryStore(self.block_bytes)))
