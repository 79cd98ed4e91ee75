# SPDX-License-Identifier: Apache-2.0
"""Guarded tiers and their jobs: whatever a tier raises is a miss, and every job ends once."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from tests.tiering.rig import Memory, keys

from kvoffload.base import OffloadingEvent, ReqContext
from kvoffload.testing import FakeTier
from kvoffload.tiering.base import JobResult
from kvoffload.tiering.tier_jobs import GuardedTier, TierJob, TierJobs

REQUEST = ReqContext("r")


def break_calls(tier: FakeTier, *names: str) -> None:
    """Makes these methods raise."""

    def broken(*_: Any) -> Any:
        raise OSError("broken on plan")

    for name in names:
        setattr(tier, name, broken)


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier(Memory(4).create_kv_memoryview())


def submit(jobs: TierJobs, tier: GuardedTier, *numbers: int) -> None:
    assert jobs.submit(TierJob(tier, REQUEST, keys(*numbers), range(len(numbers)), is_promotion=False))


def test_a_job_ends_once_with_the_keys_that_succeeded(tier: FakeTier) -> None:
    guarded = GuardedTier(0, tier)
    jobs = TierJobs([guarded])
    submit(jobs, guarded, 1, 2)
    assert jobs.take_finished() == []
    tier.finish(lose=keys(2))
    (job,) = jobs.take_finished()
    assert (job.succeeded, job.failed) == (keys(1), keys(2))
    assert len(jobs.in_flight) == 0


def test_results_for_unknown_jobs_and_for_those_of_other_tiers_are_ignored(tier: FakeTier) -> None:
    other = FakeTier(Memory(4).create_kv_memoryview())
    tiers = [GuardedTier(0, tier), GuardedTier(1, other)]
    jobs = TierJobs(tiers)
    submit(jobs, tiers[0], 1)
    submit(jobs, tiers[1], 2)
    (first,), (second,) = tier.jobs, other.jobs
    tier._results += [JobResult(second, success=True), JobResult(99, success=True)]
    assert jobs.take_finished() == []
    tier._results += [JobResult(first, success=True)] * 2
    assert [job.job_id for job in jobs.take_finished()] == [first]
    assert len(jobs.in_flight) == 1


def test_what_is_no_result_ends_no_job_and_hides_no_other(tier: FakeTier) -> None:
    guarded = GuardedTier(0, tier)
    jobs = TierJobs([guarded])
    submit(jobs, guarded, 1)
    submit(jobs, guarded, 2)
    first, second = tier.jobs
    odd: list[Any] = [
        None,
        (first, True),
        JobResult(first, True, successful_keys=5),  # type: ignore[arg-type]
        JobResult([first], True),  # type: ignore[arg-type]
    ]
    tier._results += [*odd, JobResult(second, success=True, ended_s=math.nan)]
    assert [(job.job_id, job.ended_s) for job in jobs.take_finished()] == [(second, None)]
    assert list(jobs.in_flight) == [first], "its slots may still be written"


def test_a_job_that_the_tier_did_not_take_is_returned_failed(tier: FakeTier) -> None:
    break_calls(tier, "submit_store")
    guarded = GuardedTier(0, tier)
    jobs = TierJobs([guarded])
    job = TierJob(guarded, REQUEST, keys(1), [0], is_promotion=False)
    assert not jobs.submit(job)
    assert (job.succeeded, job.failed) == ([], keys(1))
    assert len(jobs.in_flight) == 0


def test_a_reset_marks_the_jobs_in_flight(tier: FakeTier) -> None:
    guarded = GuardedTier(0, tier)
    jobs = TierJobs([guarded])
    submit(jobs, guarded, 1)
    jobs.mark_stale()
    submit(jobs, guarded, 2)
    assert [job.is_stale for job in jobs.in_flight.values()] == [True, False]


def test_whatever_a_tier_raises_becomes_its_mildest_answer_and_is_logged_once(
    tier: FakeTier, caplog: pytest.LogCaptureFixture
) -> None:
    calls = ("lookup", "get_finished_jobs", "on_new_request", "touch", "has_pending_work", "get_stats", "take_events")
    break_calls(tier, *calls)
    guarded = GuardedTier(0, tier)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert guarded.lookup(keys(1)[0], REQUEST) is False
            assert guarded.get_finished_jobs() == []
            assert guarded.wants_whole_request(REQUEST) is False
            assert guarded.has_pending_work() is False
            assert (guarded.get_stats(), list(guarded.take_events())) == ({}, [])
            guarded.touch(keys(1), REQUEST)
    assert guarded.faults == 2 * len(calls)
    assert len(caplog.records) == len(calls)


def test_what_is_no_event_and_what_no_metric_counts_are_left_out(tier: FakeTier) -> None:
    guarded = GuardedTier(0, tier)
    event = OffloadingEvent(keys(1), "fake", removed=False)
    for events in ([event, "none"], [OffloadingEvent(["no key"], "fake", removed=False)], 7, [None]):  # type: ignore[list-item]
        tier.take_events = lambda events=events: events  # type: ignore[method-assign, misc]
        assert list(guarded.take_events()) == []
    tier.take_events = lambda: iter([event])  # type: ignore[method-assign, assignment, return-value]
    assert list(guarded.take_events()) == [event]
    good = {("tier_blocks", "fake"): 3, ("tier_batch_seconds", "fake", "read", "count", "+Inf"): 2, ("its_own",): 1.5}
    bad = {
        ("tier_blocks",): 1,
        ("tier_batch_seconds", "fake", "read", "count", "7.77"): 1,
        ("tier_blocks", 5): 1,
        "tier_blocks": 1,
        (): 1,
        ("tier_bytes", "fake"): None,
    }
    tier.get_stats = lambda: {**bad, **good, ("tier_quota_bytes", "fake"): np.int64(4)}  # type: ignore[method-assign, dict-item]
    assert guarded.get_stats() == {**good, ("tier_quota_bytes", "fake"): 4}
    assert type(guarded.get_stats()["tier_quota_bytes", "fake"]) is int


@pytest.mark.parametrize("answer", [1, 0, np.True_, np.array([True, False]), "yes"])
def test_a_lookup_is_answered_by_true_or_false_whatever_a_tier_returns(tier: FakeTier, answer: Any) -> None:
    guarded = GuardedTier(0, tier)
    tier.answers[keys(1)[0]] = answer
    found = guarded.lookup(keys(1)[0], REQUEST)
    assert type(found) is bool
    assert guarded.faults == isinstance(answer, np.ndarray)
    tier.on_new_request = lambda context: None  # type: ignore[method-assign, assignment, return-value]
    assert guarded.wants_whole_request(REQUEST) is False
    tier.take_news = lambda: answer  # type: ignore[method-assign, assignment, return-value]
    assert guarded.take_news() in (None, [])
    tier.take_news = lambda: [*keys(1), answer]  # type: ignore[method-assign, list-item]
    assert guarded.take_news() == keys(1), "no key"
    tier.holds = lambda asked: [True]  # type: ignore[method-assign]
    assert guarded.holds(keys(1, 2)) == [True, False], "what is not answered is not held"
