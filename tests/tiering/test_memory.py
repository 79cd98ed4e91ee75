# SPDX-License-Identifier: Apache-2.0
"""Test that a scheduler process's memory grows with the blocks in its tiers, but not beyond full tiers."""

from __future__ import annotations

import gc
import time
import tracemalloc
from pathlib import Path

import pytest
from tests.tiering.test_spec import PAGE_BYTES, layout, spec

from kvoffload.base import OffloadingManager, ReqContext
from kvoffload.testing.keys import keys
from kvoffload.tiering import presence, questions

BATCH, ROUND = 16, 60


def serve(manager: OffloadingManager, first: int) -> None:
    """Serve requests with new blocks, each written to all tiers before the next one, without transfers."""
    for begin in range(first, first + BATCH * ROUND, BATCH):
        context = ReqContext(f"r{begin}")
        manager.on_new_request(context)
        names = keys(*range(begin, begin + BATCH))
        manager.lookup_prefix(names, context)
        output = manager.prepare_store(names, context)
        assert output is not None
        manager.complete_store(output.keys_to_store, context)
        manager.on_request_finished(context)
        while manager.has_pending_work():
            manager.on_schedule_end()
            list(manager.take_events())
            time.sleep(0.0005)


def test_a_remembered_key_takes_120_bytes() -> None:
    """``docs/operating.md`` says so."""
    count, step = 50_000, 100
    gc.collect()
    tracemalloc.start()
    try:
        remembered = presence._RememberedKeys(count)
        for first in range(0, count, step):
            remembered.add(keys(*range(first, first + step)))
        gc.collect()
        per_key = tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()
    assert len(remembered) == count
    assert 64 < per_key <= 120


@pytest.mark.long
def test_full_tiers_take_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Memory that is bounded by a number of keys reaches its bound within the test.
    monkeypatch.setattr(questions, "_MAX_SKIPPED", 500)
    quota = {"max_bytes": "2MiB", "timeout_s": 60.0, "max_index_blocks": 1000}
    tiers = [{"type": kind, "path": str(tmp_path / kind), **quota} for kind in ("disk", "fs")]
    made = spec(*tiers, cpu_bytes_to_use=64 * PAGE_BYTES, eviction_policy="lru", of=layout(events_enabled=True))
    manager = made.get_manager()
    sizes = []
    tracemalloc.start()
    try:
        for number in range(6):
            serve(manager, number * BATCH * ROUND)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        made.shutdown()
    # Both tiers and the index of the fs tier have been full since the third round.
    assert max(sizes[3:]) - min(sizes[3:]) < 64 * 1024, sizes
    assert sizes[1] - sizes[0] > 30 * BATCH * ROUND, "while they fill, each block takes some"
