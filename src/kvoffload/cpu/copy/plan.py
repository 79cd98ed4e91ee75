# SPDX-License-Identifier: Apache-2.0
"""From block ids to byte runs: what a transfer copies, as plain arrays, computed in one vectorised pass.

An offloaded block fills one slot of the primary region, in pages. Each page holds the block's ``factor`` sub-blocks
side by side::

    | page 0: sub 0, sub 1, .. | page 1: sub 0, sub 1, .. | ...

So consecutive GPU blocks are contiguous on both sides, and merge into one run. Either each rank has a slice of the slot
with pages of its own, one after the other in the group's ref order; or the pages are those of the whole slot, and a
rank has a part of each (``SharedPage``), which is the same part of every sub-block.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvoffload.base import Direction, GPULoadStoreSpec, SharedPage
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.errors import TransferError

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageRef:
    """One page of a group's GPU block: where its tensor lies, in bytes, without torch."""

    address: int
    """Of the page of GPU block 0."""
    stride_bytes: int
    """From one GPU block's page to that of the next."""
    num_blocks: int
    """GPU blocks in the tensor."""
    page_bytes: int
    """Of this rank."""
    shared: SharedPage | None = None
    """Where they lie in a page of all ranks; ``None``: they are a page of this rank's slice."""


@dataclass(frozen=True, slots=True)
class _PageColumns:
    """The pages of a group as columns, one row a page, for arithmetic with rows of blocks."""

    address: Int64s
    stride_bytes: Int64s
    page_bytes: Int64s
    offset: Int64s
    """Within the slot, of sub-block 0."""
    slot_stride_bytes: Int64s
    """In the slot, from one sub-block to the next."""
    num_blocks: int
    """GPU blocks that all of its tensors have."""

    @classmethod
    def of(cls, pages: Sequence[PageRef], factor: int, slice_start: int) -> _PageColumns:
        rows, end = [], slice_start
        for page in pages:
            offset, slot_stride = end, page.page_bytes
            if page.shared is None:
                end += factor * page.page_bytes
            else:
                offset, slot_stride = factor * page.shared.start + page.shared.offset, page.shared.num_bytes
            rows.append((page.address, page.stride_bytes, page.page_bytes, offset, slot_stride))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5, 1).swapaxes(0, 1)
        address, stride, length, offsets, slot_strides = columns
        return cls(address, stride, length, offsets, slot_strides, min(page.num_blocks for page in pages))


@dataclass(frozen=True)
class CopyLayout:
    """Both sides of the transfers of one rank."""

    groups: tuple[tuple[PageRef, ...], ...]
    factor: int
    """GPU blocks per offloaded block."""
    region_address: int
    """Of slot 0."""
    slot_bytes: int
    """From one slot to the next."""
    num_slots: int
    slice_start: int = 0
    """From the slot's start to this rank's slice."""
    replica: int = 0
    num_replicas: int = 1
    """Ranks that hold the same bytes. Slot s is stored by replica s modulo this number, and loaded by all."""

    @functools.cached_property
    def columns(self) -> tuple[_PageColumns | None, ...]:
        """By group; ``None`` for one without pages."""
        return tuple(_PageColumns.of(pages, self.factor, self.slice_start) if pages else None for pages in self.groups)

    def at(self, addresses: Sequence[Sequence[int]]) -> CopyLayout:
        """The same with the pages of GPU block 0 elsewhere: by group and page."""
        groups = (
            tuple(replace(page, address=address) for page, address in zip(pages, of_group, strict=True))
            for pages, of_group in zip(self.groups, addresses, strict=True)
        )
        return replace(self, groups=tuple(groups))

    def bytes_in_slot(self, group: int) -> list[slice]:
        """The parts of a slot that a block of ``group`` fills on this rank, disjoint and ascending."""
        pages, parts = self.columns[group], []
        if pages is not None:
            sides = pages.offset, pages.slot_stride_bytes, pages.page_bytes
            for offset, stride, length in zip(*(side.ravel().tolist() for side in sides), strict=True):
                parts += [slice(offset + sub * stride, offset + sub * stride + length) for sub in range(self.factor)]
        return sorted(parts, key=lambda part: part.start)


