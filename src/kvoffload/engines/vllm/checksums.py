# SPDX-License-Identifier: Apache-2.0
"""Checksums of the weights that a vLLM worker computes with. Runs in workers; loads torch only there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_WORDS = 4096
"""Number of words in a row, see ``_checksum``."""


def weights_state(worker: Any) -> list[int] | None:
    """Return a checksum of each piece of memory with parameters or buffers of the worker's models, or ``None`` if the
    worker does not show a model. It reads all weights on the GPU twice, which takes about 20 ms, and needs little
    additional memory."""
    import torch

    try:
        models = [worker.get_model()]
    except (AttributeError, NotImplementedError):
        return None
    draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
    models += [] if draft is None else [draft]
    with torch.inference_mode():
        sums = [_checksum(words) for words in _memory_of(models)]
        return [int(each) for each in sums]  # after all have started


def _memory_of(models: list[Any]) -> Iterator[torch.Tensor]:
    """Yield each storage once, as bytes, because weights may be views of others, in any order of dimensions."""
    import torch

    seen = set()
    for model in models:
        for _, tensor in (*model.named_parameters(), *model.named_buffers()):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _checksum(memory: torch.Tensor) -> torch.Tensor:
    """Return a checksum of ``memory``. The words form rows of ``_WORDS``. The sums of rows and of columns, and the
    words after the last row, are each multiplied by a number of their own."""
    import torch

    num_words = memory.numel() // 8
    words, rest = memory[: num_words * 8].view(torch.int64), memory[num_words * 8 :]
    whole = num_words // _WORDS * _WORDS
    rows = words[:whole].view(-1, _WORDS)
    parts = torch.cat((rows.sum(dim=1), rows.sum(dim=0), words[whole:], rest.to(torch.int64)))
    places = torch.arange(parts.numel(), dtype=torch.int64, device=parts.device)
    return (parts * (2 * places + 1)).sum()
