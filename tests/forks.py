# SPDX-License-Identifier: Apache-2.0
"""Other processes of a test, each a fork of one that has imported what they need: dozens are started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["Fork"]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.stateful.neighbour", "tests.tiering.stores.fs.host"])


class Fork:
    """Runs ``serve``, a function of a module, with the other end of ``pipe`` and with ``arguments``."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        """Returns when it stands still."""
        self._signal(signal.SIGSTOP)
        state = Path(f"/proc/{self._process.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> None:
        """Waits until it has ended."""
        self._process.join()
        self.pipe.close()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
