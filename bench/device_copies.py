# SPDX-License-Identifier: Apache-2.0
"""Compare copies between a GPU and the region with one large copy of pinned memory in the same rounds.

These are the measurements of ``kvoffload doctor``, with targets. Pages of 4 KiB to 4 MiB are in scattered blocks, so
that no copies merge. Planning and submitting count as part of the copy. Without a GPU, the only figure is the CPU time
of planning.
"""

from __future__ import annotations

import numpy as np

from bench.core import Row, thread_medians
from kvoffload.base import Direction, GPULoadStoreSpec
from kvoffload.cli.doctor import Effort, examine
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.plan import CopyLayout, PageRef, plan_runs
from kvoffload.doctor.findings import least_ratio
from kvoffload.doctor.report import PageSpeed

_JOB = "64 scattered blocks of 64 layers"


def run(short: bool) -> list[Row]:
    rows = [_planning()]
    if short:
        effort = Effort(check_s=0, pages=(4 << 10, 64 << 10), device_bytes=1 << 20, pinned_bytes=1 << 20, repeats=2)
    else:
        effort = Effort(check_s=0)
    report = examine(0, None, effort)
    if report.device is None:
        return rows
    assert report.checked.wrong is None, report.checked.wrong
    for page in report.pages:
        rows += _rows_of(page)
    if report.job_s is not None:
        rows.append(Row(f"processor time, {_JOB}", report.job_s * 1e3, "ms", "1 ms", report.job_s / 1e-3, "<= 1"))
    if report.matmul_slowdown is not None:
        longer = 1 + report.matmul_slowdown
        rows.append(Row("matrix product beside copies both ways", longer, "x", "alone", longer, "<= 1.03"))
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
