# SPDX-License-Identifier: Apache-2.0
"""A spec whose copies go through the CUDA backend and a fake driver: named by ``spec_name`` and ``spec_module_path``.

vLLM's CPU platform computes on the host, and its KV cache stands for the device's memory. So a real scheduler meets
copies that end late, in any order.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.cpu.copy import fake_cuda

from kvoffload.base import CanonicalKVCaches, OffloadingHandler
from kvoffload.cpu.copy.cuda import make_cuda_handlers
from kvoffload.cpu.gpu_worker import copy_layout
from kvoffload.cpu.spec import CPUOffloadingSpec

LONGEST_PAUSE_US = 1000
_STORAGES: dict[int, torch.Tensor] = {}
"""A tensor of each part of the KV cache, by address."""


class FakeCudaSpec(CPUOffloadingSpec):
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
        fake = fake_cuda.load()
        fake.reset()
        fake.pace(seed=1, longest_pause_us=LONGEST_PAUSE_US)
        _STORAGES.update((tensor.tensor.untyped_storage().data_ptr(), tensor.tensor) for tensor in kv_caches.tensors)
        _map(fake)
        view = self.region.create_kv_memoryview()
        layout = copy_layout(kv_caches, view, self.block_size_factor)
        idle = fake.driver.create_stream()
        self._handlers = make_cuda_handlers(kv_caches, view, layout, fake.device(idle))
        for handler in self._handlers.values():
            handler.flush = handler.wait  # type: ignore[method-assign]
        return self._handlers


def sleep_and_wake(connector: Any) -> None:
    """Sleep and wake up as vLLM 0.33 does: the KV cache is unmapped without copies, and returns with other bytes."""
    fake = fake_cuda.load()
    connector.unregister_kv_caches()
    for address, tensor in _STORAGES.items():
        fake.calls.fake_disown(address)
        tensor.untyped_storage().fill_(0x55)
    _map(fake)
    connector.restore_kv_caches()


def _map(fake: fake_cuda.FakeCuda) -> None:
    for address, tensor in _STORAGES.items():
        fake.calls.fake_adopt(address, tensor.untyped_storage().nbytes())
