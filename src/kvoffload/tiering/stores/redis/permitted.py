# SPDX-License-Identifier: Apache-2.0
"""The commands that a server accepts. Managed servers rename some, and access lists exclude some."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvoffload.tiering.stores.redis.wire import ClosedError, ErrorReply, encode, encode_each, in_one_line

T = TypeVar("T")
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
        self._is_answered = False
        """Whether a server has answered the current one."""
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
            self._is_answered |= bool(answers)
            return False
        with self._lock:
            if self.wording != used:
                return self.wording is not None  # another thread has already switched
            if not self._has_next:
                return False
            self._at += 1
            self._is_answered = False
        self._say(used, str(refusal))
        return self.wording is not None

    def without(self, used: Wording | None, repeat: Callable[[], T]) -> T | None:
        """Return the result of ``repeat`` with one of the next wordings, if no server has answered the one that was
        ``used``. Some proxies close a connection instead. Returns ``None`` if there is nothing else to try. If
        ``repeat`` raises, the wording was not the reason."""
        if used is None:
            return None
        with self._lock:
            is_current = self.wording == used
            if is_current and (self._is_answered or not self._has_next):
                return None
            self._at += is_current
        if not is_current:
            return repeat()  # another thread has already switched
        try:
            while True:
                try:
                    result = repeat()
                    break
                except ClosedError:
                    with self._lock:
                        if self._is_answered or not self._has_next:
                            raise
                        self._at += 1
        except BaseException:
            with self._lock:
                if not self._is_answered:
                    self._at = self._wordings.index(used)
            raise
        self._say(used, "it closes the connection")
        return result

    @property
    def _has_next(self) -> bool:
        return self._at + 1 < len(self._wordings) + self._is_optional

    def _say(self, used: Wording, reason: str) -> None:
        instead = self.wording
        _log.warning(
            "The Redis server rejects %s (%s): %s. kvoffload uses %s.",
            used.word.decode(),
            in_one_line(reason),
            used.effect,
            instead.word.decode() if instead else "no other command instead",
        )


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
