# SPDX-License-Identifier: Apache-2.0
"""Test laws 2, 5 and 6: which blocks are read from tiers, the effect of failures, and how long requests wait."""

from __future__ import annotations

import pytest
from tests.tiering.rig import Rig, keys, prefix, stats_of_blocks

from kvoffload.base import OffloadPolicy

BLOCK = OffloadPolicy.BLOCK_LEVEL


# ---------------------------------------------------------------------------------------------------- 2 promotion


def test_a_miss_comes_up_from_the_first_tier_that_has_it() -> None:
    rig = Rig(policies=(BLOCK, BLOCK, BLOCK))
    rig.below(keys(0), tier=1)
    rig.below(keys(0), tier=2)
    request = rig.start("r")
    assert rig.ask(keys(0), request) == [None]
    rig.step()
    assert [len(tier.calls("submit_load")) for tier in rig.tiers] == [0, 1, 0]
    rig.finish()
    assert rig.ask(keys(0), request) == [True]
    rig.load(keys(0), request)


def test_loads_of_a_step_are_one_batch_per_tier_and_request() -> None:
    rig = Rig(num_blocks=16, policies=(BLOCK, BLOCK))
    rig.below(keys(0, 1, 4), tier=0)
    rig.below(keys(2, 3), tier=1)
    one, two = rig.start("one"), rig.start("two")
    assert rig.ask(keys(0, 1, 2, 3), one) == [None] * 4
    assert rig.ask(keys(4), two) == [None]
    assert not any(tier.jobs for tier in rig.tiers), "nothing goes out before the step ends"
    assert rig.manager.has_pending_work()
    rig.step()
    calls = [[(call.req_id, list(call.keys)) for call in tier.calls("submit_load")] for tier in rig.tiers]
    assert calls == [[("one", keys(0, 1)), ("two", keys(4))], [("one", keys(2, 3))]]
    assert all(job.is_promotion for tier in rig.tiers for job in tier.jobs.values())


def test_nobody_promotes_a_block_twice() -> None:
    rig = Rig()
    rig.below(keys(0))
    one, two = rig.start("one"), rig.start("two")
    assert rig.ask(keys(0), one) == [None]
    assert rig.ask(keys(0), two) == [None]
    assert rig.ask(keys(0), one) == [None]
    rig.step()
    assert rig.ask(keys(0), two) == [None]
    rig.step()
    assert len(rig.tier.calls("submit_load")) == 1


def test_no_slot_to_be_had_is_a_miss() -> None:
    rig = Rig(num_blocks=2)
    rig.below(keys(0))
    rig.write(prefix(2, of="q"), rig.start("writer"))  # both slots are being written
    request = rig.start("r")
    assert rig.ask(keys(0), request) == [False]
    rig.step()
    assert not rig.tier.jobs
    assert rig.manager.get_stats()["promotions_refused", "no_room"] == 1


def test_a_tier_that_must_find_out_defers_and_another_may_answer_first() -> None:
    rig = Rig(policies=(BLOCK, BLOCK))
    request = rig.start("r")
    (key,) = keys(0)
    rig.tiers[0].answers[key] = None
    assert rig.ask([key], request) == [None]
    rig.below([key], tier=1)
    assert rig.ask([key], request) == [None]
    rig.finish()
    rig.finish()
    assert rig.ask([key], request) == [True]


def test_a_tier_that_answers_no_after_finding_out_is_a_miss() -> None:
    rig = Rig()
    request = rig.start("r")
    (key,) = keys(0)
    rig.tier.answers[key] = None
    assert rig.ask([key], request) == [None]
    rig.step()
    rig.tier.answers[key] = False
    assert rig.ask([key], request) == [False]


def test_the_end_of_a_promotion_is_seen_within_the_step_it_happened_in() -> None:
    rig = Rig()
    rig.below(keys(0))
    request = rig.start("r")
    assert rig.ask(keys(0), request) == [None]
    rig.step()
    assert rig.ask(keys(0), request) == [None]
    rig.tier.finish()
    assert rig.ask(keys(0), request) == [True]


def test_promotion_goes_past_the_reuse_filter() -> None:
    # The filter decides which blocks are worth storing. Blocks in a tier have already passed it.
    rig = Rig(primary_options={"store_threshold": 3})
    rig.below(prefix(2))
    assert rig.wait_for_prefix(prefix(2), rig.start("r")) == 2


