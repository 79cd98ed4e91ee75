# SPDX-License-Identifier: Apache-2.0
"""Secrets of a configuration: given as text, or as where to read it, and shown nowhere."""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence

from kvoffload.errors import ConfigError, reason_of
from kvoffload.files import read_file

Secret = str | dict[str, str]
"""Text, or where to read it: ``{"file": path}`` or ``{"env": name}``. Only the last two keep it out of the engine's own
log of its configuration."""

Keys = str | dict[str, str] | list[str | dict[str, str]]
"""One secret, or several."""

_SHORTEST_KEY = 16


def check_secret(secret: Secret | None, what: str) -> None:
    """Raise ``ConfigError`` unless ``secret`` says where it is. Reads nothing."""
    if isinstance(secret, dict) and (len(secret) != 1 or not secret.keys() <= {"file", "env"} or "" in secret.values()):
        raise ConfigError(f'{what} must be text, {{"file": path}} or {{"env": name}}.')


def read_secret(secret: Secret, what: str) -> str:
    """Return the text itself, without line breaks at its end and without a byte-order mark. A ``ConfigError`` only says
    where the text should be."""
    check_secret(secret, what)
    if isinstance(secret, str):
        return secret
    if name := secret.get("env"):
        if name not in os.environ:
            raise ConfigError(f"{what} is read from the environment variable {name}, which is not set.")
        source, value = f"the environment variable {name}", os.environb[os.fsencode(name)]
    else:
        source = secret["file"]
        try:
            value = read_file(source)
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{what} is read from {source}, which cannot be read: {reason_of(exc)}.") from exc
    value = value.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")
    if not value:
        raise ConfigError(f"{what} is read from {source}, which is empty.")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} is read from {source}, which is not UTF-8.") from None  # it has the bytes


def check_keys(keys: Keys | None, what: str) -> None:
    """Raise ``ConfigError`` unless ``keys`` can be secrets of blocks, as far as that is known without reading them."""
    if keys == []:
        raise ConfigError(f"{what} is an empty list; leave it out, or give a key.")
    for key in _each(keys):
        check_secret(key, what)
        if isinstance(key, str) and len(key) < _SHORTEST_KEY:
            raise ConfigError(
                f"{what} must have at least {_SHORTEST_KEY} characters; create one with 'openssl rand -hex 32'."
            )


def read_keys(keys: Keys | None, what: str) -> list[bytes]:
    """Return the secrets that ``keys`` contain or name. The first one seals; all of them open."""
    texts = [read_secret(key, what) for key in _each(keys)]
    if texts:
        check_keys(list(texts), what)
    if len(set(texts)) < len(texts):
        raise ConfigError(f"{what} has a key twice.")
    return [text.encode() for text in texts]


def _each(keys: Keys | None) -> Sequence[Secret]:
    return () if keys is None else keys if isinstance(keys, list) else (keys,)
