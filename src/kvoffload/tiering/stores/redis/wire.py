# SPDX-License-Identifier: Apache-2.0
"""One connection's data path: requests gathered from their parts, and replies scattered to their targets. A block moves
between its slot and the kernel without another copy. A missed deadline closes the socket, so that nothing can write to
a slot afterwards."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from kvoffload.errors import reason_of
from kvoffload.units import printable

Buffer = bytes | bytearray | memoryview
Place = bytearray | memoryview
"""Memory that receives bytes."""

_TIMEVAL = struct.Struct("ll")
_MOST_BUFFERS = 512
"""Maximum number of buffers of one ``sendmsg``; the kernel accepts 1,024."""
_LINE_BYTES = 512
_LINES_BYTES = 1 << 14
_LARGEST_TEXT = 1 << 16
_MOST_REPLIES = 1 << 16
_DEEPEST_LIST = 8
"""Limits on a reply without a block, so that no server can make the engine use much memory."""
_MOST_CHARACTERS = 300
_REJECTIONS = {
    b"-ERR max number of clients": "it already has as many clients as its maxclients allows",
    b"-DENIED": "it is in protected mode, in which it accepts connections from other machines only with a password",
}
"""Errors with which a server closes a connection before it has read a command, and their meanings."""
_REJECTION_BYTES = 64
_PRECISION = 8
"""A deadline is precise to this fraction of its time limit. The kernel's timeout is set again whenever that much time
has passed, not before each call."""


class ErrorReply(str):
    """An error that a server answered, for example ``MOVED 3999 127.0.0.1:6381``."""

    __slots__ = ()


def error_reply(line: bytes) -> ErrorReply:
    """Return the error in ``line``, without its sign, and without the part of an unknown command that a server
    repeats."""
    text = line[1:].decode("utf-8", "replace")
    return ErrorReply(re.split(",? *with args beginning with", text, maxsplit=1)[0])


def in_one_line(text: str) -> str:
    """Return ``text`` from a server or the system in one line, as part of a sentence."""
    return printable(" ".join(text.split()))[:_MOST_CHARACTERS].rstrip(".")


def encode(*words: bytes) -> bytes:
    """Return a command in the form of the protocol."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def encode_each(word: bytes, names: Iterable[bytes]) -> bytes:
    """Return the command ``word NAME`` for each of ``names``."""
    begin = b"*2\r\n$%d\r\n%s\r\n" % (len(word), word)
    return b"".join([b"%s$%d\r\n%s\r\n" % (begin, len(name), name) for name in names])


