# SPDX-License-Identifier: Apache-2.0
"""Spans of requests, in the traces that vLLM sends to ``--otlp-traces-endpoint``.

vLLM sets up OpenTelemetry in the engine core's process, with a thread that sends finished spans. It passes on the trace
of a client's request as ``Request.trace_headers``. A request gets one span, a sibling of vLLM's ``llm_request``, with a
child for each time that it waited for transfers. The remaining time is spent waiting for the engine. Importing this
module requires ``opentelemetry`` but not vLLM.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvoffload.connector.observer import DEVICE, Explanation

_NAME = "kvoffload"


class Spans:
    """A ``Watch`` that turns explanations into spans. Scheduler thread.

    A request is not explained if its client or ``OTEL_TRACES_SAMPLER`` does not sample its trace.
    ``kvoffload.request_id`` is the engine core's id: the client's id and a suffix of vLLM. ``clock`` is the scheduler
    side's clock. OpenTelemetry's SDK takes about 50 microseconds per span, so instant phases get no span.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tracer = trace.get_tracer(_NAME)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, request: Any) -> Callable[[Explanation], None] | None:
        context = self._propagator.extract(request.trace_headers or {}, Context())
        begin_ns, now_s = time.time_ns(), self._clock()
        span = self._tracer.start_span(_NAME, context, start_time=begin_ns)
        if not span.is_recording():
            return None
        return functools.partial(self._end, span, request.request_id, begin_ns - round(now_s * 1e9))

    def _end(self, span: trace.Span, request_id: str, zero_ns: int, explanation: Explanation) -> None:
        """End ``span``, and create its children. ``zero_ns`` is the Unix time in nanoseconds at which the clock was
        zero."""
        found, end_s = explanation.found, explanation.since_s
        parent = trace.set_span_in_context(span, Context())
        for phase, begin_s, end_s in explanation.phases:
            if phase == "queue":
                continue
            attributes: dict[str, float] = {}
            if phase == "tiers":
                attributes = _named("promoted_bytes", explanation.promoted_bytes)
            elif phase == "load":
                attributes = _named("hit_tokens", {place: found[place] for place in found if place != DEVICE})
                attributes["kvoffload.loaded_bytes"] = explanation.loaded_bytes
            child = self._tracer.start_span(
                f"{_NAME}.{_word(phase)}", parent, attributes=attributes, start_time=zero_ns + round(begin_s * 1e9)
            )
            child.end(zero_ns + round(end_s * 1e9))
        span.set_attributes(
            {
                "kvoffload.request_id": request_id,
                "kvoffload.served_by": [place for place in found if found[place]],
                **_named("hit_tokens", found),
                **_named("missed_tokens", explanation.missed),
                **_named("lost_seconds_ago", explanation.lost_s),
            }
        )
        span.end(zero_ns + round(end_s * 1e9))


def _named(what: str, numbers: Mapping[str, float]) -> dict[str, float]:
    return {f"kvoffload.{what}.{_word(name)}": number for name, number in numbers.items()}


def _word(name: str) -> str:
    return name.replace(" ", "_")
