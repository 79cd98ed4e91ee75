# SPDX-License-Identifier: Apache-2.0
"""Compare copies between a KV cache in host memory and the region with one large memcpy with the same threads.

Every job moves the same number of bytes, in pages of 4 KiB to 4 MiB in the tensors of several layers, so that no two
pages of a block merge. GPU blocks and rows are scattered over pools twice the size of the job (the worst case of a
long-lived engine), or consecutive (a fresh engine). Planning and queueing count as part of the copy.
"""

from __future__ import annotations

import os

import numpy as np

from bench.core import Row, interleaved_medians
from kvoffload.doctor.copies import HostPlace

LAYERS = 8
PAGES = (4 << 10, 16 << 10, 64 << 10, 512 << 10, 4 << 20)
TARGET_FROM_BYTES = 256 << 10
"""Below this, the call for each page costs too much."""


def run(short: bool) -> list[Row]:
    """Measure the throughput in both directions by page size, relative to one large memcpy in the same rounds."""
    size = (8 << 20) if short else (128 << 20)
    repeats = 2 if short else 15
    threads = max(1, min(4, os.cpu_count() or 1))
    place = HostPlace(threads)
    rows = []
    for page_bytes in PAGES[:2] if short else PAGES:
        num_blocks = size // page_bytes // LAYERS
        with place.rig(LAYERS, page_bytes, 2 * num_blocks) as rig, place.large_copies(size) as memcpy:
            rng = np.random.default_rng(0)
            orders = {
                "consecutive": [list(range(num_blocks))] * 2,
                "scattered": [rng.permutation(rig.num_blocks)[:num_blocks].tolist() for _ in range(2)],
            }
            for order, (blocks, slots) in orders.items():

                def store(blocks: list[int] = blocks, slots: list[int] = slots) -> None:
                    rig.submit_store(blocks, slots)
                    rig.finish()

                def load(blocks: list[int] = blocks, slots: list[int] = slots) -> None:
                    rig.submit_load(slots, blocks)
                    rig.finish()

                reference_s, store_s, load_s = interleaved_medians(memcpy.store, store, load, repeats=repeats)
                for direction, seconds in (("store", store_s), ("load", load_s)):
                    rows.append(
                        Row(
                            case=f"{direction}, {page_bytes >> 10} KiB pages, {order} ids, {threads} threads",
                            value=size / seconds / 1e9,
                            unit="GB/s",
                            reference=f"one large memcpy, {size / reference_s / 1e9:.1f} GB/s",
                            ratio=reference_s / seconds,
                            target=">= 0.9" if page_bytes >= TARGET_FROM_BYTES else "",
                        )
                    )
    return rows
