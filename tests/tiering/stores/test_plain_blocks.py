# SPDX-License-Identifier: Apache-2.0
"""Test blocks that were stored before ``encryption_key`` was set, and the information about a key that others can
see."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import pytest

from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.seal import EncryptionKey, secret_id

SIZE = 4096
(KEY,) = keys_of(1)
PROMPT = b"PROMPT OF ALICE!"


def open_tier(root: Path, kind: str, namespace: str = "ns", **more: str) -> BlockStore:
    options: dict[str, Any] = {"type": kind, "path": str(root), "max_bytes": "64MiB"}
    return parse_tier(options | more).open_store(SIZE, namespace)


def put(store: BlockStore) -> None:
    assert store.write([KEY], [memoryview(bytearray(PROMPT * (SIZE // len(PROMPT))))]) == [True]


def shows(root: Path) -> bool:
    return any(PROMPT in path.read_bytes() for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["disk", "fs"])
@pytest.mark.parametrize("before", [{}, {"seal_key": "s" * 32}], ids=["plain", "sealed"])
def test_they_are_dropped_although_there_is_room(
    tmp_path: Path, kind: str, before: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_tier(tmp_path, kind, **before)
    put(store)
    store.close()
    assert shows(tmp_path)
    with caplog.at_level(logging.WARNING, "kvoffload"):
        store = open_tier(tmp_path, kind, encryption_key="k" * 32)
        assert KEY not in [key for batch in store.scan() for key in batch]
    assert not shows(tmp_path)
    assert "not encrypted" in caplog.text
    assert "under a key that this server does not have" not in caplog.text
    put(store)
    store.close()
    assert not shows(tmp_path)


@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_other_namespaces_and_older_keys_stay(tmp_path: Path, kind: str) -> None:
    for namespace in ("other", "ns2"):
        store = open_tier(tmp_path, kind, namespace)
        put(store)
        store.close()
    store = open_tier(tmp_path, kind, encryption_key="o" * 32)
    put(store)
    store.close()
    for key in ("k" * 32, "o" * 32):
        store = open_tier(tmp_path, kind, encryption_key=key)
        list(store.scan())
        assert store.contains([KEY]) == [key[0] == "o"]
        store.close()
    for namespace in ("other", "ns2"):
        store = open_tier(tmp_path, kind, namespace)
        assert store.contains([KEY]) == [True]
        store.close()


def test_a_running_server_keeps_its_blocks_until_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = open_tier(tmp_path, "disk")
    put(plain)
    with caplog.at_level(logging.WARNING, "kvoffload"):
        first = open_tier(tmp_path, "disk", encryption_key="k" * 32)
    assert "not encrypted: they are removed once it ends" in caplog.text
    assert plain.contains([KEY]) == [True]
    plain.close()
    open_tier(tmp_path, "disk", encryption_key="k" * 32).close()
    assert not shows(tmp_path)
    first.close()


def test_the_name_of_a_key_is_slow_to_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody who sees the store sees it."""
    stretched = list[bytes]()
    real = hashlib.scrypt

    def scrypt(secret: bytes, **options: Any) -> bytes:
        assert options["n"] * options["r"] >= 1 << 17, "at least 16 MiB for each guess"
        stretched.append(secret)
        return real(secret, **options)

    monkeypatch.setattr(hashlib, "scrypt", scrypt)
    secret = b"another secret of 32 characters.."
    names = {secret_id(secret), secret_id(EncryptionKey(secret)), secret_id(secret + b"!")}
    assert len(names) == 3
    assert set(stretched) == {secret, secret + b"!"}
    assert hashlib.blake2b(secret, digest_size=8, person=b"kvoffload-gmac").hexdigest() not in names
