# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache, registered with transformers as an attention function for its models.

transformers passes every extra keyword argument of a model's forward call to the attention function that the model's
``attn_implementation`` names. In this way, a layer receives the step's ``PagedStep``. The step's tokens are packed into
one row, request after request, so that a batch needs no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kvoffload.engines.reference.layout import LayerPosition
from kvoffload.engines.reference.request import Scheduled

ATTENTION_NAME = "kvoffload_paged"


@dataclass(frozen=True, slots=True)
class Context:
    """The tokens that one request's tokens attend to, in one group."""

    first: int
    stop: int
    """The request's tokens are ``first:stop`` of the packed row."""
    blocks: torch.Tensor
    """GPU blocks to gather, int64."""
    skip: int
    length: int
    """The context consists of the gathered tokens ``skip:skip + length``. The last one is the request's last token."""
    mask: torch.Tensor | None
    """(tokens, context) bool, or ``None`` if each token attends to the whole context."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One group's part of a step."""

    pool: torch.Tensor
    """(num_blocks, 2, layers, block_tokens, kv_heads, head_dim): keys at 0, values at 1."""
    write_blocks: torch.Tensor
    write_offsets: torch.Tensor
    """GPU block, and position in it, for the keys and values of each packed token."""
    contexts: tuple[Context, ...]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The input of ``paged_attention`` in one step."""

    groups: tuple[GroupStep, ...]
    layer_positions: Sequence[LayerPosition]
    """One entry for each layer of the model."""


def plan_step(
    scheduled: Sequence[Scheduled],
    pools: Sequence[torch.Tensor],
    windows: Sequence[int | None],
    layer_positions: Sequence[LayerPosition],
) -> PagedStep:
    """Return the tensors that all layers share in one step. ``windows`` lists the window of each group in tokens."""
    groups = []
    for index, (pool, window) in enumerate(zip(pools, windows, strict=True)):
        blocks: list[int] = []
        offsets: list[int] = []
        contexts = []
        for each in scheduled:
            table, block_tokens = each.block_ids[index], pool.shape[3]
            first, start = len(blocks), each.num_computed_tokens
            stop = start + each.num_tokens
            blocks += [table[position // block_tokens] for position in range(start, stop)]
            offsets += [position % block_tokens for position in range(start, stop)]
            contexts.append(_context(table, block_tokens, first, start, stop, window, pool.device))
        groups.append(
            GroupStep(
                pool,
                torch.tensor(blocks, device=pool.device),
                torch.tensor(offsets, device=pool.device),
                tuple(contexts),
            )
        )
    return PagedStep(tuple(groups), layer_positions)


def _context(
    table: Sequence[int], block_tokens: int, first: int, start: int, stop: int, window: int | None, device: torch.device
) -> Context:
    """Return the context of a request's tokens ``start:stop``, which start at ``first`` in the packed row."""
    oldest = 0 if window is None else max(0, start - window + 1)
    first_block = oldest // block_tokens
    blocks = torch.tensor(table[first_block : -(-stop // block_tokens)], device=device)
    mask = None
    if stop - start > 1:
        queries = torch.arange(start, stop, device=device)[:, None]
        keys = torch.arange(oldest, stop, device=device)[None, :]
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
    return Context(first, first + stop - start, blocks, oldest - first_block * block_tokens, stop - oldest, mask)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    paged_step: PagedStep,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values to the pool, compute attention, and return a tensor of shape (1, tokens, heads,
    head_dim).

    ``query`` is (1, heads, tokens, head_dim), ``key`` and ``value`` are (1, kv_heads, tokens, head_dim), all with
    positions applied.
    """
    layer = paged_step.layer_positions[int(module.layer_idx)]
    group = paged_step.groups[layer.group]
    keys, values = group.pool[:, 0, layer.index], group.pool[:, 1, layer.index]
    keys[group.write_blocks, group.write_offsets] = key[0].transpose(0, 1)
    values[group.write_blocks, group.write_offsets] = value[0].transpose(0, 1)
    output = torch.empty_like(query)
    for context in group.contexts:
        output[:, :, context.first : context.stop] = scaled_dot_product_attention(
            query[:, :, context.first : context.stop],
            _gather(keys, context),
            _gather(values, context),
            attn_mask=context.mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return output.transpose(1, 2), None


def _gather(pages: torch.Tensor, context: Context) -> torch.Tensor:
    """Return the context of one layer, of shape (1, kv_heads, context tokens, head_dim)."""
    tokens = pages.index_select(0, context.blocks).flatten(0, 1)
    return tokens[context.skip : context.skip + context.length].transpose(0, 1)[None]


# No mask function is registered under this name, so transformers builds no mask. The step contains its own masks.
AttentionInterface.register(ATTENTION_NAME, paged_attention)
