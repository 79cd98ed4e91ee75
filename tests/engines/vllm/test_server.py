# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` as people run it: a process of its own, driven over HTTP, with metrics scraped and events received."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.harness import Baseline
from tests.engines.vllm.models import SmallModel
from tests.engines.vllm.prompts import BLOCK_TOKENS, Prompt, long_prompts, random_tokens
from tests.engines.vllm.server import CPU_SLOTS, Server, ask, judge

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


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

    # kvoffload's own records are in the log, in vLLM's form.
    line = r"^\(EngineCore\S* pid=\d+\) WARNING \d\d-\d\d \d\d:\d\d:\d\d \[scheduler\.py:\d+\] .*max_load_tokens"
    assert re.search(line, server.log.read_text(), flags=re.MULTILINE)

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


def test_two_engine_cores_have_a_host_memory_each_and_share_a_pool(
    llama: SmallModel, llama_baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    pool = {"type": "disk", "path": str(tmp_path / "pool"), "max_bytes": "256MiB", "cascade": "on_store"}
    server = Server(llama.path, tmp_path, num_engines=2, secondary_tiers=[pool], load_policy="always")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    prompts = long_prompts(4)
    try:
        server.wait_until_ready()
        cached: dict[str, list[int]] = {"first": [], "again": [], "elsewhere": []}

        def ask_engine(engine: int, name: str, prompt: Prompt) -> None:
            answer = {prompt.name: ask(client, prompt, engine=engine)}
            judge(server, client, llama_baseline, answer)
            cached[name].append(answer[prompt.name][1])

        for name in ("first", "again"):
            for prompt in prompts:
                ask_engine(1, name, prompt)
        for (
            prompt
        ) in prompts:  # a neighbour's blocks are known after a poll of the directory, and asking changes what is there
            ask_engine(0, "elsewhere", prompt)
            if cached["elsewhere"][-1] == 992:
                break
            time.sleep(2.0)
        own = re.findall(
            r'^kvoffload_tier_hit_tokens_total\{engine="(\d)".*tier="(\w+)".*\} (\S+)$',
            server.get("/metrics"),
            flags=re.MULTILINE,
        )
    finally:
        client.close()
        server.stop()
    assert set(cached["first"]) == {0}
    assert set(cached["again"]) == {992}
    assert cached["elsewhere"][-1] == 992
    hits = {(engine, tier): float(tokens) for engine, tier, tokens in own}
    assert hits["0", "disk"] > 0, "the other engine core found in the pool what this one stored"
    assert hits["1", "disk"] == 0