def test_the_reuse_filter_keeps_what_was_seen_once_away_from_the_tiers() -> None:
    rig = Rig(num_blocks=16, primary_options={"store_threshold": 2})
    for req_id, expected in (("first", 0), ("second", 4)):
        request = rig.start(req_id)
        assert rig.ask(prefix(4), request) == [False]
        rig.store(prefix(4), request)
        assert sum(len(call.keys) for call in rig.tier.calls("submit_store")) == expected
        rig.manager.on_request_finished(request)
    assert rig.manager.get_stats()["reuse_filtered_blocks",] == 4


def test_lookup_prefix_is_the_loop() -> None:
    def story(rig: Rig) -> list[list[bool | None]]:
        answers = []
        rig.below(keys(2, 3, 5))
        rig.store(keys(0, 1), rig.start("w"))
        request = rig.start("r")
        for _ in range(4):
            if rig is looping:
                found: list[bool | None] = []
                for key in prefix(8):
                    found.append(rig.manager.lookup(key, request))
                    if found[-1] is False:
                        break
            else:
                found = rig.manager.lookup_prefix(prefix(8), request)
            answers.append(found)
            rig.step()
            rig.finish()
        return answers

    looping, batched = Rig(), Rig()
    assert story(looping) == story(batched)
    assert looping.tier.log == batched.tier.log
    assert stats_of_blocks(looping.manager.get_stats()) == stats_of_blocks(batched.manager.get_stats())


def test_shared_prefix_waiters_are_all_answered_by_one_load() -> None:
    rig = Rig(num_blocks=8)
    rig.below(prefix(4))
    requests = [rig.start(f"r{i}") for i in range(20)]
    for request in requests:
        assert rig.ask(prefix(4), request) == [None] * 4
    rig.step()
    rig.finish()
    for request in requests:
        assert rig.ask(prefix(4), request) == [True] * 4
        rig.load(prefix(4), request)
    assert len(rig.tier.calls("submit_load")) == 1


@pytest.mark.parametrize("submitted", [True, False])
def test_a_promotion_begun_for_an_aborted_request_serves_the_others(submitted: bool) -> None:
    rig = Rig()
    rig.below(prefix(3))
    first, second = rig.start("first"), rig.start("second")
    rig.ask(prefix(3), first)
    rig.ask(prefix(3), second)
    if submitted:
        rig.step()
    rig.manager.on_request_finished(first)
    rig.manager.check_invariants()
    rig.step()
    rig.finish()
    assert rig.ask(prefix(3), second) == [True] * 3
    rig.load(prefix(3), second)
    assert len(rig.tier.calls("submit_load")) == 1


# ------------------------------------------------------------------------------------------------------ 5 failure


def test_a_failed_promotion_frees_its_slots_and_is_a_miss_for_good() -> None:
    rig = Rig(num_blocks=4)
    rig.below(prefix(3))
    request = rig.start("r")
    assert rig.ask(prefix(3), request) == [None] * 3
    rig.step()
    rig.finish(success=False, tear=True)
    for _ in range(3):
        assert rig.ask(prefix(3), request) == [False]
        rig.step()
    assert len(rig.tier.calls("submit_load")) == 1
    assert rig.manager.get_stats()["promotions", "failed"] == 3
    assert rig.manager.prepare_store(prefix(4, of="q"), request) is not None, "all four slots are free"


def test_another_request_may_try_again() -> None:
    rig = Rig()
    rig.below(keys(0))
    first = rig.start("first")
    rig.ask(keys(0), first)
    rig.step()
    rig.finish(success=False)
    assert rig.wait_for_prefix(keys(0), rig.start("second")) == 1


def test_everybody_who_waited_for_a_failed_block_has_a_miss() -> None:
    # Otherwise each of them would try the same bad block in turn.
    rig = Rig()
    rig.below(keys(0))
    requests = [rig.start(f"r{i}") for i in range(5)]
    for request in requests:
        assert rig.ask(keys(0), request) == [None]
    rig.step()
    rig.finish(success=False)
    for request in requests:
        assert rig.ask(keys(0), request) == [False]


