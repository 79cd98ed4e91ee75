# SPDX-License-Identifier: Apache-2.0
"""Sweeps against a plain list: pinned and protected blocks keep their position, however often a sweep passes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.cpu.policies.base import BlockStatus
from kvoffload.cpu.policies.recency import RecencyList, Sweep
from kvoffload.testing import key, keys


def list_of(*numbers: int) -> RecencyList:
    recency = RecencyList()
    for number in numbers:
        add(recency, number)
    return recency


def add(recency: RecencyList, number: int) -> None:
    block = BlockStatus(number)
    block.key, block.pins = key(number), 0
    recency.blocks[key(number)] = block


def evict(recency: RecencyList, n: int, *protected: int) -> list[int] | None:
    sweep = Sweep(recency, set(keys(*protected)))
    if sweep.take(n) < n:
        sweep.undo()
        return None
    sweep.commit()
    return [block.block_id for _, block in sweep.victims]


def pin(recency: RecencyList, number: int, pins: int = 1) -> None:
    block = recency.get(key(number))
    assert block is not None
    block.pins = pins
    if not pins:
        recency.released([key(number)])


def test_a_pinned_block_is_stepped_over_once_and_keeps_its_position() -> None:
    recency = list_of(1, 2, 3, 4)
    pin(recency, 1)
    assert evict(recency, 1) == [2]
    assert key(1) not in recency.blocks, "the next sweep starts behind it"
    assert list(recency) == keys(1, 3, 4)
    pin(recency, 1, pins=0)
    assert recency.first_idle(2) == keys(1, 3)
    assert evict(recency, 2) == [1, 3]
    recency.check_invariants()


def test_a_sweep_that_finds_too_little_changes_nothing() -> None:
    recency = list_of(1, 2, 3, 4, 5)
    pin(recency, 2)
    assert evict(recency, 4, 4) is None
    assert list(recency) == keys(1, 2, 3, 4, 5)
    recency.check_invariants()
    assert evict(recency, 3, 4) == [1, 3, 5]


def test_a_skipped_block_can_be_found_and_removed() -> None:
    recency = list_of(1, 2, 3)
    pin(recency, 1)
    assert evict(recency, 1) == [2]
    skipped = recency.get(key(1))
    found: list[BlockStatus | None] = [recency.blocks.get(one) for one in keys(3, 1)]
    recency.get_all(keys(3, 1), found)
    assert found == [recency.blocks[key(3)], skipped]
    assert recency.pop(key(1)) is skipped
    assert len(recency) == 1
    assert evict(recency, 1) == [3]


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "pin", "unpin", "use", "evict"]), st.integers(0, 9), st.integers(0, 9)),
        max_size=60,
    )
)
def test_equals_a_plain_list(steps: list[tuple[str, int, int]]) -> None:
    recency = RecencyList()
    order: list[int] = []  # least recent first
    pinned: set[int] = set()
    for what, number, other in steps:
        if what == "add" and number not in order:
            add(recency, number)
            order.append(number)
        elif what == "use" and number in order:
            block = recency.pop(key(number))
            assert block is not None
            recency.blocks[key(number)] = block
            order.append(order.pop(order.index(number)))
        elif what in ("pin", "unpin") and number in order:
            pin(recency, number, pins=int(what == "pin"))
            (pinned.add if what == "pin" else pinned.discard)(number)
        elif what == "evict":
            idle = [one for one in order if one not in pinned and one != other]
            expected = idle[:number] if number <= len(idle) else None
            assert evict(recency, number, other) == expected
            order = [one for one in order if one not in (expected or [])]
        assert list(recency) == keys(*order)
        recency.check_invariants()
