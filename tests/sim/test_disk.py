# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.sim.disk import Contents, Link, SimDisk, VirtualClock
from kvoffload.testing import keys
from kvoffload.tiering.base import JobMetadata

REQUEST = ReqContext("r")


class Rig:
    """A disk of four blocks of 100 bytes. Each link moves 100 bytes a second, half a second after it was asked."""

    def __init__(self, steps_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.disk = SimDisk(Contents(4), 100, [Link(100.0, 0.5)], [Link(100.0, 0.5)], self.clock, steps_s=steps_s)
        self._last_job = 0

    def submit(self, blocks: list[OffloadKey], is_promotion: bool = False) -> int:
        self._last_job += 1
        job = JobMetadata(self._last_job, blocks, np.arange(len(blocks)), is_promotion, REQUEST)
        (self.disk.submit_load if is_promotion else self.disk.submit_store)(job)
        return self._last_job

    def has(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.disk.lookup(keys(number)[0], REQUEST)]

    def drain(self) -> None:
        while self.disk.has_pending_work():
            self.disk.drain_jobs()
            self.disk.get_finished_jobs()


def test_a_link_queues_transfers() -> None:
    link = Link(bytes_per_s=10.0, latency_s=1.0)
    assert link.queue(5.0, 20) == 8.0
    assert link.queue(6.0, 10) == 10.0
    assert link.queue(20.0, 0) == 20.0


def test_a_block_is_there_once_the_clock_has_passed_the_end_of_its_write() -> None:
    rig = Rig()
    job_id = rig.submit(keys(1, 2))
    assert rig.disk.next_end_s() == 2.5
    assert rig.has(1, 2) == []
    assert list(rig.disk.get_finished_jobs()) == []
    rig.clock.advance_to(2.5)
    (result,) = rig.disk.get_finished_jobs()
    assert (result.job_id, result.success) == (job_id, True)
    assert rig.has(1, 2) == [1, 2]
    assert rig.disk.written_blocks == 2
    assert rig.disk.next_end_s() is None


def test_steps_make_each_answer_late_and_hold_up_no_other() -> None:
    rig = Rig(steps_s=5.0)
    for number in (1, 2):
        rig.submit(keys(number))
    ends = []
    while (end_s := rig.disk.next_end_s()) is not None:
        ends.append(end_s)
        rig.clock.advance_to(end_s)
        rig.disk.get_finished_jobs()
    assert ends == [6.5, 8.0]


def test_a_read_takes_time_and_names_what_it_found() -> None:
    rig = Rig()
    rig.submit(keys(1))
    rig.drain()
    start_s = rig.clock.now_s
    rig.submit(keys(1, 9), is_promotion=True)
    assert rig.disk.next_end_s() == pytest.approx(start_s + 1.5)
    rig.disk.drain_jobs()
    (result,) = rig.disk.get_finished_jobs()
    assert not result.success
    assert result.successful_keys == keys(1)
    assert rig.disk.read_blocks == 1


def test_reads_and_writes_are_uses_and_the_least_recent_block_is_evicted() -> None:
    rig = Rig()
    rig.submit(keys(1, 2, 3, 4))
    rig.drain()
    rig.submit(keys(2, 1), is_promotion=True)  # recency now: 3, 4, 2, 1
    rig.drain()
    rig.submit(keys(5, 6))
    rig.drain()
    assert rig.has(1, 2, 3, 4, 5, 6) == [1, 2, 5, 6]
    assert rig.disk.contents.index.num_evicted == 2


def test_a_write_without_room_fails_at_once() -> None:
    rig = Rig()
    rig.submit(keys(1, 2, 3, 4))
    job_id = rig.submit(keys(5))
    (result,) = rig.disk.get_finished_jobs()
    assert (result.job_id, result.success) == (job_id, False)


class Sharers:
    """Machines, each with a link of its own speed, that share a store."""

    def __init__(self, *bytes_per_s: float, **more: float) -> None:
        self.clock = VirtualClock()
        contents = Contents(4, is_shared=True, **more)
        self.ways = [SimDisk(contents, 100, [Link(each, 0.0)], [Link(each, 0.0)], self.clock) for each in bytes_per_s]

    def write(self, machine: int, *numbers: int) -> None:
        job = JobMetadata(1, keys(*numbers), np.arange(len(numbers)), False, REQUEST)
        self.ways[machine].submit_store(job)

    def seen_by(self, machine: int, number: int, at_s: float) -> bool | None:
        self.clock.advance_to(at_s)
        self.ways[machine].get_finished_jobs()
        return self.ways[machine].lookup(keys(number)[0], REQUEST)


def test_a_block_that_several_machines_write_is_there_when_the_first_has_written_it() -> None:
    sharers = Sharers(10.0, 100.0, 1.0, 1.0)
    sharers.write(0, 1)  # ends at 10 s
    sharers.write(1, 1)  # at 1 s
    assert sharers.seen_by(2, 1, 0.5) is False
    assert sharers.seen_by(3, 1, 2.0) is True
    sharers.clock.advance_to(10.0)
    for way in sharers.ways:
        way.get_finished_jobs()
    assert [way.written_blocks for way in sharers.ways] == [1, 1, 0, 0], "it crossed both links"


def test_a_store_is_not_asked_again_at_once_for_what_it_lacked() -> None:
    sharers = Sharers(100.0, 100.0)
    sharers.write(0, 1)
    assert sharers.seen_by(1, 1, 0.5) is False
    assert sharers.seen_by(1, 1, 1.2) is False
    assert sharers.seen_by(0, 1, 1.2) is True
    assert sharers.seen_by(1, 1, 1.5) is False, "the store is asked, and the answer comes after this lookup"
    assert sharers.seen_by(1, 1, 1.6) is True
    assert sharers.seen_by(1, 2, 2.0) is False
    sharers.write(1, 2)  # its own writes it knows of
    assert sharers.seen_by(1, 2, 3.0 - 1e-9) is False
    assert sharers.seen_by(1, 2, 3.0) is True


def test_what_was_evicted_has_no_age() -> None:
    sharers = Sharers(100.0, ttl_s=50.0)
    for number in range(20):
        sharers.write(0, number)
        sharers.seen_by(0, number, number + 1.0)
    contents = sharers.ways[0].contents
    assert len(contents._written_s) == 4
    assert sharers.seen_by(0, 19, 69.5) is True
    assert sharers.seen_by(0, 19, 70.0) is False
