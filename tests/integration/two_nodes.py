# SPDX-License-Identifier: Apache-2.0
"""Run the reference engine over two nodes, each with half of every page, and its own region, directory and agent
process.

The model is computed once, in the engine's process, which also copies for both ranks. Packets travel over sockets that
drop data that does not fit, so a stopped process delays nobody.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integration.node_agent import MAX_MESSAGE_BYTES, NodeSpec

from kvoffload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.config import EngineLayout, RankSlice, parse_config
from kvoffload.connector import (
    ConnectorMeta,
    GuardedManager,
    OffloadingConnectorScheduler,
    OffloadingConnectorWorker,
    WorkerReport,
)
from kvoffload.engines.reference import Engine, EngineOptions
from kvoffload.engines.reference.scheduler import Scheduler
from kvoffload.tiering.nodes import Nodes, Packet

ROOT = Path(__file__).parents[2]
NUM_NODES = 2


class AgentProcess:
    """The agent of one node, and its memory, which outlives it."""

    def __init__(self, options: dict[str, Any], layout: EngineLayout) -> None:
        self.spec = NodeSpec(parse_config(options), layout)
        self._arguments = pickle.dumps((options, layout)).hex()
        self._memory = os.memfd_create(f"node {layout.node}")
        os.ftruncate(self._memory, self.spec.num_blocks * self.spec.block_bytes)
        self.spec.map_region(self._memory)
        self.start()

    def start(self, most_bytes: int = 0) -> None:
        """``wait_until_it_runs`` is to follow. ``most_bytes``: larger files fail; 0: no bound."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = map(str, (self._memory, theirs.fileno(), most_bytes))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.node_agent", *numbers, self._arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            pass_fds=(self._memory, theirs.fileno()),
        )
        theirs.close()

    def wait_until_it_runs(self) -> None:
        assert pickle.loads(self._connection.recv(MAX_MESSAGE_BYTES)) == ()
        self._connection.setblocking(False)

    def send(self, packets: tuple[Packet, ...]) -> None:
        if packets:
            with suppress(OSError):  # the packet is lost if the socket is full or nobody listens
                self._connection.send(pickle.dumps(packets))

    def received(self) -> list[Packet]:
        packets: list[Packet] = []
        with suppress(OSError):
            while message := self._connection.recv(MAX_MESSAGE_BYTES):
                packets += pickle.loads(message)
        return packets

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.thaw()
        self._connection.close()  # the agent ends by itself
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        if self.process.poll() is None:
            self.kill()
        os.close(self._memory)


class _Ranks:
    """The workers of both nodes, and the packets between the scheduler and the agents. To the engine, one worker."""

    def __init__(self, workers: list[OffloadingConnectorWorker], nodes: Nodes, agents: list[AgentProcess]) -> None:
        self._workers = workers
        self._nodes = nodes
        self._agents = agents

    def start_step(self, meta: ConnectorMeta) -> None:
        packets = self._nodes.take_packets()
        for agent in self._agents:
            agent.send(packets)
        for worker in self._workers:
            worker.start_step(meta)

    def end_step(self) -> None:
        for worker in self._workers:
            worker.end_step()

    def get_report(self) -> WorkerReport:
        for agent in self._agents:
            self._nodes.receive(agent.received())
        return WorkerReport.merge(worker.get_report() for worker in self._workers)

    def shutdown(self) -> None:
        for worker in self._workers:
            worker.shutdown()


class TwoNodeEngine(Engine):
    """``Engine`` with its KV on two nodes. ``options[n]`` are kvoffload's options on node n."""

    def __init__(self, model: Any, engine: EngineOptions, options: list[dict[str, Any]]) -> None:
        super().__init__(model, engine)
        whole = self._runner.canonical_kv_caches()
        halves = tuple(replace(group, page_bytes=group.page_bytes // NUM_NODES) for group in self.layout.groups)
        self.layout = replace(self.layout, groups=halves, num_ranks=NUM_NODES, rank_slice=RankSlice(0, 1))
        self.agents = [AgentProcess(each, replace(self.layout, rank=rank)) for rank, each in enumerate(options)]
        for agent in self.agents:
            agent.wait_until_it_runs()
        workers = [OffloadingConnectorWorker(rank) for rank in range(NUM_NODES)]
        for rank, (worker, agent) in enumerate(zip(workers, self.agents, strict=True)):
            worker.register_kv_caches(agent.spec, _half(whole, rank))
        self._spec = spec = self.agents[0].spec
        assert spec.nodes is not None
        self.nodes = spec.nodes
        self._connector = OffloadingConnectorScheduler(GuardedManager(spec.get_manager()), self.layout, spec.config)
        self._worker = _Ranks(workers, self.nodes, self.agents)  # type: ignore[assignment]
        self._scheduler = Scheduler(self._kv_cache, engine.max_batch_tokens, engine.max_requests, self._connector)

    def shutdown(self) -> None:
        super().shutdown()
        self.agents[1].spec.shutdown()
        for agent in self.agents:
            agent.close()


def _half(caches: CanonicalKVCaches, rank: int) -> CanonicalKVCaches:
    tensors, references = [], []
    for index, whole in enumerate(caches.tensors):
        half = whole.page_size_bytes // NUM_NODES
        tensors.append(CanonicalKVCacheTensor(whole.tensor[:, rank * half : (rank + 1) * half], half))
        references.append([CanonicalKVCacheRef(index, half)])
    return CanonicalKVCaches(tensors, references)
