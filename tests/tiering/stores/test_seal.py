# SPDX-License-Identifier: Apache-2.0
"""A seal fits one block as one key of one namespace, and with a secret nobody else can make it."""

from __future__ import annotations

import pytest
import xxhash

from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.seal import SEAL_BYTES, Sealer, shared_identity
from kvoffload.tiering.stores.wrappers import Checksummed

ONE, OTHER = keys(1, 2)
BLOCK = memoryview(bytes(range(256)) * 16)


@pytest.mark.parametrize("secret", [None, b"the fleet's own secret"])
def test_it_fits_what_it_was_made_for_and_nothing_else(secret: bytes | None) -> None:
    sealer = Sealer("ns", secret)
    seal = sealer.seal(ONE, BLOCK)
    assert len(seal) == SEAL_BYTES
    assert sealer.fits(seal, ONE, BLOCK)
    assert sealer.fits(memoryview(bytearray(seal)), ONE, memoryview(bytearray(BLOCK)))
    changed = bytearray(BLOCK)
    changed[100] ^= 1
    assert not sealer.fits(seal, ONE, memoryview(changed))
    assert not sealer.fits(seal, ONE, BLOCK[:-1])
    assert not sealer.fits(seal, OTHER, BLOCK)
    assert not sealer.fits(bytes(SEAL_BYTES), ONE, BLOCK)
    for stranger in (Sealer("other", secret), Sealer("", secret), Sealer("ns", b"another secret")):
        assert not stranger.fits(seal, ONE, BLOCK)


def test_a_key_and_the_blocks_first_bytes_are_not_one_text() -> None:
    sealer = Sealer("ns")
    assert sealer.seal(ONE, BLOCK) != sealer.seal(type(ONE)(ONE + bytes(BLOCK[:1])), BLOCK[1:])


def test_what_checksummed_stores_have_stays_readable() -> None:
    inner = MemoryStore(len(BLOCK) + Checksummed.OVERHEAD_BYTES)
    assert Checksummed(inner).write([ONE], [BLOCK]) == [True]
    found = memoryview(bytearray(len(BLOCK) + Checksummed.OVERHEAD_BYTES))
    assert inner.read_into([ONE], [found]) == [True]
    assert found == bytes(BLOCK) + xxhash.xxh3_128_digest(len(ONE).to_bytes(4, "big") + ONE + BLOCK)


def test_the_identity_of_a_shared_store_tells_what_could_not_be_read_apart() -> None:
    secrets = (None, b"one", b"two")
    identities = [shared_identity(name, size, secret) for name in ("", "ns") for size in (1, 2) for secret in secrets]
    assert len({identity for identity, _ in identities}) == len({digest for _, digest in identities}) == 12
    assert all(len(digest) == 16 for _, digest in identities)


def test_a_secret_is_not_to_be_seen() -> None:
    assert "hush" not in repr(Sealer("ns", b"hush"))
