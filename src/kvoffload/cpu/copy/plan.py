# SPDX-License-Identifier: Apache-2.0
"""Turn the block ids of a transfer into byte runs, as plain arrays, in one vectorised pass.

An offloaded block fills one slot of the region in host memory. The slot consists of pages, and each page holds the
block's ``factor`` sub-blocks side by side::

    | page 0: sub 0, sub 1, .. | page 1: sub 0, sub 1, .. | ...

So consecutive GPU blocks are contiguous on both sides and merge into one run. There are two arrangements. Either each
rank has its own slice of the slot, with its own pages one after the other in the group's ref order; or all ranks share
the slot's pages, and a rank owns the same part of every sub-block of a page (``SharedPage``).
"""

from __future__ import annotations

import functools
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
    """The position in memory of one page of a group's GPU blocks, without torch."""

    address: int
    """The address of the page of GPU block 0."""
    stride_bytes: int
    """The distance between the pages of two consecutive GPU blocks."""
    num_blocks: int
    """The number of GPU blocks in the tensor."""
    page_bytes: int
    """The number of the page's bytes on this rank."""
    shared: SharedPage | None = None
    """The position of these bytes in a page of all ranks, or ``None`` if the page belongs to this rank's slice."""


@dataclass(frozen=True, slots=True)
class _PageColumns:
    """The pages of a group as columns of shape (pages, 1), which broadcast with rows of blocks."""

    address: Int64s
    stride_bytes: Int64s
    page_bytes: Int64s
    offset: Int64s
    """The offset of sub-block 0 within the slot."""
    slot_stride_bytes: Int64s
    """The distance between two consecutive sub-blocks in the slot."""
    num_blocks: int
    """The number of GPU blocks in the group's smallest tensor."""

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
    """The number of GPU blocks per offloaded block."""
    region_address: int
    """The address of slot 0."""
    slot_bytes: int
    """The distance between two consecutive slots."""
    num_slots: int
    slice_start: int = 0
    """The offset of this rank's slice within a slot, in bytes."""
    replica: int = 0
    num_replicas: int = 1
    """The number of ranks that hold the same bytes. Replica ``s % num_replicas`` stores slot s, and all replicas load
    it."""

    @functools.cached_property
    def columns(self) -> tuple[_PageColumns | None, ...]:
        """The pages of each group, or ``None`` for a group without pages."""
        return tuple(_PageColumns.of(pages, self.factor, self.slice_start) if pages else None for pages in self.groups)

    def at(self, addresses: Sequence[Sequence[int]]) -> CopyLayout:
        """Return this layout with new addresses of GPU block 0's pages, given by group and page."""
        groups = (
            tuple(replace(page, address=address) for page, address in zip(pages, of_group, strict=True))
            for pages, of_group in zip(self.groups, addresses, strict=True)
        )
        return replace(self, groups=tuple(groups))

    def bytes_in_slot(self, group: int) -> list[slice]:
        """Return the parts of a slot that a block of ``group`` fills on this rank, disjoint and ascending."""
        pages, parts = self.columns[group], []
        if pages is not None:
            sides = pages.offset, pages.slot_stride_bytes, pages.page_bytes
            for offset, stride, length in zip(*(side.ravel().tolist() for side in sides), strict=True):
                parts += [slice(offset + sub * stride, offset + sub * stride + length) for sub in range(self.factor)]
        return sorted(parts, key=lambda part: part.start)


