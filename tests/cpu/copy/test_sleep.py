# SPDX-License-Identifier: Apache-2.0
"""An engine that sleeps: its memory is unmapped, and mapped again elsewhere. Over the fake driver, to which memory that
goes away under a copy is a fault."""

from __future__ import annotations

import torch
from tests.cpu.copy.cuda_rig import CudaRig, make_rig
from tests.cpu.copy.fake_cuda import FakeCuda, cuda
from tests.fakes.manual_handler import ManualSpec

from kvoffload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingHandler
from kvoffload.connector.messages import ConnectorMeta, TransferJob
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUOffloadingManager

__all__ = ["cuda"]


class _Spec(ManualSpec):
    """The handlers of a rig."""

    def __init__(self, rig: CudaRig) -> None:
        super().__init__(CPUOffloadingManager(8), rig.store)
        self._rig = rig

    def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
        return {("GPU", "CPU"): self._rig.store, ("CPU", "GPU"): self._rig.load}


def _job(job_id: int, block: int, slot: int, is_store: bool) -> TransferJob:
    gpu, cpu = GPULoadStoreSpec([block], [1, 0], [0, 0]), CPULoadStoreSpec([slot])
    return TransferJob(job_id, "r", gpu, cpu) if is_store else TransferJob(job_id, "r", cpu, gpu)


def test_copies_have_ended_when_memory_goes_and_find_it_where_it_comes_back(cuda: FakeCuda) -> None:
    rig = make_rig(cuda, layered=True)
    worker = OffloadingConnectorWorker()
    worker.register_kv_caches(_Spec(rig), CanonicalKVCaches())
    cuda.pace(1, longest_pause_us=5000)
    rig.compute_fills(1, 3)
    worker.start_step(ConnectorMeta(stores=(_job(1, block=1, slot=2, is_store=True),)))
    worker.suspend()
    assert rig.in_slot(2) == {3}
    cuda.disown(*rig.tensors)
    before = [tensor.clone() for tensor in rig.tensors]
    given_up = [torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()) for tensor in rig.tensors]  # type: ignore[call-overload]
    for tensor in rig.tensors:
        tensor.set_(torch.zeros_like(tensor))  # type: ignore[call-overload]
    worker.start_step(ConnectorMeta(loads=(_job(2, block=5, slot=2, is_store=False),)))
    cuda.settle()
    cuda.adopt(*rig.tensors)
    worker.resume()
    worker.start_step(ConnectorMeta(loads=(_job(3, block=7, slot=2, is_store=False),)))
    rig.load.wait([3])
    ends = {result.job_id: result.success for _, result in worker.get_report().results}
    assert ends == {1: True, 2: False, 3: True}
    assert (rig.in_block(5), rig.in_block(7)) == ({0}, {3})
    assert all(torch.equal(old, was.flatten()) for old, was in zip(given_up, before, strict=True))
    rig.close()
