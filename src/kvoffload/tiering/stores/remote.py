# SPDX-License-Identifier: Apache-2.0
"""Common parts of remote stores: connections, URLs without credentials, ages, and a check at startup."""

from __future__ import annotations

import re
import socket
import time
from typing import Any, ClassVar
from urllib.parse import urlsplit

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, Problems
from kvoffload.tiering.options import SealedOptions
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.secrets import Secret, check_secret

_LONGEST_S = 1e9
"""The longest age or deadline, about 30 years, which every clock and server can represent."""


def check_age(seconds: float | None, what: str) -> None:
    """Raise ``ConfigError`` unless blocks may expire after ``seconds``; ``None`` means never."""
    if seconds is not None and not 1 <= seconds <= _LONGEST_S:
        raise ConfigError(f"{what} must be between 1 and {_LONGEST_S:.0f} seconds, not {seconds:g}.")


def check_credentials(url: str, what: str) -> None:
    """Raise ``ConfigError`` if an ``@`` in ``url`` does not follow a complete user and password. They then contain a
    character that ends them too early, and the text after it would not be treated as a secret."""
    if _has_stray_at(url):
        raise ConfigError(
            f"{what} contains an @ after the first /, ? or #; write / as %2F, ? as %3F, # as %23 and @ as %40 in a "
            "user, a password or a path."
        )


def _has_stray_at(url: str) -> bool:
    scheme, _, rest = url.partition("://")
    return "@" in scheme or "@" in "".join(re.split("[/?#]", rest, maxsplit=1)[1:])


def without_credentials(url: str) -> str:
    """Return ``url`` for people, without user, password and query, or ``...`` if these cannot be identified."""
    if _has_stray_at(url):
        return "..."
    try:
        parts = urlsplit(url)
    except ValueError:
        return "..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a TCP connection to the first address of ``host`` that accepts it. Each address gets its share of the
    time, so that an address that drops packets leaves time for the next. The system may need longer to resolve the
    name. Raises ``OSError``."""
    end_s = time.monotonic() + timeout_s
    endpoints = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for left, endpoint in zip(reversed(range(len(endpoints))), endpoints, strict=True):
        try:
            return _connected(endpoint, max(0.001, (end_s - time.monotonic()) / (left + 1)))
        except OSError:  # also for a family that this host lacks, such as IPv6
            if not left:
                raise
    raise OSError("the name has no address")


def _connected(endpoint: tuple[Any, ...], timeout_s: float) -> socket.socket:
    sock = socket.socket(*endpoint[:3])
    try:
        sock.settimeout(timeout_s)
        sock.connect(endpoint[4])
    except BaseException:
        sock.close()
        raise
    return sock


class RemoteOptions(SealedOptions, frozen=True, kw_only=True):
    """Options of a store that other machines share."""

    locality: ClassVar[str | None] = "REMOTE"

    required: bool = False
    """Stop the engine's start if the store cannot be used. If false, the engine starts, and uses the tier once it
    works."""

    @property
    def place(self) -> str:
        url: Secret | None = getattr(self, "url", None)
        if isinstance(url, dict):
            return f"the URL from {' '.join(*url.items())}"
        return without_credentials(url) if url else ""

    def check(self, block_bytes: int | None = None) -> None:
        problems = Problems()
        with problems:
            SealedOptions.check(self, block_bytes)
        with problems:
            check_secret(getattr(self, "url", None), f"url of the {self.type!r} tier")
        problems.raise_found()

    def _check_deadlines(self, *names: str) -> None:
        """Raise ``ConfigError`` unless the options ``names`` are valid time limits in seconds."""
        problems = Problems()
        for name in names:
            if not 0 < getattr(self, name) <= _LONGEST_S:
                problems.add(
                    f"{name} of the {self.type!r} tier must be positive, and at most {_LONGEST_S:.0f}, "
                    f"not {getattr(self, name)}."
                )
        problems.raise_found()

    def _check_opened(self, store: BlockStore) -> None:
        if self.required:
            self._check_store(store)

    def check_store(self, block_bytes: int, ask: bool) -> list[str]:
        """Read all secrets, as a server does at startup. With ``ask``, also request a block from the store's servers,
        and return a warning sentence for each unwise setting of theirs. Raises ``ConfigError`` or ``StoreError``, in
        one sentence, if that fails."""
        store = self._open(block_bytes, "", next(iter(self.read_keys()), None))
        try:
            if not ask:
                return []
            self._check_store(store)
            return self._warnings(store)
        finally:
            store.close()

    def _warnings(self, store: BlockStore) -> list[str]:
        """Return warning sentences about servers of ``store`` that work, but are badly configured."""
        return []

    def _check_store(self, store: BlockStore) -> None:
        """Raise ``StoreError``, in one sentence, if ``store`` cannot be used."""
        store.contains([OffloadKey(b"check")])
