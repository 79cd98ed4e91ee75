# SPDX-License-Identifier: Apache-2.0
"""The runner alone: every piece ends once, in lane order, in time or not at all."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from kvoffload.testing import ManualClock
from kvoffload.tiering.runner import Ended, Job, Lane, Overdue, TierRunner


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def runner(clock: ManualClock) -> Iterator[TierRunner]:
    made = TierRunner("test", 2, timeout_s=10, clock=clock)
    yield made
    assert made.shutdown(10) == 0


def collect(runner: TierRunner, count: int) -> list[Ended]:
    told, end = [], time.monotonic() + 30
    while len(told) < count:
        assert time.monotonic() < end, f"{len(told)} of {count} pieces ended"
        told += runner.poll()
        time.sleep(0.0005)
    return told


def test_every_item_is_answered_once(runner: TierRunner) -> None:
    done: Counter[int] = Counter()

    def work(start: int, stop: int) -> list[bool]:
        done.update(range(start, stop))
        return [index % 3 == 0 for index in range(start, stop)]

    job = Job(Lane.LOAD, 100, work)
    runner.submit(job, 7)
    assert runner.backlog(Lane.LOAD) == 100
    told = collect(runner, 15)
    assert [end.is_last for end in told] == [False] * 14 + [True]
    assert done == Counter(range(100))
    assert job.answers == [index % 3 == 0 for index in range(100)]
    assert runner.is_idle
    assert runner.backlog(Lane.LOAD) == 0


def test_an_error_is_the_answer_of_its_piece_alone(runner: TierRunner) -> None:
    def work(start: int, stop: int) -> list[bool]:
        if start == 4:
            raise OSError("no")
        return [True] * (stop - start)

    job = Job(Lane.STORE, 8, work)
    runner.submit(job, 4)
    errors = {end.start: end.error for end in collect(runner, 2)}
    assert errors[0] is None
    assert isinstance(errors[4], OSError)
    assert job.answers == [True] * 4 + [False] * 4


def test_too_few_answers_are_an_error(runner: TierRunner) -> None:
    runner.submit(Job(Lane.STORE, 3, lambda start, stop: [True]), 3)
    (end,) = collect(runner, 1)
    assert isinstance(end.error, ValueError)


def test_lanes_go_in_order(clock: ManualClock) -> None:
    runner, gate, order = TierRunner("one", 1, clock=clock), threading.Event(), []

    def job(lane: Lane, name: str) -> Job:
        def work(start: int, stop: int) -> list[bool]:
            gate.wait()
            order.append(name)
            return [True]

        return Job(lane, 1, work)

    begun = threading.Event()
    runner.submit(Job(Lane.STORE, 1, lambda start, stop: [begun.set() or gate.wait()]), 1)
    begun.wait()
    for lane, name in [
        (Lane.STORE, "s1"),
        (Lane.LOAD, "l1"),
        (Lane.LOOKUP, "k"),
        (Lane.STORE, "s2"),
        (Lane.LOAD, "l2"),
    ]:
        runner.submit(job(lane, name), 1)
    gate.set()
    collect(runner, 6)
    assert order == ["k", "l1", "l2", "s1", "s2"]
    assert runner.shutdown(10) == 0


def test_long_upkeep_holds_up_nothing(runner: TierRunner) -> None:
    gate = threading.Event()
    runner.submit(Job(Lane.UPKEEP, 1, lambda start, stop: [gate.wait()]), 1)
    runner.submit(Job(Lane.LOAD, 4, lambda start, stop: [True]), 1)
    assert all(end.job.lane is Lane.LOAD for end in collect(runner, 4))
    assert runner.drain(10)
    gate.set()
    collect(runner, 1)


def test_a_stuck_piece_is_reported_once_and_stays_open(runner: TierRunner, clock: ManualClock) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def hang(start: int, stop: int) -> list[bool]:
        begun.release()
        return [gate.wait()]

    job = Job(Lane.LOAD, 2, hang)
    runner.submit(job, 1)
    begun.acquire()
    begun.acquire()
    late = Job(Lane.STORE, 1, lambda start, stop: [True])
    runner.submit(late, 1)
    clock.advance(5)
    assert runner.newly_overdue() == []
    clock.advance(6)
    assert runner.newly_overdue() == [job, job]
    assert runner.num_stuck((Lane.LOAD,)) == 2
    assert runner.num_stuck((Lane.STORE,)) == 0
    (end,) = runner.poll()
    assert end.job is late
    assert isinstance(end.error, Overdue)
    assert not end.was_begun
    clock.advance(100)
    assert runner.newly_overdue() == []
    assert not runner.drain(0.01)
    assert runner.poll() == []
    gate.set()
    collect(runner, 2)
    assert job.answers == [True, True]
    assert runner.num_stuck() == 0
    assert runner.drain(10)


def test_shutdown_says_how_many_hang(clock: ManualClock) -> None:
    runner, gate = TierRunner("stuck", 2, clock=clock), threading.Event()
    begun = threading.Event()
    runner.submit(Job(Lane.LOAD, 1, lambda start, stop: [begun.set() or gate.wait()]), 1)
    begun.wait()
    assert runner.shutdown(0.05) == 1
    gate.set()
    assert runner.shutdown(10) == 0


@pytest.mark.parametrize("seed", range(5))
def test_any_mixture_ends_each_piece_once(seed: int, clock: ManualClock) -> None:
    rng = random.Random(seed)
    runner = TierRunner("mix", 3, timeout_s=10, clock=clock)
    told: Counter[tuple[int, int]] = Counter()
    jobs = []
    for _ in range(200):
        match rng.randrange(8):
            case 0:
                runner.cancel_queued(rng.choice(list(Lane)))
            case 1:
                clock.advance(rng.random() * 8)
                runner.newly_overdue()
            case _:
                job = Job(rng.choice(list(Lane)), rng.randrange(1, 9), lambda start, stop: [True] * (stop - start))
                jobs.append(job)
                runner.submit(job, rng.randrange(1, 5))
        told.update((id(end.job), end.start) for end in runner.poll())
    assert runner.drain(30)
    assert runner.shutdown(30) == 0
    told.update((id(end.job), end.start) for end in runner.poll())
    assert set(told.values()) == {1}
    assert runner.is_idle
    assert all(job.open_pieces == 0 for job in jobs)
    assert {job_id for job_id, _ in told} == {id(job) for job in jobs}
    assert [runner.backlog(lane) for lane in Lane] == [0] * 4
