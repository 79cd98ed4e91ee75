# SPDX-License-Identifier: Apache-2.0
"""Spans of requests, as a collector receives them from OpenTelemetry's own exporter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from tests.fakes.engine import FakeRequest
from tests.integration.served_tiers import BLOCK_TOKENS, PAGE_BYTES, ServedTiers, prompt
from tests.otlp_collector import Collector, Span

from kvoffload.engines.vllm.spans import Spans

BLOCKS = 8
TRACE, CLIENT = "5" * 32, "7" * 16
SAMPLED = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{CLIENT}-00"}


class Traced:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.collector = Collector()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(self.collector.endpoint)))
        monkeypatch.setattr(trace, "get_tracer", self.provider.get_tracer)
        self.served = ServedTiers(root, num_blocks=16, watch=Spans(), **options)

    def ask(self, first_token: int, headers: dict[str, str] | None) -> None:
        engine = self.served.engine
        engine.preempt_all()
        request = FakeRequest(f"r{first_token}", prompt(first_token, BLOCKS), 1, BLOCK_TOKENS)
        request.trace_headers = headers  # type: ignore[attr-defined]
        engine.connector.on_new_request(request)
        engine.waiting.append(request)
        self.served.finish(request)
        self.served.drain()

    def spans_of(self, first_token: int) -> dict[str, Span]:
        """Return the spans of the last request with this first token, by name."""
        spans = list(self.collector.spans)
        root = [s for s in spans if s.attributes.get("kvoffload.request_id") == f"r{first_token}"][-1]
        return {span.name: span for span in spans if span.parent_id == root.span_id} | {root.name: root}

    def close(self) -> None:
        self.served.close()
        self.provider.shutdown()
        self.collector.close()


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    made = Traced(tmp_path, monkeypatch)
    try:
        yield made
    finally:
        made.close()


def test_a_span_says_which_tier_served_a_request(traced: Traced) -> None:
    for first_token in (1, 2, 3, 4, 1):
        traced.ask(first_token, SAMPLED)
    spans = traced.spans_of(1)
    root, tiers, load = spans["kvoffload"], spans["kvoffload.tiers"], spans["kvoffload.load"]
    assert (root.trace_id, root.parent_id) == (TRACE, CLIENT)
    assert root.attributes["kvoffload.served_by"] == ["disk"]
    assert root.attributes["kvoffload.hit_tokens.disk"] == BLOCKS * BLOCK_TOKENS
    assert root.attributes["kvoffload.missed_tokens.tail"] == 1
    assert tiers.attributes == {"kvoffload.promoted_bytes.disk": BLOCKS * PAGE_BYTES}
    assert load.attributes == {
        "kvoffload.loaded_bytes": BLOCKS * PAGE_BYTES,
        "kvoffload.hit_tokens.disk": BLOCKS * BLOCK_TOKENS,
    }
    assert root.begin_ns <= tiers.begin_ns < tiers.end_ns <= load.begin_ns < load.end_ns == root.end_ns
    assert {span.trace_id for span in spans.values()} == {TRACE}


def test_a_span_says_why_the_rest_was_missing(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    traced.ask(1, None)
    root = traced.spans_of(1)["kvoffload"]
    assert root.attributes["kvoffload.served_by"] == []
    assert root.attributes["kvoffload.missed_tokens.new"] == BLOCKS * BLOCK_TOKENS
    assert root.parent_id == "", "without a client's trace it is one of its own"


def test_a_request_that_its_client_does_not_sample_is_not_explained(traced: Traced) -> None:
    traced.ask(1, UNSAMPLED)
    traced.ask(2, SAMPLED)
    ids = [span.attributes["kvoffload.request_id"] for span in traced.collector.spans if span.name == "kvoffload"]
    assert ids == ["r2"]


def test_one_that_is_aborted_while_it_waits_has_a_span_too(traced: Traced) -> None:
    connector = traced.served.engine.connector
    request = FakeRequest("r1", prompt(1, BLOCKS), 1, BLOCK_TOKENS)
    request.trace_headers = SAMPLED  # type: ignore[attr-defined]
    connector.on_new_request(request)
    connector.request_finished(request)
    root = traced.spans_of(1)["kvoffload"]
    assert root.attributes["kvoffload.served_by"] == []
    assert not [name for name in root.attributes if "tokens" in name]
