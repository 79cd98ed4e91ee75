# SPDX-License-Identifier: Apache-2.0
"""Test ``vllm serve`` as people run it: in its own process, driven over HTTP, with metrics scraped and events
received."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.greedy import Baseline, Prompt, random_tokens
from tests.engines.models import SmallModel
from tests.engines.vllm.prompts import BLOCK_TOKENS, long_prompts
from tests.engines.vllm.routers import Dynamo, LlmD
from tests.engines.vllm.server import CPU_SLOTS, Server, ask, client_of, judge

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


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

    def replay(self, endpoint: str) -> list[dict[str, Any]]:
        """All events since the server's start, for a router that comes late."""
        import msgspec

        socket = self._context.socket(self._zmq.DEALER)
        socket.connect(endpoint)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        events: list[dict[str, Any]] = []
        try:
            while True:
                assert socket.poll(60_000, self._zmq.POLLIN), "the publisher sends no end"
                *_, sequence, payload = socket.recv_multipart()
                if int.from_bytes(sequence, "big", signed=True) < 0:
                    return events
                events += msgspec.msgpack.decode(payload)[1]
        finally:
            socket.close(linger=0)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def small_prompts() -> Iterator[Prompt]:
    """Yield prompts of one block each. An idle engine makes no steps, so an occasional prompt moves waiting blocks."""
    return (Prompt(f"small{n}", random_tokens(9000 + n, BLOCK_TOKENS)) for n in itertools.count())


def cpu_events(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind and event.get("medium") == "CPU"]


def fold(events: list[dict[str, Any]]) -> set[bytes]:
    """Return the hashes in host memory according to the events alone."""
    resident: set[bytes] = set()
    for event in events:
        if event.get("medium") != "CPU":
            continue
        if event["type"] == "BlockStored":
            resident |= set(event["block_hashes"])
        else:
            resident -= set(event["block_hashes"])
    return resident


def as_struct(event: dict[str, Any]) -> Any:
    """Return an event as a struct. vLLM leaves out default values."""
    return type(event["type"], (SimpleNamespace,), {})(**{"locality": None, "kv_cache_spec_kind": None} | event)


def test_served_over_http_with_metrics_and_events(server: Server, llama_baseline: Baseline) -> None:
    from tests.redis_server import wait_until

    subscriber = Subscriber(server.events)
    client = client_of(server.url)
    events: list[dict[str, Any]] = []
    small, asked = small_prompts(), list[Prompt]()

    def receive_beside_a_small_prompt() -> None:
        asked.append(next(small))
        ask(client, asked[-1])
        events.extend(subscriber.receive(250))

    def is_subscribed() -> bool:  # which nothing signals
        receive_beside_a_small_prompt()
        return bool(events)

    def is_stored(prompts: Sequence[Prompt]) -> bool:
        """Return whether an event of one prompt has arrived, and hence all events of blocks stored before it."""
        receive_beside_a_small_prompt()
        stored = {tuple(event["token_ids"]) for event in cpu_events(events, "BlockStored")}
        return any(prompt.token_ids in stored for prompt in prompts)

    try:
        prompts = long_prompts()
        wait_until(is_subscribed, "an event arrives")
        first = {prompt.name: ask(client, prompt) for prompt in prompts}
        again = {prompt.name: ask(client, prompt) for prompt in prompts[2:6]}
        limited = Prompt("limited", random_tokens(777, 5 * BLOCK_TOKENS))
        ask(client, limited, max_offload_tokens=2 * BLOCK_TOKENS + 1, max_load_tokens="a bad value is ignored")
        num_before = len(asked)
        wait_until(lambda: is_stored(asked[num_before:]), "the events of what was asked are here")
        wait_until(lambda: server.metrics()["jobs_in_flight"] == 0, "no transfer is in flight")
        metrics = server.metrics()
        replayed = subscriber.replay(server.replay)
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

    # kvoffload's own records are in the log, in vLLM's form.
    line = r"^\(EngineCore\S* pid=\d+\) WARNING \d\d-\d\d \d\d:\d\d:\d\d \[scheduler\.py:\d+\] .*max_load_tokens"
    assert re.search(line, server.log.read_text(), flags=re.MULTILINE)

    stored, removed = cpu_events(events, "BlockStored"), cpu_events(events, "BlockRemoved")
    assert stored
    assert removed
    unseen = metrics["primary_blocks_stored"] - sum(len(event["block_hashes"]) for event in stored)
    assert 0 <= unseen <= len(asked)  # before the subscription was active, and at the end
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

    # Routers that subscribe late know the blocks in host memory.
    resident = fold(replayed)
    assert len(resident) == metrics["primary_blocks_used"]
    llm_d, dynamo = LlmD(), Dynamo(BLOCK_TOKENS)
    llm_d.computed(each for event in replayed if event["medium"] == "GPU" for each in event["block_hashes"])
    for router in (llm_d, dynamo):
        router.apply([as_struct(event) for event in replayed if event["medium"] == "CPU"])
    assert llm_d.blocks == {"cpu": resident}
    assert dynamo.blocks == {"host": resident}


def test_two_engine_cores_have_a_host_memory_each_and_share_a_pool(
    llama: SmallModel, llama_baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.redis_server import wait_until

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    pool = {"type": "disk", "path": str(tmp_path / "pool"), "max_bytes": "256MiB", "cascade": "on_store"}
    server = Server(llama.path, tmp_path, num_engines=2, secondary_tiers=[pool], load_policy="always", max_wait_s=300.0)
    client = client_of(server.url)
    prompts = long_prompts(4)
    try:
        server.wait_until_ready()
        cached: dict[str, list[int]] = {"first": [], "again": [], "elsewhere": []}

        def ask_engine(engine: int, name: str, prompt: Prompt) -> None:
            answer = {prompt.name: ask(client, prompt, engine=engine)}
            judge(server, client, llama_baseline, answer)
            cached[name].append(answer[prompt.name][1])

        def of_disk(series: str, engine: int) -> float:
            found = re.findall(
                rf'^kvoffload_tier_{series}\{{engine="{engine}".*tier="disk".*\}} (\S+)$',
                server.get("/metrics"),
                flags=re.MULTILINE,
            )
            return float(found[0]) if found else 0.0

        fillers = small_prompts()

        def is_stored() -> bool:
            ask(client, next(fillers), engine=1)
            return of_disk("blocks_stored_total", 1) >= 4 * 31

        def is_seen() -> bool:
            ask(client, next(fillers), engine=0)
            return of_disk("blocks", 0) - of_disk("blocks_stored_total", 0) >= of_disk("blocks_stored_total", 1)

        for name in ("first", "again"):
            for prompt in prompts:
                ask_engine(1, name, prompt)
        wait_until(is_stored, "the blocks are in the pool")
        wait_until(is_seen, "the other engine core knows of them")
        for prompt in prompts:
            ask_engine(0, "elsewhere", prompt)
        hits = [of_disk("hit_tokens_total", engine) for engine in (0, 1)]
    finally:
        client.close()
        server.stop()
    assert cached == {"first": [0] * 4, "again": [992] * 4, "elsewhere": [992] * 4}
    assert hits == [4 * 992, 0], "the other engine core found in the pool what this one stored"