def test_what_did_load_of_a_failed_batch_is_kept() -> None:
    rig = Rig()
    rig.below(prefix(4))
    request = rig.start("r")
    rig.ask(prefix(4), request)
    rig.step()
    rig.finish(lose=keys(2), tear=True)
    assert rig.ask(prefix(4), request) == [True, True, False]
    rig.load(prefix(2), request)
    assert rig.ask(keys(3), request) == [True]
    rig.load(keys(3), request)


def test_a_tier_that_raises_is_a_tier_that_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(policies=(BLOCK, BLOCK))
    rig.below(prefix(2), tier=1)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("tier is gone")

    for name in (
        "lookup",
        "submit_store",
        "get_finished_jobs",
        "on_new_request",
        "on_request_finished",
        "touch",
        "on_schedule_end",
        "has_pending_work",
        "drain_jobs",
        "take_events",
        "get_stats",
        "shutdown",
    ):
        monkeypatch.setattr(rig.tiers[0], name, broken)
    request = rig.start("r")
    rig.store(keys(7), request)
    assert rig.wait_for_prefix(prefix(2), request) == 2
    rig.manager.touch(prefix(2), request)
    rig.load(prefix(2), request)
    rig.manager.on_request_finished(request)
    list(rig.manager.take_events())
    rig.manager.get_stats()
    rig.manager.reset_cache()
    rig.manager.check_invariants()
    rig.manager.shutdown()


def test_a_load_that_the_tier_refuses_by_raising_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.below(keys(0))
    request = rig.start("r")
    rig.ask(keys(0), request)

    def broken(job: object) -> None:
        raise OSError("no such tier")

    monkeypatch.setattr(rig.tier, "submit_load", broken)
    rig.step()
    assert rig.ask(keys(0), request) == [False]
    assert not rig.manager.has_pending_work()


def test_results_that_nobody_asked_for_are_ignored() -> None:
    from kvoffload.tiering.base import JobResult

    rig = Rig(policies=(BLOCK, BLOCK))
    rig.below(keys(0))
    request = rig.start("r")
    rig.ask(keys(0), request)
    rig.step()
    (job_id,) = rig.tiers[0].jobs
    rig.store(keys(5), request, finish=False)  # gives the other tier a job, so that it is asked at all
    rig.tiers[1]._results += [JobResult(job_id, True), JobResult(10_000, True)]
    rig.step()
    assert rig.ask(keys(0), request) == [None], "only the tier that has the job can end it"
    rig.finish()
    assert rig.ask(keys(0), request) == [True]


# ----------------------------------------------------------------------------------------------------- 6 patience


def test_a_slow_promotion_becomes_a_miss_but_keeps_its_slot_until_it_ends() -> None:
    rig = Rig(num_blocks=2, max_wait_s=5.0)
    rig.below(keys(0))
    request = rig.start("r")
    assert rig.ask(keys(0), request) == [None]
    rig.step()
    rig.clock.advance(4.9)
    assert rig.ask(keys(0), request) == [None]
    rig.clock.advance(0.2)
    assert rig.ask(keys(0), request) == [False]
    assert rig.manager.get_stats()["lookups_out_of_patience",] == 1
    assert rig.manager.prepare_store(prefix(2, of="q"), request) is None, "the late read may still write into it"
    rig.manager.on_request_finished(request)
    assert rig.manager.prepare_store(prefix(2, of="q"), request) is None
    rig.finish()
    assert rig.wait_for_prefix(keys(0), rig.start("next")) == 1, "it serves the next one"
    assert len(rig.tier.calls("submit_load")) == 1


@pytest.mark.parametrize("asks_meanwhile", [False, True])
def test_a_request_that_runs_out_of_patience_counts_once(asks_meanwhile: bool) -> None:
    """Whether an engine asks in each of ten steps, or in none until its wait has expired at the end of one."""
    rig = Rig(max_wait_s=5.0)
    rig.below(prefix(3))
    request = rig.start("r")
    assert rig.ask(prefix(3), request) == [None] * 3
    rig.step()
    rig.clock.advance(5.1)
    for _ in range(10):
        if asks_meanwhile:
            assert rig.ask(prefix(3), request) == [False]
        rig.step()
    assert rig.manager.get_stats()["lookups_out_of_patience",] == 1
    assert rig.ask(prefix(3), request) == [False]
    assert rig.manager.get_stats()["lookups_out_of_patience",] == 1


