# SPDX-License-Identifier: Apache-2.0
"""The layout of a slab on disk. No I/O.

::

    root/.kvoffload/slabs               locked by a process that creates or removes a slab
    root/<namespace>/                   locked (shared) by each process that uses the namespace
    root/<namespace>/<16 hex>.slab      payloads: slot i at i * block_bytes, nothing else
    root/<namespace>/<16 hex>.table     contents of the slots; locked by the process that writes to the slab

A slab uses two files, because tables are written through the page cache and payloads bypass it, and within one file
Linux makes these writes wait for each other. An unfinished slab's name begins with ``new-``. A table consists of::

    header     4096 bytes    magic 8 · version u16 · 0 u16 · slots u32 · block_bytes u64 ·
                             blake2b-256 of ``<block_bytes>:<directory>`` 32 · zeros · xxh3_64 of all before 8
    changes    u32 per page of 64 slots, rounded up: grows whenever an entry of the page has changed
    uses       u32 per slot: time of last use, seconds since 1970; a hint, which every process may write
    entries    64 bytes per slot: payload's seal 16 · time of writing u32 · key's hash u32 · length u8 · key 39
    tails      12 bytes per slot, where blocks are encrypted: the rest of the seal, written before the entry

All numbers are little endian. A slot with length 0 is empty. Length 255 means a key of more than 39 bytes; the
entry then contains a digest (blake2b) of 39 bytes.

``h``, the key's 64-bit hash, is xxh3_64 of the entry's last 40 bytes, length and key, seeded with xxh3_64 of
``<block_bytes>:<directory>``. The entry contains its lower half. The seal is xxh3_128 of the payload, seeded
with ``h``. So bytes of another key, namespace or block size never pass for a block, even with a wrong entry. With a
secret, the seal covers namespace, block size, key and payload (``stores/seal.py``); the payload may then be encrypted.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.disk.allocator import MAX_SLAB_SLOTS
from kvoffload.tiering.stores.seal import SEAL_BYTES, Sealer, seal_bytes_of, sealer_of

PAYLOAD_SUFFIX = ".slab"
TABLE_SUFFIX = ".table"
NEW_PREFIX = "new-"
PAGE_BYTES = 4096
PAGE_SLOTS = 64
ENTRY_BYTES = 64
EMPTY_ENTRY = bytes(ENTRY_BYTES)
PROBE_AT = 20
"""Offset of an entry's probe: the part of an entry that depends only on the key."""
LENGTH_AT = 24
LONGEST_KEY = 39
"""Maximum bytes of a key in an entry. For a longer key, it contains a digest."""
ENTRY = np.dtype([("seal", "V16"), ("written_s", "<u4"), ("hash", "<u4"), ("length", "u1"), ("key", "V39")])

_MAGIC = b"KVOSLAB\0"
_VERSION = 1
_FIELDS = struct.Struct("<8sHHIQ32s")
_SUM_BYTES = 8
_KEY = struct.Struct("<B39s")
_DIGEST_LENGTH = 255
_MIN_SLAB_BYTES = 1 << 20
_LARGE_SLAB_BYTES = 1 << 30
"""Usual size of a slab. Slabs are larger only if there would be too many."""
_MAX_SLAB_BYTES = 16 << 30
_SLABS_WANTED = 16
_MANY_SLABS = 256
_MAX_SLABS = 2000


class Stated(NamedTuple):
    """The contents of a table's header, which may be damaged."""

    has_magic: bool
    num_slots: int
    block_bytes: int
    digest: bytes

    def is_of(self, directory: str) -> bool:
        """Return whether the table was created for this directory."""
        return self.digest == _digest(directory, self.block_bytes)


def stated_in(start: bytes) -> Stated | None:
    """Return the header of a table that begins with ``start``, or ``None`` if it is too short."""
    if len(start) < _FIELDS.size:
        return None
    magic, _, _, num_slots, block_bytes, digest = _FIELDS.unpack_from(start)
    return Stated(magic == _MAGIC, num_slots, block_bytes, digest)


def _identity(directory: str, block_bytes: int) -> str:
    return f"{block_bytes}:{directory}"


def _digest(directory: str, block_bytes: int) -> bytes:
    return hashlib.blake2b(_identity(directory, block_bytes).encode(), digest_size=32).digest()


class HashedKey(NamedTuple):
    """The parts of a key that a store needs: its hash ``h``, and the part of an entry that depends on the key."""

    hash64: int
    probe: bytes


def key_in(entry: bytes | bytearray) -> OffloadKey | None:
    """Return the key of an entry; ``None`` if the entry contains only a digest, is empty, or is damaged."""
    length = entry[LENGTH_AT]
    return OffloadKey(bytes(entry[25 : 25 + length])) if 0 < length <= LONGEST_KEY else None


