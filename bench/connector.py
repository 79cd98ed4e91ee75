# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of the connector's scheduler side for an engine, in microseconds per step and per admission."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from bench.core import Row, thread_medians
from kvoffload.base import OffloadKey, ReqContext, TransferResult, make_offload_key
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.connector import (
    BoundaryState,
    ConnectorMeta,
    EngineStep,
    OffloadingConnectorScheduler,
    ScheduledRequest,
    WorkerReport,
)
from kvoffload.connector.observer import Watch
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.engines.vllm.spans import Spans
from kvoffload.metrics import Histogram
from kvoffload.tiering import TieringOffloadingManager

BLOCK = 16
FULL = KVGroupLayout(GroupKind.FULL_ATTENTION, BLOCK, 1)
STATE = KVGroupLayout(GroupKind.SINGLE_STATE, BLOCK, 1)
STEP_S = 0.010
"""The duration of a decode step on a fast server with 64 running requests. "1% of a step" refers to it."""


@dataclass
class Request:
    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None

    def grow(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        for n in range(len(self.block_hashes), num_tokens // BLOCK):
            self.block_hashes.append(f"{self.request_id}/{n}".encode().ljust(32, b"."))


class Decoding:
    """Requests with stored prompts of a given length that decode one token per step.

    If there are states, the last state of each prompt is stored, as vLLM does by default. ``tiered`` selects the
    manager of all tiers, instead of host memory alone with ``num_blocks`` and ``policy``.
    """

    def __init__(
        self,
        running: int,
        prompt_tokens: int = 1000,
        num_blocks: int = 100_000,
        groups: tuple[KVGroupLayout, ...] = (FULL,),
        record_trace: str | None = None,
        policy: str = "lru",
        tiered: TieringOffloadingManager | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.groups = groups
        layout = EngineLayout(groups, BLOCK, "bench")
        config = OffloadingConfig(cpu_bytes_to_use=num_blocks, record_trace=record_trace)  # blocks of a byte each
        self.manager = tiered.primary_tier if tiered else CPUOffloadingManager(num_blocks, policy)
        self.manager.slots.make_records()  # as a served engine does
        self.scheduler = OffloadingConnectorScheduler(tiered or self.manager, layout, config, watch=watch)
        self.requests = [Request(f"request-{n}", 0, prompt_tokens) for n in range(running)]
        self.num_blocks = num_blocks
        self.next_block = 0
        self.served = 0
        self.tokens = prompt_tokens
        for request in self.requests:
            request.grow(prompt_tokens)
            self.scheduler.on_new_request(request)
            self.scheduler.get_num_new_matched_tokens(request, 0)
            ids = tuple(self.blocks(-(-prompt_tokens // BLOCK)) for _ in groups)
            self.scheduler.update_state_after_alloc(request, ids, 0)
            last = prompt_tokens // BLOCK
            states = tuple(
                BoundaryState(request.request_id, index, table[last - 1], last * BLOCK)
                for index, (group, table) in enumerate(zip(groups, ids, strict=True))
                if group is STATE
            )
            self.step((ScheduledRequest(request.request_id, ids, 0, prompt_tokens, True),), states)

    def serve(self, running: int, decoded: int, rounds: int) -> None:
        """Serve ``rounds`` times ``running`` requests from arrival to end.

        Half of each prompt equals that of a request of the previous round, so that it is loaded.
        """
        prompt_tokens = 1000
        for _ in range(rounds):
            self.served += running
            requests = [Request(f"request-{self.served + n}", 0, prompt_tokens) for n in range(running)]
            for n, request in enumerate(requests):
                request.block_hashes += [
                    f"head-{n}/{block}".encode().ljust(32, b".") for block in range(prompt_tokens // BLOCK // 2)
                ]
            steps = []
            for request in requests:
                request.grow(prompt_tokens)
                self.scheduler.on_new_request(request)
                hit, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
                assert hit is not None
                ids = (self.blocks(-(-prompt_tokens // BLOCK)),)
                self.scheduler.update_state_after_alloc(request, ids, hit)
                steps.append(ScheduledRequest(request.request_id, ids, hit, prompt_tokens - hit, True))
            self.step(())  # the loads
            self.step(tuple(steps))
            self.requests, self.tokens = requests, prompt_tokens
            for _ in range(decoded):
                self.step(self.decode_records())
            for request in requests:
                self.scheduler.request_finished(request)
            self.step(())  # the last stores
            self.requests = []

    def fill(self) -> None:
        """Pin every slot of host memory, so that all later stores are refused."""
        assert self.manager.prepare_store(self.others("pin", self.num_blocks), ReqContext("pins")) is not None

    def fill_with_others(self) -> None:
        """Fill host memory with blocks of ended requests, and use each prefix in it once more.

        So every block that is stored later evicts one, and the running requests' own blocks are the most recent.
        """
        context = ReqContext("others")
        others = self.others("other", self.manager.slots.num_free)
        for first in range(0, len(others), 50):
            self.manager.prepare_store(others[first : first + 50], context)
            self.manager.complete_store(others[first : first + 50], context)
        for state in self.scheduler._requests.values():
            self.manager.touch(state.keys_in_use(), state.context)

    @staticmethod
    def others(name: str, num_blocks: int) -> list[OffloadKey]:
        return [make_offload_key(f"{name}/{n}".encode().ljust(32, b"."), 0) for n in range(num_blocks)]

    def blocks(self, n: int) -> list[int]:
        self.next_block += n
        return list(range(self.next_block - n, self.next_block))

    def step(self, scheduled: tuple[ScheduledRequest, ...], states: tuple[BoundaryState, ...] = ()) -> ConnectorMeta:
        meta = self.scheduler.build_connector_meta(EngineStep(scheduled, boundary_states=states))
        self.scheduler.update_connector_output(
            WorkerReport(
                tuple((0, TransferResult(job.job_id, True)) for job in (*meta.loads, *meta.stores, *meta.final_stores))
            )
        )
        return meta

    def decode_records(self) -> tuple[ScheduledRequest, ...]:
        """Return the next step's records, as an engine would pass them. Call it outside the timed part."""
        starts_block = self.tokens % BLOCK == 0
        self.tokens += 1
        for request in self.requests:
            request.grow(self.tokens)
        return tuple(
            ScheduledRequest(
                r.request_id, tuple(self.blocks(1) for _ in self.groups) if starts_block else (), self.tokens - 1, 1
            )
            for r in self.requests
        )


def read_records(steps: list[tuple[ScheduledRequest, ...]], limits: dict[str, int]) -> Callable[[], int]:
    """Return the least work that any connector must do: read each record and compare two numbers."""

    def run() -> int:
        full = 0
        for scheduled in steps:
            for each in scheduled:
                new = any(each.new_block_ids) or each.block_table_is_new
                full += new and each.num_computed_tokens + each.num_scheduled_tokens >= limits[each.request_id]
        return full

    return run


def steps_row(
    running: int,
    num_steps: int,
    rounds: int,
    repeats: int,
    case: str,
    *,
    full: bool = False,
    prompt_tokens: int = 1000,
    num_blocks: int = 100_000,
    evict_by: str | None = None,
) -> Row:
    """Time ``num_steps`` consecutive decode steps, ``rounds`` times per repeat. Times are per step.

    With ``full``, every request waits for room in full host memory. With ``evict_by``, each stored block evicts another
    block by this policy.
    """
    bench = Decoding(running, prompt_tokens, num_blocks, policy=evict_by or "lru")
    if full:
        bench.fill()
    if evict_by is not None:
        bench.fill_with_others()
    limits = dict.fromkeys((request.request_id for request in bench.requests), 1 << 40)
    while (bench.tokens + 1) % BLOCK != 1:  # start where a block has just been filled
        bench.step(bench.decode_records())
    times: list[list[float]] = []
    for _ in range(repeats):
        steps: list[tuple[ScheduledRequest, ...]] = []
        if num_steps < BLOCK:
            # The same idle steps are repeated, because nothing changes in them.
            if not times:
                idle = [bench.decode_records() for _ in range(num_steps + 1)][1:]
            steps = idle * rounds
        else:
            steps = [bench.decode_records() for _ in range(num_steps * rounds)]

        def connector(steps: list[tuple[ScheduledRequest, ...]] = steps) -> None:
            for scheduled in steps:
                bench.step(scheduled)

        times.append([t / len(steps) for t in thread_medians(connector, read_records(steps, limits), repeats=1)])
    ours, least = (sorted(column)[len(times) // 2] for column in zip(*times, strict=True))
    return Row(
        f"{case}, {running} running",
        1e6 * ours,
        "us/step",
        reference=f"reading the records, {1e6 * least:.3g} us",
        ratio=ours / least,
    )


def states_row(running: int, rounds: int, repeats: int) -> Row:
    """Compare decode steps of a model with attention and states with attention alone, in turn. Times are per step."""
    benches = [Decoding(running, 4000, groups=groups) for groups in ((FULL, STATE), (FULL,))]
    times: list[list[float]] = []
    for _ in range(repeats):
        work = []
        for bench in benches:
            steps = [bench.decode_records() for _ in range(BLOCK * rounds)]

            def serve(bench: Decoding = bench, steps: list[tuple[ScheduledRequest, ...]] = steps) -> None:
                for scheduled in steps:
                    bench.step(scheduled)

            work.append(serve)
        times.append([t / (BLOCK * rounds) for t in thread_medians(*work, repeats=1)])
    ours, alone = (sorted(column)[len(times) // 2] for column in zip(*times, strict=True))
    return Row(
        f"decode with states beside attention, prompts of 4,000 tokens, {running} running",
        1e6 * ours,
        "us/step",
        reference=f"attention alone, {1e6 * alone:.3g} us",
        ratio=ours / alone,
        target="<= 1.2",
    )


class _NoCollector(SpanExporter):
    def export(self, spans: Sequence[object]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def watching_rows(running: int, decoded: int, rounds: int, repeats: int) -> list[Row]:
    """Time requests from arrival to end, with ``decoded`` tokens and prompts of 1,000 tokens whose first half is
    loaded.

    Compares recording or tracing them, with explanations, to the usual setup with histograms, and the usual setup to
    histograms that do nothing. Times are per request.
    """
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_NoCollector()))
    with tempfile.TemporaryDirectory() as folder, patch.object(trace, "get_tracer", provider.get_tracer):
        benches = [
            Decoding(0),
            Decoding(0, record_trace=f"{folder}/trace.jsonl"),
            Decoding(0, watch=Spans()),
            Decoding(0),
        ]
        lives = [partial(bench.serve, running, decoded, rounds) for bench in benches]

        def without_histograms() -> None:
            with patch.object(Histogram, "observe", lambda histogram, value: None):
                lives[3]()

        usual, recorded, traced, bare = thread_medians(*lives[:3], without_histograms, repeats=repeats)
        for bench in benches:
            bench.scheduler.shutdown()
    provider.shutdown()
    name, scale = f"a request with {decoded} generated tokens, {running} at a time", 1e6 / running / rounds
    return [
        Row(f"{name}, recorded", recorded * scale, "us", "no trace", recorded / usual),
        Row(f"{name}, traced", traced * scale, "us", "no trace", traced / usual),
        Row(
            "what tracing all of them adds to a step",
            percent := 100 * (traced - usual) / rounds / decoded / STEP_S,
            "%",
            "10 ms",
            percent,
            "<= 1",
        ),
        Row(name, usual * scale, "us", "histograms that do nothing", usual / bare, "<= 1.05"),
    ]


def share_row(row: Row, most_percent: float) -> Row:
    """Compare a row with the design's goal: 0.1% of a step that fills no block, and 1% of a step that stores."""
    percent = 100 * row.value / 1e6 / STEP_S
    return Row("the same as a share of a step", percent, "%", "10 ms", percent, f"<= {most_percent:g}")


def admission_row(num_blocks: int, repeats: int) -> Row:
    """Compare the lookup of a prompt whose whole prefix is in host memory with lookups in a bare dict."""
    bench = Decoding(1, prompt_tokens=num_blocks * BLOCK, num_blocks=2 * num_blocks)
    (resident,) = bench.requests
    table: dict[OffloadKey, int] = {make_offload_key(each, 0): n for n, each in enumerate(resident.block_hashes)}
    keys = list(table)
    asked = Request("again", resident.num_tokens + 1, resident.num_tokens + 1, resident.block_hashes)
    bench.scheduler.on_new_request(asked)

    def lookup() -> None:
        found, _ = bench.scheduler.get_num_new_matched_tokens(asked, 0)
        assert found == num_blocks * BLOCK

    def bare() -> None:
        found = 0
        for key in keys:
            found += key in table

    ours, least = thread_medians(lookup, bare, repeats=repeats)
    return Row(
        f"lookup of a hit of {num_blocks} blocks",
        1e6 * ours,
        "us",
        reference=f"a dict lookup each, {1e6 * least:.3g} us",
        ratio=ours / least,
    )


def run(short: bool) -> list[Row]:
    repeats = 3 if short else 15
    idle = steps_row(64, BLOCK - 2, 2 if short else 20, repeats, "step that fills no block")
    # 64 requests gather eight blocks each, so every eighth block is followed by stores.
    decoding = steps_row(64, BLOCK, 1 if short else 8, repeats, "decode, each request fills a block every 16th step")
    evicting = steps_row(
        64,
        BLOCK,
        1 if short else 8,
        repeats,
        "the same, each store evicts by the default policy",
        num_blocks=6_000 if short else 100_000,
        evict_by=OffloadingConfig(cpu_bytes_to_use=0).eviction_policy,
    )
    return [
        idle,
        share_row(idle, 0.1),
        steps_row(64, BLOCK - 2, 2 if short else 20, repeats, "the same, all refused by a full tier", full=True),
        decoding,
        share_row(decoding, 1),
        evicting,
        share_row(evicting, 1),
        steps_row(
            64,
            BLOCK,
            1 if short else 24,
            repeats,
            "the same with prompts of 32,000 tokens",
            prompt_tokens=1000 if short else 32_000,
            num_blocks=200_000,
        ),
        states_row(64, 1 if short else 8, repeats),
        admission_row(100 if short else 6_250, repeats),
        *watching_rows(64, 20 if short else 200, 1 if short else 2, repeats),
    ]
