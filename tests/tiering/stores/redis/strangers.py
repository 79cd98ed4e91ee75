# SPDX-License-Identifier: Apache-2.0
"""Listeners that are not Redis servers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Mute:
    """Takes connections and never answers. Closes them, and all that come later, once ``gives_up`` is set."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.gives_up = threading.Event()
        self.num_connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self.gives_up.wait()
            connection.close()

    def close(self) -> None:
        self.gives_up.set()
        self.listener.shutdown(socket.SHUT_RDWR)  # ends its thread too
        self.listener.close()


@contextmanager
def answering_server(answer: bytes, before: Callable[[], object] = lambda: None) -> Iterator[int]:
    """Yield the port of a listener that calls ``before``, answers the first data with ``answer``, and disconnects."""

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(100)
                before()
                peer.sendall(answer)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
