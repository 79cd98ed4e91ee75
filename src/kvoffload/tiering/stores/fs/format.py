# SPDX-License-Identifier: Apache-2.0
"""How blocks look on disk: the names of directories and files, and the header before each payload. No I/O.

::

    root/.kvoffload/files             says that the root is one of files
    root/<namespace>/<2 hex>/<key in hex>.kvb
    root/<namespace>/<2 hex>/tmp-<random>-<number>      a block that is being written, until it is renamed

The two hex digits are the *fan*: one of 256 directories in each namespace, over which keys are spread evenly.

A file is a header and then the payload. The header is one page where payloads are whole pages, so that direct I/O can
move both, and 128 bytes otherwise::

    magic 8 · version u16 · 0 u16 · header_bytes u32 · block_bytes u64 · identity 32 · seal 16 or 28 ·
    zeros · xxh3_64 of all before 8                                                           (little endian)

``identity`` is a digest of namespace and key, so another block's file never passes for this one. ``seal`` is the
payload's xxh3_128, or with a secret the seal of identity and payload (``stores/seal.py``); the payload may then be
encrypted.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass, field

import xxhash

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.direct_io import PAGE_BYTES
from kvoffload.tiering.stores.seal import Sealer, sealer_of

MARKER = "files"
SUFFIX = ".kvb"
TEMPORARY_PREFIX = "tmp-"
NUM_FANS = 256

_MAGIC = b"KVOBLOCK"
_VERSION = 1
_FIELDS = struct.Struct("<8sHHIQ32s")
_SMALL_HEADER_BYTES = 128
_SUM_BYTES = 8
_PAGED_FROM_BYTES = 16 * PAGE_BYTES
_LONGEST_HEX_KEY = 112
_TEMPORARY = re.compile(TEMPORARY_PREFIX + "[0-9a-f]+(-[0-9]+)?")
_LONG_KEY = re.compile("~[0-9a-f]{64}" + re.escape(SUFFIX))
_FAN = re.compile("[0-9a-f]{2}")


def parse_name(name: str) -> OffloadKey | None:
    """Return the key in a file's name; ``None`` if the name contains only its digest, or is not the name of a block
    file."""
    if not name.endswith(SUFFIX) or name.startswith("~"):
        return None
    try:
        key = OffloadKey(bytes.fromhex(name.removesuffix(SUFFIX)))
    except ValueError:
        return None
    # ``fromhex`` also accepts upper case and spaces, but no lookup uses such a name.
    return key if key.hex() + SUFFIX == name else None


def is_our_name(fan: str, name: str) -> bool:
    """Return whether ``name`` is a valid name in the directory ``fan``: a block whose key belongs there, or a temporary
    file."""
    if name.startswith(TEMPORARY_PREFIX):
        return _TEMPORARY.fullmatch(name) is not None
    key = parse_name(name)
    return _LONG_KEY.fullmatch(name) is not None if key is None else _fan_of_key(key) == fan


def fan_of_name(name: str) -> int | None:
    """Return the fan of a directory with this name, or ``None``."""
    return int(name, 16) if _FAN.fullmatch(name) else None


def _fan_of_key(key: OffloadKey) -> str:
    return f"{xxhash.xxh3_64_intdigest(key) % NUM_FANS:02x}"


def identity_of(directory: str, key: OffloadKey) -> bytes:
    """Return the identity of namespace and key, which a block's header contains."""
    return hashlib.blake2b(directory.encode() + b"\0" + key, digest_size=32).digest()


def is_blank(start: bytes) -> bool:
    """Return whether a file with this beginning is empty, because nothing was written or a power failure lost it."""
    return not start.strip(b"\0")


def fan_of(path: str) -> int:
    """Return the fan of a block's path, relative to the root."""
    return int(path.split("/", 2)[1], 16)


def turn_of(key: OffloadKey) -> int:
    """Return a number that is spread evenly over the keys of each fan."""
    return xxhash.xxh3_64_intdigest(key) // NUM_FANS


def stated_in(start: bytes) -> tuple[int, bytes] | None:
    """Return block size and identity from the header in a file's first page, for tools that do not know them; ``None``
    without a header. Verifies nothing."""
    if len(start) < _FIELDS.size:
        return None
    magic, version, _, _, block_bytes, identity = _FIELDS.unpack_from(start)
    return (block_bytes, identity) if (magic, version) == (_MAGIC, _VERSION) else None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The files of one namespace and block size."""

    directory: str
    block_bytes: int
    secret: bytes | None = field(default=None, repr=False)
    header_bytes: int = field(init=False)
    file_bytes: int = field(init=False)
    _front: bytes = field(init=False, repr=False)
    _sealer: Sealer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        paged = self.block_bytes % PAGE_BYTES == 0 and self.block_bytes >= _PAGED_FROM_BYTES
        header_bytes = PAGE_BYTES if paged else _SMALL_HEADER_BYTES
        object.__setattr__(self, "header_bytes", header_bytes)
        object.__setattr__(self, "file_bytes", header_bytes + self.block_bytes)
        front = _FIELDS.pack(_MAGIC, _VERSION, 0, header_bytes, self.block_bytes, bytes(32))[:-32]
        object.__setattr__(self, "_front", front)
        # The header identifies the key.
        sealer = sealer_of(self.directory, self.secret, lambda _, payload: xxhash.xxh3_128_digest(payload))
        object.__setattr__(self, "_sealer", sealer)

    @property
    def is_paged(self) -> bool:
        """Whether header and payload are whole pages, as direct I/O requires."""
        return self.header_bytes == PAGE_BYTES

    def path_of(self, key: OffloadKey) -> str:
        """Return the file of ``key``, relative to the root. A key too long for a name is replaced by its digest."""
        name = key.hex() if len(key) <= _LONGEST_HEX_KEY else "~" + self.identity(key).hex()
        return f"{self.directory}/{_fan_of_key(key)}/{name}{SUFFIX}"

    def identity(self, key: OffloadKey) -> bytes:
        return identity_of(self.directory, key)

    def sealed(self, identity: bytes, payload: memoryview) -> tuple[bytes, memoryview]:
        """Return the header and the payload of a block's file, for a key with this identity."""
        stored, seal = self._sealer.seal(identity, payload)
        return self._header(identity, seal), stored

    def unseal(self, header: bytes, identity: bytes, payload: memoryview) -> bool:
        """Return whether a file with this ``header`` and ``payload`` contains the block of a key with this identity. If
        so, ``payload`` is then that block; otherwise its content is undefined."""
        seal = header[_FIELDS.size : _FIELDS.size + self._sealer.seal_bytes]
        return header == self._header(identity, seal) and self._sealer.unseal(seal, identity, payload, payload)

    def _header(self, identity: bytes, seal: bytes) -> bytes:
        parts = self._front + identity + seal
        body = parts + bytes(self.header_bytes - _SUM_BYTES - len(parts))
        return body + xxhash.xxh3_64_digest(body)
