# SPDX-License-Identifier: Apache-2.0
"""The seal of a block: some bytes beside it that no other block, key or namespace has. With a secret, nobody else can
make them, or read the block.

Stores whose blocks others, or later processes, read have one ``Sealer`` each. Host memory and ``memory`` tiers have
none.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import hmac
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import xxhash

from kvoffload.errors import MissingExtraError
from kvoffload.tiering.stores.direct_io import PAGE_BYTES

SEAL_BYTES = 16
"""Of a checksum, and of a message authentication code."""
_NONCE_BYTES = 12
_LEAST_CRYPTOGRAPHY = 43
"""Older ones encrypt into no buffer that is as long as a block."""
_ENCRYPTING = "e-"
_FORMAT = "2"
"""Of a value in a shared store: the block and then its seal."""

Digest = Callable[[bytes, memoryview], bytes]
"""16 bytes of a key and a block."""


class EncryptionKey(bytes):
    """A secret that also encrypts the blocks that it seals. Any other secret only authenticates them."""

    def __repr__(self) -> str:
        return "EncryptionKey(...)"


class Sealer(ABC):
    """Makes and opens the seals of one namespace. Any thread may use it."""

    seal_bytes = SEAL_BYTES
    changes_blocks = False
    """Whether a block is stored as other bytes than its own."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def seal(self, key: bytes, block: memoryview, into: memoryview | None = None) -> tuple[memoryview, bytes]:
        """What to store for ``block`` (contiguous) as ``key``, as long as the block, and the seal to store beside it.
        The first is in ``into`` (as long, contiguous) if that is given; else it is ``block`` itself, or memory of its
        own if the sealer ``changes_blocks``."""

    @abstractmethod
    def unseal(self, seal: bytes | bytearray | memoryview, key: bytes, stored: memoryview, block: memoryview) -> bool:
        """Whether ``stored`` was sealed as ``key`` with ``seal``; then ``block`` is what it was made of, else its
        content is undefined. Both may be the same memory, which saves a copy."""


