# SPDX-License-Identifier: Apache-2.0
"""Traces of ``vllm serve``, as a collector receives them: which tier served a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.greedy import NEW_TOKENS, Prompt
from tests.engines.models import SmallModel
from tests.engines.vllm.prompts import long_prompts
from tests.engines.vllm.server import Server, client_of
from tests.otlp_collector import Collector, Span

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_a_served_request_has_its_tiers_in_vllms_trace(
    collector: Collector, llama: SmallModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    tier = {"type": "disk", "path": str(tmp_path / "blocks"), "cascade": "on_store", "max_bytes": "1GiB"}
    server = Server(
        llama.path,
        tmp_path,
        vllm_arguments=("--otlp-traces-endpoint", collector.endpoint),
        secondary_tiers=[tier],
        load_policy="always",
        max_wait_s=60.0,
    )
    client = client_of(server.url)

    def ask(prompt: Prompt, trace_id: str, is_sampled: bool = True) -> None:
        client.completions.create(
            model="small",
            prompt=list(prompt.token_ids),
            max_tokens=NEW_TOKENS,
            extra_headers={"traceparent": f"00-{trace_id}-{'c' * 16}-0{is_sampled:d}"},
        )

    def of_trace(spans: list[Span], trace_id: str) -> dict[str, Span]:
        return {span.name: span for span in spans if span.trace_id == trace_id}

    prompts, again, unsampled = long_prompts(), "a" * 32, "b" * 32
    try:
        server.wait_until_ready()
        for number, prompt in enumerate(prompts):
            ask(prompt, f"{number + 1:032x}")
        ask(prompts[1], unsampled, is_sampled=False)
        ask(prompts[0], again)
        spans = collector.wait_for(lambda spans: {"llm_request", "kvoffload"} <= set(of_trace(spans, again)))
    finally:
        client.close()
        server.stop()

    first, found = of_trace(spans, f"{1:032x}"), of_trace(spans, again)
    assert first["kvoffload"].attributes["kvoffload.missed_tokens.new"] == 992
    request = found["kvoffload"]
    assert request.parent_id == found["llm_request"].parent_id == "c" * 16
    assert request.attributes["kvoffload.request_id"].startswith(found["llm_request"].attributes["gen_ai.request.id"])
    assert request.attributes["kvoffload.served_by"] == ["disk"]
    assert request.attributes["kvoffload.hit_tokens.disk"] == 992
    assert found["kvoffload.tiers"].attributes["kvoffload.promoted_bytes.disk"] > 0
    assert found["kvoffload.tiers"].parent_id == found["kvoffload.load"].parent_id == request.span_id
    assert found["kvoffload.tiers"].end_ns <= found["kvoffload.load"].begin_ns
    assert found["kvoffload.load"].attributes["kvoffload.loaded_bytes"] > 0
    assert not of_trace(spans, unsampled)
