# SPDX-License-Identifier: Apache-2.0
"""vLLM under the soak's traffic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines.greedy import SHARP_GAP
from tests.engines.models import write_llama
from tests.engines.vllm.harness import Engine, child_environment, idle_state
from tests.engines.vllm.prompts import BLOCK_BYTES, family
from tests.engines.vllm.scenarios import baseline
from tests.soak.server import Server, Turn, offloading

__all__ = ["VLLMServer", "make_vllm_turns"]


def make_vllm_turns(directory: Path) -> list[Turn]:
    """Return prompts with the tokens that vLLM generates for them without a connector."""
    os.environ.update(child_environment())  # before vLLM is imported, so that its core is in this process
    VLLMServer.model = write_llama(directory).path
    answer = directory.with_name("answers.json")
    command = [sys.executable, "-m", "tests.soak.vllm_server", VLLMServer.model, str(answer)]
    subprocess.run(command, env=child_environment() | {"LD_PRELOAD": ""}, check=True)
    answers = json.loads(answer.read_text())
    return [
        Turn(list(prompt.token_ids), answers[prompt.name]["tokens"])
        for prompt in family("llama")
        if answers[prompt.name]["gap"] >= SHARP_GAP
    ]


class VLLMServer(Server):
    """In this process. ``make_vllm_turns`` comes first, and makes the ``model``, a folder."""

    model: str
    rss_share = 1.12
    """Without a connector, vLLM 0.32 under this traffic grew from 798 MiB after 500 requests to 901 after 3,500; with
    kvoffload from 902 to 1008 (two cores of an x86-64 machine)."""
    quotas_bytes = tuple(blocks * (BLOCK_BYTES + 8192) + (64 << 10) for blocks in (60, 200, 500))

    def _start(self, quota_bytes: int) -> None:
        config = offloading(self.root, 120 * BLOCK_BYTES, quota_bytes)
        self._engine = Engine(self.model, extra=config, gpu_blocks=150, max_num_seqs=6)
        self._llm: Any = self._engine.llm.llm_engine

    def _add(self, name: str, turn: Turn) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=len(turn.reply), ignore_eos=True)
        self._llm.add_request(name, {"prompt_token_ids": turn.prompt}, parameters)

    def _step(self) -> list[tuple[str, list[int], int]]:
        finished = [output for output in self._llm.step() if output.finished]
        return [
            (each.request_id, list(each.outputs[0].token_ids), int(each.num_cached_tokens or 0)) for each in finished
        ]

    def _end_request(self, name: str) -> None:
        self._llm.abort_request([name])

    def reset(self, *, device: bool, offloaded: bool) -> None:
        """vLLM resets its own cache whenever it resets the connector's, and refuses while a load is in flight."""
        try:
            self._engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=offloaded)
        except RuntimeError as error:
            if "remote KV transfer" not in str(error):
                raise

    def _drain(self) -> dict[str, float]:
        state: dict[str, float] = idle_state(self._engine)
        return {what: count for what, count in state.items() if what != "used_blocks"}

    def _shutdown(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(baseline(sys.argv[1], "llama")))