@dataclass(frozen=True, slots=True)
class Extent:
    """What a job reads and writes: slots on the host side, GPU blocks on the device side."""

    slots: frozenset[int]
    gpu_blocks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte runs: ``device[i]`` and ``host[i]`` are addresses, ``lengths[i]`` is in bytes and positive."""

    device: Int64s
    host: Int64s
    lengths: Int64s

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def in_order_of(self, addresses: Int64s) -> Runs:
        """The same runs by ascending ``addresses``, which is ``device`` or ``host``.

        Pass the side that is read: reads in order are much faster than scattered ones, and the order of writes does not
        matter.
        """
        order = np.argsort(addresses)
        return Runs(self.device[order], self.host[order], self.lengths[order])

    def select(self, chosen: npt.NDArray[np.bool_]) -> Runs:
        return Runs(self.device[chosen], self.host[chosen], self.lengths[chosen])

    def merged(self) -> Runs:
        """The same bytes, with neighbours that touch on both sides as one run."""
        if len(self.lengths) < 2:
            return self
        touches = self.device[1:] - self.device[:-1] == self.lengths[:-1]
        if not touches.any():  # scattered, as most are
            return self
        touches &= self.host[1:] - self.host[:-1] == self.lengths[:-1]
        starts = np.concatenate(([0], np.flatnonzero(~touches) + 1))
        return Runs(self.device[starts], self.host[starts], np.add.reduceat(self.lengths, starts))

    def cut_at(self, borders: Int64s) -> Runs:
        """The same bytes in runs that do not cross any of ``borders``, ascending addresses of the host side. A run may
        be cut more than once."""
        if not len(borders):
            return self
        first = np.searchsorted(borders, self.host, side="right")
        last = np.searchsorted(borders, self.host + self.lengths - 1, side="right")
        counts = last - first + 1
        if not (counts > 1).any():
            return self
        run = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        low: Int64s = np.where(nth == 0, self.host[run], borders[np.maximum(first[run] + nth - 1, 0)])
        is_last = nth == counts[run] - 1
        end = self.host[run] + self.lengths[run]
        high: Int64s = np.where(is_last, end, borders[np.minimum(first[run] + nth, len(borders) - 1)])
        return Runs(self.device[run] + (low - self.host[run]), low, high - low)

    def split(self, parts: int) -> list[Runs]:
        """At most ``parts`` parts of about the same number of bytes. Long runs are cut."""
        total = self.num_bytes
        if parts < 2 or total < parts * _LEAST_PART_BYTES:
            return [self] if total else []
        ends = np.cumsum(self.lengths)
        cuts = np.linspace(0, total, parts + 1).astype(np.int64) & ~np.int64(4095)
        cuts[-1] = total
        return [self._slice(int(low), int(high), ends) for low, high in itertools.pairwise(cuts)]

    def pieces(self, max_bytes: int, max_runs: int) -> Iterator[Runs]:
        """The same bytes in order, at most so many at a time. Long runs are cut."""
        ends = np.cumsum(self.lengths)
        low, total = 0, int(ends[-1]) if len(ends) else 0
        while low < total:
            last = int(np.searchsorted(ends, low, side="right")) + max_runs - 1
            high = min(low + max_bytes, total if last >= len(ends) else int(ends[last]))
            yield self._slice(low, high, ends)
            low = high

    def _slice(self, low: int, high: int, ends: Int64s) -> Runs:
        first = int(np.searchsorted(ends, low, side="right"))
        last = int(np.searchsorted(ends, high, side="left")) + 1
        device, host = self.device[first:last].copy(), self.host[first:last].copy()
        lengths = self.lengths[first:last].copy()
        head = low - (int(ends[first]) - int(lengths[0]))
        device[0] += head
        host[0] += head
        lengths[0] -= head
        lengths[-1] -= int(ends[last - 1]) - high
        return Runs(device, host, lengths)


_LEAST_PART_BYTES = 64 << 10


def plan_runs(layout: CopyLayout, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, direction: Direction) -> Runs:
    """The runs between the blocks of ``gpu`` and the slots of ``cpu``. Runs that touch on both sides are merged. A
    store leaves out the slots that other replicas store.

    No two runs write the same byte, since copies of one job have no order. Of a GPU block that a load names twice, or
    of a slot that a store does, only the last place is copied.

    ``cpu.block_ids`` lists, group after group, the slots that hold the group's GPU blocks. Raises ``TransferError`` for
    ids outside the layout, so that a mistake is a failed transfer and never a write to foreign memory, and for pages of
    two sizes in one place.
    """
    if len(gpu.group_sizes) > len(layout.groups):
        raise TransferError(f"A transfer names {len(gpu.group_sizes)} groups, and there are {len(layout.groups)}.")
    all_slots, all_gpu_ids = cpu.block_ids, gpu.block_ids
    if len(all_slots) and not 0 <= int(all_slots.min()) <= int(all_slots.max()) < layout.num_slots:
        raise TransferError(f"A transfer names slot {all_slots.max()}, and there are {layout.num_slots}.")
    device: list[Int64s] = []
    host: list[Int64s] = []
    lengths: list[Int64s] = []
    gpu_start = cpu_start = 0
    for pages, size, index in zip(layout.columns, gpu.group_sizes, gpu.block_indices, strict=False):
        if not size:
            continue
        positions = index % layout.factor + np.arange(size, dtype=np.int64)
        num_slots = int(positions[-1]) // layout.factor + 1
        slots = all_slots[cpu_start : cpu_start + num_slots]
        if len(slots) != num_slots:
            raise TransferError(f"A transfer of {size} GPU blocks needs {num_slots} slots, and names {len(slots)}.")
        gpu_ids = all_gpu_ids[gpu_start : gpu_start + size]
        slots, sub_blocks = slots[positions // layout.factor], positions % layout.factor
        if pages is not None:
            _check_ids(gpu_ids, pages.num_blocks)
            if direction is Direction.STORE and layout.num_replicas > 1:
                mine = slots % layout.num_replicas == layout.replica
                gpu_ids, slots, sub_blocks = gpu_ids[mine], slots[mine], sub_blocks[mine]
            slot_starts = layout.region_address + slots * layout.slot_bytes
            device.append((pages.address + gpu_ids * pages.stride_bytes).ravel())
            host.append((slot_starts + pages.offset + sub_blocks * pages.slot_stride_bytes).ravel())
            lengths.append(np.repeat(pages.page_bytes, len(gpu_ids)))
        gpu_start += size
        cpu_start += num_slots
    if cpu_start != len(all_slots):
        raise TransferError(f"A transfer names {len(all_slots)} slots, and needs {cpu_start}.")
    runs = Runs(_concatenate(device), _concatenate(host), _concatenate(lengths))
    written = all_slots if direction is Direction.STORE else all_gpu_ids
    if len(np.unique(written)) < len(written):
        runs = _without_repeats(runs, direction)
    return runs.merged()


def plan_parts(
    layout: CopyLayout, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, direction: Direction, num_parts: int
) -> tuple[list[Runs], int]:
    """The runs of a copy within host memory, by ascending addresses of its source, in at most ``num_parts`` parts; and
    their bytes together. Raises as ``plan_runs`` does."""
    runs = plan_runs(layout, gpu, cpu, direction)
    runs = runs.in_order_of(runs.device if direction is Direction.STORE else runs.host)
    return runs.split(num_parts), runs.num_bytes


def _check_ids(gpu_ids: Int64s, num_blocks: int) -> None:
    low, high = int(gpu_ids.min()), int(gpu_ids.max())
    if low < 0 or high >= num_blocks:
        raise TransferError(f"A transfer names GPU block {high if low >= 0 else low} of {num_blocks}.")


def _concatenate(parts: list[Int64s]) -> Int64s:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _without_repeats(runs: Runs, direction: Direction) -> Runs:
    """The last run to each destination."""
    destinations = runs.host if direction is Direction.STORE else runs.device
    starts, backwards, which = np.unique(destinations[::-1], return_index=True, return_inverse=True)
    kept = len(destinations) - 1 - backwards  # the last of each, since they were looked for from the end
    lengths = runs.lengths[kept]
    if (lengths[which] != runs.lengths[::-1]).any() or (starts[:-1] + lengths[:-1] > starts[1:]).any():
        raise TransferError("A transfer writes pages of two sizes to one place.")
    kept.sort()
    return Runs(runs.device[kept], runs.host[kept], runs.lengths[kept])
