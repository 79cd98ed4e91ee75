# SPDX-License-Identifier: Apache-2.0
"""Directories whose blocks a secret seals: who lacks it makes no block that is served, and harms none."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.errors import ConfigError
from kvoffload.testing import block_of, keys
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.format import PAYLOAD_SUFFIX, TABLE_SUFFIX, SlabFormat
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import BlockFormat
from kvoffload.tiering.stores.root import directory_of

SIZE = 4096
KEY, OTHER = keys(1, 2)
SECRETS = [None, b"0123456789abcdef", b"another key of the fleet"]
GOOD = block_of(KEY, SIZE)
FORGED = bytes(reversed(GOOD))


def open_store(kind: str, root: Path, secret: bytes | None) -> BlockStore:
    if kind == "fs":
        return FileSystemStore(root, SIZE, "ns", secret=secret)
    return DiskStore(root, SIZE, "ns", max_bytes=1 << 24, secret=secret)


def forge_file(directory: Path) -> None:
    """Puts another block in the place of ``KEY``'s, by what the format says and no more."""
    layout = BlockFormat(directory.name, SIZE)
    path = directory.parent / layout.path_of(KEY)
    path.write_bytes(layout.header(layout.identity(KEY), memoryview(FORGED)) + FORGED)


def forge_slot(directory: Path) -> None:
    layout = SlabFormat(directory.name, SIZE)
    entry = layout.entry(layout.hashed(KEY), memoryview(FORGED), time.time_ns())
    (payload,) = (path for path in directory.glob("*" + PAYLOAD_SUFFIX) if GOOD in path.read_bytes())
    table = payload.with_suffix(TABLE_SUFFIX)
    at = payload.read_bytes().index(GOOD)
    payload.write_bytes(payload.read_bytes().replace(GOOD, FORGED))
    content = bytearray(table.read_bytes())
    num_slots = layout.parse_header(bytes(content[:4096]))
    assert num_slots is not None
    begin = layout.entries_at(num_slots) + at // SIZE * len(entry)
    content[begin : begin + len(entry)] = entry
    table.write_bytes(content)


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
        assert options.holds_secrets == (number == 0)  # type: ignore[attr-defined]
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
