# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.base import ReqContext
from kvoffload.cpu import CPUOffloadingManager, ReuseFilter
from kvoffload.cpu import reuse as reuse_module
from kvoffload.errors import ConfigError
from kvoffload.testing import key, keys


def announced(reuse: ReuseFilter, name: str) -> ReqContext:
    context = ReqContext(name)
    reuse.on_new_request(context)
    return context


def test_a_request_counts_a_key_once_however_it_asks() -> None:
    reuse = ReuseFilter(2)
    first = announced(reuse, "a")
    for _ in range(5):
        reuse.looked_up([key(1)], first)
        reuse.looked_up(keys(1, 2), first)
    assert reuse.offered(keys(1, 2), first) == []
    assert reuse.offered(keys(1, 2), first) == []
    assert (reuse.count(key(1)), reuse.count(key(2))) == (1, 1)
    second = announced(reuse, "b")
    reuse.looked_up([key(1)], second)
    assert reuse.offered(keys(2, 1, 3), second) == keys(2, 1)


def test_offers_of_a_request_that_reads_no_cache_do_not_count_but_are_filtered() -> None:
    reuse = ReuseFilter(2)
    unread = ReqContext("u", reads_cache=False)
    reuse.on_new_request(unread)
    assert reuse.offered(keys(1, 2), unread) == []
    assert reuse.count(key(1)) == 0
    for name in "ab":
        reuse.offered(keys(1), announced(reuse, name))
    assert reuse.offered(keys(1, 2), unread) == keys(1)
    assert reuse.count(key(1)) == 2
    reuse.on_request_finished(unread)
    reuse.check_invariants()


def test_interleaved_retries_do_not_inflate() -> None:
    reuse = ReuseFilter(3)
    contexts = [announced(reuse, name) for name in "ab"]
    for _ in range(10):
        for context in contexts:
            reuse.looked_up([key(1)], context)
    assert reuse.count(key(1)) == 2


def test_a_context_never_announced_counts_each_lookup_and_no_offer() -> None:
    reuse = ReuseFilter(2)
    stranger = ReqContext("stranger")
    assert reuse.offered(keys(1), stranger) == []
    assert reuse.count(key(1)) == 0
    reuse.looked_up([key(1)], stranger)
    assert reuse.offered(keys(1), stranger) == []
    reuse.looked_up([key(1)], stranger)
    assert reuse.offered(keys(1), stranger) == keys(1)


def test_a_finished_request_is_forgotten_and_its_counts_are_not() -> None:
    reuse = ReuseFilter(2)
    first = announced(reuse, "a")
    reuse.looked_up([key(1)], first)
    reuse.on_request_finished(first)
    reuse.on_request_finished(first)
    again = announced(reuse, "a")  # another request that bears the same id
    reuse.looked_up([key(1)], again)
    assert reuse.count(key(1)) == 2
    assert reuse._counted_by == {"a": {key(1)}}


def test_the_tracker_forgets_the_least_recently_counted() -> None:
    reuse = ReuseFilter(2, max_tracker_size=2)
    stranger = ReqContext("stranger")
    for number in (1, 2, 1, 3):
        reuse.looked_up([key(number)], stranger)
    assert [reuse.count(key(number)) for number in (1, 2, 3)] == [2, 0, 1]
    assert len(reuse) == 2
    reuse.check_invariants()


def test_what_a_request_counted_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse_module, "_MIN_REMEMBERED", 1)
    reuse = ReuseFilter(2, max_tracker_size=4)
    context = announced(reuse, "a")
    for number in range(1000):
        reuse.looked_up([key(number)], context)
        reuse.looked_up([key(number)], context)
        reuse.check_invariants()
    assert reuse.count(key(999)) == 1


@pytest.mark.parametrize(("threshold", "size"), [(1, 10), (0, 10), (-3, 10), (2, 0)])
def test_settings_that_make_no_filter(threshold: int, size: int) -> None:
    with pytest.raises(ConfigError, match="at least"):
        ReuseFilter(threshold, size)