@dataclass(frozen=True, slots=True)
class SlabFormat:
    """The slabs of one namespace and block size."""

    directory: str
    """Directory of the namespace, as named by ``root.directory_of``."""
    block_bytes: int
    secret: bytes | None = field(default=None, repr=False)
    digest: bytes = field(init=False, repr=False)
    _seed: int = field(init=False, repr=False)
    tail_bytes: int = field(init=False)
    """Bytes of a seal that do not fit in its entry."""
    sealer: Sealer = field(init=False, repr=False, compare=False)
    """Sealer of payloads. It gets an entry's ``probe`` as the key."""

    def __post_init__(self) -> None:
        identity = _identity(self.directory, self.block_bytes)
        object.__setattr__(self, "digest", _digest(self.directory, self.block_bytes))
        object.__setattr__(self, "_seed", xxhash.xxh3_64_intdigest(identity.encode()))
        object.__setattr__(self, "tail_bytes", seal_bytes_of(self.secret) - SEAL_BYTES)
        object.__setattr__(self, "sealer", sealer_of(identity, self.secret, self._checksum))

    @property
    def is_paged(self) -> bool:
        """Whether payloads are whole pages, as direct I/O requires."""
        return self.block_bytes % PAGE_BYTES == 0

    def hashed(self, key: OffloadKey) -> HashedKey:
        length, content = len(key), key
        if not 0 < length <= LONGEST_KEY:
            length, content = _DIGEST_LENGTH, OffloadKey(hashlib.blake2b(key, digest_size=LONGEST_KEY).digest())
        stored = _KEY.pack(length, content)
        hash64 = xxhash.xxh3_64_intdigest(stored, self._seed)
        return HashedKey(hash64, (hash64 & 0xFFFF_FFFF).to_bytes(4, "little") + stored)

    def key_of(self, entry: bytes) -> HashedKey:
        return HashedKey(xxhash.xxh3_64_intdigest(entry[-_KEY.size :], self._seed), entry[PROBE_AT:])

    def entry(self, key: HashedKey, seal: bytes, written_ns: int) -> bytes:
        """Return the entry of a block with this seal, written at this time (nanoseconds since 1970). It does not
        contain the seal's tail."""
        written_s = min(written_ns // 1_000_000_000, 0xFFFF_FFFF)
        return seal[:SEAL_BYTES] + written_s.to_bytes(4, "little") + key.probe

    def _checksum(self, probe: bytes, payload: memoryview) -> bytes:
        return xxhash.xxh3_128_digest(payload, xxhash.xxh3_64_intdigest(probe[-_KEY.size :], self._seed))

    def header(self, num_slots: int) -> bytes:
        body = _FIELDS.pack(_MAGIC, _VERSION, 0, num_slots, self.block_bytes, self.digest)
        body += bytes(PAGE_BYTES - _SUM_BYTES - len(body))
        return body + xxhash.xxh3_64_digest(body)

    def parse_header(self, page: bytes) -> int | None:
        """Return the number of slots of a table that begins with ``page``; ``None`` unless its slab uses this
        format."""
        if len(page) != PAGE_BYTES or xxhash.xxh3_64_digest(page[:-_SUM_BYTES]) != page[-_SUM_BYTES:]:
            return None
        magic, version, zero, num_slots, block_bytes, digest = _FIELDS.unpack_from(page)
        is_ours = (magic, version, zero, block_bytes, digest) == (_MAGIC, _VERSION, 0, self.block_bytes, self.digest)
        return num_slots if is_ours and 0 < num_slots <= MAX_SLAB_SLOTS else None

    @staticmethod
    def uses_at(num_slots: int) -> int:
        return PAGE_BYTES + 4 * -(-num_slots // PAGE_SLOTS)

    @classmethod
    def entries_at(cls, num_slots: int) -> int:
        return cls.uses_at(num_slots) + 4 * num_slots

    @classmethod
    def tails_at(cls, num_slots: int) -> int:
        return cls.entries_at(num_slots) + ENTRY_BYTES * num_slots

    def table_bytes(self, num_slots: int) -> int:
        return self.tails_at(num_slots) + self.tail_bytes * num_slots

    def slab_bytes(self, num_slots: int) -> int:
        """Return the bytes of both files."""
        return self.table_bytes(num_slots) + num_slots * self.block_bytes

    def slots_in(self, num_bytes: int) -> int:
        """Return the maximum number of slots of a slab of at most ``num_bytes``."""
        num_slots = max(0, num_bytes - PAGE_BYTES - 4) // (self.block_bytes + ENTRY_BYTES + self.tail_bytes + 4)
        while num_slots and self.slab_bytes(num_slots) > num_bytes:
            num_slots -= 1
        return min(num_slots, MAX_SLAB_SLOTS)

    def slots_per_slab(self, max_bytes: int, max_slabs: int = _MAX_SLABS) -> int:
        """Return the number of slots of a slab under a quota, at least one. The slabs are numerous enough that
        processes and namespaces can share the quota. They are large enough that housekeeping stays cheap, and that a
        process can open all of them (``max_slabs``)."""
        least_bytes = max(max_bytes // min(max_slabs, _MAX_SLABS), _MIN_SLAB_BYTES)
        many_bytes = min(_MAX_SLAB_BYTES, max_bytes // _MANY_SLABS)
        wanted_bytes = max(min(_LARGE_SLAB_BYTES, max_bytes // _SLABS_WANTED), many_bytes, least_bytes)
        return max(1, self.slots_in(min(max_bytes, wanted_bytes)))
