# SPDX-License-Identifier: Apache-2.0
"""The vectorised plan against an oracle that maps every byte by the layout's definition."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvoffload.base import Direction, GPULoadStoreSpec, SharedPage
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.plan import CopyLayout, PageRef, Runs, in_parts, plan_runs
from kvoffload.errors import TransferError

NUM_GPU_BLOCKS, NUM_SLOTS, REGION = 10, 6, 1_000_000
STORE = Direction.STORE


@st.composite
def layouts(draw: st.DrawFn) -> CopyLayout:
    """Draw groups with pages of a slice, and groups with pages of the whole slot, of which this rank owns one or two
    parts."""
    factor, slice_start = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    groups, address, slot_bytes = [], 0, 0
    for _ in range(draw(st.integers(1, 3))):
        pages: list[PageRef] = []
        is_shared, start = draw(st.booleans()), 0
        for _ in range(draw(st.integers(1, 3))):
            parts = [
                (draw(st.integers(0, 2)), draw(st.integers(1, 5))) for _ in range(1 + draw(st.integers(0, is_shared)))
            ]
            num_bytes, offset = sum(map(sum, parts)) + draw(st.integers(0, 2)), 0
            for gap, page_bytes in parts:
                stride = page_bytes + draw(st.integers(0, 2))
                place = SharedPage(start, num_bytes, offset + gap) if is_shared else None
                pages.append(PageRef(address, stride, NUM_GPU_BLOCKS, page_bytes, place))
                address += stride * NUM_GPU_BLOCKS
                offset += gap + page_bytes
            start += num_bytes
        groups.append(tuple(pages))
        end = factor * start if is_shared else slice_start + factor * sum(page.page_bytes for page in pages)
        slot_bytes = max(slot_bytes, end)
    slot_bytes += draw(st.integers(0, 3))
    return CopyLayout(tuple(groups), factor, REGION, slot_bytes, NUM_SLOTS, slice_start)


@st.composite
def transfers(draw: st.DrawFn, layout: CopyLayout) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    ids, sizes, indices, slots = [], [], [], []
    for _ in layout.groups:
        size, index = draw(st.integers(0, 2 * layout.factor)), draw(st.integers(0, 9))
        ids += draw(st.lists(st.integers(0, NUM_GPU_BLOCKS - 1), min_size=size, max_size=size))
        num_slots = -(-(index % layout.factor + size) // layout.factor) if size else 0
        slots += draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=num_slots, max_size=num_slots))
        sizes.append(size)
        indices.append(index)
    return GPULoadStoreSpec(ids, sizes, indices), CPULoadStoreSpec(slots)


def pages_by_definition(layout: CopyLayout, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec) -> list[tuple[int, int, int]]:
    """(device byte, host byte, bytes) for every page that is named, in order."""
    found = []
    ids, slots = gpu.block_ids.tolist(), cpu.block_ids.tolist()
    for group, size, index in zip(layout.groups, gpu.group_sizes, gpu.block_indices, strict=True):
        first_slot_index = index // layout.factor
        for nth in range(size):
            slot = slots[(index + nth) // layout.factor - first_slot_index]
            sub, packed = (index + nth) % layout.factor, layout.slice_start
            for page in group:
                at = packed + sub * page.page_bytes
                if page.shared is not None:
                    at = layout.factor * page.shared.start + sub * page.shared.num_bytes + page.shared.offset
                device = page.address + ids[nth] * page.stride_bytes
                found.append((device, layout.region_address + slot * layout.slot_bytes + at, page.page_bytes))
                packed += layout.factor * page.page_bytes
        ids = ids[size:]
        slots = slots[-(-(index % layout.factor + size) // layout.factor) if size else 0 :]
    return found


def bytes_by_definition(
    layout: CopyLayout, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, direction: Direction
) -> list[tuple[int, int]]:
    """Return (device byte, host byte) for every byte that moves, or for the last of several bytes written to one
    place."""
    written: dict[int, tuple[int, int]] = {}
    for device, host, length in pages_by_definition(layout, gpu, cpu):
        for byte in range(length):
            written[(host if direction is STORE else device) + byte] = device + byte, host + byte
    return sorted(written.values())


def has_pages_of_two_sizes_in_one_place(
    layout: CopyLayout, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, direction: Direction
) -> bool:
    pages = pages_by_definition(layout, gpu, cpu)
    ranges = sorted({(host if direction is STORE else device, length) for device, host, length in pages})
    return any(first + length > second for (first, length), (second, _) in itertools.pairwise(ranges))


def bytes_of(runs: Runs) -> list[tuple[int, int]]:
    return [
        (device + byte, host + byte)
        for device, host, length in zip(runs.device.tolist(), runs.host.tolist(), runs.lengths.tolist(), strict=True)
        for byte in range(length)
    ]


@given(st.data())
def test_runs_are_exactly_the_bytes_of_the_definition(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    gpu, cpu = data.draw(transfers(layout))
    direction = data.draw(st.sampled_from(Direction))
    if has_pages_of_two_sizes_in_one_place(layout, gpu, cpu, direction):
        with pytest.raises(TransferError, match="two sizes"):
            plan_runs(layout, gpu, cpu, direction)
        return
    runs = plan_runs(layout, gpu, cpu, direction)
    assert sorted(bytes_of(runs)) == bytes_by_definition(layout, gpu, cpu, direction)
    assert (runs.lengths > 0).all()


@given(st.data(), st.integers(1, 4))
def test_replicas_store_every_byte_once_together_and_load_all(data: st.DataObject, num_replicas: int) -> None:
    layout = data.draw(layouts())
    gpu, cpu = data.draw(transfers(layout))
    replicas = [replace(layout, replica=n, num_replicas=num_replicas) for n in range(num_replicas)]
    assume(not any(has_pages_of_two_sizes_in_one_place(layout, gpu, cpu, direction) for direction in Direction))
    stored = [bytes_of(plan_runs(each, gpu, cpu, STORE)) for each in replicas]
    assert sorted(itertools.chain.from_iterable(stored)) == bytes_by_definition(layout, gpu, cpu, STORE)
    for replica, found in enumerate(stored):
        assert {(host - REGION) // layout.slot_bytes % num_replicas for _, host in found} <= {replica}
    for each in replicas:
        loaded = bytes_of(plan_runs(each, gpu, cpu, Direction.LOAD))
        assert sorted(loaded) == bytes_by_definition(layout, gpu, cpu, Direction.LOAD)


@given(st.data())
def test_the_bytes_of_a_slot_are_those_that_a_block_fills(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    for group in range(len(layout.groups)):
        sizes, indices = [0] * len(layout.groups), [0] * len(layout.groups)
        sizes[group] = layout.factor
        moved = bytes_by_definition(
            layout, GPULoadStoreSpec(range(layout.factor), sizes, indices), CPULoadStoreSpec([0]), STORE
        )
        parts = layout.bytes_in_slot(group)
        assert sorted(host - REGION for _, host in moved) == [
            byte for part in parts for byte in range(part.start, part.stop)
        ]


def test_runs_that_touch_on_both_sides_are_merged() -> None:
    layout = CopyLayout(((PageRef(0, 100, 8, 100), PageRef(5000, 100, 8, 100)),), 4, REGION, 800, NUM_SLOTS)
    runs = plan_runs(layout, GPULoadStoreSpec([2, 3, 4, 5], [4], [0]), CPULoadStoreSpec([1]), STORE)
    assert runs.device.tolist() == [200, 5200]
    assert runs.host.tolist() == [REGION + 800, REGION + 1200]
    assert runs.lengths.tolist() == [400, 400]


def test_neighbours_on_one_side_only_are_not_merged() -> None:
    layout = CopyLayout(((PageRef(0, 100, 8, 100),),), 1, REGION, 100, NUM_SLOTS)
    assert len(plan_runs(layout, GPULoadStoreSpec([2, 4], [2], [0]), CPULoadStoreSpec([0, 1]), STORE).lengths) == 2
    assert len(plan_runs(layout, GPULoadStoreSpec([2, 3], [2], [0]), CPULoadStoreSpec([1, 0]), STORE).lengths) == 2


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_splitting_keeps_every_byte_and_balances(parts: int) -> None:
    rng = np.random.default_rng(parts)
    lengths = rng.integers(1, 400_000, size=40)
    starts = np.cumsum(lengths + 10)
    whole = Runs(starts, starts + 10**9, lengths)
    pieces = in_parts(whole, parts)
    assert len(pieces) == parts
    seen = [
        (int(d), int(h), int(n))
        for piece in pieces
        for d, h, n in zip(piece.device, piece.host, piece.lengths, strict=True)
    ]
    assert all(n > 0 and h - d == 10**9 for d, h, n in seen)
    joined: list[list[int]] = []  # there is a gap behind each run
    for device, _, length in seen:
        if joined and sum(joined[-1]) == device:
            joined[-1][1] += length
        else:
            joined.append([device, length])
    assert joined == np.stack([starts, lengths], axis=1).tolist()
    sizes = [piece.num_bytes for piece in pieces]
    assert max(sizes) - min(sizes) <= 4096 * parts


def test_little_is_not_split_and_nothing_is_nothing() -> None:
    little = Runs(np.array([0]), np.array([9]), np.array([1000]))
    (part,) = in_parts(little, 8)
    assert (part.device, part.host, part.lengths) == (little.device, little.host, little.lengths)
    layout = CopyLayout(((PageRef(0, 100, 8, 100),),), 1, REGION, 100, NUM_SLOTS)
    assert in_parts(plan_runs(layout, GPULoadStoreSpec([], [0], [0]), CPULoadStoreSpec([]), STORE), 4) == []


@pytest.mark.parametrize(
    ("gpu", "slots"),
    [([8], [0]), ([-1], [0]), ([0], [6]), ([0], [-1]), ([0, 1], [0]), ([0], [0, 1])],
)
def test_ids_outside_of_the_layout_are_refused(gpu: list[int], slots: list[int]) -> None:
    layout = CopyLayout(((PageRef(0, 100, 8, 100),),), 1, REGION, 100, NUM_SLOTS)
    with pytest.raises(TransferError):
        plan_runs(layout, GPULoadStoreSpec(gpu, [len(gpu)], [0]), CPULoadStoreSpec(slots), STORE)


def test_more_groups_than_the_layout_has_are_refused() -> None:
    layout = CopyLayout(((PageRef(0, 100, 8, 100),),), 1, REGION, 100, NUM_SLOTS)
    with pytest.raises(TransferError, match="2 groups"):
        plan_runs(layout, GPULoadStoreSpec([0, 0], [1, 1], [0, 0]), CPULoadStoreSpec([0, 1]), STORE)


@given(
    runs=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), max_size=8),
    borders=st.lists(st.integers(0, 600), unique=True, max_size=30),
)
def test_cut_runs_hold_the_same_bytes_and_none_crosses_a_border(
    runs: list[tuple[int, int]], borders: list[int]
) -> None:
    starts, lengths = (np.array([run[side] for run in runs], dtype=np.int64) for side in (0, 1))
    whole = Runs(starts * 3 + 7, REGION + starts, lengths)
    cut = whole.cut_at(REGION + np.array(sorted(borders), dtype=np.int64))
    assert bytes_of(cut) == bytes_of(whole)
    assert (cut.lengths > 0).all()
    for host, length in zip((cut.host - REGION).tolist(), cut.lengths.tolist(), strict=True):
        assert not any(host < border < host + length for border in borders)
