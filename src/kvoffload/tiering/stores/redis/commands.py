# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server in one window, and what its replies mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.redis.wire import Buffer, ErrorReply, Wire, encode, encode_each, error_reply
from kvoffload.tiering.stores.seal import SEAL_BYTES, Sealer

__all__ = ["Answer", "Ask", "Asking", "Commands", "Get", "Put", "PutNew"]

_AT_ONCE_BYTES = 1 << 20

_WHETHER = {b":0": False, b":1": True}
_SET = {b"+OK": True, b"$-1": True}
"""``SET NX`` is answered with nothing if the key is there."""

Answer = bool | ErrorReply
"""Of one key: its outcome, or what the server has against it."""


class Commands(ABC):
    """What is to be done for each of ``names``. ``most`` of them make a window."""

    def __init__(self, names: Sequence[bytes], most: int) -> None:
        self.names = names
        self.most = most
        self.there: set[int] = set()
        """Indexes of those that were done before, so that their outcomes do not tell whether the server does any."""

    @abstractmethod
    def exchange(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        """Does it for ``names[index]`` of each index, a window at most, and returns the answers."""

    @abstractmethod
    def asking(self) -> Commands:
        """The same at a node that a slot is moving to, which needs to be asked before each command."""


class Pipelined(Commands):
    """A command for each name, sent together."""

    @abstractmethod
    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        """Sends the commands for ``names[index]`` of each index."""

    @abstractmethod
    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        """The answers to them."""

    def exchange(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        self.send(wire, indexes)
        return self.receive(wire, indexes)

    def asking(self) -> Commands:
        return Asking(self)


class Ask(Pipelined):
    """A command that has only a name: ``EXISTS``, ``TOUCH``, ``UNLINK``. The outcome: whether there was such a key."""

    def __init__(self, command: bytes, names: Sequence[bytes], most: int) -> None:
        super().__init__(names, most)
        self._command = command

    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        wire.send([encode_each(self._command, [self.names[index] for index in indexes])])

    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        return _answers(wire.read_lines(len(indexes)), _WHETHER)


class Put(Pipelined):
    """``SET NX``: a block from its slot, and its seal after it. The outcome is ``True`` also if the key is there."""

    def __init__(
        self,
        names: Sequence[bytes],
        most: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
        sealer: Sealer,
        ttl_s: int | None,
    ) -> None:
        super().__init__(names, most)
        self._keys, self._blocks, self._sealer = keys, blocks, sealer
        self.at_once = max(1, _AT_ONCE_BYTES // max(1, blocks[0].nbytes)) if blocks else 1
        """Blocks, all of one size, that are sent before they are answered."""
        options = [b"NX"] if ttl_s is None else [b"NX", b"EX", b"%d" % ttl_s]
        self._end = b"\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in options)
        self._begin = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))

    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        wire.send([part for index in indexes for part in self.parts(index)])

    def parts(self, index: int) -> tuple[Buffer, ...]:
        """The command for ``names[index]``, block and seal included."""
        name, block = self.names[index], self._blocks[index]
        head = b"%s$%d\r\n%s\r\n$%d\r\n" % (self._begin, len(name), name, block.nbytes + SEAL_BYTES)
        return head, block, self._sealer.seal(self._keys[index], block) + self._end

    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        return _answers(wire.read_lines(len(indexes)), _SET)


class PutNew(Commands):
    """``put`` for the keys that are not there by ``touch``. Another engine may have written them meanwhile, and the
    answer may save megabytes. The question also counts as a use where the server evicts the least recently used.

    Blocks of some 1 MiB are sealed, sent and answered before the next ones: they are still in the processor's cache
    when they are sent, and when a server on the same machine receives them."""

    def __init__(self, touch: Ask, put: Put) -> None:
        super().__init__(put.names, put.most)
        self._touch, self._put = touch, put

    def exchange(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        self._touch.send(wire, indexes)
        # The first seals are made while the server answers, so that the thread does not sleep: that cost more than
        # seals made in vain.
        at_once = self._put.at_once
        made = {place: self._put.parts(index) for place, index in enumerate(indexes[:at_once])}
        answers = self._touch.receive(wire, indexes)
        new = [place for place, answer in enumerate(answers) if answer is False]
        self.there.update(index for index, answer in zip(indexes, answers, strict=True) if answer is True)
        for start in range(0, len(new), at_once):
            places = new[start : start + at_once]
            commands = (made.get(place) or self._put.parts(indexes[place]) for place in places)
            wire.send([part for parts in commands for part in parts])
            for place, answer in zip(places, self._put.receive(wire, places), strict=True):
                answers[place] = answer
        return answers

    def asking(self) -> Commands:
        return self._put.asking()  # it decides by itself too


class Get(Pipelined):
    """``GET``: a value into its slot, if it is the block that it should be. ``bad`` collects the indexes of those that
    are not: of another length or kind, or with a seal that does not fit."""

    def __init__(
        self,
        names: Sequence[bytes],
        most: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[memoryview],
        sealer: Sealer,
    ) -> None:
        super().__init__(names, most)
        self._keys, self._blocks, self._sealer = keys, blocks, sealer
        self.bad: list[int] = []

    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        wire.send([encode_each(b"GET", [self.names[index] for index in indexes])])

    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        answers: list[Answer] = []
        seal = memoryview(bytearray(SEAL_BYTES))
        keys, blocks, fits = self._keys, self._blocks, self._sealer.fits
        for index in indexes:
            block = blocks[index]
            reply = wire.read_value(block, seal)
            if reply is True and fits(seal, keys[index], block):
                answers.append(True)
            elif isinstance(reply, ErrorReply) and not reply.startswith("WRONGTYPE"):
                answers.append(reply)
            else:
                answers.append(False)
                if reply is not None:
                    self.bad.append(index)
        return answers


class Asking(Pipelined):
    """``inner``, where each command needs the permission of a node that a slot is moving to."""

    def __init__(self, inner: Pipelined) -> None:
        super().__init__(inner.names, inner.most)
        self._inner = inner

    def send(self, wire: Wire, indexes: Sequence[int]) -> None:
        for index in indexes:
            wire.send([encode(b"ASKING")])
            self._inner.send(wire, [index])

    def receive(self, wire: Wire, indexes: Sequence[int]) -> list[Answer]:
        answers: list[Answer] = []
        for index in indexes:
            wire.read_line()
            answers += self._inner.receive(wire, [index])
        return answers


def _answers(lines: Sequence[bytes], meanings: Mapping[bytes, bool]) -> list[Answer]:
    """What ``lines`` mean. Raises ``ConnectionError`` for what such a command is not answered with."""
    answers: list[Answer] = []
    for line in lines:
        if (meaning := meanings.get(line)) is not None:
            answers.append(meaning)
        elif line[:1] == b"-":
            answers.append(error_reply(line))
        else:
            raise ConnectionError("the server's answer is not a reply")
    return answers
