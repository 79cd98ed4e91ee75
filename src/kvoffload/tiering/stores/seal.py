# SPDX-License-Identifier: Apache-2.0
"""The seal of a block: a few bytes beside it that fit no other block, key or namespace. With a secret, only its owners
can create a seal; an encrypting secret also hides the block.

Each store whose blocks are read by others, or by later processes, uses one ``Sealer``. Host memory and ``memory`` tiers
do not use any.
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
"""Length of a checksum, and of a message authentication code."""
_NONCE_BYTES = 12
_LEAST_CRYPTOGRAPHY = 43
"""Oldest supported version of ``cryptography``. Older versions cannot encrypt into a buffer that is as long as a
block."""
_ENCRYPTING = "e-"
_FORMAT = "2"
"""Format of a value in a shared store: the block, then its seal."""

Digest = Callable[[bytes, memoryview], bytes]
"""A function that returns 16 bytes for a key and a block."""


class EncryptionKey(bytes):
    """A secret that also encrypts the blocks that it seals. Any other secret only authenticates them."""

    def __repr__(self) -> str:
        return "EncryptionKey(...)"


class Sealer(ABC):
    """The seals of one namespace: creates and checks them. Any thread may use it."""

    seal_bytes = SEAL_BYTES
    changes_blocks = False
    """Whether the stored bytes differ from the block's own bytes."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def seal(self, key: bytes, block: memoryview, into: memoryview | None = None) -> tuple[memoryview, bytes]:
        """Return the bytes to store for ``block`` (contiguous) as ``key``, and the seal to store beside them. The bytes
        are as long as the block. They are in ``into`` (as long, contiguous) if it is given; else they are ``block``
        itself, or new memory if the sealer ``changes_blocks``."""

    @abstractmethod
    def unseal(self, seal: bytes | bytearray | memoryview, key: bytes, stored: memoryview, block: memoryview) -> bool:
        """Return whether ``stored`` was sealed as ``key`` with ``seal``. If so, ``block`` then contains the original
        block; otherwise its content is undefined. Both may be the same memory, which saves a copy."""


class Digests(Sealer):
    """Seals that are computed from key and block: checksums, or message authentication codes."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest

    def seal(self, key: bytes, block: memoryview, into: memoryview | None = None) -> tuple[memoryview, bytes]:
        if into is not None:
            into[:] = block
        return block if into is None else into, self._digest(key, block)

    def unseal(self, seal: bytes | bytearray | memoryview, key: bytes, stored: memoryview, block: memoryview) -> bool:
        # Nobody may write to ``stored`` meanwhile, so it can be checked in place.
        if not hmac.compare_digest(seal, self._digest(key, stored)):
            return False
        if block is not stored:
            block[:] = stored
        return True


def _checksum_of(prefix: bytes) -> Digest:
    """Return a digest that detects accidental damage and mix-ups. It does not need a secret, so anybody can compute
    it."""
    # The block is hashed first and alone: after other bytes, all of it would be read unaligned, a third more slowly.
    return lambda key, block: xxhash.xxh3_128_digest(_named(prefix, key) + xxhash.xxh3_128_digest(block))


def _code_of(prefix: bytes, secret: bytes) -> Digest:
    """Return a message authentication code: nobody can make a block that passes without knowing the secret.

    AES-GMAC hashes the block under a fixed nonce. HMAC-SHA256, cut to 16 bytes, then covers the result together with
    namespace and key. Nobody sees the first result, so it does not need its own nonce: it is a universal hash,
    protected by the HMAC (a hash, then a pseudorandom function).
    """
    stretched = _stretched(secret)
    hashing = _ciphers().AESGCM(_derived(stretched, b"kvoffload seal: hash"))
    outer = _derived(stretched, b"kvoffload seal: code")

    def code(key: bytes, block: memoryview) -> bytes:
        hashed = hashing.encrypt(bytes(_NONCE_BYTES), b"", block)
        return hmac.digest(outer, _named(prefix, key) + hashed, "sha256")[:SEAL_BYTES]

    return code


class Encryption(Sealer):
    """Encryption with AES-256-GCM. The seal is the tag and a random nonce. Namespace and key of the block are the
    associated data.

    Each block has its own encryption key, derived from the secret, namespace and key. So the number of blocks is not
    limited by the risk of repeated nonces.
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
    """Return the sealer for the blocks of ``identity``: a namespace, and anything else that distinguishes blocks.
    Without a ``secret`` it uses ``checksum``, by default one that covers identity and key. Raises ``MissingExtraError``
    if the secret needs a package that is not installed."""
    prefix = hashlib.blake2b(identity.encode(), digest_size=16).digest() if identity else b""
    if isinstance(secret, EncryptionKey):
        return Encryption(prefix, secret)
    if secret is not None:
        return Digests(_code_of(prefix, secret))
    return Digests(checksum or _checksum_of(prefix))


