# SPDX-License-Identifier: Apache-2.0
"""Test a request's own limits: how much of it is stored and loaded, and whether its prefix is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.connector.rig import BT, FULL, SLIDING, Request, Rig, key
from tests.sizes import by_size

from kvoffload.base import OffloadPolicy
from kvoffload.config import EngineLayout, OffloadingConfig
from kvoffload.connector import EngineStep, OffloadingConnectorScheduler, ScheduledRequest
from kvoffload.connector.limits import RequestLimits
from kvoffload.cpu import CPUOffloadingManager

NONE = RequestLimits()
NAMES = ("max_offload_tokens", "max_load_tokens")


BAD = [-1, True, False, 1.0, "12", [3], {"a": 1}, -(10**5000), "x" * 10_000, "a\nb"]


# ---------------------------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"max_load_tokens": None}])
def test_without_limits_there_are_none(params: object) -> None:
    assert RequestLimits.parse(params) == (NONE, [])


def test_limits_are_whole_numbers_of_tokens() -> None:
    limits, problems = RequestLimits.parse({"max_offload_tokens": 0, "max_load_tokens": 1 << 70, "other": "x"})
    assert limits == RequestLimits(max_offload_tokens=0, max_load_tokens=1 << 70)
    assert problems == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", BAD, ids=range(len(BAD)))
def test_a_bad_value_is_ignored_and_named_in_one_short_line(name: str, value: object) -> None:
    other = next(each for each in NAMES if each != name)
    limits, (problem,) = RequestLimits.parse({name: value, other: 7})
    assert (getattr(limits, name), getattr(limits, other)) == (None, 7)
    assert name in problem
    assert "\n" not in problem
    assert len(problem) < 200


@pytest.mark.parametrize("params", ["max_load_tokens=3", 5, True, ["max_load_tokens"], [("max_load_tokens", 3)]])
def test_parameters_that_are_no_mapping_are_ignored(params: object) -> None:
    limits, (problem,) = RequestLimits.parse(params)
    assert limits == NONE
    assert "kv_transfer_params" in problem
    assert len(problem) < 200


TEXT = st.text("a \n\0é\u2028\ud800𝄞")  # listing every character would take a second
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES) | TEXT, inner),
)


@settings(max_examples=by_size(15, 500))
@given(JSON)
def test_whatever_a_client_sends_is_parsed(params: Any) -> None:
    limits, problems = RequestLimits.parse(params)
    for name in NAMES:
        limit = getattr(limits, name)
        assert limit is None or (limit >= 0 and params[name] == limit)
    assert all(len(problem) < 200 and problem.isprintable() for problem in problems)


# ----------------------------------------------------------------------------------------------------------- stores


@pytest.mark.parametrize("policy", OffloadPolicy)
@pytest.mark.parametrize(("most", "blocks"), [(0, 0), (3, 0), (4, 1), (10, 2), (16, 4), (400, 4)])
def test_only_the_head_of_a_request_is_stored(policy: OffloadPolicy, most: int, blocks: int) -> None:
    rig = Rig(policy=policy)
    request = rig.arrive(Request("r", 16, kv_transfer_params={"max_offload_tokens": most}))
    rig.ask(request)
    rig.alloc(request, range(4))
    for tokens in (6, 12, 16):
        rig.end(*rig.step(rig.run(request, range(4), computed=0, tokens=tokens, new=tokens == 6)).stores)
    assert [each for keys in rig.manager.offered for each in keys] == [key(n) for n in range(blocks)]
    rig.finish(request)
    rig.assert_drained()


def test_of_every_group_only_the_head_is_stored() -> None:
    rig = Rig(groups=(FULL, SLIDING))
    rig.admit(Request("r", 16, kv_transfer_params={"max_offload_tokens": 8}), range(4), range(10, 14))
    assert rig.manager.offered == [[key(0), key(0, 1), key(1), key(1, 1)]]


def test_the_limit_holds_for_generated_tokens_and_beside_prompt_only() -> None:
    for prompt_only in (False, True):
        rig = Rig(prompt_only=prompt_only)
        request = Request("r", 7, kv_transfer_params={"max_offload_tokens": 8})
        rig.admit(request, [0, 1])
        for tokens in range(8, 20):
            request.num_tokens = tokens
            rig.step(rig.run(request, [tokens], computed=tokens - 1, new=False))
        assert rig.manager.offered == ([[key(0)]] if prompt_only else [[key(0)], [key(1)]])


# ------------------------------------------------------------------------------------------------------------ loads


@pytest.mark.parametrize(("most", "computed", "found"), [(0, 0, 0), (3, 0, 0), (4, 0, 4), (9, 0, 8), (6, 4, 4)])
def test_only_so_many_tokens_are_loaded(most: int, computed: int, found: int) -> None:
    rig = Rig()
    rig.store_prefix(16)
    request = rig.arrive(Request("r", 17, kv_transfer_params={"max_load_tokens": most}))
    assert rig.ask(request, computed=computed) == (found, found > 0)
    rig.alloc(request, range(5), external=found)
    rig.end(*rig.step().loads)
    stats = rig.scheduler.get_stats()
    assert stats["hit_tokens",] == found
    assert stats["lookup_tokens",] == 16 + min(17 - computed, most), "the seed's, and what this one may have"


def test_the_limits_are_independent() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 16, kv_transfer_params={"max_load_tokens": 0}))
    assert rig.ask(request) == (0, False)
    rig.alloc(request, range(4))
    (store,) = rig.step(rig.run(request, range(4))).stores
    assert len(store.source.block_ids) == 2, "the other two are there"


# ------------------------------------------------------------------------------------------------ opting out of reads


@dataclass
class Unread(Request):
    """A request that asks the engine not to read its prefix cache, like vLLM's requests for prompt log
    probabilities."""

    skip_reading_prefix_cache: bool = True


def test_a_request_that_skips_reading_is_not_looked_up_nor_counted() -> None:
    rig = Rig()
    rig.store_prefix(8)
    before = rig.scheduler.get_stats()
    lookups: list[object] = []
    rig.manager.lookup_prefix = lambda keys, context: lookups.append(keys)  # type: ignore[assignment]
    request = rig.arrive(Unread("r", 17))
    assert rig.ask(request) == (0, False)
    rig.alloc(request, range(4))
    (store,) = rig.step(rig.run(request, range(4))).stores
    rig.end(store)
    rig.finish(request)
    after = rig.scheduler.get_stats()
    for sample in ("lookup_tokens", "hit_tokens", "lookups_deferred"):
        assert after.get((sample,), 0) == before.get((sample,), 0)
    assert lookups == []
    # Its blocks are stored like any other's, in their own order. Blocks that existed before do not become younger.
    assert rig.manager.touched == [[key(2), key(3)]]
    rig.assert_drained()


def test_a_request_that_does_not_skip_reading_is_as_ever() -> None:
    rig = Rig()
    rig.store_prefix(8)
    request = rig.arrive(Unread("r", 9, skip_reading_prefix_cache=False))
    assert rig.ask(request) == (8, True)


def test_a_request_that_skips_reading_does_not_wait_for_its_old_stores() -> None:
    rig = Rig()
    request = Unread("r", 9)
    meta = rig.admit(request, [0, 1, 2])
    rig.step(preempted=["r"])
    assert rig.ask(request) == (0, False), "the engine takes no other answer"
    rig.alloc(request, [5, 6, 7])
    rig.end(*meta.stores, success=False)
    (store,) = rig.step(rig.run(request, [5, 6, 7])).stores
    assert store.source.block_ids.tolist() == [5, 6]


def test_a_request_that_skips_reading_is_no_reuse() -> None:
    manager = CPUOffloadingManager(8, store_threshold=2)
    scheduler = OffloadingConnectorScheduler(
        manager, EngineLayout((FULL,), BT, "test"), OffloadingConfig(cpu_bytes_to_use=1 << 20)
    )

    def serve(request: Request) -> int:
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        scheduler.update_state_after_alloc(request, ([0, 1],), 0)
        scheduled = ScheduledRequest(request.request_id, ([0, 1],), 0, request.num_tokens, True)
        stores = scheduler.build_connector_meta(EngineStep((scheduled,))).stores
        scheduler.request_finished(request)
        return len(stores)

    assert serve(Request("first", 8)) == 0
    assert [serve(Unread(f"unread{n}", 8)) for n in range(3)] == [0, 0, 0]
    assert serve(Request("second", 8)) == 1


# --------------------------------------------------------------------------------------------------- bad parameters


@pytest.mark.parametrize("params", [{"max_load_tokens": "s3cret" * 100}, "text", 7, [1]])
def test_a_request_with_bad_parameters_is_served_and_logged_once(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.store_prefix(8)
    for name in "abc":
        request = rig.arrive(Request(name, 9, kv_transfer_params=params))
        assert rig.ask(request) == (8, True)
        rig.finish(request)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.exc_info is None
    assert len(record.getMessage()) < 300
    assert record.getMessage().count("s3cret") < 10


def test_a_prompt_that_another_connector_gets_from_elsewhere_waits_for_nothing() -> None:
    rig = Rig()
    rig.store_prefix(8)
    lookups: list[object] = []
    lookup = rig.manager.lookup_prefix

    def counted(keys, req_context):
        lookups.append(keys)
        return lookup(keys, req_context)

    rig.manager.lookup_prefix = counted  # type: ignore[method-assign]
    request = rig.arrive(Request("r", 9, kv_transfer_params={"do_remote_prefill": True}))
    assert rig.ask(request) == (0, False)
    assert lookups == []
    rig.alloc(request, [0, 1, 2])
    # Loaded blocks are stored like any other request's, and after a failure the engine asks again, without the mark.
    assert len(rig.step(rig.run(request, [0, 1, 2])).stores) <= 1
    rig.step(preempted=["r"])
    request.kv_transfer_params = {"do_remote_prefill": False}
    assert rig.ask(request) == (8, True)
