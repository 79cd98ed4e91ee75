# SPDX-License-Identifier: Apache-2.0
"""The seal of a block: 16 bytes beside it that no other block, key, namespace or secret gives."""

from __future__ import annotations

import hashlib
import hmac

import xxhash

__all__ = ["SEAL_BYTES", "Sealer", "secret_id", "shared_identity"]

SEAL_BYTES = 16
_FORMAT = "2"
"""Of a value in a shared store: the block and then its seal."""


def secret_id(secret: bytes | None) -> str:
    """16 hex digits for names, of which each secret has others; none for no secret."""
    return hashlib.blake2b(secret, digest_size=8, person=b"kvoffload-id").hexdigest() if secret else ""


def shared_identity(namespace: str, block_bytes: int, secret: bytes | None) -> tuple[str, str]:
    """What a shared store seals its blocks for, and 16 hex digits of it for names.

    Stores that could not read each other's blocks have other names, so that neither deletes the other's as bad.
    """
    identity = "\0".join((_FORMAT, namespace, str(block_bytes), secret_id(secret)))
    return identity, hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


class Sealer:
    """Makes the seals of one namespace. Any thread may use it.

    Without a ``secret`` a seal is an xxh3 checksum, which finds what was damaged or mixed up by accident. With one it
    is a message authentication code (HMAC-SHA256, cut to 16 bytes): who does not know the secret cannot make a block
    that passes.
    """

    def __init__(self, namespace: str = "", secret: bytes | None = None) -> None:
        self._prefix = hashlib.blake2b(namespace.encode(), digest_size=16).digest() if namespace else b""
        self._secret = secret

    def __repr__(self) -> str:
        return f"Sealer({'keyed' if self._secret else 'checksum'})"

    def seal(self, key: bytes, block: memoryview) -> bytes:
        """The only seal that ``block`` (contiguous) has as ``key``."""
        identity = self._prefix + len(key).to_bytes(4, "big") + key
        if self._secret is not None:
            return hmac.digest(hmac.digest(self._secret, identity, "sha256"), block, "sha256")[:SEAL_BYTES]
        # The block first and alone: after some other bytes all of it would be read unaligned, a third more slowly.
        return xxhash.xxh3_128_digest(identity + xxhash.xxh3_128_digest(block))

    def fits(self, seal: bytes | bytearray | memoryview, key: bytes, block: memoryview) -> bool:
        """Whether ``seal`` is that of ``block`` as ``key``."""
        return hmac.compare_digest(seal, self.seal(key, block))
