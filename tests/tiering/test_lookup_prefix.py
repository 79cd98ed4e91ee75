# SPDX-License-Identifier: Apache-2.0
"""Compare ``lookup_prefix`` of the tiering manager with a loop of ``lookup``: two managers get the same calls."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest
from tests.sizes import by_size
from tests.tiering.rig import Rig, keys, prefix, stats_of_blocks

from kvoffload.base import OffloadingManager, OffloadKey, OffloadPolicy, ReqContext
from kvoffload.cpu import POLICIES, BlockStatus
from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.tiering.load_policy import BlockWorth

BLOCK = OffloadPolicy.BLOCK_LEVEL


def rigs(rng: random.Random) -> list[Rig]:
    num_blocks, threshold = rng.randint(2, 16), rng.choice([1, 1, 2])
    share = rng.choice([0.75, 0.5, 1.0, 0.3])
    made = [
        Rig(
            num_blocks,
            (BLOCK, BLOCK),
            primary_options={"store_threshold": threshold},
            promotion_share=share,
            max_wait_s=5.0,
        )
        for _ in range(2)
    ]
    for index, name in enumerate("ab"):
        length = rng.randint(0, 14)
        for rig in made:
            rig.below(prefix(length, of=name), tier=index)
    return made


def state(rig: Rig) -> object:
    resident = {
        key: block.is_ready for name in "ab" for key in prefix(14, of=name) if (block := rig.primary.slots.get(key))
    }
    log = [(call.name, call.req_id, call.keys) for tier in rig.tiers for call in tier.log]
    return (
        resident,
        log,
        stats_of_blocks(rig.manager.get_stats()),
        [(key, event.removed) for event in rig.manager.take_events() for key in event.keys],
    )


@pytest.mark.parametrize("seed", range(by_size(30, 120)))
def test_answers_and_effects_are_those_of_the_loop(seed: int) -> None:
    """No block has a choice of sources, and no read fails. ``lookup_prefix`` would choose for all blocks together, and
    would end the claims on blocks behind one that is lost."""
    rng = random.Random(seed)
    left, right = rigs(rng)
    contexts = [ReqContext(f"r{number}") for number in range(4)]
    for context in contexts[:3]:  # the last one is never announced
        for rig in (left, right):
            rig.manager.on_new_request(context)
    for _ in range(40):
        context, name = rng.choice(contexts), rng.choice("ab")
        asked: list[OffloadKey] = prefix(rng.randint(1, 14), of=name)
        if rng.random() < 0.2:
            asked = [*asked, *keys(0, of="b"), *asked[:2]]
        action = rng.choice(["ask"] * 4 + ["store", "finish", "wait", "step"])
        unknown = rng.random() < 0.1 and name == "a"  # of which the other tier has none
        answers: dict[Rig, list[bool | None]] = {}
        for rig in (left, right):
            manager = rig.manager
            if unknown:
                rig.tier.answers[asked[-1]] = None
            if action == "ask":
                ask = OffloadingManager.lookup_prefix if rig is right else type(manager).lookup_prefix
                answers[rig] = ask(manager, asked, context)
            elif action == "store":
                if rig.primary.slots.num_free + rig.primary.slots.num_idle > 8:
                    rig.store(asked[:4], context, finish=False)
            elif action == "finish":
                rig.finish()
            elif action == "wait":
                rig.clock.advance(1.0)
            rig.step()
        assert len(answers) == 0 or answers[left] == answers[right]
        assert state(left) == state(right)


def test_a_prefix_is_reserved_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(64)
    rig.below(prefix(40))
    rig.store(prefix(64, of="old"), rig.start("before"))
    evictions: list[int] = []
    prepare_write = rig.primary.prepare_write

    def reserve(*arguments: object) -> object:
        output = prepare_write(*arguments)
        evictions.append(len(output.evicted_keys))
        return output

    monkeypatch.setattr(rig.primary, "prepare_write", reserve)
    assert rig.ask(prefix(40), rig.start("r")) == [None] * 40
    assert evictions == [40]


def test_a_block_that_the_run_before_it_evicts_is_a_miss() -> None:
    rig = Rig(4)
    rig.store(keys(0, of="b"), rig.start("first"))
    rig.store(prefix(3, of="c"), rig.start("second"))
    rig.tier.blocks.clear()
    rig.below(prefix(1))
    assert rig.ask([*prefix(1), *keys(0, of="b")], rig.start("r")) == [None, False]


def test_waiting_for_a_long_prefix_polls_the_tier_once_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(64)
    rig.below(prefix(40))
    request = rig.start("r")
    rig.ask(prefix(40), request)
    rig.step()
    polls: list[None] = []
    poll = rig.tier.get_finished_jobs
    monkeypatch.setattr(rig.tier, "get_finished_jobs", lambda: polls.append(None) or poll())
    assert rig.ask(prefix(40), request) == [None] * 40
    assert len(polls) == 1
    rig.tier.finish()
    assert rig.ask(prefix(40), request) == [True] * 40


def test_what_follows_a_block_that_was_taken_is_looked_at_as_ever() -> None:
    rig = Rig(4)
    asked = keys(0, 1)
    rig.below(asked)
    rig.store(asked[:1], rig.start("first"), finish=False)
    rig.finish()
    request = rig.start("r")
    assert rig.ask(asked[1:], request) == [None]
    rig.finish()
    rig.finish()
    assert rig.ask(asked, request) == [True, True], "its head is claimed last, and taken first"
    rig.store(prefix(3, of="q"), rig.start("runs"))
    assert rig.primary.slots.get(asked[0]) is None and rig.primary.slots.get(asked[1]) is not None
    assert rig.ask(asked, request) == [None, True]


def test_a_block_that_was_taken_is_counted_once_per_lookup() -> None:
    rig = Rig(4, primary_options={"store_threshold": 4})
    rig.below(prefix(3))
    unknown = ReqContext("never announced")
    assert rig.ask(prefix(3), unknown) == [None] * 3
    rig.finish()
    rig.finish()
    for key in prefix(4, of="q"):
        for _ in range(3):
            rig.ask([key], ReqContext(f"{key!r}"))
    runs = rig.start("runs")
    rig.store(prefix(4, of="q"), runs)
    assert rig.ask(prefix(3), unknown) == [False]
    assert rig.write(keys(0), runs) == [], "asked for twice and offered once, where it takes four"


class Refusing(LRUCachePolicy):
    """Has nothing to evict while it refuses, although blocks are idle."""

    refuses = False

    def evict(
        self, n: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey] = ()
    ) -> list[tuple[OffloadKey, BlockStatus]] | None:
        return None if n and self.refuses else super().evict(n, protected)


READY, GUEST, ABSENT = keys(0, of="old")[0], keys(0, of="guest")[0], keys(0, of="absent")[0]


@pytest.mark.parametrize(
    "asked",
    [
        prefix(3),
        [*prefix(2), *prefix(3)],
        [*prefix(2), READY, *prefix(3)[2:]],
        [*prefix(2), GUEST, *prefix(3)[2:]],
        [*prefix(2), ABSENT],
        prefix(20),
    ],
    ids=["all", "repeated", "then ready", "then unknown", "then absent", "beyond the share"],
)
@pytest.mark.parametrize("loops", [False, True])
def test_a_prefix_ends_with_the_first_block_that_the_policy_has_no_room_for(
    asked: list[OffloadKey], loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    POLICIES.register("test-refusing", Refusing)
    try:
        rig = Rig(16, cache_policy="test-refusing")
    finally:
        POLICIES.unregister("test-refusing")
    rig.store(prefix(16, of="old"), rig.start("writer"))
    rig.below(prefix(20))
    rig.tier.answers[GUEST] = None
    request = rig.start("r")
    monkeypatch.setattr(Refusing, "refuses", True)
    ask = OffloadingManager.lookup_prefix if loops else type(rig.manager).lookup_prefix
    assert ask(rig.manager, asked, request) == [False]
    rig.manager.check_invariants()
    rig.step()
    assert not rig.tier.jobs
    assert rig.manager.get_stats()["promotions_refused", "no_room"] == 1
    monkeypatch.setattr(Refusing, "refuses", False)
    assert rig.wait_for_prefix(prefix(3), request) == 3, "it is asked for again, and there is room"


def test_a_request_that_waits_is_unchanged_until_an_event_concerns_it() -> None:
    rig = Rig(64)
    rig.below(prefix(40))
    request, other = rig.start("r"), rig.start("other")
    unchanged = rig.manager.is_unchanged
    assert not unchanged(request)
    assert rig.ask(prefix(40), request) == [None] * 40
    for _ in range(20):
        rig.step()
        rig.store(keys(*range(3), of="q"), other, finish=False)  # actions of other requests do not count as a change
        assert unchanged(request)
    rig.finish()
    assert not unchanged(request)
    assert rig.ask(prefix(40), request) == [True] * 40
    for _ in range(3):
        rig.step()
        assert unchanged(request), "it waits for the engine"
        assert rig.ask(prefix(40), request) == [True] * 40
    rig.load(prefix(40), request)
    assert not unchanged(request), "it does not wait any more"


def test_a_request_is_looked_up_again_when_the_last_of_its_blocks_has_arrived() -> None:
    """Reads of large blocks end one by one. Each end was followed by a lookup of the whole prefix."""
    rig = Rig(64, block_worth=BlockWorth(5 << 20))
    rig.below(prefix(40))
    request = rig.start("r")
    assert rig.ask(prefix(40), request) == [None] * 40
    rig.step()
    jobs = [*rig.tier.jobs]
    assert len(jobs) > 10
    for job in jobs:
        assert rig.manager.is_unchanged(request)
        rig.tier.finish([job])
        rig.step()
    assert not rig.manager.is_unchanged(request)
    assert rig.ask(prefix(40), request) == [True] * 40


def test_with_a_reuse_filter_every_lookup_counts_and_none_is_left_out() -> None:
    rig = Rig(64, primary_options={"store_threshold": 4})
    rig.below(prefix(10))
    unknown, writer = ReqContext("never announced"), rig.start("writer")
    for _ in range(3):
        assert rig.ask(prefix(10), unknown) == [None] * 10
        rig.step()
    rig.manager.reset_cache()
    assert rig.write(prefix(10), writer) == prefix(10), "asked for three times, and offered once"


def test_a_claimed_block_that_is_evicted_or_written_is_asked_for_again() -> None:
    rig = Rig(4)
    rig.below(keys(1))
    runs, request = rig.start("runs"), rig.start("r")
    written = rig.write(keys(0), runs)
    for _ in range(3):
        assert rig.ask(keys(0, 1), request) == [None, None]
        rig.step()
    rig.manager.complete_store(written, runs)
    assert rig.ask(keys(0, 1), request) == [True, None]
    rig.finish()
    for _ in range(3):
        assert rig.ask(keys(0, 1), request) == [True, True]
        rig.step()
    rig.finish()
    rig.tier.blocks.clear()
    rig.store(prefix(4, of="q"), runs)  # takes all there is
    assert rig.ask(keys(0, 1), request) == [False]


def test_a_request_that_finds_nothing_does_not_wait_and_is_asked_again_after_news_or_at_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(8)
    monkeypatch.setattr(rig.tier, "take_news", list)
    unchanged = rig.manager.is_unchanged
    blocks = prefix(3)
    ahead, at_turn, other = (rig.start(name) for name in ("ahead", "turn", "other"))
    ahead.tokens_ahead = 1000
    for context in (ahead, at_turn):
        assert rig.ask(blocks, context) == [False]
        assert unchanged(context)
        assert rig.manager._requests[context.req_id].wait is None
    rig.store(prefix(1, of="b"), other)
    assert unchanged(ahead), "a store of other blocks says nothing about it"
    rig.below(prefix(1))
    assert unchanged(ahead)
    ahead.tokens_ahead = None
    for context in (ahead, at_turn):
        assert not unchanged(context), "at its turn, it may find blocks that another process has written meanwhile"
    assert rig.ask(blocks, ahead) == [None, False]
    assert not unchanged(at_turn), "its first block is being read now"
    rig.step()
    rig.finish()
    assert rig.ask(blocks, at_turn) == [True, False]


def test_a_request_whose_blocks_arrived_in_time_is_not_over_although_they_are_taken_in_late() -> None:
    rig = Rig(8, max_wait_s=5.0)
    rig.below(prefix(1))
    request = rig.start("r")
    assert rig.ask(prefix(2), request) == [None, False]
    rig.step()
    rig.clock.advance(4.0)
    rig.tier.finish()
    for result in rig.tier._results:
        result.ended_s = rig.clock()
    rig.below(prefix(2))
    rig.clock.advance(2.0)
    assert rig.ask(prefix(2), request) == [True, None]


@pytest.mark.parametrize("end", ["store", "finish", "reset"])
def test_nothing_is_left_of_a_request_that_found_nothing(end: str) -> None:
    rig = Rig(8)
    context = rig.start("r")
    assert rig.ask(prefix(2), context) == [False]
    if end == "store":
        rig.store(prefix(2), context)
    elif end == "finish":
        rig.manager.on_request_finished(context)
    else:
        rig.manager.reset_cache()
        assert not rig.manager.is_unchanged(context)
    assert not rig.manager._waits.watched
    rig.step()


def test_a_request_that_found_nothing_is_asked_in_each_step_if_a_tier_cannot_tell_its_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(8)
    monkeypatch.setattr(rig.tier, "take_news", lambda: None)
    context = rig.start("r")
    assert rig.ask(prefix(2), context) == [False]
    rig.step()
    assert not rig.manager.is_unchanged(context)
