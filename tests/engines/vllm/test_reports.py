# SPDX-License-Identifier: Apache-2.0
"""Events and metrics in vLLM's terms. No engine, but vLLM's classes: part of the lane."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.base import OffloadingEvent, OffloadKey, make_offload_key
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout
from kvoffload.engines.vllm.events import EventTranslator
from kvoffload.metrics import METRICS

pytestmark = pytest.mark.vllm

LAYOUT = EngineLayout(
    groups=(
        KVGroupLayout(GroupKind.FULL_ATTENTION, block_tokens=4, page_bytes=64),
        KVGroupLayout(GroupKind.SLIDING_WINDOW, block_tokens=4, page_bytes=64, sliding_window_tokens=6),
    ),
    hash_block_tokens=4,
    instance_id="engine",
)


@pytest.fixture(autouse=True)
def hashes_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def request(name: str, num_hashes: int, lora: Any = None) -> Any:
    return SimpleNamespace(
        request_id=name,
        block_hashes=[f"{name}-{n}".encode() for n in range(num_hashes)],
        all_token_ids=list(range(100, 100 + 4 * num_hashes + 2)),
        lora_request=lora,
    )


def key(name: str, index: int, group: int = 0) -> OffloadKey:
    return make_offload_key(f"{name}-{index}".encode(), group)


def stored(*keys: OffloadKey) -> OffloadingEvent:
    return OffloadingEvent(list(keys), "CPU", removed=False)


def test_plain_events_name_hashes_only_one_event_per_group() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=False)
    translator.track(request("a", 3))
    events = translator.translate(
        [stored(key("a", 0), key("a", 0, 1), key("a", 1)), OffloadingEvent([key("b", 5, 1)], "fs", removed=True)]
    )
    full, window, removed = events
    assert (full.block_hashes, full.group_idx, full.block_size, full.token_ids) == ([b"a-0", b"a-1"], 0, 0, [])
    assert (full.medium, full.parent_block_hash, full.kv_cache_spec_kind) == ("CPU", None, "full_attention")
    assert (window.block_hashes, window.group_idx, window.kv_cache_spec_sliding_window) == ([b"a-0"], 1, 6)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([b"b-5"], "fs", 1)
    assert type(removed).__name__ == "BlockRemoved"


def test_described_events_carry_tokens_parent_and_size_of_the_block_that_can_be_fetched() -> None:
    translator = EventTranslator(LAYOUT, factor=2, describe=True)
    lora = SimpleNamespace(adapter_id=7, name="tuned")
    translator.track(request("a", 4, lora))
    first, second, plain = translator.translate([stored(key("a", 1), key("a", 3)), stored(key("unknown", 1))])
    assert (first.block_hashes, first.parent_block_hash, first.block_size) == ([b"a-1"], None, 8)
    assert first.token_ids == list(range(100, 108))
    assert (second.block_hashes, second.parent_block_hash) == ([b"a-3"], b"a-1")
    assert second.token_ids == list(range(108, 116))
    assert (second.lora_id, second.lora_name) == (7, "tuned")
    assert (plain.block_size, plain.token_ids) == (0, [])


def test_windows_are_never_described() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    translator.track(request("a", 2))
    (event,) = translator.translate([stored(key("a", 1, 1))])
    assert event.block_size == 0


def test_hashes_that_grow_are_tracked_and_requests_are_forgotten_after_their_end() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    growing = request("a", 1)
    translator.track(growing)
    growing.block_hashes.append(b"a-1")
    growing.all_token_ids += [1, 2, 3, 4]
    translator.finish(growing)
    (event,) = translator.translate([stored(key("a", 1))])
    assert event.block_size == 4  # stores end after their request
    for n in range(512):
        translator.finish(request(f"r{n}", 1))
    (event,) = translator.translate([stored(key("a", 1))])
    assert event.block_size == 0
    assert len(translator._origins) == 512
    assert not translator._num_tracked_hashes


def test_a_shared_prefix_stays_tracked_for_the_request_that_still_runs() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    old, young = request("a", 1), request("a", 1)
    old.request_id, young.request_id = "old", "young"
    translator.track(old)
    translator.track(young)
    translator.finish(old)
    for n in range(512):
        translator.finish(request(f"r{n}", 1))
    (event,) = translator.translate([stored(key("a", 0))])
    assert event.block_size == 4


# ------------------------------------------------------------------------------------------------------ metrics


def test_reports_are_increments_of_counters_and_values_of_gauges() -> None:
    from kvoffload.engines.vllm.stats import StatsReporter

    reporter = StatsReporter()
    first = reporter.report({("hit_tokens",): 5, ("primary_blocks_used",): 3, ("load_jobs", "ok"): 2, ("private",): 1})
    assert first is not None
    assert first.counters == {"hit_tokens": 5, "load_jobs\x1fok": 2}
    assert first.gauges == {"primary_blocks_used": 3}
    assert reporter.report({("hit_tokens",): 5, ("primary_blocks_used",): 3, ("load_jobs", "ok"): 2}) is None
    second = reporter.report({("hit_tokens",): 8, ("primary_blocks_used",): 0, ("load_jobs", "ok"): 2})
    assert second is not None
    assert (second.counters, second.gauges) == ({"hit_tokens": 3}, {"primary_blocks_used": 0})


def test_stats_add_up_and_survive_being_sent() -> None:
    import msgspec

    from kvoffload.engines.vllm.stats import OffloadStats

    one = OffloadStats({"counters": {"hit_tokens": 3, "lookup_tokens": 4}, "gauges": {"primary_blocks_used": 3}})
    two = OffloadStats({"counters": {"hit_tokens": 1, "load_bytes": 2e6}, "gauges": {"primary_blocks_used": 9}})
    total = one.aggregate(OffloadStats(msgspec.msgpack.decode(msgspec.msgpack.encode(two.to_dict()))))
    assert total.counters == {"hit_tokens": 4, "lookup_tokens": 4, "load_bytes": 2e6}
    assert total.gauges == {"primary_blocks_used": 9}
    assert total.reduce()["offload hit rate (%)"] == 100.0
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert OffloadStats().reduce() == {}


def test_prometheus_series_are_named_after_the_table_and_may_be_made_again() -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    from kvoffload.engines.vllm.stats import OffloadPromMetrics, OffloadStats

    types = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    for _ in range(2):  # the second engine of a process takes over the names
        series = OffloadPromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
    stats = OffloadStats({"counters": {"load_jobs\x1ffailed": 2}, "gauges": {"primary_blocks": 7}})
    series.observe(stats.to_dict(), 1)
    series.observe(stats.to_dict(), 1)
    labels = {"engine": "1", "outcome": "failed"}
    assert REGISTRY.get_sample_value("kvoffload_load_jobs_total", labels) == 4
    assert REGISTRY.get_sample_value("kvoffload_primary_blocks", {"engine": "1"}) == 7
    assert REGISTRY.get_sample_value("kvoffload_hit_tokens_total", {"engine": "0"}) == 0
    names = {metric.name for metric in REGISTRY.collect()}
    assert {f"kvoffload_{name}" for name in METRICS} <= names
