# SPDX-License-Identifier: Apache-2.0
"""Test events and metrics in vLLM's terms, with vLLM's classes but without an engine: part of the lane.

Our own parts, such as which request describes a block and for how long, are also tested elsewhere.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Container, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.vllm.configs import know_plain_events
from tests.tiering.rig import Rig, keys

from kvoffload.base import OffloadingEvent, OffloadKey, ReqContext, make_offload_key
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, OffloadingConfig
from kvoffload.cpu import CPUOffloadingManager
from kvoffload.engines.vllm.events import EventTranslator, _extra_keys
from kvoffload.metrics import METRICS

pytestmark = pytest.mark.vllm
BOTH = pytest.mark.vllm(elsewhere=True)

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
    know_plain_events(monkeypatch)


def request(name: str, num_hashes: int, lora: Any = None, salt: str | None = None, images: Any = ()) -> Any:
    return SimpleNamespace(
        cache_salt=salt,
        mm_features=list(images),
        prompt_embeds=None,
        request_id=name,
        block_hashes=[f"{name}-{n}".encode() for n in range(num_hashes)],
        all_token_ids=list(range(100, 100 + 4 * num_hashes + 2)),
        lora_request=lora,
        resumable=False,
        session_id=f"session-{name}",
    )


class Pixels:
    """Megabytes, in a real request."""


def image(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(
        identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length), data=Pixels()
    )


def key(name: str, index: int, group: int = 0) -> OffloadKey:
    return make_offload_key(f"{name}-{index}".encode(), group)


def stored(*keys: OffloadKey) -> OffloadingEvent:
    return OffloadingEvent(list(keys), "CPU", removed=False)


def num_tracked(translator: EventTranslator) -> int:
    """Return the number of hashes by which a request can be found."""
    return len(translator._holders)


def live(translator: EventTranslator) -> Container[str]:
    return translator._live


@BOTH
def test_plain_events_name_hashes_only_one_event_per_group() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=False)
    translator.track(request("a", 3))
    (full, window) = translator.translate([stored(key("a", 0), key("a", 0, 1), key("a", 1))])
    assert (full.block_hashes, full.group_idx, full.block_size, full.token_ids) == ([b"a-0", b"a-1"], 0, 0, [])
    assert (full.medium, full.parent_block_hash, full.kv_cache_spec_kind) == ("CPU", None, "full_attention")
    assert (window.block_hashes, window.group_idx, window.kv_cache_spec_sliding_window) == ([b"a-0"], 1, 6)
    (removed,) = translator.translate([OffloadingEvent([key("a", 0, 1)], "CPU", removed=True)])
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([b"a-0"], "CPU", 1)
    assert type(removed).__name__ == "BlockRemoved"


@BOTH
@pytest.mark.parametrize("describe", [False, True])
def test_keys_that_no_block_of_the_engine_has_are_left_out(describe: bool) -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=describe)
    strange = [OffloadKey(b""), OffloadKey(b"ab"), make_offload_key(b"hash", 2), make_offload_key(b"", 0)]
    for removed in (False, True):
        (event,) = translator.translate([OffloadingEvent([*strange, key("b", 0)], "disk", removed)])
        assert event.block_hashes == [b"b-0"]


@BOTH
def test_states_have_vllms_word_and_no_tokens() -> None:
    groups = (*LAYOUT.groups[:1], KVGroupLayout(GroupKind.SINGLE_STATE, 4, 8))
    translator = EventTranslator(replace(LAYOUT, groups=groups), factor=1, describe=True)
    translator.track(request("a", 3))
    (state,) = translator.translate([stored(key("a", 2, 1))])
    assert (state.kv_cache_spec_kind, state.block_hashes, state.token_ids) == ("mamba", [b"a-2"], [])


def test_described_events_carry_tokens_and_parent_of_each_of_the_engines_blocks() -> None:
    translator = EventTranslator(LAYOUT, factor=2, describe=True)
    lora = SimpleNamespace(adapter_id=7, name="tuned", lora_name="tuned", lora_path="/adapters/7")
    translator.track(request("a", 4, lora))
    first, second, plain = translator.translate([stored(key("a", 1), key("a", 3)), stored(key("unknown", 1))])
    assert (first.block_hashes, first.parent_block_hash, first.block_size) == ([b"a-0", b"a-1"], None, 4)
    assert first.token_ids == list(range(100, 108))
    assert (second.block_hashes, second.parent_block_hash) == ([b"a-2", b"a-3"], b"a-1")
    assert second.token_ids == list(range(108, 116))
    assert (second.lora_id, second.lora_name) == (7, "tuned")
    assert (second.session_id, plain.session_id) == ("session-a", None)
    assert second.extra_keys == [("tuned",), ("tuned",)]
    assert (plain.block_size, plain.token_ids, plain.extra_keys) == (0, [], None)


def masked(block_hash: bytes) -> bytes:
    return b"masked " + block_hash


@BOTH
@pytest.mark.parametrize("describe", [False, True])
def test_events_name_vllms_own_hashes_where_keys_contain_an_adapter(describe: bool) -> None:
    translator = EventTranslator(LAYOUT, factor=2, describe=describe)
    lora = SimpleNamespace(adapter_id=7, name="tuned", lora_name="tuned", lora_path="/adapters/7")
    asked = request("a", 4, lora)
    translator.track(asked, SimpleNamespace(block_hashes=[*map(masked, asked.block_hashes)]))
    translator.track(request("b", 4))
    ours = [make_offload_key(masked(f"a-{n}".encode()), 0) for n in (1, 3)]
    events = translator.translate([stored(*ours, key("b", 1))])
    hashes = [each for event in events for each in event.block_hashes]
    inner = {b"a-0", b"a-2", b"b-0"} if describe else set()
    assert set(hashes) == {b"a-1", b"a-3", b"b-1"} | inner
    if describe:
        assert events[0].token_ids == list(range(100, 108))
        assert events[1].parent_block_hash == b"a-1"
    translator.finish(asked)
    assert not [*translator.translate([stored(*ours)])]
    storage = OffloadingEvent(ours, "disk", removed=False)
    again = [each for event in translator.translate([storage]) for each in event.block_hashes]
    assert set(again) == {each for each in hashes if each.startswith(b"a-")}
    for medium in ("CPU", "disk"):
        gone = translator.translate([OffloadingEvent(ours, medium, removed=True)])
        assert {each for event in gone for each in event.block_hashes} == set(again)
    assert not translator._of_vllm


def test_described_events_carry_what_else_went_into_the_hash() -> None:
    translator = EventTranslator(LAYOUT, factor=2, describe=True)
    asked = request("a", 8, salt="tenant", images=[image("cat", 3, 4), image("dog", 14, 6)])
    translator.track(asked)

    def extras() -> list[Any]:
        blocks = [key("a", n) for n in (1, 3, 5, 7)]
        events = translator.translate([stored(*blocks)])
        translator.translate([OffloadingEvent(blocks, "CPU", removed=True)])
        return [event.extra_keys for event in events]

    # By block of 4 tokens: the image's offset counts from the block's first token; the salt goes into the first block.
    expected = [
        [(("cat", 3), "tenant"), (("cat", -1),)],
        [None, (("dog", 2),)],
        [(("dog", -2),), None],
        [None, None],
    ]
    assert extras() == expected
    translator.finish(asked)
    assert extras() == expected, "stores end after their request"


def test_extra_keys_are_those_of_vllms_own_events() -> None:
    from vllm.v1.core import kv_cache_utils

    lora = SimpleNamespace(adapter_id=7, name="tuned", lora_name="tuned", lora_path="/adapters/7")
    asked = request("a", 5, lora, "tenant", [image("cat", 1, 2), image("dog", 3, 6), image("cat", 12, 4)])
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    translator.track(asked)
    own, image_index = [], 0
    for first in range(0, 20, 4):
        extra, image_index = kv_cache_utils.generate_block_hash_extra_keys(asked, first, first + 4, image_index)
        own.append(extra)
    events = translator.translate([stored(*(key("a", n) for n in range(5)))])
    assert [event.extra_keys[0] for event in events] == kv_cache_utils.to_event_extra_keys(own)


def test_finished_requests_are_tracked_without_their_images() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    asked = request("a", 2, images=[image("cat", 0, 4)])
    data = weakref.ref(asked.mm_features[0].data)
    translator.track(asked)
    translator.finish(asked)
    del asked
    gc.collect()
    assert data() is None
    (event,) = translator.translate([stored(key("a", 0))])
    assert event.extra_keys == [(("cat", 0),)]


@pytest.mark.parametrize("factor", [1, 2])
def test_finished_requests_are_tracked_without_their_prompt_embeddings(factor: int) -> None:
    import torch
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    embeds = torch.arange(18.0 * 3).reshape(18, 3)
    data = weakref.ref(embeds)
    asked = Request(
        "a",
        None,
        SamplingParams(max_tokens=9),
        None,
        prompt_embeds=embeds,
        block_hasher=get_request_block_hasher(4, hash_fn),
    )
    keys = [make_offload_key(bytes(each), 0) for each in asked.block_hashes[factor - 1 :: factor]]
    expected = []
    for first in range(0, 16, 4 * factor):
        twin = Request("twin", None, SamplingParams(max_tokens=9), None, prompt_embeds=embeds)
        expected.append(_extra_keys(twin, range(first, first + 4 * factor, 4)))
    translator = EventTranslator(LAYOUT, factor=factor, describe=True)
    translator.track(asked)
    translator.finish(asked)
    del asked, embeds, twin
    gc.collect()
    assert data() is None
    assert [event.extra_keys for event in translator.translate([stored(*keys)])] == expected


@BOTH
def test_windows_are_never_described() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    translator.track(request("a", 2))
    (event,) = translator.translate([stored(key("a", 1, 1))])
    assert event.block_size == 0


@BOTH
def test_the_late_end_of_a_request_leaves_the_one_that_has_its_id_tracked() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    earlier, asked = request("a", 1), request("a", 1)
    translator.track(earlier)
    translator.track(asked)
    translator.finish(earlier)
    asked.block_hashes.append(b"a-1")
    asked.all_token_ids += [1, 2, 3, 4]
    (event,) = translator.translate([stored(key("a", 1))])
    assert event.block_size == 4


@BOTH
def test_hashes_that_grow_are_tracked_and_requests_are_forgotten_after_their_end() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    growing = request("a", 1)
    translator.track(growing)
    growing.block_hashes.append(b"a-1")
    growing.all_token_ids += [1, 2, 3, 4]
    translator.finish(growing)
    (event,) = translator.translate([stored(key("a", 1))])
    assert event.block_size == 4  # stores end after their request
    translator.translate([OffloadingEvent([key("a", 1)], "CPU", removed=True)])
    for n in range(512):
        translator.finish(request(f"r{n}", 1))
    (event,) = translator.translate([stored(key("a", 1))])
    assert event.block_size == 0
    assert num_tracked(translator) == 512
    assert not live(translator)


@BOTH
def test_finished_requests_are_tracked_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.engines.vllm.events._FINISHED_TOKENS_TRACKED", 40, raising=False)
    translator = EventTranslator(LAYOUT, factor=1, describe=True)

    for name in "abc":
        translator.finish(request(name, 5))
    events = translator.translate([stored(key(name, 4)) for name in "abc"])
    assert [event.block_size for event in events] == [0, 4, 4]
    translator.finish(request("long", 11))
    translator.translate([OffloadingEvent([key("c", 4)], "CPU", removed=True)])
    events = translator.translate([stored(key("c", 4)), stored(key("long", 10))])
    assert [event.block_size for event in events] == [0, 4], "the last one is tracked however long it is"
    assert num_tracked(translator) == 11


@BOTH
def test_blocks_of_generated_tokens_are_described_while_their_request_runs() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    growing = request("a", 1)
    translator.track(growing)
    growing.block_hashes.append(b"a-1")
    (event,) = translator.translate([stored(key("a", 1))])
    assert (event.block_size, event.parent_block_hash, event.token_ids) == (4, b"a-0", [104, 105])


@BOTH
def test_a_block_whose_last_token_the_next_input_of_a_session_replaced_is_described() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    session = request("a", 2)
    del session.all_token_ids[8:]
    translator.track(session)
    session.block_hashes[1:] = [b"b-1", b"b-2"]
    session.all_token_ids[7:] = [7, 8, 9, 10, 11]
    first, second, third = translator.translate([stored(key("a", 0), key("b", 1), key("b", 2))])
    assert (first.token_ids, second.token_ids) == ([100, 101, 102, 103], [104, 105, 106, 7])
    assert (second.parent_block_hash, third.parent_block_hash) == (b"a-0", b"b-1")
    assert third.token_ids == [8, 9, 10, 11]
    (dropped,) = translator.translate([stored(key("a", 1))])
    assert dropped.token_ids == [], "its tokens are the session's no longer"
    del session.block_hashes[1:]  # and shorter
    translator.finish(session)
    for n in range(512):
        translator.finish(request(f"r{n}", 1))
    assert num_tracked(translator) == 512


@BOTH
def test_a_block_that_a_session_gave_up_is_described_from_the_request_that_still_has_it() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    session, twin = request("a", 2), request("a", 2)
    twin.request_id = "twin"
    translator.track(twin)
    translator.track(session)
    session.block_hashes[1:] = [b"b-1", b"b-2"]
    session.all_token_ids[7:] = [7, 8, 9, 10, 11]
    (given_up,) = translator.translate([stored(key("a", 1))])
    assert given_up.token_ids == [104, 105, 106, 107]
    translator.translate([OffloadingEvent([key("a", 1)], "CPU", removed=True)])
    translator.finish(twin)
    for n in range(512):
        translator.finish(request(f"r{n}", 1))
    (unknown,) = translator.translate([stored(key("a", 1))])
    assert unknown.token_ids == [], "its tokens are nobody's any longer"


@BOTH
def test_unknown_blocks_cost_one_look_at_the_live_requests_a_call() -> None:
    """At startup, the scan of a disk tier announces thousands of blocks that no request knows."""
    looks = []

    class Counted(list[bytes]):
        def __len__(self) -> int:
            looks.append(1)
            return super().__len__()

    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    growing = request("a", 1)
    growing.block_hashes = Counted(growing.block_hashes)
    translator.track(growing)
    counts = []
    for num_blocks in (1, 100, 100):
        looks.clear()
        translator.translate([stored(*(key(f"unknown{len(counts)}", n) for n in range(num_blocks)))])
        counts.append(len(looks))
    assert counts[0] > 0 and counts == [counts[0]] * 3


@BOTH
def test_an_id_used_again_is_another_request() -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    old, new = request("old", 3), request("new", 2)
    old.request_id = new.request_id = "same"
    translator.track(old)
    translator.track(new)
    keys = key("new", 0), key("new", 1), key("old", 2)
    assert [event.block_size for event in translator.translate([stored(*keys)])] == [4, 4, 4]
    translator.translate([OffloadingEvent([*keys], "CPU", removed=True)])
    translator.finish(new)
    for n in range(512):
        translator.finish(request(f"r{n}", 1))
    assert not live(translator)
    (event,) = translator.translate([stored(*keys)])
    assert event.block_size == 0


# ----------------------------------------------------------------------------------------- the adapter's scheduler side


def test_blocks_promoted_before_their_request_is_admitted_are_described() -> None:
    from kvoffload.config import OffloadingConfig
    from kvoffload.engines.vllm.connector import _SchedulerSide

    class Promoting(CPUOffloadingManager):
        """Has a tier below it that delivers each block one step after the lookup."""

        def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
            output = self.prepare_store(keys, req_context)
            assert output is not None
            self.complete_store(output.keys_to_store, req_context)
            return [None] * len(keys)

    manager = Promoting(8, enable_events=True)
    config = OffloadingConfig(cpu_bytes_to_use=1 << 20, self_describing_kv_events=True)
    layout = EngineLayout(LAYOUT.groups[:1], 4, "engine", events_enabled=True)
    side = _SchedulerSide(SimpleNamespace(get_manager=lambda: manager), layout, config)
    asked = request("a", 2)
    asked.num_tokens = asked.num_prompt_tokens = 10
    asked.kv_transfer_params = None
    side.on_new_request(asked)
    assert side.get_num_new_matched_tokens(asked, 0) == (None, False)
    events = side.take_events()
    assert [(event.block_size, event.token_ids) for event in events] == [
        (4, [100, 101, 102, 103]),
        (4, [104, 105, 106, 107]),
    ]
    assert [event.parent_block_hash for event in events] == [None, b"a-0"]
    # Aborted while it waits: it is forgotten like any other.
    side.request_finished(asked)
    assert not live(side._events)


@pytest.mark.parametrize("call", ["on_new_request", "get_num_new_matched_tokens"])
def test_a_request_is_tracked_with_whichever_call_comes_first(call: str) -> None:
    from kvoffload.config import OffloadingConfig
    from kvoffload.engines.vllm.connector import _SchedulerSide

    config = OffloadingConfig(cpu_bytes_to_use=1 << 20, self_describing_kv_events=True)
    layout = EngineLayout(LAYOUT.groups[:1], 4, "engine", events_enabled=True)
    side = _SchedulerSide(SimpleNamespace(get_manager=lambda: CPUOffloadingManager(8)), layout, config)
    asked = request("a", 2)
    asked.num_tokens = asked.num_prompt_tokens = 10
    asked.kv_transfer_params = None
    getattr(side, call)(*([asked] if call == "on_new_request" else [asked, 0]))
    assert num_tracked(side._events) == 2


@pytest.mark.parametrize("first_to_end", ["old", "young"])
def test_a_shared_prefix_stays_tracked_for_the_request_that_still_runs(first_to_end: str) -> None:
    translator = EventTranslator(LAYOUT, factor=1, describe=True)
    old, young = request("a", 1), request("a", 1)
    old.request_id, young.request_id = "old", "young"
    translator.track(old)
    translator.track(young)
    translator.finish(old if first_to_end == "old" else young)
    for n in range(512):
        translator.finish(request(f"r{n}", 1))
    (event,) = translator.translate([stored(key("a", 0))])
    assert event.block_size == 4
    for ended in (old, young):
        if ended.request_id in live(translator):
            translator.finish(ended)
    for n in range(512):
        translator.finish(request(f"r{n}", 1))
    assert num_tracked(translator) == 512


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
    third = reporter.report({("hit_tokens",): 8, ("primary_blocks_used",): 0, ("cascades_parked",): 0})
    assert third is not None
    assert third.gauges == {"cascades_parked": 0}, "a gauge is reported once even if it is 0"
    fourth = reporter.report({("hit_tokens",): 8, ("load_jobs", "ok"): 3})
    assert fourth is not None
    assert fourth.counters == {"load_jobs\x1fok": 1}, "a sample that was missing once goes on"
    fifth = reporter.report({("hit_tokens",): 7, ("load_jobs", "ok"): 4})
    assert fifth is not None
    assert fifth.counters == {"load_jobs\x1fok": 1}, "a counter that fell, of a tier of others, is left out"


def test_histograms_are_the_same_after_reports_and_at_prometheus() -> None:
    import random

    from prometheus_client import REGISTRY, Counter, Gauge
    from prometheus_client import Histogram as PrometheusHistogram

    from kvoffload.engines.vllm.stats import OffloadPromMetrics, OffloadStats, StatsReporter
    from kvoffload.metrics import Histogram, buckets_of

    types = {Counter: Counter, Gauge: Gauge, PrometheusHistogram: PrometheusHistogram}
    config = SimpleNamespace(kv_transfer_config=None)
    series = OffloadPromMetrics(config, types, ["engine"], {0: ["0"]})
    series.begin(["disk"])
    labels = {"engine": "0", "tier": "disk", "direction": "read"}
    assert REGISTRY.get_sample_value("kvoffload_tier_batch_seconds_count", labels) == 0, "there from the start"
    assert REGISTRY.get_sample_value("kvoffload_tier_healthy", {"engine": "0", "tier": "disk"}) == 1
    histogram, reporter, rng = Histogram("tier_batch_seconds", "disk", "read"), StatsReporter(), random.Random(1)
    values: list[float] = []
    pending = OffloadStats()
    for _ in range(20):
        for _ in range(rng.randrange(30)):
            values.append(rng.choice([0.0, 0.001, 10.0, rng.expovariate(20), rng.uniform(0, 30)]))
            histogram.observe(values[-1])
        pending = pending.aggregate(reporter.report(histogram.stats()) or OffloadStats())
        if rng.random() < 0.5:
            series.observe(pending.to_dict(), 0)
            pending = OffloadStats()
    series.observe(pending.to_dict(), 0)
    metric = METRICS["tier_batch_seconds"]
    for bound, upper in zip(buckets_of(metric), (*metric.buckets, float("inf")), strict=True):
        seen = REGISTRY.get_sample_value("kvoffload_tier_batch_seconds_bucket", labels | {"le": bound})
        assert seen == sum(value <= upper for value in values)
    total = REGISTRY.get_sample_value("kvoffload_tier_batch_seconds_sum", labels)
    assert total == pytest.approx(sum(values))


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
    for _ in range(2):  # the second engine of a process reuses the names
        series = OffloadPromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
        series.begin([])
    stats = OffloadStats({"counters": {"load_jobs\x1ffailed": 2}, "gauges": {"primary_blocks": 7}})
    series.observe(stats.to_dict(), 1)
    series.observe(stats.to_dict(), 1)
    labels = {"engine": "1", "outcome": "failed"}
    assert REGISTRY.get_sample_value("kvoffload_load_jobs_total", labels) == 4
    assert REGISTRY.get_sample_value("kvoffload_primary_blocks", {"engine": "1"}) == 7
    assert REGISTRY.get_sample_value("kvoffload_hit_tokens_total", {"engine": "0"}) == 0
    names = {metric.name for metric in REGISTRY.collect()}
    assert {f"kvoffload_{name}" for name in METRICS} <= names
    # Values that cannot be counted are left out, because an exception here would end vLLM's front end.
    odd = {"load_jobs\x1ffailed": -1, "of_a_newer_version\x1fa": 1, "load_jobs": 1, "load_seconds": float("nan")}
    series.observe({"counters": odd, "gauges": {"of_a_newer_version": 1, "primary_blocks": 8}}, 1)
    assert REGISTRY.get_sample_value("kvoffload_load_jobs_total", labels) == 4
    assert REGISTRY.get_sample_value("kvoffload_primary_blocks", {"engine": "1"}) == 8


def test_the_last_step_before_an_engine_sleeps_reports_that_nothing_is_queued_or_pinned() -> None:
    """However soon it comes after the report before."""
    from kvoffload.connector.messages import WorkerReport
    from kvoffload.engines.vllm.connector import StepReport, _SchedulerSide

    rig = Rig()
    spec, config = SimpleNamespace(get_manager=lambda: rig.manager), OffloadingConfig(cpu_bytes_to_use=1 << 20)
    side = _SchedulerSide(spec, LAYOUT, config)
    context = rig.start("a")
    rig.store(keys(1, 2), context, finish=False)
    first = side.get_stats()
    assert first is not None
    assert first.gauges["primary_blocks_pinned"] == 2
    rig.step()
    side._take_output(None, StepReport(WorkerReport()))
    assert side.get_stats() is None, "not in each step, even if transfers have ended"
    rig.finish()
    last = side.get_stats()
    assert last is not None
    assert last.gauges["primary_blocks_pinned"] == 0
    assert side.get_stats() is None
