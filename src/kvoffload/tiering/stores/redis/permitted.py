# SPDX-License-Identifier: Apache-2.0
"""The commands that a server accepts. Managed servers rename some, and access lists exclude some."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.tiering.stores.redis.wire import ErrorReply, encode, encode_each, in_one_line

_log = logging.getLogger(__name__)

_REFUSED = re.compile(
    r"NOPERM\b.*command|(?=.*command)(ERR\b.*\b)?(unknown|unsupported|invalid|not|disabled|denied|forbidden)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Servers and proxies word it differently. Errors about memory, replication or a node have codes of their own."""


class Wording(NamedTuple):
    """A command for one name: ``word NAME options``."""

    word: bytes
    options: tuple[bytes, ...] = ()
    effect: str = ""
    """The consequence if the servers do not accept it, for the log."""

    def encode(self, names: Sequence[bytes]) -> bytes:
        if not self.options:
            return encode_each(self.word, names)
        return b"".join([encode(self.word, name, *self.options) for name in names])


class Permitted:
    """Equivalent commands, the best first. If a server does not accept one, the next is used. Any thread may use it."""

    def __init__(self, *wordings: Wording, is_optional: bool = False) -> None:
        """``is_optional`` says that the store also works without any of them."""
        self._wordings = wordings
        self._is_optional = is_optional
        self._at = 0
        self._lock = threading.Lock()

    @property
    def wording(self) -> Wording | None:
        """The command to use, or ``None`` if the servers accept none of them."""
        at = self._at
        return self._wordings[at] if at < len(self._wordings) else None

    @property
    def is_first(self) -> bool:
        """Whether the servers accept the best one, as far as is known."""
        return not self._at

    def note(self, used: Wording, answers: Sequence[object]) -> bool:
        """Switch to the next wording if one of the ``answers`` says that the server does not accept the one that was
        ``used``. Returns whether another one can be used."""
        refusal = next((answer for answer in answers if is_refusal(answer)), None)
        if refusal is None:
            return False
        with self._lock:
            if self._wordings[self._at : self._at + 1] != (used,):
                return self.wording is not None  # another thread has already switched
            if self._at + 1 == len(self._wordings) and not self._is_optional:
                return False
            self._at += 1
        instead = self.wording
        _log.warning(
            "The Redis server does not take %s (%s): %s. kvoffload uses %s.",
            used.word.decode(),
            in_one_line(str(refusal)),
            used.effect,
            instead.word.decode() if instead else "no other command instead",
        )
        return instead is not None


def is_refusal(answer: object) -> bool:
    """Return whether a server says that it does not accept a command at all, or not from this user."""
    return isinstance(answer, ErrorReply) and _REFUSED.match(answer) is not None


def to_look() -> Permitted:
    """Return the commands that ask whether a key exists."""
    return Permitted(Wording(b"EXISTS", effect="each lookup counts as a use of the block"), Wording(b"TOUCH"))


def to_use() -> Permitted:
    """Return the commands that ask whether a key exists, and record its use."""
    effect = "the server's eviction does not learn which blocks are used"
    late = "each block is sent, also those that the server has"
    return Permitted(Wording(b"TOUCH", effect=effect), Wording(b"EXISTS", effect=late), is_optional=True)


def to_remove() -> Permitted:
    """Return the commands that remove a key. Any user that may write can at least store an empty value that expires at
    once."""
    slow = "the server frees the memory of deleted blocks while other commands wait"
    late = "a damaged block is overwritten with an empty value that expires"
    last = Wording(b"SET", (b"", b"PX", b"1"), effect="damaged blocks stay")
    return Permitted(Wording(b"UNLINK", effect=slow), Wording(b"DEL", effect=late), last)
