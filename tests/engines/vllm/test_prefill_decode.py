# SPDX-License-Identifier: Apache-2.0
"""Test separate prefill and decoding, as in docs/fleet.md: two ``vllm serve``, a Redis server, and the proxy of
``deploy/``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.greedy import Baseline
from tests.engines.models import SmallModel
from tests.engines.vllm.harness import ROOT
from tests.engines.vllm.prompts import BLOCK_TOKENS, long_prompts
from tests.engines.vllm.server import Server, ask, client_of, judge
from tests.ports import free_port
from tests.redis_server import PATIENT_OPTIONS, RedisServer, wait_until

from kvoffload.config_file import load_config_file

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def engines(llama: SmallModel, tmp_path: Path, redis_server: RedisServer) -> Iterator[dict[str, Server]]:
    (example,) = load_config_file(ROOT / "examples" / "prefill-decode.yaml")["secondary_tiers"]
    tier = example | {"url": redis_server.url} | PATIENT_OPTIONS
    servers: dict[str, Server] = {}
    try:
        for name in ("prefill", "decode"):
            (tmp_path / name).mkdir()
            servers[name] = Server(
                llama.path, tmp_path / name, secondary_tiers=[tier], load_policy="always", max_wait_s=120
            )
            servers[name].wait_until_ready()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


@pytest.fixture
def proxy(engines: dict[str, Server]) -> Iterator[str]:
    """Its URL."""
    port = free_port()
    program = ROOT / "deploy" / "prefill-decode" / "proxy.py"
    urls = [engines["prefill"].url, engines["decode"].url]
    process = subprocess.Popen([sys.executable, str(program), *urls, str(port)], env=os.environ)

    def listens() -> bool:
        assert process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens, "the proxy listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


def test_one_engine_prefills_and_another_decodes(
    engines: dict[str, Server], proxy: str, redis_server: RedisServer, llama_baseline: Baseline
) -> None:
    decode = engines["decode"]
    through_proxy, prefill_alone = client_of(proxy), client_of(engines["prefill"].url)
    first, *others = long_prompts(4)
    num_blocks = len(first.token_ids) // BLOCK_TOKENS
    with redis_server.client() as side_door:
        # Once all of a prompt is in the tier, decode finds all of it.
        ask(prefill_alone, first)
        wait_until(lambda: side_door.dbsize() >= num_blocks, "prefill's blocks are in the shared tier")
    answers = {first.name: ask(through_proxy, first)}
    assert answers[first.name][1] == num_blocks * BLOCK_TOKENS, "cached tokens, as decode counts them"
    assert decode.metrics()["tier_hit_tokens|redis"] == num_blocks * BLOCK_TOKENS
    # Without that wait, it computes the blocks that have not arrived yet, and the answers are the same.
    answers |= {prompt.name: ask(through_proxy, prompt) for prompt in others}
    judge(decode, through_proxy, llama_baseline, answers)
    streamed = through_proxy.completions.create(
        model="small",
        prompt=list(first.token_ids),
        max_tokens=first.new_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    texts = [chunk.choices[0].text for chunk in streamed]
    assert len(texts) > 1
    assert [int(word.removeprefix("w")) for word in "".join(texts).split()] == answers[first.name][0]
    computed_by_prefill = engines["prefill"].metrics()["lookup_tokens"]
    assert computed_by_prefill >= sum(len(prompt.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in others)
    through_proxy.close()
    prefill_alone.close()
