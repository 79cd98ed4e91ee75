# SPDX-License-Identifier: Apache-2.0
"""The runner alone: each slice ends once, queues are served in order, and deadlines are kept."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload.testing import ManualClock
from kvoffload.tiering.runner import IoQueue, IoResult, IoStatus, IoTask, TierRunner


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def runner(clock: ManualClock) -> Iterator[TierRunner]:
    made = TierRunner("test", 2, timeout_s=10, clock=clock)
    yield made
    assert made.shutdown(10) == 0


def collect(runner: TierRunner, count: int) -> list[IoResult]:
    results, end = [], time.monotonic() + 120
    while len(results) < count:
        assert time.monotonic() < end, f"{len(results)} of {count} slices ended"
        results += runner.take_results()
        time.sleep(0.0005)
    return results


def test_every_item_gets_its_outcome_once(runner: TierRunner) -> None:
    done: Counter[int] = Counter()

    def work(start: int, stop: int) -> list[bool]:
        done.update(range(start, stop))
        return [index % 3 == 0 for index in range(start, stop)]

    task = IoTask(IoQueue.LOAD, 100, work)
    runner.submit(task, 7)
    assert runner.backlog(IoQueue.LOAD) == 100
    results = collect(runner, 15)
    assert [result.is_last for result in results] == [False] * 14 + [True]
    assert done == Counter(range(100))
    outcomes = {result.start + at: good for result in results for at, good in enumerate(result.outcomes)}
    assert outcomes == {index: index % 3 == 0 for index in range(100)}
    assert not runner.num_open_slices
    assert runner.backlog(IoQueue.LOAD) == 0


class Odd:
    def __bool__(self) -> bool:
        raise TypeError("neither true nor false")


def test_outcomes_are_foreign_and_end_no_thread(runner: TierRunner) -> None:
    """A plug-in's numpy array of booleans must not end the threads that handle it."""
    answers: list[object] = [np.array([True, False]), (1, 0), [Odd(), Odd()], None, 7]
    for _ in range(3):  # more often than there are threads
        for answer in answers:
            runner.submit(IoTask(IoQueue.LOAD, 2, lambda start, stop, answer=answer: answer), 2)
    results = collect(runner, 3 * len(answers))
    done = [result.outcomes for result in results if result.status is IoStatus.DONE]
    assert done == [[True, False]] * 6
    assert all(type(outcome) is bool for outcomes in done for outcome in outcomes)
    assert sum(result.status is IoStatus.FAILED for result in results) == 9


def test_an_error_fails_its_slice_alone(runner: TierRunner) -> None:
    def work(start: int, stop: int) -> list[bool]:
        if start == 4:
            raise OSError("no")
        return [True] * (stop - start)

    task = IoTask(IoQueue.STORE, 8, work)
    runner.submit(task, 4)
    results = {result.start: result for result in collect(runner, 2)}
    assert (results[0].status, results[0].error) == (IoStatus.DONE, None)
    assert results[0].outcomes == [True] * 4
    assert results[4].status is IoStatus.FAILED
    assert isinstance(results[4].error, OSError)
    assert results[4].outcomes == [False] * 4


@pytest.mark.parametrize("fails", [False, True])
def test_a_slice_takes_as_long_as_its_work(runner: TierRunner, clock: ManualClock, fails: bool) -> None:
    took_s: list[float] = []

    def work(start: int, stop: int) -> list[bool]:
        begin_s = time.perf_counter()
        time.sleep(0.002)
        took_s.append(time.perf_counter() - begin_s)
        if fails:
            raise OSError("no")
        return [True]

    clock.advance(7)
    begin_s = time.perf_counter()
    runner.submit(IoTask(IoQueue.LOAD, 1, work), 1)
    (result,) = collect(runner, 1)
    assert took_s[0] <= result.seconds <= time.perf_counter() - begin_s
    assert result.ended_s == clock()


def test_too_few_outcomes_are_an_error(runner: TierRunner) -> None:
    runner.submit(IoTask(IoQueue.STORE, 3, lambda start, stop: [True]), 3)
    (result,) = collect(runner, 1)
    assert result.status is IoStatus.FAILED
    assert isinstance(result.error, ValueError)