class Wire(ABC):
    """A connection, for one thread at a time. Close it after any exception.

    ``begin`` starts the clock of one exchange. A call that would end later raises ``TimeoutError``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.idle_since_s = 0.0
        self._end_s = 0.0
        self._timeout_s = 0.0
        self._left = memoryview(b"")
        """Bytes that were received but not used."""
        self._is_accepted = False
        """Whether the server has sent anything but a rejection."""
        self._lines_place = memoryview(bytearray(_LINES_BYTES))
        # The line before a value, and the memory that receives it.
        self._num_bytes, self._head, self._head_place = 0, b"", bytearray()
        self._end_place = bytearray(2)

    def begin(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def close(self) -> None:
        """End the connection at once, even during an exchange. Idempotent."""
        self.socket.close()

    # -------------------------------------------------------------------------------------------------- transport

    @abstractmethod
    def send(self, parts: Sequence[Buffer]) -> None:
        """Send all bytes of ``parts``, in order. No part is read after the call."""

    @abstractmethod
    def _receive(self, targets: Sequence[Place]) -> int:
        """Fill some bytes of ``targets``, in order, at least one."""

    @abstractmethod
    def _receive_exactly(self, targets: Sequence[Place]) -> None:
        """Fill all of ``targets``."""

    def _check_start(self, targets: Sequence[Place], count: int) -> None:
        """Raise ``ConnectionError`` if the server closed the connection, or if its first ``count`` bytes, which are in
        ``targets``, say that it will."""
        if not count:
            raise ConnectionError("the server closed the connection")
        start = b"".join(_before(targets, min(count, _REJECTION_BYTES)))
        if reason := next((reason for error, reason in _REJECTIONS.items() if start.startswith(error)), None):
            raise ConnectionError(reason)
        self._is_accepted = True

    def _remaining_s(self) -> float:
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("no answer in time")
        return remaining_s

    # ---------------------------------------------------------------------------------------------------- replies

    def read_lines(self, count: int) -> list[bytes]:
        """Return the next ``count`` replies. Each must be one line, so not a value or a list. If ``count`` is more than
        one, nothing may follow them."""
        if count == 1:
            return [self.read_line()]
        answers = bytes(self._take(self._left.nbytes))
        place = self._lines_place
        while answers.count(b"\n") < count:
            if len(answers) >= count * _LINE_BYTES:
                raise ConnectionError("a line does not end")
            answers += place[: self._receive([place])]
        *lines, rest = answers.split(b"\r\n")
        if len(lines) != count or rest:
            raise ConnectionError("the server sent more than was asked for")
        return lines

    def read_value(self, block: memoryview, seal: memoryview) -> bool | ErrorReply | None:
        """Return the reply to a GET: ``True`` for a value as long as ``block`` and ``seal``, which then contain it,
        ``None`` for an absent key, and ``False`` for a value of another length, which is skipped.

        The next bytes are received as if they were such a value, in one call if they have arrived. If they are
        something else, they are put back and read line by line. This code does little per value, because a block that
        was just received has displaced everything else from the processor's cache.
        """
        num_bytes = block.nbytes + seal.nbytes
        if not self._left:
            if num_bytes != self._num_bytes:
                self._num_bytes, self._head = num_bytes, b"$%d\r\n" % num_bytes
                self._head_place = bytearray(len(self._head))
            parts: list[Place] = [self._head_place, block, seal, self._end_place]
            count = self._receive(parts)
            if self._head_place == self._head and count >= len(self._head):
                if count < len(self._head) + num_bytes + 2:
                    self._receive_exactly(_after(parts, count))
                return self._ended()
            self._left = memoryview(b"".join(_before(parts, count)))
        line = self.read_line()
        if line[:1] == b"-":
            return error_reply(line)
        if line == b"$-1":
            return None
        if line[:1] != b"$" or not line[1:].isdigit():
            raise ConnectionError("the server's answer is not a value")
        size = int(line[1:])
        if size != num_bytes:
            self._skip(size + 2)
            return False
        self._fill([block, seal, memoryview(self._end_place)])
        return self._ended()

    def read_reply(self, depth: int = 0) -> Any:
        """Return the next reply, which must not be a block: bytes, a number, an error, ``None``, or a list of
        replies."""
        line = self.read_line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return error_reply(line)
        if not re.fullmatch(rb"-?[0-9]{1,19}", rest):
            raise ConnectionError("the server's answer is not a reply")
        number = int(rest)
        if kind == b":":
            return number
        if kind in (b"$", b"*") and number == -1:
            return None
        if kind == b"$" and 0 <= number <= _LARGEST_TEXT:
            text = bytearray(number)
            self._fill([memoryview(text), memoryview(self._end_place)])
            self._ended()
            return bytes(text)
        if kind == b"*" and 0 <= number <= _MOST_REPLIES and depth < _DEEPEST_LIST:
            return [self.read_reply(depth + 1) for _ in range(number)]
        raise ConnectionError("the server's answer is not a reply")

    def _ended(self) -> bool:
        if self._end_place != b"\r\n":
            raise ConnectionError("a value does not end where it should")
        return True

    def read_line(self) -> bytes:
        """Return the next line, without its end."""
        line = bytes(self._take(_LINE_BYTES))
        while (end := line.find(b"\r\n")) < 0:
            if len(line) >= _LINE_BYTES:
                raise ConnectionError("a line does not end")
            more = memoryview(bytearray(_LINE_BYTES))
            line += more[: self._receive([more])]
        self._left = memoryview(b"".join((line[end + 2 :], self._left)))
        return line[:end]

    def _take(self, most: int) -> memoryview:
        """Return up to ``most`` of the unused bytes."""
        taken, self._left = self._left[:most], self._left[most:]
        return taken

    def _fill(self, targets: Sequence[memoryview]) -> None:
        rest = []
        for target in targets:
            if taken := self._take(target.nbytes):
                target[: taken.nbytes] = taken
            if taken.nbytes < target.nbytes:
                rest.append(target[taken.nbytes :])
        if rest:
            self._receive_exactly(rest)

    def _skip(self, num_bytes: int) -> None:
        num_bytes -= self._take(num_bytes).nbytes
        waste = memoryview(bytearray(min(num_bytes, 1 << 16)))
        while num_bytes:
            num_bytes -= self._receive([waste[:num_bytes]])


def _before(parts: Sequence[Place], count: int) -> list[memoryview]:
    """Return the first ``count`` bytes of ``parts``."""
    found = []
    for part in parts:
        found.append(memoryview(part)[:count])
        count = max(0, count - len(part))
    return found


def _after(parts: Sequence[Buffer], count: int) -> list[memoryview]:
    """Return ``parts`` without their first ``count`` bytes."""
    found = []
    for part in parts:
        if count < len(part):
            found.append(memoryview(part)[count:])
        count = max(0, count - len(part))
    return found


class _PlainWire(Wire):
    """A blocking socket with the deadline in the kernel. One call moves a whole window or block, even if it waits
    several times, and releases the interpreter lock only once."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.settimeout(None)
        # The kernel's current limit for a call, and the time until which it is right.
        self._limit_s = self._limit_holds_s = 0.0

    def begin(self, timeout_s: float) -> None:
        super().begin(timeout_s)
        # The kernel usually still uses the right limit from the previous exchange.
        self._limit_holds_s = self._end_s - timeout_s * (1 - 1 / _PRECISION) if self._limit_s == timeout_s else 0.0

    def send(self, parts: Sequence[Buffer]) -> None:
        while parts:
            if time.monotonic() >= self._limit_holds_s:
                self._limit()
            now = parts[:_MOST_BUFFERS]
            try:
                sent = self.socket.sendmsg(now)
            except BlockingIOError as exc:
                raise TimeoutError("the server does not read the data that it is sent") from exc
            except ConnectionError as exc:
                raise ConnectionError(self._last_words() or reason_of(exc)) from exc
            parts = parts[_MOST_BUFFERS:] if sent == sum(map(len, now)) else _after(parts, sent)

    def _receive_exactly(self, targets: Sequence[Place]) -> None:
        while targets:
            targets = _after(targets, self._receive(targets, socket.MSG_WAITALL))

    def _receive(self, targets: Sequence[Place], flags: int = 0) -> int:
        if time.monotonic() >= self._limit_holds_s:
            self._limit()
        try:
            count = self.socket.recvmsg_into(targets, 0, flags)[0]
        except BlockingIOError as exc:
            raise TimeoutError("no answer in time") from exc
        if not count or not self._is_accepted:
            self._check_start(targets, count)
        return count

    def _last_words(self) -> str | None:
        """Return the last error that the server sent before it closed the connection, or ``None``."""
        try:
            rest = self.socket.recv(_LINES_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return None
        return next((error_reply(line) for line in reversed(rest.split(b"\r\n")) if line[:1] == b"-"), None)

    def _limit(self) -> None:
        """Set the kernel's time limit for a call. It is kept for a while, so the next calls may end a little later."""
        remaining_s = self._remaining_s()
        step_s = self._timeout_s / _PRECISION
        # At the beginning it is the whole timeout, so that it is also right for the next exchange.
        self._limit_s = self._timeout_s if remaining_s > self._timeout_s - step_s else remaining_s
        self._limit_holds_s = self._end_s - max(0.0, self._limit_s - step_s)
        value = _TIMEVAL.pack(*divmod(max(1, int(self._limit_s * 1e6)), 1_000_000))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, value)


class _TlsWire(Wire):
    """The same over TLS, which sends and receives at most one record of 16 KiB at a time."""

    def send(self, parts: Sequence[Buffer]) -> None:
        small: list[Buffer] = []
        for part in parts:
            if len(part) < 1 << 14:
                small.append(part)  # parts of one record
                continue
            self._send_all(b"".join(small))
            small.clear()
            self._send_all(part)
        self._send_all(b"".join(small))

    def _send_all(self, part: Buffer) -> None:
        if part:
            self.socket.settimeout(self._remaining_s())
            self.socket.sendall(part)  # the timeout covers the whole call

    def _receive(self, targets: Sequence[Place]) -> int:
        self.socket.settimeout(self._remaining_s())
        count = self.socket.recv_into(targets[0])
        if not count or not self._is_accepted:
            self._check_start(targets, count)
        return count

    def _receive_exactly(self, targets: Sequence[Place]) -> None:
        while targets:
            targets = _after(targets, self._receive(targets))


def open_wire(sock: socket.socket) -> Wire:
    """Return a wire that owns ``sock``, which is connected."""
    return _TlsWire(sock) if isinstance(sock, ssl.SSLSocket) else _PlainWire(sock)
