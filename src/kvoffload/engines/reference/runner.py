# SPDX-License-Identifier: Apache-2.0
"""The worker: it owns the model and the KV pools, runs forward passes, and chooses tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvoffload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvoffload.engines.reference.attention import plan_step
from kvoffload.engines.reference.layout import KVShape
from kvoffload.engines.reference.request import Scheduled
from kvoffload.engines.reference.states import StateViews, plan_states
from kvoffload.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Token:
    """A chosen token, with the best logit and the difference to the second best."""

    token_id: int
    top_logit: float
    margin: float


class ModelRunner:
    """Runs a model on one device and one thread.

    The pool of a group is one tensor. A GPU block in it is one contiguous page of all layers, so that offloading copies
    large pieces. Pages of states are bytes, because their parts differ in dtype.
    """

    def __init__(self, model: Any, shape: KVShape, num_blocks: int, block_tokens: int) -> None:
        self._model = model
        self._shape = shape
        self._device: torch.device = model.device
        self._block_tokens = block_tokens
        self._state_views: StateViews | None = None
        sizes = [
            (num_blocks, 2, shape.num_layers(group), block_tokens, shape.kv_heads, shape.head_dim)
            for group in range(len(shape.windows))
        ]
        try:
            # Zeroed, so that failures are reproducible. No code reads bytes that were not written.
            self.pools = tuple(torch.zeros(size, dtype=model.dtype, device=self._device) for size in sizes)
            if shape.states is not None:
                size = (num_blocks, shape.states.page_bytes(model.dtype))
                states = torch.zeros(size, dtype=torch.int8, device=self._device)
                self._state_views = StateViews(states, shape.states, model.dtype)
                self.pools += (states,)
        except RuntimeError as exc:
            raise CapacityError(
                f"A KV pool of {num_blocks} blocks does not fit on {self._device}; lower num_blocks."
            ) from exc

    def canonical_kv_caches(self) -> CanonicalKVCaches:
        """Return the pools as bytes: one tensor and one reference per group."""
        tensors, references = [], []
        for index, pool in enumerate(self.pools):
            view = pool.view(pool.shape[0], -1).view(torch.int8)
            tensors.append(CanonicalKVCacheTensor(view, view.shape[1]))
            references.append([CanonicalKVCacheRef(index, view.shape[1])])
        return CanonicalKVCaches(tensors, references)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute(self, scheduled: Sequence[Scheduled]) -> torch.Tensor:
        """Run the model over the scheduled tokens, which writes their keys and values to the pools.

        Returns float32 logits of shape (requests that yield a token, vocab), in order.
        """
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for each in scheduled:
            stop = each.num_computed_tokens + each.num_tokens
            ids += each.request.tokens[each.num_computed_tokens : stop]
            positions += range(each.num_computed_tokens, stop)
            if each.yields_token:
                last.append(len(ids) - 1)
        with_keys = len(self._shape.windows)
        step: dict[str, Any] = {
            "paged_step": plan_step(scheduled, self.pools[:with_keys], self._shape.windows, self._shape.layer_positions)
        }
        if self._state_views is not None:
            step["paged_states"] = plan_states(scheduled, with_keys, self._block_tokens, self._state_views)
        output = self._model(
            input_ids=torch.tensor([ids], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            # If no request yields a token, compute one unused row, because not every model accepts an empty choice.
            logits_to_keep=torch.tensor(last or [0], device=self._device),
            **step,
        )
        logits: torch.Tensor = output.logits[0, : len(last)].float()
        return logits

    def choose(self, logits: torch.Tensor) -> list[Token]:
        """Return the most likely token of each row of ``logits``."""
        best = logits.topk(2, dim=-1)
        return [
            Token(chosen, top, top - second)
            for (chosen, _), (top, second) in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
