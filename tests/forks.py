# SPDX-License-Identifier: Apache-2.0
"""Run other processes of a test as forks of one process that has imported their modules, because dozens are started."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path

__all__ = ["Command", "Fork", "output_of", "output_of_module"]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "tests.cpu.partner",
        "tests.stateful.neighbour",
        "tests.tiering.stores.disk.rig",
        "tests.tiering.stores.fs.host",
        "tests.s3_server",
        "moto.server",
        "moto.s3.urls",
    ]
)


class _Process:
    """The common part of both kinds. ``pid`` is the process's id."""

    pid: int | None

    def stop(self) -> None:
        """Stop the process, and return when it has stopped."""
        self._signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)


class Command(_Process, subprocess.Popen[bytes]):
    """A process that runs a program instead."""

    @property
    def is_alive(self) -> bool:
        return self.poll() is None

    def kill(self) -> None:
        super().kill()
        self.wait()


class Fork(_Process):
    """Runs ``serve``, a function of a module, with the other end of ``pipe`` and with ``arguments``."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        self.pipe, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> None:
        """Waits until it has ended."""
        self._process.join()
        self.pipe.close()


def output_of(script: str, *arguments: object) -> str:
    """Return the output of a script in its own process, which must succeed."""
    fork = Fork(_run, script, [str(argument) for argument in arguments])
    try:
        printed: str = fork.pipe.recv()
    except EOFError:
        raise AssertionError("the script has failed; see the standard error output") from None
    finally:
        fork.end()
    return printed


def output_of_module(name: str, *arguments: object) -> str:
    """Return the output of ``python -m NAME ARGUMENTS``."""
    return output_of(f"import runpy; runpy.run_module({name!r}, run_name='__main__')", *arguments)


def _run(pipe: Connection, script: str, arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments]
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    pipe.send(printed.getvalue())
