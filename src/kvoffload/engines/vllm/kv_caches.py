# SPDX-License-Identifier: Apache-2.0
"""Convert an engine's KV cache tensors, in any layout, to ``CanonicalKVCaches``. Pure.

Layouts are derived only from shapes and strides. A *run* is a range of bytes that is contiguous in every GPU block of a
layer. A layer is one run if its blocks are contiguous, and several runs otherwise (keys apart from values, heads
outside blocks). Neighbouring runs of a group are joined. So a layout that keeps all layers of a block together is
copied in one piece.

Blocks that engines with other numbers of ranks may use contain the pages of an engine with one rank, and each rank
fills the part of its KV heads. Their bytes are in the order of vLLM's layout, outermost first: L for layers, B blocks,
H heads, N tokens, C content.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from kvoffload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, SharedPage
from kvoffload.errors import LayoutError


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer as the engine allocated it."""

    name: str
    tensors: tuple[torch.Tensor, ...]
    """Usually one tensor, of shape (num_blocks, ...) or, with keys apart from values, (2, num_blocks, ...). num_blocks
    may also be multiplied by a whole number, if a tensor counts smaller kernel blocks."""


@dataclass(frozen=True, slots=True)
class _Run:
    storage: torch.UntypedStorage
    offset: int
    """Number of bytes from the storage's start to the run in GPU block 0."""
    stride: int
    """Number of bytes from one GPU block to the next."""
    num_bytes: int

    @property
    def location(self) -> tuple[int, int, int]:
        """(address in GPU block 0, stride, length), in bytes: equal for runs of the same memory."""
        return self.storage.data_ptr() + self.offset, self.stride, self.num_bytes

    def joined(self, after: _Run) -> _Run | None:
        """Return this run and ``after`` as one run, or ``None`` unless they are neighbours in every GPU block."""
        mine, theirs = self.location, after.location
        num_bytes = self.num_bytes + after.num_bytes
        if theirs[0] != mine[0] + self.num_bytes or self.stride != after.stride or num_bytes > self.stride:
            return None
        same = self.storage.data_ptr() == after.storage.data_ptr()
        return replace(self, num_bytes=num_bytes) if same else None


def canonicalize(groups: Sequence[Sequence[LayerCache]], num_blocks: int) -> CanonicalKVCaches:
    """Return views of the same memory, group by group, with each group's layers in the given order.

    The order of a GPU block's bytes depends only on the order of layers and the layout, never on addresses, because
    blocks on disk outlive this process. A layer that shares the memory of an earlier layer of its group is left out.
    Raises ``LayoutError`` for unknown layouts.
    """
    runs = (
        _joined([run for layer in layers for each in layer.tensors for run in _runs_of(layer.name, each, num_blocks)])
        for layers in groups
    )
    return _caches([[(run, None) for run in each] for each in runs], num_blocks)


def canonicalize_heads(
    groups: Sequence[Sequence[LayerCache]], num_blocks: int, layout: str, part: int = 0, num_parts: int = 1
) -> CanonicalKVCaches:
    """Do the same as ``canonicalize`` on a rank with part ``part`` of ``num_parts`` equal parts of the KV heads, with
    pages that contain all heads.

    ``layout`` is one of ``slices.HEADS_BEFORE_TOKENS``. Each layer has one tensor of shape (num_blocks, heads, tokens,
    content), as large as the tensors of the group's other layers. A page contains the same bytes as in an engine with
    one rank and this layout, without padding. A tensor may count kernel blocks that are smaller than GPU blocks; the
    page is the same. Raises ``LayoutError`` for other tensors.
    """
    return _caches([_runs_in_pages(layers, num_blocks, layout, part, num_parts) for layers in groups], num_blocks)


def _caches(groups: Sequence[Sequence[tuple[_Run, SharedPage | None]]], num_blocks: int) -> CanonicalKVCaches:
    tensors: list[CanonicalKVCacheTensor] = []
    index_by_location: dict[tuple[int, int, int], int] = {}
    group_data_refs: list[list[CanonicalKVCacheRef]] = []
    for runs in groups:
        refs: list[CanonicalKVCacheRef] = []
        for run, page in runs:
            if run.location not in index_by_location:
                index_by_location[run.location] = len(tensors)
                tensors.append(CanonicalKVCacheTensor(_view(run, num_blocks), run.num_bytes))
            refs.append(CanonicalKVCacheRef(index_by_location[run.location], run.num_bytes, page))
        group_data_refs.append(refs)
    return CanonicalKVCaches(tensors, group_data_refs)