def test_a_job_that_never_ends_is_waited_for_until_its_tier_calls_it_overdue() -> None:
    """``load_policy="always"`` has no deadline, so each later request would spend its whole time limit on that job."""
    rig = Rig(max_wait_s=5.0)
    rig.below(prefix(3))
    first = rig.start("first")
    assert rig.ask(prefix(1), first) == [None]
    rig.step()
    assert rig.ask(prefix(3), rig.start("second")) == [None] * 3
    rig.step()
    job, _ = rig.tier.jobs.values()
    job.is_overdue = True
    later = rig.start("later")
    assert rig.ask(prefix(3), later) == [False]
    assert len(rig.tier.jobs) == 2
    rig.finish()
    assert rig.wait_for_prefix(prefix(3), later) == 3


def test_remote_lookups_are_waited_for_only_so_long() -> None:
    rig = Rig(max_wait_s=5.0)
    request = rig.start("r")
    (key,) = keys(0)
    rig.tier.answers[key] = None
    assert rig.ask([key], request) == [None]
    rig.clock.advance(5.0)
    assert rig.ask([key], request) == [False]
    rig.tier.answers[key] = True
    assert rig.ask([key], request) == [False], "no new wait is begun"
    assert rig.ask([key], rig.start("next")) == [None]
    assert rig.ask(keys(5), request) == [False]
    assert rig.manager.get_stats()["lookups_out_of_patience",] == 1, "misses that cost no hit do not count"


def test_patience_is_one_budget_for_the_whole_request() -> None:
    rig = Rig(num_blocks=8, max_wait_s=5.0)
    rig.below(keys(0, 1))
    request = rig.start("r")
    assert rig.ask(keys(0), request) == [None]
    rig.clock.advance(3.0)
    rig.step()
    rig.finish()
    assert rig.ask(keys(0), request) == [True]
    rig.load(keys(0), request)
    rig.clock.advance(100.0)  # the time limit does not run while a request runs
    assert rig.ask(keys(1), request) == [None]
    rig.clock.advance(1.9)
    assert rig.ask(keys(1), request) == [None]
    rig.clock.advance(0.2)
    assert rig.ask(keys(1), request) == [False]


def test_ready_blocks_are_true_however_late_it_is() -> None:
    rig = Rig(max_wait_s=5.0)
    rig.below(keys(0, 1))
    rig.store(keys(2), rig.start("w"))
    request = rig.start("r")
    rig.ask(keys(0), request)
    rig.step()
    rig.clock.advance(60.0)
    rig.finish()
    assert rig.ask(keys(0), request) == [True]
    assert rig.ask(keys(2), request) == [True]
    assert rig.ask(keys(1), request) == [False]


def test_claims_of_a_request_nobody_asks_for_any_more_end_with_its_patience() -> None:
    rig = Rig(num_blocks=4, max_wait_s=5.0, promotion_share=0.5)
    rig.below(prefix(2))
    rig.below(prefix(2, of="q"))
    rig.ask(prefix(2), rig.start("forgotten"))
    rig.step()
    rig.finish()
    assert rig.ask(prefix(2, of="q"), rig.start("early")) == [False]
    rig.clock.advance(5.0)
    rig.step()
    assert rig.ask(prefix(2, of="q"), rig.start("late")) == [None, None]


def test_claims_end_with_their_own_requests_patience_whoever_else_waits() -> None:
    """A request with little of its time limit left waits for the engine beside one that started to wait earlier, with
    its full time limit."""
    rig = Rig(num_blocks=8, max_wait_s=5.0, promotion_share=0.5)
    for name in "abc":
        rig.below(prefix(2, of=name))
    rig.below(keys(1))
    short, long = rig.start("short"), rig.start("long")
    rig.ask(keys(1), short)
    rig.step()
    rig.clock.advance(4.0)
    rig.finish()
    rig.load(keys(1), short)
    assert rig.ask(prefix(2, of="a"), long) == rig.ask(prefix(2, of="b"), short) == [None] * 2
    rig.step()
    rig.finish()
    assert rig.ask(prefix(2, of="a"), long) == rig.ask(prefix(2, of="b"), short) == [True] * 2
    assert rig.ask(prefix(2, of="c"), rig.start("early")) == [False], "all that may be claimed is claimed"
    rig.clock.advance(1.0)
    rig.step()
    assert rig.ask(prefix(2, of="c"), rig.start("late")) == [None] * 2