class Digests(Sealer):
    """Seals that follow from key and block: checksums, or message authentication codes."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest

    def seal(self, key: bytes, block: memoryview, into: memoryview | None = None) -> tuple[memoryview, bytes]:
        if into is not None:
            into[:] = block
        return block if into is None else into, self._digest(key, block)

    def unseal(self, seal: bytes | bytearray | memoryview, key: bytes, stored: memoryview, block: memoryview) -> bool:
        # Nobody may write to ``stored`` meanwhile, so it can be judged where it is.
        if not hmac.compare_digest(seal, self._digest(key, stored)):
            return False
        if block is not stored:
            block[:] = stored
        return True


def _checksum_of(prefix: bytes) -> Digest:
    """Finds what was damaged or mixed up by accident. Anybody can make one."""
    # The block first and alone: after some other bytes all of it would be read unaligned, a third more slowly.
    return lambda key, block: xxhash.xxh3_128_digest(_named(prefix, key) + xxhash.xxh3_128_digest(block))


def _code_of(prefix: bytes, secret: bytes) -> Digest:
    """A message authentication code: who does not know the secret cannot make a block that passes.

    The block is hashed by AES-GMAC under a nonce that never changes, and the result goes, with namespace and key,
    through HMAC-SHA256, cut to 16 bytes. Nobody sees the first result, so it needs no nonce of its own: it is a
    universal hash, and what protects it is the HMAC (hash and then a pseudorandom function).
    """
    stretched = _stretched(secret)
    hashing = _ciphers().AESGCM(_derived(stretched, b"kvoffload seal: hash"))
    outer = _derived(stretched, b"kvoffload seal: code")

    def code(key: bytes, block: memoryview) -> bytes:
        hashed = hashing.encrypt(bytes(_NONCE_BYTES), b"", block)
        return hmac.digest(outer, _named(prefix, key) + hashed, "sha256")[:SEAL_BYTES]

    return code


class Encryption(Sealer):
    """AES-256-GCM. The seal is the tag and a random nonce. Namespace and key of the block are the associated data.

    Each block has an encryption key of its own, derived from the secret, namespace and key. So there is no number of
    blocks after which nonces could repeat.
    """

    seal_bytes = SEAL_BYTES + _NONCE_BYTES
    changes_blocks = True

    def __init__(self, identity: bytes, secret: bytes) -> None:
        self._prefix, self._secret = identity, _derived(_stretched(secret), b"kvoffload encryption")
        self._lib = _ciphers()

    def seal(self, key: bytes, block: memoryview, into: memoryview | None = None) -> tuple[memoryview, bytes]:
        nonce, stored = os.urandom(_NONCE_BYTES), _aligned(block.nbytes) if into is None else into
        cipher = self._cipher(key, self._lib.GCM(nonce)).encryptor()
        cipher.authenticate_additional_data(_named(self._prefix, key))
        cipher.update_into(block, stored)
        cipher.finalize()
        return stored, cipher.tag + nonce

    def unseal(self, seal: bytes | bytearray | memoryview, key: bytes, stored: memoryview, block: memoryview) -> bool:
        if len(seal) != self.seal_bytes:
            return False
        cipher = self._cipher(key, self._lib.GCM(bytes(seal[SEAL_BYTES:]), bytes(seal[:SEAL_BYTES]))).decryptor()
        cipher.authenticate_additional_data(_named(self._prefix, key))
        cipher.update_into(stored, block)
        try:
            cipher.finalize()
        except self._lib.InvalidTag:
            return False
        return True

    def _cipher(self, key: bytes, mode: Any) -> Any:
        return self._lib.Cipher(self._lib.AES(_derived(self._secret, _named(self._prefix, key))), mode)


def sealer_of(identity: str, secret: bytes | None, checksum: Digest | None = None) -> Sealer:
    """What seals the blocks of ``identity``: a namespace, and whatever else tells blocks apart. Without a ``secret`` it
    is a ``checksum``, by default one that covers identity and key. Raises ``MissingExtraError`` if the secret needs a
    package that is not installed."""
    prefix = hashlib.blake2b(identity.encode(), digest_size=16).digest() if identity else b""
    if isinstance(secret, EncryptionKey):
        return Encryption(prefix, secret)
    if secret is not None:
        return Digests(_code_of(prefix, secret))
    return Digests(checksum or _checksum_of(prefix))


def seal_bytes_of(secret: bytes | None) -> int:
    """Bytes of each seal that ``secret`` makes."""
    return Encryption.seal_bytes if isinstance(secret, EncryptionKey) else SEAL_BYTES


def secret_id(secret: bytes | None) -> str:
    """A name for the secret, different for each: 16 hex digits, after ``e-`` if it encrypts. Empty for no secret.

    Everybody who sees the store sees it, so it follows from the stretched secret: each guess takes tens of
    milliseconds."""
    if not secret:
        return ""
    is_encrypting = isinstance(secret, EncryptionKey)
    person = b"kvoffload-aes" if is_encrypting else b"kvoffload-gmac"
    digest = hashlib.blake2b(_stretched(secret), digest_size=8, person=person).hexdigest()
    return _ENCRYPTING + digest if is_encrypting else digest


def encrypts(secret_id: str) -> bool:
    """Whether the secret with this id encrypts blocks."""
    return secret_id.startswith(_ENCRYPTING)


@functools.lru_cache(maxsize=64)
def _stretched(secret: bytes) -> bytes:
    """The secret that all keys and names are derived from. Blocks and names let anybody test guesses, so each guess
    must be slow; a fixed salt does for secrets that are random, as ``docs/security.md`` asks for."""
    return hashlib.scrypt(bytes(secret), salt=b"kvoffload secret", n=1 << 14, r=8, p=1, dklen=32)


def shared_identity(namespace: str, block_bytes: int, secret: bytes | None) -> tuple[str, str]:
    """What a shared store seals its blocks for, and 16 hex digits of it for names.

    Stores that could not read each other's blocks have other names, so that neither deletes the other's as bad.
    """
    identity = "\0".join((_FORMAT, namespace, str(block_bytes), secret_id(secret)))
    return identity, hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def _aligned(num_bytes: int) -> memoryview:
    """Memory that begins at a page, as direct I/O needs it. Pages of a mapping of its own would cost four times the
    encryption."""
    memory = bytearray(num_bytes + PAGE_BYTES)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE_BYTES
    return memoryview(memory)[start : start + num_bytes]


def _named(prefix: bytes, key: bytes) -> bytes:
    return prefix + len(key).to_bytes(4, "big") + key


def _derived(secret: bytes, purpose: bytes) -> bytes:
    """A key of 32 bytes for one purpose."""
    return hmac.digest(secret, purpose, "sha256")


class _Library:
    """The parts of ``cryptography`` that are used here."""

    def __init__(self) -> None:
        from cryptography import __version__ as version

        if int(version.partition(".")[0]) < _LEAST_CRYPTOGRAPHY:
            raise ImportError(f"cryptography {version} is too old")
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        self.InvalidTag, self.Cipher, self.AESGCM, self.AES, self.GCM = InvalidTag, Cipher, AESGCM, AES, GCM


def require_ciphers() -> None:
    """Raises ``MissingExtraError`` if secrets cannot be used here."""
    _ciphers()


def _ciphers() -> Any:
    try:
        return _Library()
    except ImportError as exc:
        raise MissingExtraError(
            "seal_key and encryption_key need kvoffload's extra 'encryption': pip install "
            f"'cryptography>={_LEAST_CRYPTOGRAPHY}' ({exc})."
        ) from exc
