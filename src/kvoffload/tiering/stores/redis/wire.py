# SPDX-License-Identifier: Apache-2.0
"""One connection's data path: requests gathered from their parts, replies scattered to where they belong.

The client library has connected and authenticated (``open_wire``). From then on the socket is this module's alone: a
block goes from its slot to the kernel and back without a copy in between, and a deadline ends by closing the socket, so
nothing can write to a slot afterwards.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["Buffer", "ErrorReply", "Wire", "encode", "open_wire"]

Buffer = bytes | bytearray | memoryview

_TIMEVAL = struct.Struct("ll")
_MOST_BUFFERS = 512
"""Buffers of one ``sendmsg``; the kernel takes 1,024."""
_LINE_BYTES = 512
"""Read at once where a line is expected. What belongs to the block behind it is copied, so it is little."""


class ErrorReply(str):
    """A server's answer that is an error, for example ``MOVED 3999 127.0.0.1:6381``."""

    __slots__ = ()


def encode(*words: bytes) -> bytes:
    """A command as the protocol has it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


class Wire(ABC):
    """A connection. One thread at a time. After any exception it is of no use any more: close it.

    ``begin`` starts the clock of one exchange. A call that would end later raises ``TimeoutError``.
    """

    def __init__(self, connection: Any, sock: socket.socket) -> None:
        self._connection = connection  # closes the socket when it is collected, so it lives as long as this
        self.socket = sock
        self._end_s = 0.0
        self._line = bytearray(_LINE_BYTES)
        # Received and not taken yet: self._line[self._start : self._stop].
        self._start = self._stop = 0

    def begin(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    def close(self) -> None:
        """Ends the connection at once, whatever is under way. Idempotent."""
        try:
            self.socket.close()
        finally:
            self._connection.disconnect()

    # -------------------------------------------------------------------------------------------------- transport

    @abstractmethod
    def send(self, parts: Sequence[Buffer]) -> None:
        """Sends all bytes of ``parts``, in order. None of them is read after the call."""

    @abstractmethod
    def _receive(self, target: memoryview) -> int:
        """Fills some bytes of ``target``, at least one."""

    def _receive_exactly(self, targets: Sequence[memoryview]) -> None:
        for target in targets:
            while target:
                target = target[self._receive(target) :]

    def _remaining_s(self) -> float:
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("no answer in time")
        return remaining_s

    # ---------------------------------------------------------------------------------------------------- replies

    def read_lines(self, count: int) -> list[bytes]:
        """The next ``count`` replies, each of which is one line: everything but values and lists. If they are several,
        nothing may follow them."""
        if count == 1:
            return [self.read_line()]
        parts = [bytes(self._take(_LINE_BYTES))]
        found = parts[0].count(b"\n")
        scratch = memoryview(bytearray(1 << 16)) if found < count else None
        while scratch is not None and found < count:
            parts.append(bytes(scratch[: self._receive(scratch)]))
            found += parts[-1].count(b"\n")
        *lines, rest = b"".join(parts).split(b"\r\n")
        if len(lines) != count or rest:
            raise ConnectionError("the server sent more than was asked for")
        return lines

    def read_value(self, targets: Sequence[memoryview], num_bytes: int) -> bool | ErrorReply | None:
        """The reply to a GET. ``True``: a value of just ``num_bytes``, which now fills ``targets``. ``None``: absent.
        ``False``: a value of another length, which was skipped."""
        # As many bytes as the line before such a value has: with more, the block would have to be copied in part, and
        # the kernel would write the rest of it to an address that is not aligned.
        line = self.read_line(len(b"$%d\r\n" % num_bytes))
        if line[:1] == b"-":
            return ErrorReply(line[1:].decode("utf-8", "replace"))
        if line == b"$-1":
            return None
        if line[:1] != b"$" or not line[1:].isdigit():
            raise ConnectionError("the server's answer is no value")
        size = int(line[1:])
        if size != num_bytes:
            self._skip(size + 2)
            return False
        self._fill([*targets, memoryview(end := bytearray(2))])
        if end != b"\r\n":
            raise ConnectionError("a value does not end where it should")
        return True

    def read_line(self, first_bytes: int = _LINE_BYTES) -> bytes:
        """The next line, without its end. Receives at most ``first_bytes`` at first."""
        while True:
            end = self._line.find(b"\r\n", self._start, self._stop)
            if end >= 0:
                line = bytes(self._line[self._start : end])
                self._start = end + 2
                return line
            if self._start == self._stop:
                self._start = self._stop = 0
            elif self._start:
                self._line[: self._stop - self._start] = self._line[self._start : self._stop]
                self._start, self._stop = 0, self._stop - self._start
            if self._stop == len(self._line):
                raise ConnectionError("a line does not end")
            self._stop += self._receive(memoryview(self._line)[self._stop : self._stop + first_bytes])
            first_bytes = _LINE_BYTES

    def _take(self, most: int) -> memoryview:
        """Up to ``most`` bytes that came with a line."""
        start = self._start
        self._start = min(self._stop, start + most)
        return memoryview(self._line)[start : self._start]

    def _fill(self, targets: Sequence[memoryview]) -> None:
        rest = []
        for target in targets:
            if taken := self._take(target.nbytes):
                target[: taken.nbytes] = taken
            if taken.nbytes < target.nbytes:
                rest.append(target[taken.nbytes :])
        self._receive_exactly(rest)

    def _skip(self, num_bytes: int) -> None:
        num_bytes -= self._take(num_bytes).nbytes
        waste = memoryview(bytearray(min(num_bytes, 1 << 16)))
        while num_bytes:
            num_bytes -= self._receive(waste[:num_bytes])


class _PlainWire(Wire):
    """A blocking socket, the deadline in the kernel: one call moves a whole window or block, however often it waits,
    and gives the interpreter away once."""

    def __init__(self, connection: Any, sock: socket.socket) -> None:
        super().__init__(connection, sock)
        sock.settimeout(None)

    def send(self, parts: Sequence[Buffer]) -> None:
        rest = [memoryview(part) for part in parts]
        while rest:
            self._limit(socket.SO_SNDTIMEO)
            try:
                sent = self.socket.sendmsg(rest[:_MOST_BUFFERS])
            except BlockingIOError as exc:
                raise TimeoutError("the server does not take what it is sent") from exc
            while rest and sent >= rest[0].nbytes:
                sent -= rest.pop(0).nbytes
            if sent:
                rest[0] = rest[0][sent:]

    def _receive(self, target: memoryview) -> int:
        return self._received([target], 0)

    def _receive_exactly(self, targets: Sequence[memoryview]) -> None:
        rest = list(targets)
        while rest:
            count = self._received(rest, socket.MSG_WAITALL)
            while rest and count >= rest[0].nbytes:
                count -= rest.pop(0).nbytes
            if count:
                rest[0] = rest[0][count:]

    def _received(self, targets: list[memoryview], flags: int) -> int:
        self._limit(socket.SO_RCVTIMEO)
        try:
            count = self.socket.recvmsg_into(targets, 0, flags)[0]
        except BlockingIOError as exc:
            raise TimeoutError("no answer in time") from exc
        if not count:
            raise ConnectionError("the server closed the connection")
        return count

    def _limit(self, option: int) -> None:
        micros = max(1, int(self._remaining_s() * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(micros, 1_000_000)))


class _TlsWire(Wire):
    """The same over TLS, which takes and gives at most one record of 16 KiB at a time."""

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
            self.socket.sendall(part)  # the timeout is that of the whole call

    def _receive(self, target: memoryview) -> int:
        self.socket.settimeout(self._remaining_s())
        count = self.socket.recv_into(target)
        if not count:
            raise ConnectionError("the server closed the connection")
        return count


def open_wire(connection: Any) -> Wire:
    """Connects ``connection``, one of redis-py's, and takes its socket over. Raises what redis-py raises."""
    connection.connect()
    # The library has no public way to its socket. Nothing is lost in its buffers: a server only ever answers.
    sock: socket.socket = connection._sock
    return _TlsWire(connection, sock) if isinstance(sock, ssl.SSLSocket) else _PlainWire(connection, sock)
