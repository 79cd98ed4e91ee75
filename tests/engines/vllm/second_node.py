# SPDX-License-Identifier: Apache-2.0
"""The second node of an engine, ``vllm serve --headless --node-rank 1`` without the command, and faults of its disk.

It represents another machine: it has its own region, agent and directory of kvoffload.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from tests.engines.vllm.harness import ROOT, settings


class SecondNode:
    """The process and its workers. ``options`` are those of the first node's ``Engine``.

    ``namespace`` is its network namespace with the address after the first node's, or empty for the first node's
    namespace.
    """

    def __init__(self, model: str, disk: str, extra: dict[str, Any], namespace: str = "", **options: Any) -> None:
        self._disk = Path(disk)
        given = {"model": model, "gpu_blocks": options.pop("gpu_blocks", 400), "extra": extra, "node_rank": 1} | options
        command = [sys.executable, "-m", "tests.engines.vllm.second_node", json.dumps(given)]
        environment = dict(os.environ)
        if namespace:
            command = ["ip", "netns", "exec", namespace, *command]
            environment["VLLM_HOST_IP"] = str(ip_address(environment["VLLM_HOST_IP"]) + 1)
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE)

    def close(self) -> None:
        """Kill everything, like a machine that is switched off."""
        for pid in [self._process.pid, *_below(self._process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def flip(self) -> None:
        """Flips a bit in each 8 KiB of the disk's data."""
        for path in self._disk.rglob("*"):
            if path.is_file() and path.stat().st_size > 1 << 16:
                with path.open("r+b") as file:
                    data = bytearray(file.read())
                    for at in range(4000, len(data), 8192):
                        if data[at]:  # nothing was written where there are zeros
                            file.seek(at)
                            file.write(bytes([data[at] ^ 1]))

    def refuse_writes(self) -> None:
        """Make each later write to a file fail there, as on a full disk."""
        for pid in _below(self._process.pid):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, 100))

    def remove(self) -> None:
        shutil.rmtree(self._disk)


def _below(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _below(child)


def _end_with_parent() -> None:
    sys.stdin.read()  # until the process at the other end has ended
    os._exit(1)  # the workers end by themselves then


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    given: dict[str, Any] = json.loads(sys.argv[1])
    model, gpu_blocks, extra = given.pop("model"), given.pop("gpu_blocks"), given.pop("extra")
    arguments = EngineArgs(model=model, **(settings(gpu_blocks, extra) | given))
    executor = MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)


if __name__ == "__main__":
    main()
