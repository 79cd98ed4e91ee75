# SPDX-License-Identifier: Apache-2.0
"""Test kvoffload together with NIXL under ``MultiConnector``.

Prefill passes its blocks to decoding with ``NixlConnector``, and kvoffload keeps blocks for later requests. Two ``vllm
serve`` run on the CPU platform, with UCX between them.
"""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.greedy import Baseline, Prompt
from tests.engines.models import SmallModel
from tests.engines.vllm.prompts import BLOCK_BYTES, long_prompts
from tests.engines.vllm.server import Server
from tests.ports import free_port

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="needs NIXL, which brings a CUDA build of torch unless: pip install --no-deps nixl nixl-cu12",
    ),
]

FEW_TOKENS = 4
CONNECTORS = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "connectors": [
            {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
            {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"},
        ]
    },
}
"""``NixlConnector`` is asked first, so that it loads the blocks that a prefill server holds for a request."""


@pytest.fixture
def engines(llama: SmallModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Server]]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    servers: dict[str, Server] = {}
    try:
        for name in ("prefill", "decode"):
            (tmp_path / name).mkdir()
            monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(len(servers)))
            servers[name] = Server(
                llama.path, tmp_path / name, vllm_arguments=("--kv-transfer-config", json.dumps(CONNECTORS))
            )
        for server in servers.values():
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


def ask(url: str, prompt: Prompt, max_tokens: int = FEW_TOKENS, **kv_transfer_params: Any) -> dict[str, Any]:
    body = {
        "model": "small",
        "prompt": list(prompt.token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": kv_transfer_params,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def prefill(server: Server, prompt: Prompt) -> dict[str, Any]:
    """Compute the prompt and hold its blocks. Returns the parameters with which decoding can read them."""
    nobody = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    answer = ask(server.url, prompt, max_tokens=1, do_remote_decode=True, do_remote_prefill=False, **nobody)
    parameters: dict[str, Any] = answer["kv_transfer_params"]
    return parameters


def bytes_by_nixl(server: Server) -> float:
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith("vllm:nixl_bytes_transferred_sum")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_decode_reads_from_prefill_and_what_returns_from_its_own_host_memory(
    engines: dict[str, Server], llama_baseline: Baseline
) -> None:
    decode, prompts = engines["decode"], long_prompts()

    def judge(prompt: Prompt, answer: dict[str, Any]) -> None:
        expected = llama_baseline.tokens(prompt.name)
        assert expected is None or tokens_of(answer) == expected[:FEW_TOKENS], prompt.name

    for prompt in prompts[:4]:  # one more than decode's device has room for
        judge(prompt, ask(decode.url, prompt, **prefill(engines["prefill"], prompt)))
    assert bytes_by_nixl(decode) == 4 * 32 * BLOCK_BYTES
    assert decode.metrics()["hit_tokens"] == 0

    judge(prompts[0], ask(decode.url, prompts[0]))
    assert bytes_by_nixl(decode) == 4 * 32 * BLOCK_BYTES, "nothing more came from prefill"
    assert decode.metrics()["hit_tokens"] > 0

    parameters = prefill(engines["prefill"], prompts[5])
    engines["prefill"].kill()
    judge(prompts[5], ask(decode.url, prompts[5], **parameters))
    assert bytes_by_nixl(decode) == 4 * 32 * BLOCK_BYTES
