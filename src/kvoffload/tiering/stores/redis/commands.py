# SPDX-License-Identifier: Apache-2.0
"""The commands for a server in one window, and the meaning of its replies."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.redis.wire import Buffer, ErrorReply, Wire, encode, encode_each, error_reply
from kvoffload.tiering.stores.seal import Sealer

_AT_ONCE_BYTES = 1 << 20
_PROTOCOL_ERROR = "ERR Protocol error"
"""An error after which a server closes the connection, for instance because a block is too large for it."""

_REFUSED = re.compile(r"NOPERM\b.*command|ERR unknown command", re.IGNORECASE)
"""Errors that mean that the server does not accept a command at all, or not from this user."""

_WHETHER = {b":0": False, b":1": True, b"+OK": True}
_SET = {b"+OK": True, b"$-1": True}
"""The answer of ``SET NX`` is empty if the key exists."""

Answer = bool | ErrorReply
"""The answer for one key: its outcome, or the server's error."""


@dataclass(slots=True, eq=False)
class Commands(ABC):
    """A command for each of ``names``. A window contains at most ``most`` of them."""

    names: Sequence[bytes]
    most: int
    there: set[int] = field(default_factory=set, init=False)
    """Indexes of keys that were stored before, so that their outcomes do not show whether the server works."""

    @abstractmethod
    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        """Send the commands for ``names[index]`` of each index."""

    @abstractmethod
    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        """Return the answers to these commands."""

    def exchange(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        """Send the commands and receive their answers, for at most one window."""
        self.send(wire, indexes)
        return self.receive(wire, indexes)


@dataclass(slots=True, eq=False)
class Ask(Commands):
    """The command ``word NAME``, such as ``EXISTS``. The outcome is whether the key existed."""

    word: bytes

    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        wire.send([encode_each(self.word, [self.names[index] for index in indexes])])

    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        return _answers(wire.read_lines(len(indexes)), _WHETHER)


@dataclass(slots=True, eq=False)
class Put(Commands):
    """``SET NX`` of a block from its slot, followed by its seal. The outcome is also ``True`` if the key exists.

    A window first asks which keys exist, because the answer may save megabytes. It uses ``TOUCH``, which also counts as
    a use if the server evicts the least recently used. A server that does not accept ``TOUCH`` receives every block.
    The first block is sent with the question, so that no thread waits only for the answer. Another engine may
    still write a block meanwhile. About 1 MiB of blocks are sealed, sent and answered before the next ones, so that
    they are still in the processor's cache when they are sent, and when a server on the same machine receives them.
    """

    keys: Sequence[OffloadKey]
    blocks: Sequence[memoryview]
    """Blocks, all of one size."""
    sealer: Sealer
    ttl_s: int | None
    _at_once: int = field(init=False)
    _begin: bytes = field(init=False)
    _end: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._at_once = max(1, _AT_ONCE_BYTES // max(1, self.blocks[0].nbytes)) if self.blocks else 1
        options = [b"NX"] if self.ttl_s is None else [b"NX", b"EX", b"%d" % self.ttl_s]
        self._end = b"\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in options)
        self._begin = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))

    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        wire.send(self._parts(indexes))

    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        return _answers(wire.read_lines(len(indexes)), _SET)

    def exchange(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        first, rest = indexes[: self._at_once], range(self._at_once, len(indexes))
        wire.send([encode_each(b"TOUCH", [self.names[index] for index in indexes]), *self._parts(first)])
        lines = wire.read_lines(len(indexes) + len(first))
        answers: list[Answer] = [
            False if isinstance(answer, ErrorReply) and _REFUSED.match(answer) else answer
            for answer in _answers(lines[: len(indexes)], _WHETHER)
        ]
        self.there.update(index for index, answer in zip(indexes, answers, strict=True) if answer is True)
        for place, answer in enumerate(_answers(lines[len(indexes) :], _SET)):
            if answers[place] is not True:  # a full server also rejects a block that it contains
                answers[place] = answer
        if any(isinstance(answer, ErrorReply) and answer.startswith(_PROTOCOL_ERROR) for answer in answers):
            return answers  # the server is closing the connection
        new = [place for place in rest if answers[place] is False]
        for start in range(0, len(new), self._at_once):
            places = new[start : start + self._at_once]
            self.send(wire, [indexes[place] for place in places])
            for place, answer in zip(places, self.receive(wire, places), strict=True):
                answers[place] = answer
        return answers

    def _parts(self, indexes: Sequence[int]) -> list[Buffer]:
        """Return the commands for ``names[index]`` of each index, including blocks and seals."""
        parts: list[Buffer] = []
        for index in indexes:
            name = self.names[index]
            stored, seal = self.sealer.seal(self.keys[index], self.blocks[index])
            head = b"%s$%d\r\n%s\r\n$%d\r\n" % (self._begin, len(name), name, stored.nbytes + len(seal))
            parts += head, stored, seal + self._end
        return parts


@dataclass(slots=True, eq=False)
class Get(Commands):
    """``GET`` of a value into its slot, if it is the right block."""

    keys: Sequence[OffloadKey]
    blocks: Sequence[memoryview]
    sealer: Sealer
    bad: list[int] = field(default_factory=list, init=False)
    """Indexes of values that are not the right blocks: they have another length or type, or a seal that does not
    fit."""

    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        wire.send([encode_each(b"GET", [self.names[index] for index in indexes])])

    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        answers: list[Answer] = []
        seal = memoryview(bytearray(self.sealer.seal_bytes))
        keys, blocks, unseal = self.keys, self.blocks, self.sealer.unseal
        for index in indexes:
            block = blocks[index]
            reply = wire.read_value(block, seal)
            if reply is True and unseal(seal, keys[index], block, block):
                answers.append(True)
            elif isinstance(reply, ErrorReply) and not reply.startswith("WRONGTYPE"):
                answers.append(reply)
            else:
                answers.append(False)
                if reply is not None:
                    self.bad.append(index)
        return answers


@dataclass(slots=True, eq=False)
class Asking(Commands):
    """``inner`` at a node that a slot is moving to. Such a node requires ``ASKING`` before each command. A write does
    not ask which keys exist, because ``SET NX`` decides that anyway."""

    inner: Commands

    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        for index in indexes:
            wire.send([encode(b"ASKING")])
            self.inner.send(wire, [index])

    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        answers: list[Answer] = []
        for index in indexes:
            wire.read_line()
            answers += self.inner.receive(wire, [index])
        return answers


def _answers(lines: Sequence[bytes], meanings: Mapping[bytes, bool]) -> list[Answer]:
    """Return the meaning of ``lines``. Raises ``ConnectionError`` for an invalid answer to such a command."""
    answers: list[Answer] = []
    for line in lines:
        if (meaning := meanings.get(line)) is not None:
            answers.append(meaning)
        elif line[:1] == b"-":
            answers.append(error_reply(line))
        else:
            raise ConnectionError("the server's answer is not a reply")
    return answers
