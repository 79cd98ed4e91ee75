# SPDX-License-Identifier: Apache-2.0
"""Recurrent states in a paged pool, for the mixers of transformers' models.

A mixer reads the state before its tokens and leaves the state after them. A GPU block contains the state of one
position, for all layers together. A request's last state is written in place while the request moves through a block.
At a block's end, the request continues in another GPU block, so the state at that end remains for the prefix cache and
for the connector.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvoffload.engines.reference.layout import StateShape
from kvoffload.engines.reference.request import Scheduled
from kvoffload.errors import LayoutError


class StateViews:
    """The states of all GPU blocks, as tensors over the pool's bytes."""

    def __init__(self, pool: torch.Tensor, shape: StateShape, dtype: torch.dtype) -> None:
        """Create the views. ``pool`` has the shape (num_blocks, ``shape.page_bytes(dtype)``) and the type int8."""
        split = shape.recurrent_bytes
        blocks, layers = pool.shape[0], shape.layers
        self.recurrent = pool[:, :split].view(torch.float32).view(blocks, layers, *shape.recurrent)
        convolved = pool[:, split : split + shape.convolution_bytes(dtype)]
        self.convolution = convolved.view(dtype).view(blocks, layers, *shape.convolution)

    def __repr__(self) -> str:
        return f"StateViews({tuple(self.recurrent.shape)}, {tuple(self.convolution.shape)})"

    def carry(self, source: int | None, destination: int, layer: int) -> None:
        """Copy one layer's state from block ``source`` to block ``destination``. ``None`` is the state before the first
        token."""
        for states in (self.recurrent, self.convolution):
            if source is None:
                states[destination, layer] = 0
            elif source != destination:
                states[destination, layer] = states[source, layer]


@dataclass(frozen=True, slots=True)
class StateSegment:
    """Consecutive tokens of one request between two kept states."""

    first: int
    stop: int
    """The tokens are ``first:stop`` of the packed row."""
    source: int | None
    """GPU block of the state before them; ``None`` at the request's first token."""
    destination: int
    """GPU block of the state after them."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """The input of the mixers in one step."""

    views: StateViews
    segments: tuple[StateSegment, ...]


def plan_states(scheduled: Sequence[Scheduled], group: int, block_tokens: int, views: StateViews) -> StateStep:
    """Return the step for ``scheduled``. It cuts each request's tokens after the last full block, whose state is
    kept."""
    segments = []
    first = 0
    for each in scheduled:
        table, start = each.block_ids[group], each.num_computed_tokens
        stop = start + each.num_tokens
        boundary = stop // block_tokens * block_tokens
        cuts = [start, boundary, stop] if start < boundary < stop else [start, stop]
        for begin, end in itertools.pairwise(cuts):
            source = table[(begin - 1) // block_tokens] if begin else None
            segments.append(StateSegment(first, first + end - begin, source, table[(end - 1) // block_tokens]))
            first += end - begin
    return StateStep(views, tuple(segments))


class PagedMixer(torch.nn.Module):  # type: ignore[misc]
    """Wraps a mixer of transformers, and computes each segment of the packed row from its own state."""

    def __init__(self, mixer: torch.nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states: torch.Tensor, *, paged_states: StateStep, **_: Any) -> torch.Tensor:
        """Compute ``hidden_states``, of shape (1, tokens, hidden), and write the states to the pool."""
        layer = int(self.mixer.layer_idx)
        output = torch.empty_like(hidden_states)
        for segment in paged_states.segments:
            views = paged_states.views
            views.carry(segment.source, segment.destination, layer)
            output[:, segment.first : segment.stop] = self.mixer(
                hidden_states[:, segment.first : segment.stop],
                _StateOfBlock(  # by position, because its name differs between versions of transformers
                    views.recurrent[segment.destination, layer, None],
                    views.convolution[segment.destination, layer, None],
                ),
            )
        return output


class _StateOfBlock:
    """The part of transformers' ``Cache`` that a mixer uses, for one layer of one GPU block. Tensors are views of the
    pool."""

    def __init__(self, recurrent: torch.Tensor, convolution: torch.Tensor) -> None:
        self._recurrent, self._convolution = recurrent, convolution

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._convolution

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        return self._recurrent.copy_(recurrent_states)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        """Return the state and the new columns, because the convolution also needs the columns before a segment."""
        whole = torch.cat([self._convolution, conv_states], dim=-1)
        self._convolution.copy_(whole[..., -self._convolution.shape[-1] :])
        return whole


def use_paged_states(model: Any, mixers: str) -> None:
    """Wrap every submodule with the name ``mixers``, once. Raises ``LayoutError`` for versions of transformers whose
    mixers store their states in another way."""
    if not hasattr(Cache, "get_recurrent_state"):
        raise LayoutError("Models with recurrent states need a newer transformers, for example 5.23; upgrade it.")
    found = [(name, module) for name, module in model.named_modules() if name.rpartition(".")[2] == mixers]
    for name, module in found:
        if not isinstance(module, PagedMixer):
            model.set_submodule(name, PagedMixer(module))
