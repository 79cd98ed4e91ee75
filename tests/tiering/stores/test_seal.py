# SPDX-License-Identifier: Apache-2.0
"""Test that a seal fits one block with one key in one namespace.

With a secret, nobody else can make it or read the block.
"""

from __future__ import annotations

import sys
import threading

import pytest
import xxhash

from kvoffload.errors import MissingExtraError
from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.seal import (
    EncryptionKey,
    Sealer,
    seal_bytes_of,
    sealer_of,
    secret_id,
    shared_identity,
)
from kvoffload.tiering.stores.wrappers import Checksummed

ONE, OTHER = keys(1, 2)
BLOCK = memoryview(bytes(range(256)) * 16)
SECRETS = [None, b"the fleet's own secret", EncryptionKey(b"the fleet's own secret")]


def opened(sealer: Sealer, seal: bytes, key: bytes, stored: bytes | memoryview) -> bytes | None:
    """Return the block that ``sealer`` opens, in place and in other memory, with equal results."""
    inside, outside = memoryview(bytearray(stored)), memoryview(bytearray(len(stored)))
    is_good = sealer.unseal(seal, key, inside, inside)
    assert sealer.unseal(memoryview(bytearray(seal)), key, memoryview(bytes(stored)), outside) == is_good
    assert not is_good or inside == outside
    return bytes(inside) if is_good else None


@pytest.mark.parametrize("secret", SECRETS)
def test_it_fits_what_it_was_made_for_and_nothing_else(secret: bytes | None) -> None:
    sealer = sealer_of("ns", secret)
    stored, seal = sealer.seal(ONE, BLOCK)
    assert len(seal) == sealer.seal_bytes == seal_bytes_of(secret)
    assert sealer.changes_blocks == (stored != BLOCK) == isinstance(secret, EncryptionKey)
    assert opened(sealer, seal, ONE, stored) == BLOCK
    assert opened(sealer_of("ns", secret), seal, ONE, stored) == BLOCK
    for at in (0, 100, len(BLOCK) - 1):
        changed = bytearray(stored)
        changed[at] ^= 1
        assert opened(sealer, seal, ONE, changed) is None
    for at in range(len(seal)):
        changed = bytearray(seal)
        changed[at] ^= 1
        assert opened(sealer, bytes(changed), ONE, stored) is None
    assert opened(sealer, seal, ONE, stored[:-1]) is None
    assert opened(sealer, seal, OTHER, stored) is None
    for wrong in (bytes(len(seal)), b"", seal[:-1], seal + b"x"):
        assert opened(sealer, wrong, ONE, stored) is None
    strangers = [sealer_of(name, secret) for name in ("other", "")]
    others = [*SECRETS, b"another secret", EncryptionKey(b"another secret")]
    strangers += [sealer_of("ns", other) for other in others if secret_id(other) != secret_id(secret)]
    for stranger in strangers:
        assert opened(stranger, seal, ONE, stored) is None


@pytest.mark.parametrize("secret", SECRETS)
def test_it_is_made_where_the_caller_wants_it(secret: bytes | None) -> None:
    """The seal is made in the memory from which a library sends it, without a copy, and nothing beside it changes."""
    sealer, memory = sealer_of("ns", secret), bytearray(len(BLOCK) + 20)
    into = memoryview(memory)[10:-10]
    stored, seal = sealer.seal(ONE, BLOCK, into)
    assert stored is into
    assert opened(sealer, seal, ONE, bytes(into)) == BLOCK
    assert (into != BLOCK) == sealer.changes_blocks
    assert memory[:10] == memory[-10:] == bytes(10)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_key_and_the_blocks_first_bytes_are_not_one_text(secret: bytes | None) -> None:
    sealer = sealer_of("ns", secret)
    stored, seal = sealer.seal(ONE, BLOCK)
    assert opened(sealer, seal, type(ONE)(ONE + bytes(stored[:1])), stored[1:]) is None


def test_an_encrypted_block_shows_nothing_and_is_never_the_same_twice() -> None:
    sealer = sealer_of("ns", SECRETS[2])
    (one, seal), (two, other) = sealer.seal(ONE, BLOCK), sealer.seal(ONE, BLOCK)
    assert one != two
    assert seal != other
    assert not any(bytes(BLOCK[at : at + 8]) in bytes(one) for at in range(0, len(BLOCK), 8))
    assert opened(sealer, other, ONE, one) is None


@pytest.mark.parametrize("secret", SECRETS)
def test_many_threads_seal_at_once(secret: bytes | None) -> None:
    sealer, wrong = sealer_of("ns", secret), list[object]()

    def work(first: int) -> None:
        try:
            for number in range(first, first + 50):
                block = memoryview(bytes([number % 256]) * 20_000)
                stored, seal = sealer.seal(keys(number)[0], block)
                if opened(sealer, seal, keys(number)[0], stored) != block:
                    wrong.append(number)
        except BaseException as exc:  # noqa: BLE001 - for the main thread
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_was_stored_with_checksums_stays_readable() -> None:
    """This applies to stores without their own format; the others have their own tests."""
    inner = MemoryStore(len(BLOCK) + Checksummed.OVERHEAD_BYTES)
    assert Checksummed(inner).write([ONE], [BLOCK]) == [True]
    found = memoryview(bytearray(len(BLOCK) + Checksummed.OVERHEAD_BYTES))
    assert inner.read_into([ONE], [found]) == [True]
    assert found == bytes(BLOCK) + xxhash.xxh3_128_digest(len(ONE).to_bytes(4, "big") + ONE + BLOCK)
    length = len(ONE).to_bytes(4, "big")
    assert sealer_of("", None).seal(ONE, BLOCK)[1] == xxhash.xxh3_128_digest(
        length + ONE + xxhash.xxh3_128_digest(BLOCK)
    )


def test_the_identity_of_a_shared_store_tells_what_could_not_be_read_apart() -> None:
    secrets = (None, b"one", b"two", EncryptionKey(b"one"))
    identities = [shared_identity(name, size, secret) for name in ("", "ns") for size in (1, 2) for secret in secrets]
    assert len({identity for identity, _ in identities}) == len({digest for _, digest in identities}) == 16
    assert all(len(digest) == 16 for _, digest in identities)
    assert len({secret_id(secret) for secret in secrets}) == 4


def test_a_secret_is_not_to_be_seen() -> None:
    for secret in (b"hush", EncryptionKey(b"hush")):
        assert "hush" not in repr(sealer_of("ns", secret))
    assert "hush" not in repr(EncryptionKey(b"hush"))


@pytest.mark.parametrize("option", ["seal_key", "encryption_key"])
def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"encryption.*pip install 'cryptography>="):
        parse_tier({"type": "disk", "path": "/kv", option: "k" * 32}, 4096)
    assert parse_tier({"type": "disk", "path": "/kv"}, 4096)


def test_a_library_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """42.0 raises at each block."""
    monkeypatch.setattr("cryptography.__version__", "42.0.8")
    with pytest.raises(MissingExtraError, match=r"pip install 'cryptography>=43' \(cryptography 42.0.8 is too old\)"):
        parse_tier({"type": "disk", "path": "/kv", "encryption_key": "k" * 32}, 4096)
