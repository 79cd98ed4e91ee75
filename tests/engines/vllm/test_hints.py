# SPDX-License-Identifier: Apache-2.0
"""Run two kinds of clients on ``vllm serve``: agents with hints, by the client of ``docs/requests.md``, and chats
without. Other prompts that exceed host memory arrive between two turns of an agent."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.engines.greedy import NEW_TOKENS, Baseline
from tests.engines.vllm.harness import ROOT
from tests.engines.vllm.prompts import long_prompts
from tests.engines.vllm.server import CPU_SLOTS, Server, client_of

from kvoffload.base import NextUse
from kvoffload.connector.hints import Hints

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

AGENTS, CHAT = range(3), 3
"""The hints by the number of their prompt. The flood uses the other numbers."""
FLOOD = 7
WITHOUT, WITH = 1, 5
"""Rounds without hints, and with them."""
WHOLE = 992
"""Tokens of a prompt's 31 whole blocks."""


class Rounds:
    """Rounds of traffic, each of sessions that are new. Keeps every answer, and counts cached tokens."""

    def __init__(self, client: Any) -> None:
        names: dict[str, Any] = {}
        exec(re.findall(r"```python\n(.*?)```", (ROOT / "docs/requests.md").read_text(), re.DOTALL)[0], names)
        self._hinting_client = names["HintingClient"]
        self._client = client
        self._prompts = long_prompts()
        self.answers: list[dict[str, list[int]]] = []

    def _session(self, salt: str) -> Any:
        extra = {"ignore_eos": True, "cache_salt": salt}
        return self._hinting_client(self._client, "small", temperature=0, extra_body=extra)

    def _flood(self, name: str, numbers: range) -> None:
        others = self._prompts[CHAT + 1 :]
        for number in numbers:
            tokens = others[number % len(others)].token_ids
            self._session(f"{name}, flood {number}").ask(list(tokens), max_tokens=1)

    def _ask(self, salt: str, number: int, next_use: str | None = None) -> int:
        prompt = self._prompts[number]
        answer = self._session(salt).ask(list(prompt.token_ids), next_use, max_tokens=NEW_TOKENS)
        tokens = [int(word.removeprefix("w")) for word in answer.choices[0].text.split()]
        self.answers[-1][prompt.name] = tokens
        details = answer.usage.prompt_tokens_details
        return details.cached_tokens or 0 if details else 0

    def run(self, name: str, hinted: bool) -> tuple[list[int], int]:
        """Return the cached tokens of the second turns, of agents and of the chat."""
        soon = "soon" if hinted else None
        self.answers.append({})
        for number in AGENTS:
            self._ask(name, number, soon)
        self._ask(name, CHAT)
        self._flood(name, range(1))
        self.answers.append({})
        of_chat = self._ask(name, CHAT)
        self._flood(name, range(1, FLOOD))
        of_agents = [self._ask(name, number, soon) for number in AGENTS]
        for number in AGENTS if hinted else ():
            self._session(name).say(list(self._prompts[number].token_ids), "never")
        return of_agents, of_chat


def test_the_envelope_of_vllm_says_it_too() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    kv_hints = pytest.importorskip("vllm.v1.kv_hints", reason="vLLM has kv_hints from 0.32 on")
    payloads = {"kv.retain": {"ttl_seconds": 30}, "vllm.set_priority": {"target": "request_cached", "value": -1}}
    said = {}
    for kind, payload in payloads.items():
        action = kv_hints.KvHintAction("a", kind, "1.0", payload)
        request = Request("r", [1], SamplingParams(), None, kv_hints=kv_hints.KvHintsEnvelope("0.1", "m", [action]))
        said[kind], _ = Hints().of_request(kind, request.kv_transfer_params, request.kv_hints)
    assert said == {"kv.retain": NextUse.SOON, "vllm.set_priority": NextUse.NEVER}


def test_hinted_prefixes_outlive_a_flood_and_the_others_lose_nothing_by_it(
    server: Server, llama_baseline: Baseline
) -> None:
    assert len(AGENTS) * 31 < CPU_SLOTS < (len(AGENTS) + FLOOD) * 31
    client = client_of(server.url)
    try:
        rounds = Rounds(client)
        before = [rounds.run(f"without {number}", hinted=False) for number in range(WITHOUT)]
        after = [rounds.run(f"with {number}", hinted=True) for number in range(WITH)]
        metrics = server.metrics()
    finally:
        client.close()

    assert [of_agents for of_agents, _ in before] == [[0, 0, 0]] * WITHOUT, "the flood takes them all"
    assert after[-1][0] == [WHOLE] * len(AGENTS), "by now the policy has learned"
    assert [of_chat for _, of_chat in before + after] == [WHOLE] * (WITHOUT + WITH)
    for answers in rounds.answers:
        assert llama_baseline.wrong(answers) == []
    assert metrics["requests_by_hint|soon"] == WITH * 2 * len(AGENTS)
    assert metrics["requests_by_hint|never"] == WITH * len(AGENTS)
    assert metrics["hints_in_use"] == 1
    assert metrics["hint_score"] > 0
    assert metrics["hit_tokens_by_hint|yes"] >= len(AGENTS) * WHOLE
