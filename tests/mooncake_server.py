# SPDX-License-Identifier: Apache-2.0
"""A Mooncake master, and a process that donates memory to its pool, of this machine and for one test."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.ports import free_port
from tests.redis_server import PATIENCE_S, wait_until
from tests.sizes import IS_THOROUGH

HAS_MOONCAKE = importlib.util.find_spec("mooncake") is not None
needs_mooncake = pytest.mark.skipif(
    not (HAS_MOONCAKE and IS_THOROUGH),
    reason="needs Mooncake's client, and half a minute: `make test-remote` brings it, and takes the thorough size",
)

_DONOR = """
import sys, time
from mooncake.store import MooncakeDistributedStore
donor = MooncakeDistributedStore()
code = donor.setup(sys.argv[1], sys.argv[2], int(sys.argv[3]), 16 << 20, "tcp", "", sys.argv[4])
print("donor is ready" if code == 0 else f"donor failed with {code}", flush=True)
time.sleep(1e6 if code == 0 else 0)
"""


class MooncakePool:
    """A pool with ``segment_bytes`` of one donor's memory.

    ``environment`` is the environment of the master and the donor. A read that takes longer than ``lease_s`` fails.
    """

    def __init__(
        self,
        directory: Path,
        segment_bytes: int = 256 << 20,
        environment: dict[str, str] | None = None,
        lease_s: int = 5,
    ) -> None:
        self.directory, self._segment_bytes, self._environment = directory, segment_bytes, environment
        metadata = free_port()
        self.master = f"127.0.0.1:{free_port()}"
        self.metadata = f"http://127.0.0.1:{metadata}/metadata"
        self._words = [
            str(Path(sys.executable).with_name("mooncake_master")),
            f"--port={self.master.rpartition(':')[2]}",
            f"--metrics_port={free_port()}",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={metadata}",
            f"--default_kv_lease_ttl={lease_s * 1000}",
        ]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start_master()
        self.start_donor()

    def start_master(self) -> None:
        self._start("master", self._words)
        wait_until(lambda: "Master Admin Metrics" in self.log("master") or self._answers(), "the master serves")

    def start_donor(self) -> None:
        self._donor = f"127.0.0.1:{free_port()}"
        arguments = [self._donor, self.metadata, str(self._segment_bytes), self.master]
        self._start("donor", [sys.executable, "-c", _DONOR, *arguments])
        wait_until(lambda: "donor is ready" in self.log("donor"), "the donor is ready")

    @property
    def data_port(self) -> int:
        """Return the port through which clients read and write the donor's memory, as they learn it at first use."""
        return int(self._described()["tcp_data_port"])

    @data_port.setter
    def data_port(self, port: int) -> None:
        described = json.dumps(self._described() | {"tcp_data_port": port}).encode()
        urllib.request.urlopen(urllib.request.Request(self._description, described, method="PUT")).close()

    def _described(self) -> dict[str, Any]:
        with urllib.request.urlopen(self._description) as answer:
            described: dict[str, Any] = json.load(answer)
        return described

    @property
    def _description(self) -> str:
        return f"{self.metadata}?key={quote(f'mooncake/ram/{self._donor}', safe='')}"

    def _answers(self) -> bool:
        import socket

        try:
            with socket.create_connection(("127.0.0.1", int(self.master.rpartition(":")[2])), timeout=5):
                return True
        except OSError:
            return False

    def _start(self, name: str, words: list[str]) -> None:
        with (self.directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                words, cwd=self.directory, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    def log(self, name: str) -> str:
        process = self._processes[name]
        text = (self.directory / f"{name}.log").read_text(errors="replace")
        assert process.poll() is None, text[-4000:]
        return text

    def freeze(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait(PATIENCE_S)

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(PATIENCE_S)