def test_waiting_for_the_engine_costs_no_patience() -> None:
    """Its blocks were there after 0.1 s; then the engine had no room for it, and others stored."""
    rig = Rig(num_blocks=16, max_wait_s=5.0)
    rig.below(prefix(8))
    waiting, running = rig.start("waiting"), rig.start("running")
    assert rig.ask(prefix(8), waiting) == [None] * 8
    rig.step()
    rig.clock.advance(0.1)
    rig.finish()
    assert rig.ask(prefix(8), waiting) == [True] * 8
    for number in range(20):
        rig.clock.advance(1.0)
        rig.ask(prefix(8), waiting)
        rig.step()
        rig.store(prefix(4, of=f"o{number}"), running)
        rig.finish()
        rig.manager.check_invariants()
    assert rig.wait_for_prefix(prefix(8), waiting) == 8
    rig.load(prefix(8), waiting)
    stats = rig.manager.get_stats()
    assert ("lookups_out_of_patience",) not in stats or not stats["lookups_out_of_patience",]
    waits = {sample: value for sample, value in stats.items() if sample[0] == "promotion_wait_seconds"}
    assert 0 < max(waits.values()) <= 5, "no wait was longer than its promotion took"


def waited_s(rig: Rig) -> float:
    """All waits for answers that have ended, together."""
    stats = rig.manager.get_stats()
    return sum(value for sample, value in stats.items() if sample[:2] == ("promotion_wait_seconds", "sum"))


@pytest.mark.parametrize("what", ["promotion", "failed promotion", "store", "lookup", "two groups"])
def test_a_wait_ends_when_its_blocks_arrive_although_the_engine_asks_nobody(what: str) -> None:
    """The engine's steps are full for ten seconds. That must not use up the request's time limit and cost its hits."""
    rig = Rig(num_blocks=16, max_wait_s=5.0)
    request, writer = rig.start("r"), rig.start("w")
    groups = [keys(0, 1), keys(2, 3)] if what == "two groups" else [keys(0, 1)]
    rig.below(prefix(4))
    if what == "store":
        written = rig.write(keys(0, 1), writer)
    if what == "lookup":
        rig.tier.answers.update(dict.fromkeys(keys(0, 1)))
    for asked in groups:
        assert rig.ask(asked, request) == [None, None]
    rig.step()
    rig.clock.advance(0.1)
    if what == "store":
        rig.manager.complete_store(written, writer)
    rig.tier.answers.clear()
    rig.finish(success=what != "failed promotion")
    for _ in range(20):
        rig.clock.advance(0.5)
        rig.step()
    expected = {"lookup": None, "failed promotion": False}.get(what, True)
    for asked in groups:
        assert rig.ask(asked, request)[0] is expected
    rig.step()
    rig.clock.advance(0.2)
    rig.finish()
    assert [rig.wait_for_prefix(asked, request) for asked in groups] == [0 if expected is False else 2] * len(groups)
    rig.below(keys(9))
    assert rig.ask(keys(9), request) == [None], "it has patience left"
    rig.manager.on_request_finished(request)
    assert rig.manager.get_stats()["lookups_out_of_patience",] == 0
    assert waited_s(rig) == pytest.approx(0.3 if what == "lookup" else 0.1)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_wait_ends_with_its_last_block_in_whatever_order_they_arrive(late: int) -> None:
    rig = Rig(num_blocks=16, policies=(BLOCK,) * 3, max_wait_s=5.0)
    for tier in range(3):
        rig.below(keys(tier), tier)
    request = rig.start("r")
    assert rig.ask(prefix(3), request) == [None] * 3
    rig.step()
    for tier in range(3):
        if tier != late:
            rig.tiers[tier].finish()
    for _ in range(8):
        rig.clock.advance(0.5)
        rig.step()
    rig.tiers[late].finish()
    rig.step()
    for _ in range(20):
        rig.clock.advance(0.5)
        rig.step()
    assert rig.ask(prefix(3), request) == [True] * 3
    rig.load(prefix(3), request)
    assert waited_s(rig) == pytest.approx(4.0)


