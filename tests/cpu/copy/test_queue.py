# SPDX-License-Identifier: Apache-2.0
"""Order and results of the transfer queue, with gates instead of sleeps."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvoffload.base import Direction
from kvoffload.cpu.copy.host import CopyPlan, TransferQueue
from kvoffload.cpu.copy.plan import Extent

LOAD, STORE = Direction.LOAD, Direction.STORE


def extent(slots: set[int], gpu_blocks: set[int]) -> Extent:
    return Extent(frozenset(slots), frozenset(gpu_blocks))


class Gate:
    """A job that signals when it runs, and ends when the test lets it."""

    def __init__(self, log: list[str], name: str, num_bytes: int = 5) -> None:
        self.running, self.go = threading.Event(), threading.Event()
        self._log, self._name, self._num_bytes = log, name, num_bytes

    def plan(self) -> CopyPlan:
        return CopyPlan([self._run], self._num_bytes)

    def _run(self) -> None:
        self._log.append(self._name)
        self.running.set()
        assert self.go.wait(30)


@pytest.fixture(params=[1, 3])
def queue(request: pytest.FixtureRequest) -> Iterator[TransferQueue]:
    queue = TransferQueue(request.param)
    before = set(threading.enumerate())
    yield queue
    queue.shutdown()
    assert set(threading.enumerate()) <= before


def ends(queue: TransferQueue, direction: Direction) -> dict[int, bool]:
    return {result.job_id: result.success for result in queue.take_finished(direction)}


def test_a_process_without_room_for_threads_fails_jobs_until_it_has_some(
    queue: TransferQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        queue.submit(1, STORE, extent({0}, {0}), lambda: CopyPlan([], 0))
    assert ends(queue, STORE) == {1: False}
    queue.submit(2, STORE, extent({0}, {0}), lambda: CopyPlan([], 0))
    queue.wait([2])
    assert ends(queue, STORE) == {2: True}


def conflicts(first: tuple[Direction, Extent], second: tuple[Direction, Extent]) -> bool:
    """Return whether one writes memory that the other touches, by definition."""
    (one, left), (other, right) = first, second
    slots = bool(left.slots & right.slots) and (STORE in (one, other))
    return slots or (bool(left.gpu_blocks & right.gpu_blocks) and LOAD in (one, other))


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_keeps_every_order_that_matters(seed: int) -> None:
    chance = random.Random(seed)
    queue, log, lock = TransferQueue(4), [], threading.Lock()  # type: tuple[TransferQueue, list[tuple[str, int]], Any]

    def copy(job_id: int) -> CopyPlan:
        def run() -> None:
            with lock:
                log.append(("begins", job_id))
            with lock:
                log.append(("ends", job_id))

        return CopyPlan([run], 1)

    jobs: list[tuple[Direction, Extent]] = []
    for job_id in range(60):
        some = [set(chance.sample(range(12), chance.randint(1, 3))) for _ in range(2)]
        jobs.append((chance.choice([LOAD, STORE]), extent(*some)))
        queue.submit(job_id, *jobs[-1], functools.partial(copy, job_id))
    queue.wait(range(60))
    for later, earlier in itertools.combinations(reversed(range(60)), 2):
        if conflicts(jobs[earlier], jobs[later]):
            assert log.index(("ends", earlier)) < log.index(("begins", later))
    queue.shutdown()


@pytest.mark.parametrize("shared", ["slot", "gpu", "nothing"])
def test_loads_overtake_stores_of_other_memory_that_have_not_started(shared: str) -> None:
    queue, log = TransferQueue(1), []  # type: tuple[TransferQueue, list[str]]
    gates = [Gate(log, name) for name in ("running store", "store", "load")]
    for gate in gates[1:]:
        gate.go.set()
    queue.submit(1, STORE, extent({1}, {1}), gates[0].plan)
    assert gates[0].running.wait(30)
    queue.submit(2, STORE, extent({2}, {2}), gates[1].plan)
    slot, block = 2 if shared == "slot" else 3, 2 if shared == "gpu" else 3
    queue.submit(3, LOAD, extent({slot}, {block}), gates[2].plan)
    gates[0].go.set()
    queue.wait([1, 2, 3])
    assert log == ["running store", *(["load", "store"] if shared == "nothing" else ["store", "load"])]
    queue.shutdown()


@pytest.mark.parametrize("shared", ["slot", "gpu", "nothing"])
@pytest.mark.parametrize("directions", list(itertools.product(Direction, repeat=2)))
def test_jobs_on_the_same_memory_run_one_after_another_and_others_at_once(
    directions: tuple[Direction, Direction], shared: str
) -> None:
    queue, log = TransferQueue(2), []  # type: tuple[TransferQueue, list[str]]
    first, second = Gate(log, "first"), Gate(log, "second")
    second.go.set()
    queue.submit(1, directions[0], extent({1}, {1}), first.plan)
    queue.submit(2, directions[1], extent({1 if shared == "slot" else 2}, {1 if shared == "gpu" else 2}), second.plan)
    assert first.running.wait(30)
    if shared == "nothing":
        assert second.running.wait(30)
    else:
        with queue._lock:
            assert not queue._start_next()
        assert log == ["first"]
    first.go.set()
    queue.wait([1, 2])
    assert len(log) == 2
    queue.shutdown()


def fails() -> CopyPlan:
    raise RuntimeError("no plan")


def test_what_raises_is_a_failed_job_and_the_next_ones_go_on(queue: TransferQueue) -> None:
    def bad_part() -> None:
        raise OSError("no copy")

    queue.submit(1, STORE, extent({1}, {1}), fails)
    queue.submit(2, STORE, extent({1}, {1}), lambda: CopyPlan([bad_part, lambda: None], 7))
    queue.submit(3, STORE, extent({1}, {1}), lambda: CopyPlan([lambda: None] * 4, 7))
    queue.wait([1, 2, 3])
    results = {result.job_id: result for result in queue.take_finished(STORE)}
    assert {job: result.success for job, result in results.items()} == {1: False, 2: False, 3: True}
    assert [results[job].num_bytes for job in (1, 2, 3)] == [0, 0, 7]
    assert queue.take_finished(STORE) == []


def test_a_job_takes_as_long_as_its_parts_and_no_longer_than_it_was_there(queue: TransferQueue) -> None:
    took_s: dict[int, float] = {}

    def part(job: int) -> None:
        begin_s = time.monotonic()
        time.sleep(0.002)
        took_s[job] = time.monotonic() - begin_s

    begin_s = time.monotonic()
    for job in (1, 2):
        queue.submit(job, STORE, extent({1}, {1}), lambda job=job: CopyPlan([functools.partial(part, job)], 7))
    queue.wait([1, 2])
    there_s = time.monotonic() - begin_s
    seconds = {result.job_id: result.seconds for result in queue.take_finished(STORE)}
    assert all(took_s[job] <= seconds[job] <= there_s for job in (1, 2))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_no_error_takes_a_copying_thread_down(queue: TransferQueue, error: type[BaseException]) -> None:
    def part() -> None:
        raise error

    for job in range(4):
        queue.submit(job, LOAD, extent({1}, {job}), lambda: CopyPlan([part, part], 7))
    queue.submit(4, LOAD, extent({1}, {4}), lambda: CopyPlan([lambda: None], 7))
    queue.wait(range(5))
    assert ends(queue, LOAD) == {0: False, 1: False, 2: False, 3: False, 4: True}


def test_an_id_that_is_open_already_fails_and_does_not_disturb_the_first(queue: TransferQueue) -> None:
    gate = Gate([], "only")
    queue.submit(1, STORE, extent({1}, {1}), gate.plan)
    assert gate.running.wait(30)
    queue.submit(1, LOAD, extent({2}, {2}), gate.plan)
    assert ends(queue, LOAD) == {1: False}
    gate.go.set()
    queue.wait([1])
    assert ends(queue, STORE) == {1: True}


def test_shutdown_waits_for_what_runs_and_fails_the_rest() -> None:
    queue = TransferQueue(1)
    gates = [Gate([], str(number)) for number in range(3)]
    for number, gate in enumerate(gates):
        queue.submit(number, STORE, extent({1}, {number}), gate.plan)
    assert gates[0].running.wait(30)
    closing = threading.Thread(target=queue.shutdown)
    closing.start()
    queue.wait([1, 2])  # ended by the shutdown, while the first one still runs
    assert closing.is_alive()
    gates[0].go.set()
    closing.join(30)
    assert ends(queue, STORE) == {0: True, 1: False, 2: False}
    queue.submit(9, LOAD, extent({1}, {1}), gates[0].plan)
    assert ends(queue, LOAD) == {9: False}


def test_many_jobs_on_few_blocks_end_once_each_as_if_one_after_another(queue: TransferQueue) -> None:
    """Stores append to a slot's history and loads copy it: the outcome must equal running the jobs one by one."""
    slots: dict[int, list[int]] = {slot: [] for slot in range(3)}
    blocks: dict[int, list[int]] = {block: [block] for block in range(3)}
    expected_slots, expected_blocks = {k: list(v) for k, v in slots.items()}, {k: list(v) for k, v in blocks.items()}

    def copy(
        source: dict[int, list[int]], a: int, target: dict[int, list[int]], b: int, job: int
    ) -> Callable[[], CopyPlan]:
        def part() -> None:
            target[b] = [*source[a][-5:], job]

        return lambda: CopyPlan([part], 1)

    for job in range(300):
        slot, block = job * 7 % 3, job * 5 % 11 % 3
        touched = extent({slot}, {block})
        if job % 2:
            queue.submit(job, STORE, touched, copy(blocks, block, slots, slot, job))
            copy(expected_blocks, block, expected_slots, slot, job)().parts[0]()
        else:
            queue.submit(job, LOAD, touched, copy(slots, slot, blocks, block, job))
            copy(expected_slots, slot, expected_blocks, block, job)().parts[0]()
    queue.wait(range(300))
    assert (slots, blocks) == (expected_slots, expected_blocks)
    ended = [result.job_id for direction in Direction for result in queue.take_finished(direction)]
    assert sorted(ended) == list(range(300))
