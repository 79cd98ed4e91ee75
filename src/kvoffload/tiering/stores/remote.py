# SPDX-License-Identifier: Apache-2.0
"""What the options of remote stores have in common: secrets that appear nowhere, ages, and a check at the start."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError
from kvoffload.tiering.options import StoreOptions
from kvoffload.tiering.stores.base import BlockStore

__all__ = ["RemoteOptions", "Secret", "check_age", "check_credentials", "read_secret", "without_credentials"]

Secret = str | dict[str, str]
"""Text, or where to read it: ``{"file": path}`` or ``{"env": name}``. Only the last two keep it out of the engine's own
log of its configuration."""

_LONGEST_S = 1e9
"""Some 30 years: the longest age or deadline, which every clock and server can count."""

_SHORTEST_SEAL_KEY = 16
_NAMES_A_SECRET = re.compile("key|secret|token|password", re.IGNORECASE)
"""Of the settings of a service, those that are credentials."""


def check_age(seconds: float | None, what: str) -> None:
    """Raises ``ConfigError`` unless blocks may expire after ``seconds``; ``None``: never."""
    if seconds is not None and not 1 <= seconds <= _LONGEST_S:
        raise ConfigError(f"{what} must be a second at least, and {_LONGEST_S:.0f} at most, not {seconds:g} s.")


def check_secret(secret: Secret | None, what: str) -> None:
    """Raises ``ConfigError`` unless ``secret`` says where it is. Reads nothing."""
    if isinstance(secret, dict) and (len(secret) != 1 or not secret.keys() <= {"file", "env"} or "" in secret.values()):
        raise ConfigError(f'{what} must be text, {{"file": path}} or {{"env": name}}.')


def read_secret(secret: Secret, what: str) -> str:
    """The text itself, without a file's last line break. ``ConfigError`` says where it should be, and no more."""
    check_secret(secret, what)
    if isinstance(secret, str):
        return secret
    if name := secret.get("env"):
        if name not in os.environ:
            raise ConfigError(f"{what} is to be read from the environment variable {name}, which is not set.")
        source, value = f"the environment variable {name}", os.environb[os.fsencode(name)]
    else:
        source = secret["file"]
        try:
            value = Path(source).read_bytes().rstrip(b"\r\n")
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "strerror", None) or str(exc)
            raise ConfigError(f"{what} is to be read from {source}, which fails: {reason}.") from exc
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} is to be read from {source}, which is not UTF-8.") from None  # it has the bytes


def check_credentials(url: str, what: str) -> None:
    """Raises ``ConfigError`` if an ``@`` of ``url`` ends no user and password: these have a character that ends them
    before it, and what comes after that would not count as a secret."""
    if _has_stray_at(url):
        raise ConfigError(
            f"{what} has an @ after the first /, ? or #: write / as %2F, ? as %3F, # as %23 and @ as %40 in a user, "
            "a password or a path."
        )


def _has_stray_at(url: str) -> bool:
    scheme, _, rest = url.partition("://")
    return "@" in scheme or "@" in "".join(re.split("[/?#]", rest, maxsplit=1)[1:])


def without_credentials(url: str) -> str:
    """``url`` for people to read: user, password and query are left out. ``...`` if it is not clear what these are."""
    if _has_stray_at(url):
        return "..."
    try:
        parts = urlsplit(url)
    except ValueError:
        return "..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class RemoteOptions(StoreOptions, frozen=True, kw_only=True):
    """Options of a store that other machines share."""

    is_persistent: ClassVar[bool] = True
    locality: ClassVar[str | None] = "REMOTE"

    required: bool = False
    """Refuse to start if the store cannot be used. Otherwise the engine starts, and uses the tier once it works."""
    seal_key: Secret | None = None
    """A secret of the fleet, as text, ``{"file": path}`` or ``{"env": name}``: blocks made without it are not served.
    Default: none."""

    @property
    def place(self) -> str:
        url: Secret | None = getattr(self, "url", None)
        if isinstance(url, dict):
            return f"the URL from {' '.join(*url.items())}"
        return without_credentials(url) if url else ""

    @property
    def holds_secrets(self) -> bool:
        """Whether the options themselves have credentials, instead of naming where they are read."""
        settings = (getattr(self, "config", None) or {}).items()
        texts = [value for name, value in settings if _NAMES_A_SECRET.search(name)]
        texts += [getattr(self, name, None) for name in ("password", "sentinel_password", "seal_key")]
        url = getattr(self, "url", None)
        return any(isinstance(value, str) for value in texts) or (isinstance(url, str) and "@" in url)

    def __repr__(self) -> str:
        # Whatever might be a credential is left out, and so a new option is, until it is known to be none.
        shown = ("type", "name", "required", "cascade", "threads", "timeout_s")
        known = {name: getattr(self, name) for name in shown}
        if self.place:
            known["url"] = self.place
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in known.items())})"

    def check(self, block_bytes: int | None = None) -> None:
        StoreOptions.check(self, block_bytes)
        for name in ("url", "seal_key"):
            check_secret(getattr(self, name, None), f"{name} of the {self.type!r} tier")
        if isinstance(self.seal_key, str):
            self._check_seal_key(self.seal_key)

    def _check_deadlines(self, *names: str) -> None:
        """The options ``names`` are seconds that a call may take."""
        for name in names:
            if not 0 < getattr(self, name) <= _LONGEST_S:
                raise ConfigError(
                    f"{name} of the {self.type!r} tier must be positive, and at most {_LONGEST_S:.0f}, "
                    f"not {getattr(self, name)}."
                )

    def secret(self, name: str) -> str | None:
        """The text of the option ``name``, which is a secret."""
        value: Secret | None = getattr(self, name)
        return None if value is None else read_secret(value, f"{name} of the {self.type!r} tier")

    def read_seal_key(self) -> bytes | None:
        key = self.secret("seal_key")
        if key is None:
            return None
        self._check_seal_key(key)
        return key.encode()

    def _check_seal_key(self, key: str) -> None:
        if len(key) < _SHORTEST_SEAL_KEY:
            raise ConfigError(
                f"seal_key of the {self.type!r} tier must have {_SHORTEST_SEAL_KEY} characters at least; make one with "
                "'openssl rand -hex 32'."
            )

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        store = self._open(block_bytes, namespace)
        if self.required:
            try:
                self._check_store(store)
            except BaseException:
                store.close()
                raise
        return store

    def check_servers(self, block_bytes: int) -> None:
        """Asks the store's servers for a block. Raises ``StoreError``, in one sentence, if they cannot be used."""
        store = self._open(block_bytes, "")
        try:
            self._check_store(store)
        finally:
            store.close()

    @abstractmethod
    def _open(self, block_bytes: int, namespace: str) -> BlockStore:
        """The store. Touches nothing outside of this process."""

    def _check_store(self, store: BlockStore) -> None:
        """Raises ``StoreError``, in one sentence, if ``store`` cannot be used."""
        store.contains([OffloadKey(b"check")])