def test_a_block_that_does_not_arrive_takes_the_patience_of_whom_nobody_asks_for() -> None:
    rig = Rig(num_blocks=16, policies=(BLOCK,) * 2, max_wait_s=5.0)
    rig.below(keys(0), 0)
    rig.below(keys(1), 1)
    request = rig.start("r")
    assert rig.ask(prefix(2), request) == [None] * 2
    rig.step()
    rig.tiers[0].finish()
    for _ in range(10):
        rig.clock.advance(0.5)
        rig.step()
    assert rig.ask(prefix(2), request) == [True, False]
    rig.below(keys(5))
    assert rig.ask(keys(5), request) == [False], "its patience is spent"
    assert waited_s(rig) == pytest.approx(5.0)


@pytest.mark.parametrize("asks_first", [False, True])
def test_a_step_of_ten_seconds_takes_no_patience(asks_first: bool) -> None:
    """A tier that knows when its jobs ended reports it, because nothing polls it within the step."""
    rig = Rig(num_blocks=16, max_wait_s=5.0)
    rig.below(keys(0, 1))
    request = rig.start("r")
    assert rig.ask(keys(0), request) == [None]
    rig.step()
    rig.tier.finish(ended_s=rig.clock() + 0.1)
    rig.clock.advance(10.0)
    if not asks_first:
        rig.step()
    assert rig.ask(keys(0), request) == [True]
    rig.load(keys(0), request)
    assert waited_s(rig) == pytest.approx(0.1)
    assert rig.wait_for_prefix(keys(1), request) == 1


@pytest.mark.parametrize("first", [0, 1])
def test_a_group_without_an_answer_keeps_patience_running(first: int) -> None:
    """The engine asks once for each group: here, one group is in host memory, and a tier never answers for the
    other."""
    rig = Rig(num_blocks=8, max_wait_s=5.0)
    rig.store(keys(0), rig.start("w"))
    (unknown,) = keys(1)
    rig.tier.answers[unknown] = None
    request = rig.start("r")
    groups = [keys(0), [unknown]]
    groups = groups[first:] + groups[:first]
    for _ in range(10):
        assert sorted(rig.ask(blocks, request)[0] is None for blocks in groups) == [False, True]
        rig.step()
        rig.clock.advance(0.5)
    assert all(rig.ask(blocks, request)[0] is not None for blocks in groups), "five seconds"


def test_a_wait_for_a_read_that_had_ended_before_is_no_wait() -> None:
    """Such a wait had a negative duration, and must not extend its request's time limit."""
    rig = Rig(max_wait_s=5.0)
    rig.below(keys(0, 1))
    first, second = rig.start("first"), rig.start("second")
    assert rig.ask(keys(0), first) == [None]
    rig.step()
    rig.clock.advance(3)
    assert rig.ask(keys(0), second) == [None]
    rig.finish(ended_s=rig.clock() - 2)
    assert rig.ask(keys(0), second) == [True]
    rig.load(keys(0), second)
    assert waited_s(rig) == 0
    assert rig.ask(keys(1), second) == [None]
    rig.clock.advance(5)
    rig.step()
    assert rig.ask(keys(1), second) == [False]


def test_a_wait_that_was_never_begun_is_not_measured() -> None:
    rig = Rig(num_blocks=4, promotion_share=0.25)
    rig.below(prefix(8))
    assert rig.ask(prefix(1), rig.start("first")) == [None], "all that may be promoted"
    for number in range(5):
        request = rig.start(f"r{number}")
        assert rig.ask(prefix(8)[1:], request) == [False]
        rig.manager.on_request_finished(request)
    assert not [sample for sample in rig.manager.get_stats() if sample[0] == "promotion_wait_seconds"]


def test_no_patience_at_all_means_no_promotion() -> None:
    rig = Rig(max_wait_s=0.0)
    rig.below(keys(0))
    assert rig.ask(keys(0), rig.start("r")) == [False]
    rig.step()
    assert not rig.tier.jobs


def test_a_store_that_never_ends_is_waited_for_by_no_request_that_asks_later() -> None:
    """Each of them would wait for its whole time budget."""
    rig = Rig(4, max_wait_s=5.0, primary_options={"max_wait_s": 5.0})
    rig.primary.slots._clock = rig.clock
    blocks = prefix(2)
    assert rig.write(blocks, rig.start("writer")) == blocks
    assert rig.ask(blocks, rig.start("early")) == [None, None]
    rig.clock.advance(5.0)
    rig.step()
    assert rig.ask(blocks, rig.start("late")) == [False]
    rig.manager.complete_store(blocks, rig.start("again"))
    assert rig.ask(blocks, rig.start("later")) == [True, True]
