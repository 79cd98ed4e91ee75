# SPDX-License-Identifier: Apache-2.0
"""Test the layout: another program that follows the docstring of ``format`` must find the same data."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import xxhash

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.disk.format import ENTRY, ENTRY_BYTES, PROBE_AT, SlabFormat, key_in

LAYOUT = SlabFormat("org/model", 65536)
BLOCK = memoryview(bytes(range(256)) * 256)


@pytest.mark.parametrize("key", [b"", b"\0", b"k" * 36, b"k" * 39, b"k" * 40, b"\xff" * 300])
def test_an_entry_is_what_the_docstring_says(key: bytes) -> None:
    hashed = LAYOUT.hashed(OffloadKey(key))
    entry = LAYOUT.entry(hashed, LAYOUT.sealer.seal(hashed.probe, BLOCK)[1], 1_700_000_000_900_000_000)
    is_short = 0 < len(key) <= 39
    stored = key if is_short else hashlib.blake2b(key, digest_size=39).digest()
    seed = xxhash.xxh3_64_intdigest(b"65536:org/model")
    h = xxhash.xxh3_64_intdigest(bytes([len(key) if is_short else 255]) + stored.ljust(39, b"\0"), seed)
    assert entry == struct.pack(
        "<16sIIB39s",
        xxhash.xxh3_128_digest(BLOCK, h),
        1_700_000_000,
        h & 0xFFFF_FFFF,
        len(key) if is_short else 255,
        stored,
    )
    assert len(entry) == ENTRY_BYTES == ENTRY.itemsize
    assert LAYOUT.key_of(entry) == LAYOUT.hashed(OffloadKey(key)) == (h, entry[PROBE_AT:])
    assert key_in(entry) == (key if is_short else None)
    assert np.frombuffer(entry, ENTRY)["hash"][0] == h & 0xFFFF_FFFF


def test_seals_are_bound_to_key_namespace_and_block_size() -> None:
    seals = {
        layout.sealer.seal(layout.hashed(OffloadKey(key)).probe, BLOCK)[1]
        for layout in (LAYOUT, SlabFormat("other", 65536), SlabFormat("org/model", 4096))
        for key in (b"a", b"b")
    }
    assert len(seals) == 6


def test_a_header_is_accepted_by_its_own_format_only() -> None:
    page = LAYOUT.header(1000)
    assert LAYOUT.parse_header(page) == 1000
    assert SlabFormat("org/model", 4096).parse_header(page) is None
    assert SlabFormat("other", 65536).parse_header(page) is None
    for at in (0, 9, 12, 20, 40, 4000, 4095):
        bad = bytearray(page)
        bad[at] ^= 1
        assert LAYOUT.parse_header(bytes(bad)) is None
    assert LAYOUT.parse_header(page[:-1]) is None


@pytest.mark.parametrize("block_bytes", [1, 512, 65536, 4 << 20])
def test_a_slab_never_takes_more_than_it_was_given(block_bytes: int) -> None:
    layout = SlabFormat("", block_bytes)
    for num_bytes in (0, 4096, 10_000, layout.slab_bytes(1) - 1, layout.slab_bytes(1), 1 << 20, (1 << 24) + 77):
        num_slots = layout.slots_in(num_bytes)
        assert not num_slots or layout.slab_bytes(num_slots) <= num_bytes
        assert num_slots == (1 << 20) - 1 or layout.slab_bytes(num_slots + 1) > num_bytes


def test_slabs_are_neither_few_nor_many() -> None:
    for max_bytes in (1 << 26, 1 << 30, 200 << 30, 8 << 40):
        number = max_bytes // LAYOUT.slab_bytes(LAYOUT.slots_per_slab(max_bytes))
        assert 16 <= number <= 2100
    assert SlabFormat("", 4 << 20).slots_per_slab(5 << 20) == 1


@pytest.mark.parametrize(
    ("max_bytes", "slab_gib"), [(200 << 30, 1), (1 << 40, 4), (10 * 10**12, 16), (20 << 40, 16), (1 << 30, 1 / 16)]
)
def test_slabs_are_larger_where_there_would_be_many(max_bytes: int, slab_gib: float) -> None:
    slab_bytes = LAYOUT.slab_bytes(LAYOUT.slots_per_slab(max_bytes))
    assert 0.99 * slab_gib <= slab_bytes / (1 << 30) <= slab_gib
