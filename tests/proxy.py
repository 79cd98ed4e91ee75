# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that stalls, cuts or slows down a server's answer after a given number of bytes, or forgets
connections."""

from __future__ import annotations

import socket
import threading
import time


class Proxy:
    """A proxy that listens on its own port and passes everything on to ``port`` until the test changes that.

    ``host`` is the address to listen on, or ``""`` for all.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = port
        self._change = threading.Condition()
        self._allowance: int | None = None
        self._cuts = False
        self._bytes_per_s: int | None = None
        self._is_closed = False
        self._sockets: list[socket.socket] = []
        self._forgotten: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stall_after(self, num_bytes: int) -> None:
        """Answers pass for ``num_bytes`` more, over all connections, and then wait."""
        self._limit(num_bytes, cuts=False)

    def cut_after(self, num_bytes: int) -> None:
        """After ``num_bytes`` more of answers, connections are closed."""
        self._limit(num_bytes, cuts=True)

    def throttle(self, bytes_per_s: int) -> None:
        """Answers drip: some hundred times a second, a few bytes."""
        self._bytes_per_s = bytes_per_s

    def forget(self) -> None:
        """Passes nothing on for the connections of now, without a word: as a firewall whose table lost them."""
        self._forgotten = set(self._sockets)

    @property
    def is_stalling(self) -> bool:
        """Whether all answers that may pass have passed."""
        return self._allowance == 0

    @property
    def num_connections(self) -> int:
        return len(self._sockets) // 2

    def heal(self) -> None:
        self._bytes_per_s = None
        self._limit(None, cuts=False)

    def close(self) -> None:
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._sockets:
            self._end(sock)
        for thread in self._threads[1:]:
            thread.join()
        for sock in self._sockets:
            sock.close()

    def _limit(self, num_bytes: int | None, cuts: bool) -> None:
        with self._change:
            self._allowance, self._cuts = num_bytes, cuts
            self._change.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for work in ((near, far, False), (far, near, True)):
                self._threads.append(threading.Thread(target=self._pump, args=work))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        try:
            while data := source.recv(1 << 14):
                while data and source not in self._forgotten:
                    count = self._allowed(len(data)) if is_answer else len(data)
                    if is_answer and (speed := self._bytes_per_s) is not None:
                        time.sleep(0.005)
                        count = min(count, max(1, speed // 200))
                    if not count:
                        return
                    sink.sendall(data[:count])
                    data = data[count:]
        except OSError:
            pass
        finally:
            self._end(source)
            self._end(sink)

    def _allowed(self, wanted: int) -> int:
        """How many bytes may pass now; waits while the answers are stalled. 0: the connection is to be closed."""
        with self._change:
            self._change.wait_for(lambda: self._allowance != 0 or self._cuts or self._is_closed)
            if self._is_closed or (self._allowance == 0 and self._cuts):
                return 0
            if self._allowance is None:
                return wanted
            count = min(wanted, self._allowance)
            self._allowance -= count
            return count

    @staticmethod
    def _end(sock: socket.socket) -> None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
