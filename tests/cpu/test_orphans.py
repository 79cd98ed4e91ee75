# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kvoffload.cpu.orphans import Orphans, Overlap
from kvoffload.cpu.policies.base import BlockStatus
from kvoffload.testing import key


def block(slot: int, pins: int) -> BlockStatus:
    made = BlockStatus(slot)
    made.key, made.pins = key(slot), pins
    return made


def test_an_overlap_ends_with_the_last_of_old_and_new_transfers() -> None:
    overlap = Overlap(begun=2)
    assert [overlap.count_end(begun_since) for begun_since in (0, 1, 1)] == [False, False, True]
    assert not overlap.failed


def test_one_failure_fails_all() -> None:
    overlap = Overlap(begun=2)
    overlap.count_end(0, success=False)
    assert overlap.count_end(0)
    assert overlap.failed


def test_reads_and_writes_are_kept_apart_and_pins_are_counted() -> None:
    orphans = Orphans()
    assert not orphans
    reading, writing = block(1, pins=3), block(2, BlockStatus.IN_FLIGHT)
    orphans.adopt(key(1), reading)
    orphans.adopt(key(2), writing)
    assert orphans
    assert orphans.reads[key(1)].begun == 3
    assert orphans.writes[key(2)].begun == 1
    assert orphans.slots() == [reading, writing]


def test_a_second_reset_adds_to_the_overlap_of_its_key() -> None:
    orphans = Orphans()
    orphans.adopt(key(1), block(1, pins=1))
    orphans.adopt(key(1), block(2, pins=2))
    assert orphans.reads[key(1)].begun == 3
    assert len(orphans.slots()) == 2
