# SPDX-License-Identifier: Apache-2.0
"""The cases of ``bench.busy`` on vLLM's CPU platform. In the environment of ``make test-vllm``::

    .venv-vllm/bin/python -m bench.busy_vllm [--loads L...] [--disks D...] [--requests N] [--seed N] [--json FILE]

Each case runs in its own process. This is not one of ``BENCHES``, because the development environment lacks vLLM.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.busy import DEVICE_TOKENS, UNLIMITED, Server, loaded_of, main, offloading, set_disk
from bench.stretched import LAYERS, Ask, StretchedVllm
from bench.vllm_serving import Child, answer_questions, write_model


class ChildServer:
    """Asks an engine in a child process."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def set_speed(self, tokens_per_s: float, disk: float) -> None:
        self._child.ask("set_speed", tokens_per_s=tokens_per_s, disk=disk)

    def serve(self, asks: Sequence[Ask]) -> tuple[float, list[float]]:
        seconds, ttft_s = self._child.ask("serve", asks=[(ask.at_s, ask.prompt) for ask in asks])
        return seconds, ttft_s

    def loaded_tokens(self) -> tuple[float, float]:
        host, disk = self._child.ask("loaded_tokens")
        return host, disk


@contextmanager
def vllm_server(policy: str) -> Iterator[Server]:
    with (
        tempfile.TemporaryDirectory() as model,
        tempfile.TemporaryDirectory(dir=os.environ.get("KVOFFLOAD_BENCH_DIR")) as disk,
    ):
        write_model(Path(model), layers=LAYERS, hidden=128)
        with Child(model, json.dumps([policy, disk]), "bench.busy_vllm") as child:
            yield ChildServer(child)


class BenchEngine(StretchedVllm):
    """The engine in the child process."""

    def __init__(self, model: str, policy: str, directory: str) -> None:
        super().__init__(
            model,
            offloading(policy, directory),
            tokens_per_s=UNLIMITED,
            device_tokens=DEVICE_TOKENS,
            max_batch_tokens=512,
            max_requests=32,
        )

    def set_speed(self, tokens_per_s: float, disk: float) -> None:
        self.stretched.tokens_per_s = tokens_per_s
        set_disk(disk)

    def loaded_tokens(self) -> tuple[float, float]:
        return loaded_of(self.scheduler.connector.scheduler.core.get_stats())


if __name__ == "__main__":
    if "--child" in sys.argv:
        answer_questions(BenchEngine(sys.argv[2], *json.loads(sys.argv[4])))
    else:
        main(vllm_server, "vLLM on its CPU platform")
