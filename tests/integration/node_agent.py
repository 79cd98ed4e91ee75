# SPDX-License-Identifier: Apache-2.0
"""Run a node's agent in its own process for a test.

Its region is a memory file, and its packets arrive through a socket.
"""

from __future__ import annotations

import mmap
import pickle
import resource
import socket
import sys
from contextlib import suppress

from kvoffload.config import parse_config
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.tiering.spec import TieringOffloadingSpec

MAX_MESSAGE_BYTES = 1 << 20


class NodeSpec(TieringOffloadingSpec):
    """The spec of a rank whose region is given by a file descriptor."""

    def map_region(self, memory: int) -> None:
        shape = self.num_blocks, self.block_bytes
        self._region = SharedOffloadRegion(mmap.mmap(memory, shape[0] * shape[1]), *shape)


def main() -> None:
    memory, channel, most_bytes = map(int, sys.argv[1:4])
    options, layout = pickle.loads(bytes.fromhex(sys.argv[4]))
    if most_bytes:  # a file that is larger than this fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    spec = NodeSpec(parse_config(options), layout)
    spec.map_region(memory)
    agent = spec.make_agent()
    assert agent is not None
    with socket.socket(fileno=channel) as connection, suppress(ConnectionError):
        connection.send(pickle.dumps(()))  # it runs
        while message := connection.recv(MAX_MESSAGE_BYTES):
            agent.receive(pickle.loads(message))
            if packets := agent.take_packets():
                connection.send(pickle.dumps(packets))
    spec.shutdown()


if __name__ == "__main__":
    main()
