# SPDX-License-Identifier: Apache-2.0
"""The table of transfers in flight: ends on all ranks, fences around GPU blocks, and flushes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import pytest
from tests.connector.rig import BT, FULL, SLIDING, Request, Rig, key

from kvoffload.base import Direction, GPULoadStoreSpec, OffloadPolicy, ReqContext, TransferResult
from kvoffload.config import DEFAULTS, EngineLayout
from kvoffload.connector.epochs import FIRST
from kvoffload.connector.groups import geometry_of
from kvoffload.connector.jobs import JobRecord, JobTable
from kvoffload.connector.messages import ConnectorMeta, WorkerReport
from kvoffload.connector.requests import Request as OwnRequest
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.metrics import Histogram


@pytest.fixture
def table() -> Iterator[JobTable]:
    """Yield a table of two ranks."""
    table = JobTable(geometry_of(EngineLayout((FULL,), BT, "two"), DEFAULTS), num_ranks=2)
    yield table
    table.check_invariants()


@pytest.fixture
def request_state() -> OwnRequest:
    return OwnRequest(Request("r", 8), ReqContext("r"), OffloadPolicy.BLOCK_LEVEL, (), FIRST)


def begin(table: JobTable, state: OwnRequest, *gpu_blocks: int, submitted: bool = True) -> JobRecord:
    job = table.begin(Direction.STORE, state, [key(0)], gpu_blocks)
    job.submitted = submitted
    return job


def flushes(table: JobTable) -> frozenset[int]:
    """Since the last call."""
    return table.take(()).flush_job_ids


def test_a_job_ends_with_its_last_rank_and_fails_if_one_did(table: JobTable, request_state: OwnRequest) -> None:
    job = begin(table, request_state, 1, 2)
    assert request_state.job_ids == {job.job_id}
    assert table.record(0, TransferResult(job.job_id, True, 10, 1.0)) is None
    assert table.record(0, TransferResult(job.job_id, False)) is None  # reported before
    assert table.record(1, TransferResult(99, True)) is None  # unknown
    assert table.record(1, TransferResult(job.job_id, False, 0, 2.0)) is job
    assert (job.success, job.num_bytes, job.seconds) == (False, 10, 3.0)
    assert not request_state.job_ids
    assert not table.fences


def test_a_fenced_block_that_is_handed_out_flushes_its_jobs_once(table: JobTable, request_state: OwnRequest) -> None:
    first, second = begin(table, request_state, 1, 2), begin(table, request_state, 2, 3)
    table.flush_for_blocks([7])
    assert flushes(table) == set()
    table.flush_for_blocks([2, 1])
    assert flushes(table) == {first.job_id, second.job_id}
    table.flush_for_blocks([1, 2, 3])
    assert flushes(table) == set()
    assert not table.fences
    assert len(table.in_flight) == 2


def test_a_job_that_the_workers_do_not_have_is_not_flushed(table: JobTable, request_state: OwnRequest) -> None:
    begin(table, request_state, 1, submitted=False)
    table.flush_for_blocks([1])
    assert flushes(table) == set()
    assert table.fences


def test_a_request_that_loses_its_blocks_flushes_its_own_jobs(table: JobTable, request_state: OwnRequest) -> None:
    other = OwnRequest(Request("o", 8), ReqContext("o"), OffloadPolicy.BLOCK_LEVEL, (), FIRST)
    mine, theirs = begin(table, request_state, 1), begin(table, other, 2)
    table.flush_for_request(request_state)
    assert flushes(table) == {mine.job_id}
    table.flush_for_blocks([2])
    assert flushes(table) == {theirs.job_id}


def test_reports_of_ranks_merge_in_order() -> None:
    results = [(rank, TransferResult(job_id, True)) for rank, job_id in ((0, 5), (0, 3), (1, 5))]
    merged = WorkerReport.merge([WorkerReport(tuple(results[:2])), WorkerReport(), WorkerReport(tuple(results[2:]))])
    assert merged.results == tuple(results)


class Pool:
    """Counts the holds of each block."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.released: list[tuple[int, ...]] = []

    def hold(self, gpu_block_ids: Collection[int]) -> None:
        self.held.update(gpu_block_ids)

    def release(self, gpu_block_ids: Collection[int]) -> None:
        self.held.subtract(gpu_block_ids)
        self.released.append(tuple(gpu_block_ids))
        assert min(self.held.values()) >= 0


