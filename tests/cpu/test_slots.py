# SPDX-License-Identifier: Apache-2.0
"""The slot table alone. ``tests/cpu/test_manager.py`` and the state machine see it through the manager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffload.base import OffloadKey
from kvoffload.cpu.manager import SlotTable
from kvoffload.cpu.policies.lru import LRUCachePolicy
from kvoffload.errors import ConfigError
from kvoffload.testing import key, keys


@pytest.fixture(params=[False, True], ids=["records_when_used", "records_at_once"])
def table(request: pytest.FixtureRequest) -> Iterator[SlotTable]:
    table = SlotTable(4, LRUCachePolicy, enable_events=True)
    if request.param:
        table.make_records()
    yield table
    table.check_invariants()


def write(table: SlotTable, *numbers: int) -> list[int]:
    """Stores blocks; their slots."""
    output = table.reserve(keys(*numbers))
    assert output is not None
    table.end_write(output.keys_to_store, success=True)
    slots: list[int] = output.store_spec.block_ids.tolist()  # type: ignore[attr-defined]
    return slots


def counts(table: SlotTable) -> tuple[int, int, int]:
    return table.num_free, table.num_idle, table.num_busy


def events(table: SlotTable) -> list[tuple[list[OffloadKey], bool]]:
    return [(event.keys, event.removed) for event in table.take_events()]


def test_a_slot_is_free_then_in_flight_then_idle_then_pinned(table: SlotTable) -> None:
    assert counts(table) == (4, 0, 0)
    output = table.reserve(keys(1, 2))
    assert output is not None
    assert (counts(table), table.num_in_flight) == ((2, 0, 2), 2)
    table.end_write(keys(1, 2), success=True)
    assert counts(table) == (2, 2, 0)
    assert table.pin(keys(2, 1, 2)) == [1, 0, 1]
    assert counts(table) == (2, 0, 2)
    table.unpin(keys(2, 1))
    assert counts(table) == (2, 1, 1)
    table.unpin(keys(2))
    assert counts(table) == (2, 2, 0)


def test_a_pin_that_is_refused_pins_nothing(table: SlotTable) -> None:
    write(table, 1)
    table.reserve(keys(2))
    for absent, why in ((9, "absent"), (2, "still being written")):
        with pytest.raises(AssertionError, match=why):
            table.pin(keys(1, absent))
    assert table.num_idle == 1


def test_an_unpin_that_is_refused_gives_nothing_back(table: SlotTable) -> None:
    write(table, 1, 2, 3)
    table.pin(keys(1, 2, 2))
    before = counts(table)
    for too_many in (keys(1, 2, 3), keys(1, 2, 2, 2), keys(2, 1, 1), keys(3)):
        with pytest.raises(AssertionError, match="more often than it was pinned"):
            table.unpin(too_many)
        table.check_invariants()
        assert counts(table) == before
        assert [block.pins for block in table.get_all(keys(1, 2, 3)) if block is not None] == [1, 2, 0]
    table.unpin(keys(2, 9, 1, 2))
    assert table.num_busy == 0


def test_protected_blocks_are_not_evicted_and_a_refusal_changes_nothing(table: SlotTable) -> None:
    write(table, 1, 2, 3, 4)
    table.take_events()
    assert table.reserve(keys(5, 6), protected=set(keys(2, 3, 4))) is None
    assert (table.num_idle, table.num_evicted, events(table)) == (4, 0, [])
    output = table.reserve(keys(5), protected=set(keys(2, 3, 4)))
    assert output is not None
    assert output.evicted_keys == keys(1)


def test_a_failed_write_frees_its_slot_and_announces_nothing(table: SlotTable) -> None:
    table.reserve(keys(1, 2))
    table.end_write(keys(1, 2), success=False)
    assert (counts(table), table.num_stored, events(table)) == ((4, 0, 0), 0, [])


def test_events_are_recorded_in_the_order_in_which_they_become_true(table: SlotTable) -> None:
    write(table, 1, 2, 3, 4)
    write(table, 5)
    table.reset()
    # Of a batch the last block is evicted first. A reset goes by slots.
    assert events(table) == [(keys(1, 2, 3, 4), False), (keys(4), True), (keys(5), False), (keys(1, 2, 3, 5), True)]


def test_after_a_reset_a_slot_is_reused_once_its_old_transfer_has_ended(table: SlotTable) -> None:
    write(table, 1, 2, 3)
    table.pin(keys(1))
    table.reserve(keys(4))
    table.reset()
    assert table.get(key(1)) is None
    assert counts(table) == (2, 0, 2)
    table.unpin(keys(1))
    table.end_write(keys(4), success=True)
    assert table.get(key(4)) is None, "a write from before the reset publishes nothing"
    assert counts(table) == (4, 0, 0)


def test_a_table_needs_a_slot() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        SlotTable(0, LRUCachePolicy)
