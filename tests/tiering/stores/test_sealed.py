# SPDX-License-Identifier: Apache-2.0
"""Directories whose blocks a secret seals: who lacks it makes no block that is served, and harms none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tiering.stores.disk.rig import may_grow

from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing import block_of, keys
from kvoffload.testing.stores import FaultyStore
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.format import PAYLOAD_SUFFIX, PROBE_AT, TABLE_SUFFIX, SlabFormat
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import BlockFormat
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.root import directory_of, display_name
from kvoffload.tiering.stores.seal import EncryptionKey, secret_id
from kvoffload.tiering.stores.wrappers import Rotating

SIZE = 4096
KEY, OTHER = keys(1, 2)
SECRETS = [None, b"0123456789abcdef", b"another key of the fleet", EncryptionKey(b"0123456789abcdef")]
GOOD = block_of(KEY, SIZE)
FORGED = bytes(reversed(GOOD))


def open_store(kind: str, root: Path, secret: bytes | None) -> BlockStore:
    if kind == "fs":
        return FileSystemStore(root, SIZE, "ns", secret=secret)
    return DiskStore(root, SIZE, "ns", max_bytes=1 << 24, secret=secret)


def forge_file(directory: Path) -> None:
    """Replace the block of ``KEY`` by another one, with knowledge of the format only."""
    layout = BlockFormat(directory.name, SIZE)
    path = directory.parent / layout.path_of(KEY)
    path.write_bytes(b"".join(layout.sealed(layout.identity(KEY), memoryview(FORGED))))


def forge_slot(directory: Path) -> None:
    layout = SlabFormat(directory.name, SIZE)
    key = layout.hashed(KEY)
    entry = layout.entry(key, layout.sealer.seal(key.probe, memoryview(FORGED))[1], time.time_ns())
    (table,) = (path for path in directory.glob("*" + TABLE_SUFFIX) if key.probe in path.read_bytes())
    content = bytearray(table.read_bytes())
    num_slots = layout.parse_header(bytes(content[:4096]))
    assert num_slots is not None
    begin = content.index(key.probe) - PROBE_AT
    content[begin : begin + len(entry)] = entry
    table.write_bytes(content)
    with table.with_suffix(PAYLOAD_SUFFIX).open("r+b") as payload:
        payload.seek((begin - layout.entries_at(num_slots)) // len(entry) * SIZE)
        payload.write(FORGED)


def store_one(kind: str, root: Path, secret: bytes | None) -> None:
    store = open_store(kind, root, secret)
    assert store.write([KEY], [memoryview(GOOD)]) == [True]
    store.close()


def read_one(store: BlockStore) -> bytes | None:
    target = bytearray(SIZE)
    return bytes(target) if store.read_into([KEY], [memoryview(target)]) == [True] else None


@pytest.mark.parametrize(("kind", "forge"), [("fs", forge_file), ("disk", forge_slot)])
@pytest.mark.parametrize("secret", SECRETS)
def test_a_block_made_without_the_secret_is_a_miss(
    tmp_path: Path, kind: str, forge: Callable[[Path], None], secret: bytes | None
) -> None:
    store_one(kind, tmp_path, secret)
    forge(tmp_path / directory_of("ns", secret))
    store = open_store(kind, tmp_path, secret)
    try:
        assert read_one(store) == (FORGED if secret is None else None), "a checksum is for accidents only"
        assert store.take_lost() == ({} if secret is None else {KEY: "corrupt"})
        assert store.write([KEY], [memoryview(GOOD)]) == [True]
        assert read_one(store) == (FORGED if secret is None else GOOD)
    finally:
        store.close()


@pytest.mark.parametrize("kind", ["fs", "disk"])
def test_stores_with_other_secrets_neither_read_nor_delete_each_others_blocks(tmp_path: Path, kind: str) -> None:
    for secret in SECRETS:
        store = open_store(kind, tmp_path, secret)
        assert store.contains([KEY]) == [False]
        assert read_one(store) is None
        assert store.write([KEY], [memoryview(GOOD)]) == [True]
        store.close()
    for secret in SECRETS:
        store = open_store(kind, tmp_path, secret)
        assert read_one(store) == GOOD
        assert store.take_lost() == {}
        store.close()


@pytest.mark.parametrize("kind", ["fs", "disk"])
def test_encrypted_blocks_are_nowhere_as_they_are(tmp_path: Path, kind: str) -> None:
    store_one(kind, tmp_path, SECRETS[3])
    found = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(len(content) >= SIZE for content in found)
    assert not any(GOOD[at : at + 32] in content for content in found for at in range(0, SIZE, 32))


OLD, NEW, THIRD = "the old key of the fleet", "the new key of the fleet", "the key of somebody else"


@pytest.mark.parametrize("option", ["seal_key", "encryption_key"])
@pytest.mark.parametrize("kind", ["fs", "disk"])
def test_keys_are_exchanged_without_an_empty_store(
    tmp_path: Path, kind: str, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = {"type": kind, "path": str(tmp_path / "kv"), "max_bytes": "8MiB"}

    def opened(*given: str) -> BlockStore:
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvoffload.tiering.options"):
            store = parse_tier(tier | {option: list(given) if len(given) > 1 else given[0]}).open_store(SIZE, "ns")
        assert f"the key {key_id(given[0])}." in caplog.text
        return store

    def key_id(key: str) -> str:
        return secret_id(EncryptionKey(key.encode()) if option == "encryption_key" else key.encode())

    store = opened(OLD)
    assert store.write([KEY], [memoryview(GOOD)]) == [True]
    store.close()
    store = opened(NEW, OLD)
    assert read_one(store) == GOOD
    assert store.contains([KEY, OTHER]) == [True, False]
    assert store.write([OTHER], [memoryview(block_of(OTHER, SIZE))]) == [True]
    assert sorted(key for batch in store.scan() for key in batch) == sorted([KEY, OTHER])
    assert store.resident is None or sorted(store.resident) == sorted([KEY, OTHER])
    store.close()
    store = opened(NEW)
    assert store.contains([KEY, OTHER]) == [False, True]
    store.close()
    store = opened(THIRD)
    assert store.contains([KEY, OTHER]) == [False, False]
    assert read_one(store) is None
    assert store.take_lost() == {}
    store.close()
    store = opened(OLD, NEW)
    assert store.contains([KEY, OTHER]) == [True, True]  # a wrong key has harmed none of them
    store.discard([KEY, OTHER])
    assert store.contains([KEY, OTHER]) == [False, False]
    store.close()


def test_blocks_under_an_old_key_give_all_of_their_room_to_new_ones(tmp_path: Path) -> None:
    max_bytes = SlabFormat("", SIZE).slab_bytes(6 * 200)
    many = keys(*range(6 * 200))
    blocks = [memoryview(GOOD)] * len(many)

    def opened(secret: bytes) -> DiskStore:
        return DiskStore(tmp_path, SIZE, "ns", max_bytes=max_bytes, secret=secret)

    older = opened(b"the old key of the fleet")
    older.write(many, blocks)
    assert len(older.resident or ()) > 0.7 * len(many)
    newer = opened(b"the new key of the fleet")
    rotating = Rotating(newer, [older])
    for _ in range(20):
        may_grow(newer)
        rotating.write(many, blocks)
        newer.refresh()
        older._quota._answered.clear()  # not only every few seconds
        older.refresh()
    assert len(older.resident or ()) == 0
    assert len(newer.resident or ()) > 0.7 * len(many)
    rotating.close()


def test_an_old_copy_that_is_evicted_is_not_lost_while_there_is_a_new_one(tmp_path: Path) -> None:
    older, newer = (open_store("disk", tmp_path, secret) for secret in SECRETS[1:3])
    for store in (older, newer):
        assert store.write([KEY, OTHER], [memoryview(GOOD), memoryview(block_of(OTHER, SIZE))]) == [True, True]
    rotating = Rotating(newer, [older])
    older.take_lost = lambda: {KEY: "evicted", OTHER: "evicted"}  # type: ignore[method-assign]
    newer.discard([OTHER])
    older.discard([KEY, OTHER])
    assert rotating.take_lost() == {OTHER: "evicted"}
    assert rotating.stats().used_bytes == SIZE
    rotating.close()


def test_a_store_of_an_old_key_that_fails_costs_its_own_blocks() -> None:
    newer, older = FaultyStore(MemoryStore(SIZE)), FaultyStore(MemoryStore(SIZE))
    rotating = Rotating(newer, [older])
    for store, key in ((newer, KEY), (older, OTHER)):
        store.write([key], [memoryview(block_of(key, SIZE))])
    older.broken = {"contains": StoreError("gone"), "read_into": StoreError("gone")}
    assert rotating.contains([KEY, OTHER]) == [True, False]
    assert rotating.read_into([KEY, OTHER], [memoryview(bytearray(SIZE)) for _ in range(2)]) == [True, False]
    assert rotating.contains(keys(3)) == [False]
    newer.broken = older.broken
    with pytest.raises(StoreError, match="gone"):
        rotating.contains([KEY])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seal_key": OLD, "encryption_key": NEW}, "leave out seal_key"),
        ({"encryption_key": []}, "encryption_key of the 'disk' tier is an empty list"),
        ({"seal_key": [OLD, "short"]}, "seal_key of the 'disk' tier must have at least 16 characters"),
        ({"encryption_key": [OLD, {"env": "KV_UNSET"}]}, "KV_UNSET"),
        ({"encryption_key": [OLD, OLD]}, "has a key twice"),
        ({"encryption_key": 12345678901234567}, "must be text or"),
    ],
)
def test_a_mistake_with_keys_is_one_sentence(tmp_path: Path, options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        parse_tier({"type": "disk", "path": str(tmp_path / "kv"), **options}, SIZE).open_store(SIZE, "")
    assert OLD not in str(caught.value)
    assert "12345" not in str(caught.value)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("kind", ["fs", "disk"])
def test_the_option_is_that_of_remote_tiers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hush = "hush" * 8
    (tmp_path / "key").write_text(hush + "\n")
    monkeypatch.setenv("KV_SEAL", hush)
    tier = {"type": kind, "path": str(tmp_path / "kv"), "max_bytes": "8MiB"}
    given = [hush, {"file": str(tmp_path / "key")}, {"env": "KV_SEAL"}]
    for number, seal_key in enumerate(given):
        options = parse_tier(tier | {"seal_key": seal_key})
        store = options.open_store(SIZE, "ns")
        assert read_one(store) == (GOOD if number else None)
        assert store.write([KEY], [memoryview(GOOD)]) == [True]
        store.close()
        texts = [repr(options), options.describe(1 << 30), repr(store), caplog.text, str(list(tmp_path.rglob("*")))]
        assert hush not in " ".join(texts)


@pytest.mark.parametrize("kind", ["fs", "disk"])
@pytest.mark.parametrize(
    "seal_key", ["short", {"env": "KV_SEAL_UNSET"}, {"file": "/nonexistent/key"}, {"secret": "x"}, {"file": ""}]
)
def test_a_key_that_cannot_be_used_is_refused_before_anything_is_touched(
    tmp_path: Path, kind: str, seal_key: str | dict[str, str]
) -> None:
    root = tmp_path / "kv"
    with pytest.raises(ConfigError, match="seal_key"):
        parse_tier({"type": kind, "path": str(root), "max_bytes": "8MiB", "seal_key": seal_key}).open_store(SIZE, "")
    assert not root.exists()


def test_what_others_write_into_a_name_is_shown_in_one_line() -> None:
    """A directory's name is below a shared root, so others may choose it."""
    shown = display_name("ns#evil\x1b[2J\nWARNING: all is well")
    assert shown.isprintable() and "evil" in shown