def test_off_at_zero_and_one() -> None:
    assert [ReuseFilter.of(threshold, 10) for threshold in (0, 1)] == [None, None]
    reuse = ReuseFilter.of(2, 10)
    assert reuse is not None
    assert reuse.threshold == 2


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["new", "end", "look", "offer"]), st.integers(0, 4)),
        max_size=60,
    )
)
def test_equals_a_plain_oracle(steps: list[tuple[str, str, int]]) -> None:
    reuse = ReuseFilter(2, max_tracker_size=3)
    counts: dict[bytes, int] = {}  # least recently counted first
    memory: dict[str, set[bytes]] = {}

    def oracle_count(one: bytes) -> None:
        counts[one] = counts.pop(one, 0) + 1
        if len(counts) > 3:
            del counts[next(iter(counts))]

    for name, what, number in steps:
        context, one = ReqContext(name), key(number)
        if what == "new":
            reuse.on_new_request(context)
            memory.setdefault(name, set())
        elif what == "end":
            reuse.on_request_finished(context)
            memory.pop(name, None)
        else:
            known = name in memory
            if (known and one not in memory[name]) or (not known and what == "look"):
                oracle_count(one)
            if known:
                memory[name].add(one)
            if what == "look":
                reuse.looked_up([one], context)
            else:
                assert reuse.offered([one], context) == ([one] if counts.get(one, 0) >= 2 else [])
        assert {k: reuse.count(k) for k in counts} == counts
        assert len(reuse) == len(counts)
        reuse.check_invariants()


# ----------------------------------------------------------------------------------------- in the manager


def test_a_cold_prefix_of_any_length_is_stored_at_its_second_request() -> None:
    manager = CPUOffloadingManager(100, store_threshold=2)
    prefix = keys(*range(80))
    for name, expected in (("a", []), ("b", prefix)):
        context = ReqContext(name)
        manager.on_new_request(context)
        for _ in range(3):  # it waits
            assert manager.lookup_prefix(prefix, context) == [False]
        output = manager.prepare_store(prefix, context)
        assert output is not None
        assert output.keys_to_store == expected
        manager.complete_store(output.keys_to_store)
        manager.on_request_finished(context)
    assert manager.get_stats()[("reuse_filtered_blocks",)] == 80
    manager.check_invariants()


def test_a_filtered_block_that_is_here_is_neither_counted_nor_evicted() -> None:
    manager = CPUOffloadingManager(2, store_threshold=2)
    stranger = ReqContext("stranger")
    for number in (1, 1, 2, 2, 3, 3):
        manager.lookup(key(number), stranger)
    for number in (1, 2):
        output = manager.prepare_store(keys(number), stranger)
        assert output is not None
        manager.complete_store(output.keys_to_store)
    assert manager._filter is not None
    manager._filter._counts.clear()  # as if the tracker had been flooded
    for _ in range(2):
        manager.lookup(key(3), stranger)
    output = manager.prepare_store(keys(1, 3), stranger)
    assert output is not None
    assert (output.keys_to_store, output.evicted_keys) == (keys(3), keys(2))
    assert manager.get_stats()[("reuse_filtered_blocks",)] == 0


def test_an_offer_counts_also_when_there_is_no_room() -> None:
    manager = CPUOffloadingManager(1, store_threshold=2)
    first, second = ReqContext("a"), ReqContext("b")
    for context in (first, second):
        manager.on_new_request(context)
        manager.lookup(key(0), context)
    output = manager.prepare_store(keys(0), second)
    assert output is not None
    for context in (first, second):
        refused = manager.prepare_store(keys(0, 1), context)
    assert refused is None
    assert manager.get_stats()[("primary_stores_refused",)] == 1
    manager.complete_store(keys(0))
    third = ReqContext("c")
    manager.on_new_request(third)
    output = manager.prepare_store(keys(1), third)
    assert output is not None
    assert output.keys_to_store == keys(1)


@pytest.mark.parametrize("threshold", [0, 1])
def test_a_threshold_of_zero_or_one_stores_at_once(threshold: int) -> None:
    manager = CPUOffloadingManager(1, store_threshold=threshold)
    output = manager.prepare_store(keys(1), ReqContext("r"))
    assert output is not None
    assert output.keys_to_store == keys(1)
