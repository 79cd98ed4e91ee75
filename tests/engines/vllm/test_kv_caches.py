# SPDX-License-Identifier: Apache-2.0
"""Every layout an engine may have, checked by writing through the engine's tensors and reading through ours."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sizes import by_size

from kvoffload.base import CanonicalKVCaches, Direction, GPULoadStoreSpec
from kvoffload.config import RankSlice
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.host import copy_to_device, copy_to_host
from kvoffload.cpu.copy.plan import plan_runs
from kvoffload.cpu.gpu_worker import copy_layout
from kvoffload.engines.vllm.kv_caches import LayerCache, canonicalize, canonicalize_heads
from kvoffload.engines.vllm.slices import HEADS_BEFORE_TOKENS
from kvoffload.errors import LayoutError

NUM_BLOCKS, HEADS, TOKENS, CONTENT = 5, 2, 3, 4
PAGE_BYTES = HEADS * TOKENS * CONTENT * 4


def layer_views(order: str, num_layers: int = 3, pad: int = 0) -> list[torch.Tensor]:
    """Return float tensors of logical shape (B, H, N, C), one per layer, laid out in memory by ``order`` of "LBHNC".

    ``pad`` is the number of padding floats behind each block's page, and is only possible if the page is contiguous.
    """
    sizes = {"L": num_layers, "B": NUM_BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(order):
        if axis in "LB" and not {"L", "B"} & strides.keys():
            step += pad
        strides[axis] = step
        step *= sizes[axis]
    memory = torch.zeros(step)
    everything = torch.as_strided(memory, [sizes[a] for a in "LBHNC"], [strides[a] for a in "LBHNC"])
    return [everything[layer] for layer in range(num_layers)]


def block_bytes(caches: CanonicalKVCaches, group: int, block: int) -> bytes:
    """Return one GPU block of a group, as a transfer would copy it."""
    return b"".join(
        caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes].numpy().tobytes()
        for ref in caches.group_data_refs[group]
    )


def fill_distinct(views: list[torch.Tensor]) -> None:
    for number, view in enumerate(views):
        view.copy_(torch.arange(view.numel(), dtype=view.dtype).view(view.shape) + number * 10_000)


def layers(views: list[torch.Tensor]) -> list[LayerCache]:
    return [LayerCache(f"layer{n}", (view,)) for n, view in enumerate(views)]


@pytest.mark.parametrize(
    ("order", "num_refs"),
    [
        ("LBHNC", 3),  # one region per layer
        ("LBNHC", 3),
        ("LHBNC", 3 * HEADS),  # heads outside of blocks: a page per head
        ("BLHNC", 1),  # all layers of a block side by side: one copy
        ("BLNHC", 1),
        ("BHLNC", 1),
    ],
)
def test_blocks_carry_all_their_bytes_and_no_others(order: str, num_refs: int) -> None:
    views = layer_views(order)
    fill_distinct(views)
    caches = canonicalize([layers(views)], NUM_BLOCKS)

    assert sum(ref.page_size_bytes for ref in caches.group_data_refs[0]) == 3 * PAGE_BYTES
    if order != "BHLNC":  # there the layers interleave head by head, and do not come out as neighbours in order
        assert len(caches.group_data_refs[0]) == num_refs
    for block in range(NUM_BLOCKS):
        expected = sorted(value for view in views for value in view[block].flatten().tolist())
        got = torch.frombuffer(bytearray(block_bytes(caches, 0, block)), dtype=torch.float32)
        assert sorted(got.tolist()) == expected


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_block_copied_out_and_into_another_place_is_the_same_block(order: str) -> None:
    views = layer_views(order)
    fill_distinct(views)
    source = [view[1].clone() for view in views]
    caches = canonicalize([layers(views)], NUM_BLOCKS)
    for ref in caches.group_data_refs[0]:
        tensor = caches.tensors[ref.tensor_idx].tensor
        tensor[4] = tensor[1]
    for view, expected in zip(views, source, strict=True):
        assert torch.equal(view[4], expected)
        assert not torch.equal(view[3], expected)


def test_views_are_bytes_of_the_same_memory() -> None:
    views = layer_views("LBHNC")
    caches = canonicalize([layers(views)], NUM_BLOCKS)
    for entry, view in zip(caches.tensors, views, strict=True):
        assert entry.tensor.dtype is torch.int8
        assert entry.tensor.shape == (NUM_BLOCKS, PAGE_BYTES)
        assert entry.tensor.data_ptr() == view.data_ptr()


def test_padding_is_left_out() -> None:
    views = layer_views("LBHNC", pad=7)
    fill_distinct(views)
    caches = canonicalize([layers(views)], NUM_BLOCKS)
    assert [entry.page_size_bytes for entry in caches.tensors] == [PAGE_BYTES] * 3
    assert caches.tensors[0].tensor.stride(0) == PAGE_BYTES + 7 * 4


def test_keys_apart_from_values() -> None:
    split = torch.arange(2 * NUM_BLOCKS * 6, dtype=torch.float32).view(2, NUM_BLOCKS, 6)
    caches = canonicalize([[LayerCache("layer", (split,))]], NUM_BLOCKS)
    assert len(caches.tensors) == 2
    got = torch.frombuffer(bytearray(block_bytes(caches, 0, 3)), dtype=torch.float32)
    assert torch.equal(got, torch.cat([split[0, 3], split[1, 3]]))


def test_several_tensors_of_one_layer() -> None:
    state, short = torch.rand(NUM_BLOCKS, 3, 4), torch.rand(NUM_BLOCKS, 2)
    caches = canonicalize([[LayerCache("mixer", (state, short))]], NUM_BLOCKS)
    assert [entry.page_size_bytes for entry in caches.tensors] == [48, 8]


def test_kernel_blocks_smaller_than_gpu_blocks() -> None:
    whole = torch.rand(NUM_BLOCKS * 4, 2, 8)
    caches = canonicalize([[LayerCache("layer", (whole,))]], NUM_BLOCKS)
    got = torch.frombuffer(bytearray(block_bytes(caches, 0, 2)), dtype=torch.float32)
    assert torch.equal(got, whole[8:12].flatten())


def test_groups_that_overlay_each_other_share_tensors() -> None:
    views = layer_views("LBHNC", num_layers=2)
    caches = canonicalize([layers(views), layers(views), layers(views[:1])], NUM_BLOCKS)
    assert len(caches.tensors) == 2
    assert [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs] == [[0, 1], [0, 1], [0]]


def test_a_layer_that_reuses_anothers_cache_is_copied_once() -> None:
    views = layer_views("LBHNC", num_layers=2)
    caches = canonicalize([layers([*views, views[0]])], NUM_BLOCKS)
    assert [ref.tensor_idx for ref in caches.group_data_refs[0]] == [0, 1]


def test_order_follows_the_layers_and_not_the_addresses() -> None:
    first, second = torch.rand(NUM_BLOCKS, 4), torch.rand(NUM_BLOCKS, 4)
    for pair in ((first, second), (second, first)):
        caches = canonicalize([layers(list(pair))], NUM_BLOCKS)
        got = torch.frombuffer(bytearray(block_bytes(caches, 0, 2)), dtype=torch.float32)
        assert torch.equal(got, torch.cat([pair[0][2], pair[1][2]]))


def test_layers_in_separate_allocations_are_never_joined() -> None:
    views = [torch.rand(NUM_BLOCKS, 4) for _ in range(4)]
    caches = canonicalize([layers(views)], NUM_BLOCKS)
    assert len(caches.tensors) == 4


def test_neighbours_in_one_block_only_are_not_joined() -> None:
    memory = torch.arange(100, dtype=torch.float32)
    narrow = memory.as_strided((NUM_BLOCKS, 4), (8, 1))
    wide = memory.as_strided((NUM_BLOCKS, 4), (12, 1), storage_offset=4)  # right behind it in block 0 alone
    caches = canonicalize([layers([narrow, wide])], NUM_BLOCKS)
    assert len(caches.tensors) == 2
    behind = memory.as_strided((NUM_BLOCKS, 6), (8, 1), storage_offset=4)  # together longer than a block
    assert len(canonicalize([layers([narrow, behind])], NUM_BLOCKS).tensors) == 2


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(7, 4), "cannot tell the dimension"),
        (torch.zeros(3, NUM_BLOCKS, 4), "cannot tell the dimension"),
        (torch.zeros(4).expand(NUM_BLOCKS, 4), "overlap"),
        (torch.zeros(NUM_BLOCKS, 4).as_strided((NUM_BLOCKS, 4), (2, 1)), "overlap"),
    ],
)
def test_what_is_not_understood_is_refused(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        canonicalize([layers([tensor])], NUM_BLOCKS)


def test_two_blocks_may_mean_two_things() -> None:
    with pytest.raises(LayoutError, match="cannot tell"):
        canonicalize([[LayerCache("layer", (torch.zeros(2, 2, 4),))]], 2)


@settings(max_examples=60)
@given(
    order=st.permutations("LBHNC").map("".join),
    num_layers=st.integers(1, 3),
)
def test_any_order_of_the_axes_copies_right(order: str, num_layers: int) -> None:
    views = layer_views(order, num_layers)
    fill_distinct(views)
    wanted = [view.clone() for view in views]
    caches = canonicalize([layers(views)], NUM_BLOCKS)
    assert sum(ref.page_size_bytes for ref in caches.group_data_refs[0]) == num_layers * PAGE_BYTES
    # Swapping two blocks through the canonical views swaps them for the engine, and touches no third one.
    for ref in caches.group_data_refs[0]:
        tensor = caches.tensors[ref.tensor_idx].tensor
        tensor[[0, 3]] = tensor[[3, 0]]
    for view, old in zip(views, wanted, strict=True):
        expected = old.clone()
        expected[[0, 3]] = old[[3, 0]]
        assert torch.equal(view, expected)
    assert math.prod(views[0].shape) == NUM_BLOCKS * HEADS * TOKENS * CONTENT


# ------------------------------------------------------------------------------------------------ pages of all heads


def rank_views(
    model: torch.Tensor, layout: str, part: int, num_parts: int, num_blocks: int, kernel_blocks: int, pad: int
) -> list[torch.Tensor]:
    """Return the parts that vLLM gives a rank for ``model``, of shape (layers, blocks, heads, tokens, content).

    The views have shape (B, H, N, C), one per layer, in memory by ``layout``, with padding after each block. There is
    no padding if heads are outside of blocks.
    """
    num_layers, num_blocks, heads, tokens, content = model.shape
    mine = heads // num_parts
    sizes = {"L": num_layers, "B": num_blocks, "H": mine, "N": tokens, "C": content}
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(layout):
        if axis == "B" and layout != "LHBNC":
            step += pad
        strides[axis] = step
        step *= sizes[axis]
    memory = torch.full((step + 3,), -1.0)
    whole = torch.as_strided(memory, [sizes[a] for a in "LBHNC"], [strides[a] for a in "LBHNC"], storage_offset=3)
    if kernel_blocks > 1:  # dense pages alone, cut into kernel blocks with their heads inside
        shape = num_layers, num_blocks * kernel_blocks, mine, tokens // kernel_blocks, content
        dense = strides["B"] // kernel_blocks
        whole = torch.as_strided(memory, shape, (strides["L"], dense, shape[3] * content, content, 1), storage_offset=3)
    own = model[:, :, part * mine : (part + 1) * mine]
    if kernel_blocks > 1:
        cut = own.reshape(num_layers, num_blocks, mine, kernel_blocks, tokens // kernel_blocks, content)
        own = cut.transpose(2, 3).reshape(whole.shape)
    whole.copy_(own)
    return list(whole)


def slot_of(model: torch.Tensor, layout: str, blocks: list[int]) -> bytes:
    """Return a slot by its definition: the pages of an engine with one rank, each with its sub-blocks side by side."""
    inner = layout[layout.index("B") + 1 :]
    outer = [axis for axis in layout if axis not in inner]
    order = ["LBHNC".index(axis) for axis in (*[a for a in outer if a != "B"], "B", *inner)]
    return model[:, blocks].permute(order).contiguous().numpy().tobytes()


@st.composite
def shards(draw: st.DrawFn) -> dict[str, Any]:
    layout = draw(st.sampled_from(HEADS_BEFORE_TOKENS))
    parts = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (2, 4), (3, 1), (6, 2)]))
    return {
        "layout": layout,
        "writers": parts[0],
        "readers": parts[1],
        "heads": math.lcm(*parts) * draw(st.integers(1, 2)),
        "replicas": draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)])),
        "layers": draw(st.integers(1, 3)),
        "kernel_blocks": draw(st.sampled_from([1, 1, 2, 4])) if layout == "LBHNC" else 1,
        "factor": draw(st.integers(1, 3)),
        "pad": draw(st.sampled_from([0, 5])),
    }


@settings(max_examples=by_size(60, 1000))
@given(shards(), st.randoms(use_true_random=False))
def test_what_some_ranks_store_others_load(case: dict[str, Any], chance: random.Random) -> None:
    """The slots contain the defined bytes, whichever rank wrote them, and the reading engine gets the tensors."""
    layout, factor, num_layers = case["layout"], case["factor"], case["layers"]
    kernel_blocks = case["kernel_blocks"]
    pad = 0 if kernel_blocks > 1 else case["pad"]
    num_slots, tokens, content = 3, 4, 2
    num_blocks = num_slots * factor
    model = torch.arange(num_layers * num_blocks * case["heads"] * tokens * content, dtype=torch.float32)
    model = model.view(num_layers, num_blocks, case["heads"], tokens, content)
    slots = np.zeros((num_slots, factor * model[:, 0].numel() * 4), dtype=np.uint8)
    blocks = chance.sample(range(num_blocks), num_blocks)
    order = chance.sample(range(num_slots), num_slots)
    gpu, cpu = GPULoadStoreSpec(blocks, [num_blocks], [0]), CPULoadStoreSpec(order)

    def copy(direction: Direction, parts: int, replicas: int, source: torch.Tensor, kernel: int) -> list[torch.Tensor]:
        """By all ranks of an engine. Returns their views, layer by layer and rank by rank."""
        everything = []
        for part, replica in itertools.product(range(parts), range(replicas)):
            views = rank_views(source, layout, part, parts, num_blocks, kernel, pad)
            caches = canonicalize_heads([layers(views)], num_blocks, layout, part, parts)
            plan = copy_layout(caches, memoryview(slots), factor, RankSlice(part, parts, replica, replicas))
            runs = plan_runs(plan, gpu, cpu, direction)
            (copy_to_host if direction is Direction.STORE else copy_to_device)(runs)
            everything.append(torch.stack(views))
        return everything

    copy(Direction.STORE, case["writers"], case["replicas"][0], model, kernel_blocks)
    for nth, slot in enumerate(order):
        assert slots[slot].tobytes() == slot_of(model, layout, blocks[nth * factor : (nth + 1) * factor])
    # The reader may cut its blocks into other kernel blocks.
    kernel = 1 if pad or layout != "LBHNC" else chance.choice([1, 2])
    loaded = copy(Direction.LOAD, case["readers"], case["replicas"][1], torch.zeros_like(model), kernel)
    for nth, views in enumerate(loaded):
        part = nth // case["replicas"][1]
        wanted = rank_views(model, layout, part, case["readers"], num_blocks, kernel, pad)
        assert torch.equal(views, torch.stack(wanted))


@pytest.mark.parametrize(
    ("layout", "of_one_rank", "of_two"),
    [("LBHNC", 3, 3), ("LHBNC", 12, 6), ("BLHNC", 1, 3), ("BHLNC", 1, 1)],
)
def test_a_block_is_copied_in_few_pieces(layout: str, of_one_rank: int, of_two: int) -> None:
    model = torch.rand(3, NUM_BLOCKS, 4, TOKENS, CONTENT)
    for parts, pieces in ((1, of_one_rank), (2, of_two)):
        for part in range(parts):
            views = rank_views(model, layout, part, parts, NUM_BLOCKS, 1, 0)
            caches = canonicalize_heads([layers(views)], NUM_BLOCKS, layout, part, parts)
            assert len(caches.group_data_refs[0]) == pieces


def test_groups_that_overlay_each_other_share_tensors_in_pages_of_all_heads_too() -> None:
    views = rank_views(torch.rand(2, NUM_BLOCKS, 2, TOKENS, CONTENT), "LBHNC", 0, 1, NUM_BLOCKS, 1, 0)
    again = [*views, views[0]]  # a layer that reuses the cache of the first
    caches = canonicalize_heads([layers(again), layers(views[:1])], NUM_BLOCKS, "LBHNC")
    assert [[ref.tensor_idx for ref in refs] for refs in caches.group_data_refs] == [[0, 1], [0]]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([torch.zeros(NUM_BLOCKS, 2, 8)], "does not have the tokens of a head side by side"),
        ([torch.zeros(NUM_BLOCKS, 3, 2, 4).transpose(1, 2)], "does not have the tokens of a head side by side"),
        ([torch.zeros(NUM_BLOCKS + 1, 2, 3, 4)], "does not have the tokens of a head side by side"),
        ([torch.zeros(NUM_BLOCKS, 2, 3, 4), torch.zeros(NUM_BLOCKS, 2, 3, 8)], "differ in size"),
    ],
)
def test_what_has_no_pages_of_heads_is_refused(tensors: list[torch.Tensor], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        canonicalize_heads([layers(tensors)], NUM_BLOCKS, "LBHNC")
