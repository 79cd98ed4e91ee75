# SPDX-License-Identifier: Apache-2.0
"""Compare copies between a GPU and the region with one large copy of pinned memory in the same rounds.

The copies are the measurements of ``kvoffload doctor``, with targets. Pages of 4 KiB to 4 MiB are in scattered blocks,
so that no copies merge. Planning and submitting count as part of the copy. Without a GPU, the only figure is the CPU
time of planning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.core import Row, thread_medians
from kvoffload.base import Direction, GPULoadStoreSpec
from kvoffload.cli.doctor import Effort, cuda_device, examine
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.plan import CopyLayout, PageRef, plan_runs
from kvoffload.cpu.copy.self_check import wait_for_copies
from kvoffload.doctor.copies import DevicePlace, scattered_jobs
from kvoffload.doctor.findings import least_ratio
from kvoffload.doctor.report import PageSpeed

_JOB = "64 scattered blocks of 64 layers"


def run(short: bool) -> list[Row]:
    rows = [_planning()]
    if short:
        effort = Effort(check_s=0, pages=(4 << 10, 64 << 10), device_bytes=1 << 20, repeats=2)
    else:
        effort = Effort(check_s=0)
    report = examine(0, None, effort)
    if report.device is None:
        return rows
    assert report.checked.wrong is None, report.checked.wrong
    for page in report.pages:
        rows += _rows_of(page)
    cuda, _ = cuda_device(0)
    assert cuda is not None
    place = DevicePlace(cuda)
    seconds = job_seconds(place, 64)
    rows.append(Row(f"processor time, {_JOB}", seconds * 1e3, "ms", "1 ms", seconds / 1e-3, "<= 1"))
    if (slowdown := matmul_slowdown(place, 64 << 10, effort.device_bytes, 8)) is not None:
        rows.append(Row("matrix product beside copies both ways", 1 + slowdown, "x", "alone", 1 + slowdown, "<= 1.03"))
    return rows


def _planning() -> Row:
    """Measure, without a device, the work of the engine's thread before it calls the driver."""
    page_bytes, blocks = 64 << 10, 64
    pages = tuple(PageRef(layer << 40, page_bytes, 2 * blocks, page_bytes) for layer in range(64))
    layout = CopyLayout((pages,), 1, 1 << 50, 64 * page_bytes, 2 * blocks)
    order = np.random.default_rng(0).permutation(2 * blocks)
    gpu, cpu = GPULoadStoreSpec(order[:blocks], [blocks], [0]), CPULoadStoreSpec(order[blocks:])
    (seconds,) = thread_medians(lambda: plan_runs(layout, gpu, cpu, Direction.STORE), repeats=9)
    return Row(f"planning, {_JOB}", seconds * 1e3, "ms", "1 ms", seconds / 1e-3, "<= 1")


def _rows_of(page: PageSpeed) -> list[Row]:
    size = page.page_bytes >> 10
    one_way = f">= {least_ratio(page.page_bytes)}"
    return [
        Row(
            f"{name}, {size} KiB pages, scattered ids",
            speed.bytes_per_s / 1e9,
            "GB/s",
            f"one large pinned copy{' each way' if name == 'both' else ''}, "
            f"{speed.bytes_per_s / speed.ratio / 1e9:.1f} GB/s",
            speed.ratio,
            target,
        )
        for name, speed, target in (
            ("store", page.store, one_way),
            ("load", page.load, one_way),
            ("both", page.both, ">= 0.85" if page.page_bytes >= 64 << 10 else ""),
        )
    ]


def job_seconds(
    place: DevicePlace, num_pages: int, num_blocks: int = 64, page_bytes: int = 4096, repeats: int = 9
) -> float:
    """Return the CPU time of the engine's thread to submit a store of ``num_blocks`` scattered blocks of ``num_pages``
    pages each, and to take its result. The size of a page hardly affects it."""
    with place.rig(num_pages, page_bytes, 2 * num_blocks) as rig:
        order = np.random.default_rng(0).permutation(rig.num_blocks).tolist()
        blocks, slots = order[:num_blocks], order[num_blocks:]
        times = []
        for _ in range(repeats):
            times += thread_medians(lambda: rig.submit_store(blocks, slots), repeats=1)
            rig.finish()
    return sorted(times)[len(times) // 2]


def matmul_slowdown(place: DevicePlace, page_bytes: int, num_bytes: int, layers: int) -> float | None:
    """Return how much longer a matrix product takes while blocks are copied in both directions: 0.03 is 3%. ``None`` if
    torch finds no GPU. The place's compute stream must be idle, and differ from torch's current stream."""
    import torch

    cuda: Any = torch.cuda  # its streams and events are not annotated
    if not cuda.is_available():
        return None
    side, products = 8192, 60
    left, right = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    stream = cuda.Stream()
    num_blocks = max(1, num_bytes // page_bytes // layers)

    def seconds(while_running: Callable[[], object]) -> float:
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        with cuda.stream(stream):
            start.record()
            for _ in range(products):
                torch.mm(left, right, out=out)
            end.record()

        def has_ended() -> bool:
            while_running()
            return bool(end.query())

        wait_for_copies(has_ended, nap_s=0)
        return float(start.elapsed_time(end)) / 1e3

    with place.rig(layers, page_bytes, 4 * num_blocks) as rig:
        _, _, copy = scattered_jobs(rig)
        rounds = [(seconds(lambda: time.sleep(1e-3)), seconds(copy)) for _ in range(5)]
    cuda.synchronize()
    alone, beside = (sorted(column)[len(rounds) // 2] for column in zip(*rounds, strict=True))
    return float(beside / alone - 1)
