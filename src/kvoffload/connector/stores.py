# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a request to offer for store next, and from which GPU blocks. Pure: nothing here changes a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffload.base import GPULoadStoreSpec, OffloadKey
from kvoffload.connector.groups import GroupGeometry
from kvoffload.connector.requests import RequestOffloadState

__all__ = ["Offer", "plan_offer", "select_source"]


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    key: OffloadKey
    group: int
    block: int
    gpu_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """A portion of a request's blocks, group after group, each head to tail."""

    blocks: tuple[OfferedBlock, ...]
    """Those whose bytes are on the device."""
    cursors: tuple[int, ...]
    """The groups' cursors once this was offered; blocks that left the device are passed over for good."""
    largest: int
    """Blocks of the group with most of them, those passed over included; at least 1."""

    @property
    def keys(self) -> list[OffloadKey]:
        return [each.key for each in self.blocks]


def plan_offer(
    geometry: Sequence[GroupGeometry],
    state: RequestOffloadState,
    computed_tokens: int,
    limit_tokens: int,
) -> Offer | None:
    """The next at most ``state.offer_blocks`` blocks of each group, or ``None`` if no group has any.

    A block can be offered when its tokens are computed at the end of this step (``limit_tokens``) and its key and GPU
    blocks are known: the least of the three. ``computed_tokens`` are those before this step.
    """
    blocks: list[OfferedBlock] = []
    cursors: list[int] = []
    largest = 0
    for group, own in zip(geometry, state.groups, strict=True):
        ready = min(limit_tokens // group.block_tokens, len(own.keys), len(own.gpu_block_ids) // group.factor)
        stop = max(own.cursor, min(ready, own.cursor + state.offer_blocks))
        largest = max(largest, stop - own.cursor)
        cursors.append(stop)
        for block in range(own.cursor, stop):
            ids = group.source_gpu_blocks(block, own.gpu_block_ids, computed_tokens)
            if ids is not None:
                blocks.append(OfferedBlock(own.keys[block], group.index, block, tuple(ids)))
    return Offer(tuple(blocks), tuple(cursors), largest) if largest else None


def select_source(
    geometry: Sequence[GroupGeometry], offer: Offer, keys_to_store: Sequence[OffloadKey]
) -> GPULoadStoreSpec | None:
    """The GPU side of a store of ``keys_to_store``; ``None`` if they are not a subsequence of what was offered."""
    gpu_ids: list[int] = []
    sizes = [0] * len(geometry)
    starts = [0] * len(geometry)
    offered = iter(offer.blocks)
    for key in keys_to_store:
        block = next((each for each in offered if each.key == key), None)
        if block is None:
            return None
        if not sizes[block.group]:
            starts[block.group] = block.block * geometry[block.group].factor
        sizes[block.group] += len(block.gpu_block_ids)
        gpu_ids += block.gpu_block_ids
    return GPULoadStoreSpec(gpu_ids, sizes, starts)