def test_the_blocks_of_a_store_are_held_until_it_is_flushed_or_has_ended_on_all_ranks(
    table: JobTable, request_state: OwnRequest
) -> None:
    table.pool = pool = Pool()
    first, second = begin(table, request_state, 4, 2, 2), begin(table, request_state, 2, 3)
    assert pool.held == {4: 1, 2: 2, 3: 1}
    table.flush_for_blocks([3])
    assert flushes(table) == {second.job_id}
    assert pool.released == [(2, 3)]
    for rank in range(2):
        assert len(pool.released) == 1
        table.record(rank, TransferResult(first.job_id, True))
    assert pool.released == [(2, 3), (4, 2)]
    for rank in range(2):
        table.record(rank, TransferResult(second.job_id, True))
    assert len(pool.released) == 2


def test_an_engine_that_says_so_has_the_sources_of_its_stores_held() -> None:
    rig, pool = Rig(), Pool()
    rig.scheduler.hold_sources(pool)
    meta = rig.admit(Request("r", 2 * BT), [4, 2])
    assert pool.held == {4: 1, 2: 1}
    rig.end(*meta.stores)
    assert pool.released == [(4, 2)]
    assert rig.scheduler.get_stats()["store_blocks", "full_attention"] == 2


def test_a_load_holds_nothing(table: JobTable, request_state: OwnRequest) -> None:
    table.pool = pool = Pool()
    job = table.begin(Direction.LOAD, request_state, [key(0)], [1, 2])
    table.remove(job)
    assert not pool.held
    assert not pool.released


def test_ends_are_counted_by_direction_and_kind_and_what_moved_alone_by_block(request_state: OwnRequest) -> None:
    table = JobTable(geometry_of(EngineLayout((FULL, SLIDING, FULL), BT, "two"), DEFAULTS), num_ranks=2)
    stored = table.begin(Direction.STORE, request_state, [key(0), key(1), key(0, 1), key(0, 2)], [1, 2, 3, 4])
    loaded = table.begin(Direction.LOAD, request_state, [key(0)], [5])
    stored.submitted = True
    table.flush_for_blocks([2])
    assert (table.get_stats()["jobs_in_flight",], table.get_stats()["fenced_jobs",]) == (2, 1)
    for rank in range(2):
        table.record(rank, TransferResult(stored.job_id, True, 10, 1.0 + rank))
        table.record(rank, TransferResult(loaded.job_id, rank == 0, 7, 0.25))
    seconds = Histogram("store_job_seconds")
    seconds.observe(1.5)
    table.check_invariants()
    assert table.get_stats() == {
        ("jobs_in_flight",): 0, ("fenced_jobs",): 1,
        ("load_jobs", "ok"): 0, ("load_jobs", "failed"): 1, ("load_bytes",): 14, ("load_seconds",): 0.5,
        ("load_blocks", "full_attention"): 0, ("load_blocks", "sliding_window"): 0,
        ("store_jobs", "ok"): 1, ("store_jobs", "failed"): 0, ("store_bytes",): 20, ("store_seconds",): 3.0,
        ("store_blocks", "full_attention"): 3, ("store_blocks", "sliding_window"): 1,
        **seconds.stats(),
    }  # fmt: skip


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_load_that_is_cancelled_is_not_sent_and_others_are(
    table: JobTable, request_state: OwnRequest, is_lost: bool
) -> None:
    source = None if is_lost else CPULoadStoreSpec([0])
    first, second = (
        table.begin_load(request_state, [], source, GPULoadStoreSpec([block], [1], [0]), [block]) for block in (1, 2)
    )
    assert table.cancel_load(request_state) is first
    assert {*table.in_flight} == request_state.job_ids == {second.job_id}
    meta = table.take(())
    (sent,) = meta.loads
    assert (sent.job_id, sent.source) == (second.job_id, source)
    assert sent.destination.block_ids.tolist() == [2]
    assert table.cancel_load(request_state) is None, "the workers have it"
    assert table.take(()) == ConnectorMeta()