def test_queues_are_served_in_order(clock: ManualClock) -> None:
    runner, gate, order = TierRunner("one", 1, timeout_s=30, clock=clock), threading.Event(), []

    def task(queue: IoQueue, name: str) -> IoTask:
        def work(start: int, stop: int) -> list[bool]:
            gate.wait()
            order.append(name)
            return [True]

        return IoTask(queue, 1, work)

    begun = threading.Semaphore(0)
    for queue in (IoQueue.STORE, IoQueue.LOAD):  # so that neither thread takes anything before all is queued
        runner.submit(IoTask(queue, 1, lambda start, stop: [begun.release() or gate.wait()]), 1)
        begun.acquire()
    for queue, name in [
        (IoQueue.STORE, "s1"),
        (IoQueue.LOAD, "l1"),
        (IoQueue.LOOKUP, "k"),
        (IoQueue.STORE, "s2"),
        (IoQueue.LOAD, "l2"),
    ]:
        runner.submit(task(queue, name), 1)
    gate.set()
    collect(runner, 7)
    assert order[:2] == ["k", "l1"]
    order.remove("l2")  # stores may begin as soon as the last read has begun
    assert order == ["k", "l1", "s1", "s2"]
    assert runner.shutdown(10) == 0


def test_long_upkeep_delays_nothing_and_has_no_deadline(runner: TierRunner, clock: ManualClock) -> None:
    gate = threading.Event()
    runner.submit(IoTask(IoQueue.UPKEEP, 1, lambda start, stop: [gate.wait()]), 1)
    runner.submit(IoTask(IoQueue.LOAD, 4, lambda start, stop: [True]), 1)
    assert all(result.task.queue is IoQueue.LOAD for result in collect(runner, 4))
    assert runner.drain(10)
    clock.advance(100)
    assert runner.take_results() == []
    assert runner.num_overdue() == 0
    gate.set()
    (result,) = collect(runner, 1)
    assert result.status is IoStatus.DONE


def test_an_overdue_slice_is_returned_once_and_stays_open(runner: TierRunner, clock: ManualClock) -> None:
    gate, begun = threading.Event(), threading.Semaphore(0)

    def hang(start: int, stop: int) -> list[bool]:
        begun.release()
        return [gate.wait()]

    task = IoTask(IoQueue.LOAD, 2, hang)
    runner.submit(task, 1)
    begun.acquire()
    begun.acquire()
    late = [IoTask(queue, 1, lambda start, stop: [True]) for queue in (IoQueue.LOAD, IoQueue.STORE)]
    for each in late:  # the load first: no store begins while it is queued
        runner.submit(each, 1)
    clock.advance(5)
    assert runner.take_results() == []
    clock.advance(6)
    overdue = runner.take_results()
    assert [(result.task, result.status, result.is_last) for result in overdue] == [(task, IoStatus.OVERDUE, False)] * 2
    assert runner.num_overdue((IoQueue.LOAD,)) == 2
    assert runner.num_overdue((IoQueue.STORE,)) == 0
    assert runner.ended
    results = runner.take_results()
    assert [(result.task, result.status, result.error) for result in results] == [
        (each, IoStatus.CANCELLED, None) for each in late
    ]
    assert not runner.ended
    clock.advance(100)
    assert runner.take_results() == []
    assert not runner.drain(0.01)
    assert runner.take_results() == []
    gate.set()
    assert [result.outcomes for result in collect(runner, 2)] == [[True], [True]]
    assert runner.num_overdue() == 0
    assert runner.drain(10)


def test_shutdown_returns_how_many_threads_hang(clock: ManualClock) -> None:
    runner, gate = TierRunner("hung", 2, timeout_s=30, clock=clock), threading.Event()
    begun = threading.Event()
    runner.submit(IoTask(IoQueue.LOAD, 1, lambda start, stop: [begun.set() or gate.wait()]), 1)
    begun.wait()
    assert runner.shutdown(0.05) == 1
    gate.set()
    assert runner.shutdown(10) == 0


def ends(runner: TierRunner) -> list[tuple[int, int]]:
    results = runner.take_results()
    return [(id(result.task), result.start) for result in results if result.status is not IoStatus.OVERDUE]