def _runs_in_pages(
    layers: Sequence[LayerCache], num_blocks: int, layout: str, part: int, num_parts: int
) -> list[tuple[_Run, SharedPage | None]]:
    """Return the runs with their places, in the order of the pages. A page consists of *pieces*: the tokens of one head
    in one layer and kernel block."""
    by_layer = [_pieces(layer, num_blocks) for layer in layers]
    # A layer may reuse the memory of an earlier one.
    by_layer = list({heads[0][0].location: heads for heads in by_layer}.values())
    num_heads, per_head, num_bytes = _common_sizes(layers[0].name, by_layer)
    sizes = {"L": len(by_layer), "H": num_parts * num_heads}
    outer, inner = [axis for axis in layout if axis in sizes]
    placed: dict[int, _Run] = {}
    for layer, heads in enumerate(by_layer):
        for head, pieces in enumerate(heads, start=part * num_heads):
            at = {"L": layer, "H": head}
            first = (at[outer] * sizes[inner] + at[inner]) * per_head
            placed.update(enumerate(pieces, start=first))
    # The dimensions inside a block form one page.
    page_pieces = per_head * math.prod(sizes.get(axis, 1) for axis in layout[layout.index("B") :])
    result: list[tuple[_Run, SharedPage | None]] = []
    end = 0
    for index, run in sorted(placed.items(), key=lambda item: item[0]):
        page, within = divmod(index, page_pieces)
        both = result[-1][0].joined(run) if within and index == end else None
        if both is not None:
            result[-1] = both, result[-1][1]
        else:
            place = SharedPage(page * page_pieces * num_bytes, page_pieces * num_bytes, within * num_bytes)
            result.append((run, place))
        end = index + 1
    return result


def _common_sizes(name: str, by_layer: Sequence[Sequence[Sequence[_Run]]]) -> tuple[int, int, int]:
    """Return the number of heads of a layer, of pieces of a head, and of bytes of a piece."""
    sizes = {(len(heads), len(heads[0]), heads[0][0].num_bytes) for heads in by_layer}
    if len(sizes) != 1:
        raise LayoutError(f"The layers of {name}'s KV group differ in size; kvoffload does not know this layout.")
    return sizes.pop()


def _pieces(layer: LayerCache, num_blocks: int) -> list[list[_Run]]:
    """Return one run for each head and kernel block."""
    tensor = layer.tensors[0]
    is_known = len(layer.tensors) == 1 and tensor.dim() == 4 and tensor.numel() and tensor.shape[0] % num_blocks == 0
    if not is_known or tensor.stride()[2:] != (tensor.shape[3], 1):
        raise LayoutError(
            f"The KV cache of layer {layer.name} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) does not "
            "have the tokens of a head side by side; kvoffload does not know this layout."
        )
    item = tensor.element_size()
    per_block = tensor.shape[0] // num_blocks
    block_stride, head_stride = tensor.stride(0) * item, tensor.stride(1) * item
    base = int(tensor.storage_offset()) * item
    num_bytes = tensor.shape[2] * tensor.shape[3] * item
    storage = tensor.untyped_storage()

    def piece(head: int, kernel_block: int) -> _Run:
        offset = base + head * head_stride + kernel_block * block_stride
        return _Run(storage, offset, per_block * block_stride, num_bytes)

    return [[piece(head, n) for n in range(per_block)] for head in range(tensor.shape[1])]


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    result: list[_Run] = []
    for run in {run.location: run for run in runs}.values():
        both = result[-1].joined(run) if result else None
        if both is None:
            result.append(run)
        else:
            result[-1] = both
    return result


def _view(run: _Run, num_blocks: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.int8, device=run.storage.device)
    return empty.set_(run.storage, run.offset, (num_blocks, run.num_bytes), (run.stride, 1))


def _runs_of(name: str, tensor: torch.Tensor, num_blocks: int) -> Iterator[_Run]:
    dim = _block_dim(name, tensor, num_blocks)
    if tensor.shape[dim] != num_blocks:
        shape, strides = list(tensor.shape), list(tensor.stride())
        shape[dim : dim + 1] = [num_blocks, shape[dim] // num_blocks]
        strides[dim : dim + 1] = [strides[dim] * shape[dim + 1], strides[dim]]
        tensor = tensor.as_strided(shape, strides)
    item = tensor.element_size()
    stride = tensor.stride(dim) * item
    inner = [(tensor.stride(d), tensor.shape[d]) for d in range(tensor.dim()) if d != dim and tensor.shape[d] > 1]
    # The innermost dense dimensions form the run. There is one run for each index of the other dimensions, outermost
    # first.
    length = 1
    outer: list[tuple[int, int]] = []
    for step, size in sorted(inner):
        if step == length:
            length *= size
        else:
            outer.append((step, size))
    num_bytes = length * item
    if stride < num_bytes or any(step < length for step, _ in outer):
        raise LayoutError(
            f"The KV cache of layer {name} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) has blocks that "
            "overlap; kvoffload does not know this layout."
        )
    storage = tensor.untyped_storage()
    base = int(tensor.storage_offset()) * item
    for indices in itertools.product(*(range(size) for _, size in reversed(outer))):
        steps = (step for step, _ in reversed(outer))
        shift = sum(index * step for index, step in zip(indices, steps, strict=True)) * item
        yield _Run(storage, base + shift, stride, num_bytes)


def _block_dim(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    """Return the dimension that counts GPU blocks (or kernel blocks): the first, or the second after keys and
    values."""
    shape = tuple(tensor.shape)
    first = bool(shape) and shape[0] > 0 and shape[0] % num_blocks == 0
    split = len(shape) > 1 and shape[0] == 2 and shape[1] > 0 and shape[1] % num_blocks == 0
    if first == split:
        raise LayoutError(
            f"The KV cache of layer {name} is shaped {shape}, in which kvoffload cannot tell the dimension that counts "
            f"the engine's {num_blocks} blocks."
        )
    return 0 if first else 1