def seal_bytes_of(secret: bytes | None) -> int:
    """Return the bytes of each seal that ``secret`` makes."""
    return Encryption.seal_bytes if isinstance(secret, EncryptionKey) else SEAL_BYTES


def secret_id(secret: bytes | None) -> str:
    """Return a unique name for the secret: 16 hex digits, after ``e-`` if it encrypts. It is empty without a secret.

    Everybody who sees the store sees this name, so it is derived from the stretched secret: testing a guess takes tens
    of milliseconds.
    """
    if not secret:
        return ""
    is_encrypting = isinstance(secret, EncryptionKey)
    person = b"kvoffload-aes" if is_encrypting else b"kvoffload-gmac"
    digest = hashlib.blake2b(_stretched(secret), digest_size=8, person=person).hexdigest()
    return _ENCRYPTING + digest if is_encrypting else digest


def encrypts(secret_id: str) -> bool:
    """Return whether the secret with this id encrypts blocks."""
    return secret_id.startswith(_ENCRYPTING)


@functools.lru_cache(maxsize=64)
def _stretched(secret: bytes) -> bytes:
    """Return the stretched secret. All keys and names are derived from it. Anybody can test guesses with blocks and
    names, so each guess must be slow. A fixed salt is enough for random secrets, which ``docs/security.md`` asks
    for."""
    return hashlib.scrypt(bytes(secret), salt=b"kvoffload secret", n=1 << 14, r=8, p=1, dklen=32)


def shared_identity(namespace: str, block_bytes: int, secret: bytes | None) -> tuple[str, str]:
    """Return the identity that a shared store seals its blocks for, and 16 hex digits of its hash for use in names.

    Stores that could not read each other's blocks use different names, so that neither deletes the other's blocks as
    bad.
    """
    identity = "\0".join((_FORMAT, namespace, str(block_bytes), secret_id(secret)))
    return identity, hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def _aligned(num_bytes: int) -> memoryview:
    """Return memory that starts at a page boundary, as direct I/O requires. A separate mapping would cost four times as
    much as the encryption."""
    memory = bytearray(num_bytes + PAGE_BYTES)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % PAGE_BYTES
    return memoryview(memory)[start : start + num_bytes]


def _named(prefix: bytes, key: bytes) -> bytes:
    return prefix + len(key).to_bytes(4, "big") + key


def _derived(secret: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose."""
    return hmac.digest(secret, purpose, "sha256")


class _Library:
    """The parts of ``cryptography`` that this module uses."""

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
    """Raise ``MissingExtraError`` if secrets cannot be used here."""
    _ciphers()


def _ciphers() -> Any:
    try:
        return _Library()
    except ImportError as exc:
        raise MissingExtraError(
            "seal_key and encryption_key need kvoffload's extra 'encryption': pip install "
            f"'cryptography>={_LEAST_CRYPTOGRAPHY}' ({exc})."
        ) from exc