@pytest.mark.parametrize("seed", range(5))
def test_in_any_mixture_each_slice_ends_once(seed: int, clock: ManualClock) -> None:
    rng = random.Random(seed)
    runner = TierRunner("mix", 3, timeout_s=10, clock=clock)
    ended: Counter[tuple[int, int]] = Counter()
    tasks = []
    for _ in range(200):
        match rng.randrange(8):
            case 0:
                runner.cancel_queued(rng.choice(list(IoQueue)))
            case 1:
                clock.advance(rng.random() * 8)
            case _:
                queue, num_items = rng.choice(list(IoQueue)), rng.randrange(1, 9)
                task = IoTask(queue, num_items, lambda start, stop: [True] * (stop - start))
                tasks.append(task)
                runner.submit(task, rng.randrange(1, 5))
        ended.update(ends(runner))
    assert runner.drain(30)
    assert runner.shutdown(30) == 0
    ended.update(ends(runner))
    assert set(ended.values()) == {1}
    assert not runner.num_open_slices
    assert all(task.num_open_slices == 0 for task in tasks)
    assert {task_id for task_id, _ in ended} == {id(task) for task in tasks}
    assert [runner.backlog(queue) for queue in IoQueue] == [0] * 4


def test_stores_occupy_no_thread_of_the_reads_and_wait_for_those_that_are_queued(clock: ManualClock) -> None:
    runner, gate, reading = TierRunner("pools", 1, timeout_s=30, clock=clock), threading.Event(), threading.Event()
    begun, order = threading.Semaphore(0), list[str]()

    def work(name: str, gate: threading.Event) -> IoTask:
        def wait(start: int, stop: int) -> list[bool]:
            begun.release()
            gate.wait()
            order.append(name)
            return [True]

        return IoTask(IoQueue.STORE if name.startswith("store") else IoQueue.LOAD, 1, wait)

    runner.submit(work("store 1", gate), 1)
    begun.acquire()
    runner.submit(work("load 1", reading), 1)
    begun.acquire()
    for name in ("load 2", "store 2"):
        runner.submit(work(name, reading), 1)
    gate.set()
    assert [result.task.queue for result in collect(runner, 1)] == [IoQueue.STORE]
    assert runner._begin_next((IoQueue.STORE,)) is None, "a load is queued"
    assert order == ["store 1"]
    reading.set()
    collect(runner, 3)
    assert sorted(order) == ["load 1", "load 2", "store 1", "store 2"]
    assert runner.shutdown(10) == 0


def test_while_reads_are_queued_one_store_begins_for_eight_reads(clock: ManualClock) -> None:
    runner, order = TierRunner("share", 1, timeout_s=30, clock=clock), list[str]()
    let, begun = {"r": threading.Semaphore(0), "w": threading.Semaphore(0)}, threading.Semaphore(0)

    def task(queue: IoQueue) -> IoTask:
        name = "w" if queue is IoQueue.STORE else "r"

        def work(start: int, stop: int) -> list[bool]:
            order.append(name)
            begun.release()
            assert let[name].acquire(timeout=60)
            return [True]

        return IoTask(queue, 1, work)

    def begin() -> None:
        assert begun.acquire(timeout=60)

    for queue in (IoQueue.STORE, IoQueue.LOAD):  # both threads are at work before anything is queued
        runner.submit(task(queue), 1)
        begin()
    for _ in range(30):
        runner.submit(task(IoQueue.LOAD), 1)
    for _ in range(3):
        runner.submit(task(IoQueue.STORE), 1)
    let["w"].release(4)  # no store waits for anything but reads
    for num_reads in range(2, 31):
        let["r"].release()
        begin()
        if num_reads in (8, 16, 24):
            begin()  # a store
            assert order.count("w") == 1 + num_reads // 8
        assert runner._queues[IoQueue.LOAD], "a disk that is never idle"
    assert order.count("w") == 4
    let["r"].release(2)
    collect(runner, 35)
    assert runner.shutdown(10) == 0


def test_a_callback_that_raises_ends_no_thread() -> None:
    runner = TierRunner("test", 1, timeout_s=60)

    def fail() -> None:
        raise ValueError("foreign")

    runner.on_ended = fail
    for _ in range(3):
        runner.submit(IoTask(IoQueue.LOAD, 1, lambda start, stop: [True]), 1)
        assert runner.drain(60)
    assert [result.status for result in runner.take_results()] == [IoStatus.DONE] * 3
    assert runner.shutdown(60) == 0
