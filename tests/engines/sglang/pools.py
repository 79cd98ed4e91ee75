# SPDX-License-Identifier: Apache-2.0
"""Host pools as SGLang lays them out, without SGLang: attention with keys and values apart, and latent attention."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from kvoffload.engines.sglang.updates import watch

LAYERS, HEADS, DIM, TOKENS = 3, 2, 32, 4


class HostPool:
    """A pool of ``num_pages`` pages of ``TOKENS`` tokens, with layout ``layer_first`` or ``page_first``.

    ``parts`` is 2 if keys and values are separate, and 1 for latent attention.
    """

    def __init__(self, num_pages: int, layout: str = "page_first", parts: int = 2, layers: int = LAYERS) -> None:
        self.layout, self.page_size, self.layer_num = layout, TOKENS, layers
        self.head_num, self.head_dim, self.dtype = HEADS, DIM, torch.float32
        self.size = num_pages * TOKENS
        shape = (layers, self.size) if layout == "layer_first" else (self.size, layers)
        self.kv_buffer = torch.zeros((parts, *shape, HEADS, DIM), dtype=self.dtype)
        self._token_bytes = HEADS * DIM * self.dtype.itemsize

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses = []
        pieces = range(self.layer_num) if self.layout == "layer_first" else range(1)
        for token in indices.tolist()[:: self.page_size]:
            for layer in pieces:
                for part in range(self.kv_buffer.shape[0]):
                    at = (part, layer, token) if self.layout == "layer_first" else (part, token)
                    addresses.append(self.kv_buffer[at].data_ptr())
        size = self._token_bytes * self.page_size * (1 if self.layout == "layer_first" else self.layer_num)
        return addresses, [size] * len(addresses)

    def indices(self, *pages: int) -> torch.Tensor:
        """Return the token indices of these pages."""
        return torch.tensor([page * TOKENS + token for page in pages for token in range(TOKENS)], dtype=torch.int64)

    def page(self, number: int) -> torch.Tensor:
        """Return a copy of a page's content."""
        return self._at(number).clone()

    def _at(self, number: int) -> torch.Tensor:
        tokens = slice(number * TOKENS, (number + 1) * TOKENS)
        return self.kv_buffer[:, :, tokens] if self.layout == "layer_first" else self.kv_buffer[:, tokens]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.page(index // TOKENS)
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.page(0)).flatten()

    def set_from_flat_data_page(self, index: int, data: torch.Tensor) -> None:
        self._at(index // TOKENS).copy_(data.reshape(self.page(0).shape))

    def fill(self, number: int, key: str) -> torch.Tensor:
        """Gives a page the content that only ``key`` has, and returns a copy."""
        content = torch.frombuffer(
            bytearray(hashlib.shake_128(key.encode()).digest(self.page(0).nbytes // 4)), dtype=torch.uint8
        ).to(torch.float32)
        self.set_from_flat_data_page(number * TOKENS, content)
        return self.page(number)


def hashes(*numbers: int) -> list[str]:
    """Keys as SGLang makes them."""
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in numbers]


def open_storage(kind: str, model: str, pool: Any, extra: dict[str, Any]) -> Any:
    """Return a storage of ``kind`` (``"dynamic"``, ``"file"``) for the pages of ``pool``, as SGLang's factory makes
    it."""
    from sglang.srt.managers import cache_controller  # noqa: F401 - as in a scheduler's process
    from sglang.srt.managers.scheduler_components import weight_updater  # noqa: F401
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    watch()
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=model,
        extra_config=extra,
    )
    storage = StorageBackendFactory.create_backend(kind, config, pool)
    storage.register_mem_pool_host(pool)
    return storage
