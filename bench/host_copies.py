# SPDX-License-Identifier: Apache-2.0
"""Copies between a KV cache in host memory and the region, against one large memcpy with the same threads.

Every job moves the same number of bytes, in pages of 4 KiB to 4 MiB that lie in the tensors of several layers, so that
no two pages of a block merge. GPU blocks and rows are scattered over pools twice the size of the job (the worst a
long-lived engine comes to), or consecutive (a fresh engine). Planning and queueing count as part of the copy.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from bench.core import Row, interleaved_medians
from kvoffload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingHandler,
)
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.host import MOVER
from kvoffload.cpu.gpu_worker import make_handlers
from kvoffload.cpu.region import SharedOffloadRegion

LAYERS = 8
PAGES = (4 << 10, 16 << 10, 64 << 10, 512 << 10, 4 << 20)
TARGET_FROM_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Job:
    """One copy of ``num_blocks`` blocks in both directions."""

    store: OffloadingHandler
    load: OffloadingHandler
    gpu: GPULoadStoreSpec
    cpu: CPULoadStoreSpec

    def run_store(self) -> None:
        self.store.transfer_async(1, (self.gpu, self.cpu))
        _finish(self.store)

    def run_load(self) -> None:
        self.load.transfer_async(1, (self.cpu, self.gpu))
        _finish(self.load)


def _finish(handler: OffloadingHandler) -> None:
    handler.wait([1])
    (result,) = handler.get_finished()
    assert result.success


def _jobs(page_bytes: int, num_blocks: int, threads: int) -> Iterator[tuple[str, Job]]:
    """The consecutive and the scattered job over one pool; it is freed when the generator ends."""
    pool = 2 * num_blocks
    tensors = [torch.zeros((pool, page_bytes), dtype=torch.uint8) for _ in range(LAYERS)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
        [[CanonicalKVCacheRef(layer, page_bytes) for layer in range(LAYERS)]],
    )
    region = SharedOffloadRegion.anonymous(pool, LAYERS * page_bytes)
    view = region.create_kv_memoryview()
    for tensor in tensors:
        tensor.fill_(1)
    np.asarray(view)[:] = 1  # page faults are a matter of the first use, not of copying
    handlers = make_handlers(caches, view, factor=1, num_threads=threads)
    rng = np.random.default_rng(0)
    orders: dict[str, Callable[[], npt.NDArray[np.int64]]] = {
        "consecutive": lambda: np.arange(num_blocks),
        "scattered": lambda: rng.permutation(pool)[:num_blocks],
    }
    for name, ids in orders.items():
        gpu = GPULoadStoreSpec(ids(), [num_blocks], [0])
        yield name, Job(handlers["GPU", "CPU"], handlers["CPU", "GPU"], gpu, CPULoadStoreSpec(ids()))
    for handler in handlers.values():
        handler.shutdown()
    region.close()


class Memcpy:
    """One contiguous copy, cut into a part for each thread."""

    def __init__(self, size: int, threads: int) -> None:
        self._source, self._target = mmap.mmap(-1, size), mmap.mmap(-1, size)
        self._pool = ThreadPoolExecutor(threads)
        source, target = (np.frombuffer(memory, dtype=np.uint8) for memory in (self._source, self._target))
        source[:] = target[:] = 1
        cuts = [size * part // threads for part in range(threads + 1)]
        self._parts = [
            (target.ctypes.data + low, source.ctypes.data + low, high - low) for low, high in itertools.pairwise(cuts)
        ]

    def run(self) -> None:
        list(self._pool.map(lambda part: ctypes.memmove(*part), self._parts))

    def close(self) -> None:
        self._pool.shutdown()


def run(short: bool) -> list[Row]:
    """Throughput of both directions by page size; the ratio is against ``Memcpy`` in the same rounds."""
    size = (8 << 20) if short else (128 << 20)
    repeats = 2 if short else 15
    threads = max(1, min(4, os.cpu_count() or 1))
    pages = PAGES[:2] if short else PAGES
    memcpy = Memcpy(size, threads)
    rows = []
    for page_bytes in pages:
        for order, job in _jobs(page_bytes, size // page_bytes // LAYERS, threads):
            job.run_store()
            MOVER.wait()  # for the compiled loop
            reference_s, store_s, load_s = interleaved_medians(memcpy.run, job.run_store, job.run_load, repeats=repeats)
            for direction, seconds in (("store", store_s), ("load", load_s)):
                rows.append(
                    Row(
                        bench="host_copies",
                        case=f"{direction}, {page_bytes >> 10} KiB pages, {order} ids, {threads} threads",
                        value=size / seconds / 1e9,
                        unit="GB/s",
                        reference=f"one large memcpy, {size / reference_s / 1e9:.1f} GB/s",
                        ratio=reference_s / seconds,
                        target=">= 0.9" if page_bytes >= TARGET_FROM_BYTES else "",
                    )
                )
    memcpy.close()
    return rows