@dataclass(frozen=True, slots=True)
class Extent:
    """The slots and GPU blocks that a job reads or writes."""

    slots: frozenset[int]
    gpu_blocks: frozenset[int]

    def overlaps(self, other: Extent) -> bool:
        return not (self.slots.isdisjoint(other.slots) and self.gpu_blocks.isdisjoint(other.gpu_blocks))


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
        """Return the same runs in ascending order of ``addresses``, which is ``device`` or ``host``.

        Pass the side that is read, because reads in order are much faster than scattered ones. The order of writes does
        not matter.
        """
        order = np.argsort(addresses)
        return Runs(self.device[order], self.host[order], self.lengths[order])

    def select(self, chosen: npt.NDArray[np.bool_]) -> Runs:
        return Runs(self.device[chosen], self.host[chosen], self.lengths[chosen])

    def merged(self) -> Runs:
        """Return the same bytes, with consecutive runs that touch on both sides merged into one."""
        if len(self.lengths) < 2:
            return self
        touches = self.device[1:] - self.device[:-1] == self.lengths[:-1]
        if not touches.any():  # most runs are scattered
            return self
        touches &= self.host[1:] - self.host[:-1] == self.lengths[:-1]
        starts = np.concatenate(([0], np.flatnonzero(~touches) + 1))
        return Runs(self.device[starts], self.host[starts], np.add.reduceat(self.lengths, starts))

    def cut_at(self, borders: Int64s) -> Runs:
        """Return the same bytes in runs that cross none of ``borders``, which are ascending host addresses.

        A run may be cut more than once.
        """
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

    def pieces(self, max_bytes: int, max_runs: int) -> Iterator[Runs]:
        """Yield the same bytes in order, at most ``max_bytes`` in at most ``max_runs`` runs at a time.

        Cuts long runs.
        """
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
    """Return the runs between the blocks of ``gpu`` and the slots of ``cpu``.

    Runs that touch on both sides are merged. A store leaves out the slots that other replicas store. No two runs write
    the same byte, because copies of one job have no order: if a load names a GPU block twice, or a store names a slot
    twice, only the last occurrence is copied.

    ``cpu.block_ids`` lists, group after group, the slots that hold the group's GPU blocks. Raises ``TransferError`` for
    ids outside the layout, so that a mistake causes a failed transfer and never a write to foreign memory. Raises it
    also if pages of two sizes would be written to one place.
    """
    if len(gpu.group_sizes) > len(layout.groups):
        raise TransferError(f"A transfer names {len(gpu.group_sizes)} groups, but there are {len(layout.groups)}.")
    all_slots, all_gpu_ids = cpu.block_ids, gpu.block_ids
    if len(all_slots) and not 0 <= int(all_slots.min()) <= int(all_slots.max()) < layout.num_slots:
        raise TransferError(f"A transfer names slot {all_slots.max()}, but there are only {layout.num_slots}.")
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
            raise TransferError(f"A transfer of {size} GPU blocks needs {num_slots} slots, but names {len(slots)}.")
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
        raise TransferError(f"A transfer names {len(all_slots)} slots, but needs {cpu_start}.")
    runs = Runs(_concatenate(device), _concatenate(host), _concatenate(lengths))
    written = all_slots if direction is Direction.STORE else all_gpu_ids
    if len(np.unique(written)) < len(written):
        runs = _without_repeats(runs, direction)
    return runs.merged()


def plan_parts(
    layout: CopyLayout, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, direction: Direction, num_parts: int
) -> tuple[list[Runs], int]:
    """Return the runs of a copy within host memory in at most ``num_parts`` parts, and their total number of bytes.

    The runs are in ascending order of their source addresses. Raises ``TransferError`` as ``plan_runs`` does.
    """
    runs = plan_runs(layout, gpu, cpu, direction)
    runs = runs.in_order_of(runs.device if direction is Direction.STORE else runs.host)
    return in_parts(runs, num_parts), runs.num_bytes


def in_parts(runs: Runs, num_parts: int) -> list[Runs]:
    """Return the runs in at most ``num_parts`` parts of about the same number of bytes. Cuts long runs."""
    part_bytes = max(_LEAST_PART_BYTES, -(-runs.num_bytes // num_parts))
    return list(runs.pieces(-(-part_bytes // 4096) * 4096, len(runs.lengths)))


def _check_ids(gpu_ids: Int64s, num_blocks: int) -> None:
    low, high = int(gpu_ids.min()), int(gpu_ids.max())
    if low < 0 or high >= num_blocks:
        raise TransferError(f"A transfer names GPU block {high if low >= 0 else low} of {num_blocks}.")


def _concatenate(parts: list[Int64s]) -> Int64s:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _without_repeats(runs: Runs, direction: Direction) -> Runs:
    """Return the runs, keeping only the last one to each destination."""
    destinations = runs.host if direction is Direction.STORE else runs.device
    starts, backwards, which = np.unique(destinations[::-1], return_index=True, return_inverse=True)
    kept = len(destinations) - 1 - backwards  # the last occurrence of each, because the search was from the end
    lengths = runs.lengths[kept]
    if (lengths[which] != runs.lengths[::-1]).any() or (starts[:-1] + lengths[:-1] > starts[1:]).any():
        raise TransferError("A transfer writes pages of two sizes to one place.")
    kept.sort()
    return Runs(runs.device[kept], runs.host[kept], runs.lengths[kept])
