# SPDX-License-Identifier: Apache-2.0
"""Paged attention of one layer against attention over the whole context, with scattered blocks and any chunks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvoffload.engines.reference.attention import paged_attention, plan_step
from kvoffload.engines.reference.layout import LayerPosition
from kvoffload.engines.reference.request import Request, SamplingParams, Scheduled

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 8
TABLES = {"a": (5, 2, 7, 0), "b": (1, 6, 3, 4)}
LAYER = SimpleNamespace(layer_idx=0)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """(1, heads, tokens, head_dim) of one request, all tokens at once."""
    tokens = query.shape[2]
    queries, keys = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 7, 1]])
def test_equals_attention_over_the_whole_context(window: int | None, chunks: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = {
        name: [torch.randn(1, heads, 13, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        for name in TABLES
    }
    pool = torch.full((8, 2, 1, BLOCK, KV_HEADS, HEAD_DIM), torch.nan)
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in TABLES}
    start = 0
    for count in chunks:
        scheduled = [
            Scheduled(Request(name, range(13), SamplingParams(), BLOCK), start, count, (table,))
            for name, table in TABLES.items()
        ]
        step = plan_step(scheduled, [pool], [window], [LayerPosition(0, 0)])
        packed = [
            torch.cat([rows[name][part][:, :, start : start + count] for name in TABLES], dim=2) for part in range(3)
        ]
        out, _ = paged_attention(LAYER, *packed, None, paged_step=step)  # type: ignore[arg-type]
        for at, name in enumerate(TABLES):
            outputs[name].append(out[:, at * count : (at + 1) * count].transpose(1, 2))
        start += count
    for name in TABLES:
        torch.testing.assert_close(torch.cat(outputs[name], dim=2), dense(*rows[name], window))


def test_only_blocks_inside_the_window_are_gathered() -> None:
    request = Request("a", range(14), SamplingParams(), BLOCK)
    pool = torch.zeros(8, 2, 1, BLOCK, KV_HEADS, HEAD_DIM)
    scheduled = [Scheduled(request, 13, 1, ((5, 2, 7, 0), (5, 2, 7, 0)))]
    step = plan_step(scheduled, [pool, pool], [None, 3], [LayerPosition(0, 0)])
    whole, windowed = (group.contexts[0] for group in step.groups)
    assert whole.blocks.tolist() == [5, 2, 7, 0]
    assert windowed.blocks.tolist() == [7, 0]
    assert (windowed.skip, windowed.length) == (3, 3)
