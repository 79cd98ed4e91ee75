# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import pickle
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from tests.fakes.manual_handler import ManualHandler, ManualSpec

from kvoffload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingHandler, TransferResult
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, parse_config
from kvoffload.connector.messages import ConnectorMeta, LoadOutcome, TransferJob, WorkerReport
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.errors import LayoutError
from kvoffload.specs import make_spec

GPU, SLOTS = 8, 4


class Rank:
    def __init__(self) -> None:
        self.gpu = np.arange(GPU, dtype=np.uint8)[:, None].repeat(4, axis=1)
        self.slots = np.zeros((SLOTS, 4), dtype=np.uint8)
        self.handler = ManualHandler(self.gpu, self.slots, (4,), 1)
        self.worker = OffloadingConnectorWorker(rank=3)
        self.worker.register_kv_caches(ManualSpec(CPUOffloadingManager(SLOTS), self.handler), CanonicalKVCaches())


def store(job_id: int, gpu: int, slot: int, request_id: str = "r") -> TransferJob:
    return TransferJob(job_id, request_id, GPULoadStoreSpec([gpu], [1], [0]), CPULoadStoreSpec([slot]))


def load(job_id: int, gpu: int, slot: int, request_id: str = "r") -> TransferJob:
    return TransferJob(job_id, request_id, CPULoadStoreSpec([slot]), GPULoadStoreSpec([gpu], [1], [0]))


def test_stores_start_at_the_end_of_their_step() -> None:
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(stores=(store(0, 5, 1),)))
    assert rank.handler.pending == []
    rank.worker.end_step()
    assert rank.handler.pending == [0]
    rank.handler.run(0)
    assert rank.worker.get_report().results == ((3, TransferResult(0, True, 4, 0.0)),)
    assert rank.worker.get_report().results == ()
    assert rank.slots[1].tolist() == [5] * 4


class CountingHandler(ManualHandler):
    polls = 0

    def get_finished(self) -> list[TransferResult]:
        self.polls += 1
        return super().get_finished()


def test_only_a_handler_with_a_transfer_is_asked_for_ends() -> None:
    rank = Rank()
    stores, loads = (CountingHandler(rank.gpu, rank.slots, (4,), 1) for _ in range(2))

    class TwoHandlers(ManualSpec):
        def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
            return {("GPU", "CPU"): stores, ("CPU", "GPU"): loads}

    rank.worker.register_kv_caches(TwoHandlers(CPUOffloadingManager(SLOTS), rank.handler), CanonicalKVCaches())
    rank.worker.start_step(ConnectorMeta(stores=(store(0, 5, 1),)))
    rank.worker.end_step()
    assert rank.worker.get_report().results == ()
    stores.run(0)
    assert [result.job_id for _, result in rank.worker.get_report().results] == [0]
    rank.worker.start_step(ConnectorMeta(loads=(load(1, 6, 1),)))
    loads.run(1)
    assert [result.job_id for _, result in rank.worker.get_report().results] == [1]
    assert rank.worker.get_report().results == ()
    assert (stores.polls, loads.polls) == (2, 1)


def test_flushes_come_before_the_loads_of_the_step() -> None:
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(stores=(store(0, 5, 1),)))
    rank.worker.end_step()
    rank.slots[0] = 9
    rank.worker.start_step(ConnectorMeta(loads=(load(1, 5, 0),), flush_job_ids=frozenset({0, 77})))
    assert rank.handler.pending == [1]
    assert rank.slots[1].tolist() == [5] * 4, "the store read the block before the load wrote it"
    rank.worker.end_step()
    rank.handler.run(1)
    assert rank.gpu[5].tolist() == [9] * 4


class RecordingHandler(ManualHandler):
    """Says how it was asked to flush."""

    def __init__(self) -> None:
        super().__init__(np.zeros((GPU, 4), np.uint8), np.zeros((SLOTS, 4), np.uint8), (4,), 1)
        self.calls: list[str] = []

    def flush(self, job_ids: Collection[int]) -> None:
        self.calls.append("flush")

    def wait(self, job_ids: Collection[int]) -> None:
        self.calls.append("wait")


@pytest.mark.parametrize(("on_host", "call"), [(False, "flush"), (True, "wait")])
def test_flushes_wait_on_the_host_where_the_engine_asks_for_it(on_host: bool, call: str) -> None:
    handler, worker = RecordingHandler(), OffloadingConnectorWorker()
    spec = ManualSpec(CPUOffloadingManager(SLOTS), handler)
    worker.register_kv_caches(spec, CanonicalKVCaches(), flushes_on_host=on_host)
    worker.start_step(ConnectorMeta(flush_job_ids=frozenset({7})))
    assert handler.calls == [call]


def test_a_store_whose_step_was_never_ended_can_still_be_flushed() -> None:
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(stores=(store(0, 5, 1),)))
    rank.worker.start_step(ConnectorMeta(flush_job_ids=frozenset({0})))
    assert rank.slots[1].tolist() == [5] * 4
    assert [result.job_id for _, result in rank.worker.get_report().results] == [0]


def test_final_stores_start_first_and_can_be_flushed_at_once() -> None:
    rank = Rank()
    rank.slots[0] = 9
    jobs = store(0, 5, 1), store(1, 6, 2)
    rank.worker.start_step(ConnectorMeta(final_stores=jobs, loads=(load(2, 5, 0),), flush_job_ids=frozenset({0})))
    assert rank.handler.pending == [1, 2], "the one whose GPU block is handed out again has ended"
    rank.handler.run(2)
    assert rank.gpu[5].tolist() == [9] * 4
    assert rank.slots[1].tolist() == [5] * 4
    rank.handler.run(1)
    rank.worker.end_step()
    assert [result.job_id for _, result in rank.worker.get_report().results] == [0, 2, 1]


def test_load_outcomes_for_engines_whose_workers_report_loads() -> None:
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 1, "a"), load(1, 6, 2, "b"), load(2, 7, 3, "c"))))
    rank.worker.end_step()
    rank.handler.run(0)
    rank.handler.run(1, success=False)
    assert rank.worker.take_load_outcome() == LoadOutcome(frozenset({"a"}), {"b": frozenset({6})})
    assert rank.worker.take_load_outcome() == LoadOutcome()
    assert [result[:2] for _, result in rank.worker.get_report().results] == [(0, True), (1, False)]


def test_a_lost_load_is_reported_as_a_failure_at_once() -> None:
    rank = Rank()
    job = load(0, 5, 1, "a")
    rank.worker.start_step(ConnectorMeta(loads=(TransferJob(0, "a", None, job.destination),)))
    assert rank.worker.take_load_outcome() == LoadOutcome(failed_loads={"a": frozenset({5})})
    assert rank.worker.get_report().results == ((3, TransferResult(0, False)),)
    assert rank.handler.pending == []


def test_a_handler_that_raises_fails_the_job_and_not_the_step(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    for job_id in range(3):
        rank.handler.refuse_next = True
        rank.worker.start_step(ConnectorMeta(loads=(load(job_id, 5, 1, "a"),)))
        rank.worker.end_step()
        assert rank.worker.get_report().results == ((3, TransferResult(job_id, False)),)
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 1, "not a line for each failure"


def test_media_without_a_handler_fail_the_job(caplog: pytest.LogCaptureFixture) -> None:
    worker = OffloadingConnectorWorker()
    worker.start_step(ConnectorMeta(loads=(load(0, 5, 1),)))
    assert worker.get_report().results == ((0, TransferResult(0, False)),)
    assert "from CPU to GPU could not be started" in caplog.text


def test_shutdown_twice() -> None:
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(stores=(store(0, 5, 1),)))
    rank.worker.shutdown()
    rank.worker.shutdown()
    assert rank.worker.get_report().results == ()


def test_what_a_load_outcome_says_of_all_its_requests() -> None:
    outcome = LoadOutcome(frozenset({"a"}), {"b": frozenset({1, 2}), "c": frozenset({2, 3})})
    assert outcome.ended_request_ids == {"a", "b", "c"}
    assert outcome.invalid_block_ids == {1, 2, 3}
    assert not LoadOutcome().ended_request_ids | LoadOutcome().invalid_block_ids


def test_reports_merge_in_order_and_can_be_sent_between_processes() -> None:
    one = WorkerReport(((0, TransferResult(4, True, 8, 0.5)), (0, TransferResult(3, False))))
    two = WorkerReport(((1, TransferResult(3, True)),))
    merged = WorkerReport.merge((one, WorkerReport(), two))
    assert [(rank, result.job_id) for rank, result in merged.results] == [(0, 4), (0, 3), (1, 3)]
    assert pickle.loads(pickle.dumps(merged)) == merged


@pytest.mark.parametrize("success", [True, False])
def test_the_end_of_an_earlier_load_of_the_same_id_is_not_that_of_the_newest(success: bool) -> None:
    """The engine reuses the id while the earlier request's load is running."""
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 1, "a"),)))
    rank.worker.start_step(ConnectorMeta(loads=(load(1, 6, 2, "a"),)))
    rank.handler.run(0, success=success)
    assert rank.worker.take_load_outcome() == LoadOutcome()
    assert [result[:2] for _, result in rank.worker.get_report().results] == [(0, success)]
    rank.handler.run(1, success=not success)
    expected = LoadOutcome(failed_loads={"a": frozenset({6})}) if success else LoadOutcome(frozenset({"a"}))
    assert rank.worker.take_load_outcome() == expected


def test_the_end_of_an_earlier_load_that_nobody_took_is_not_that_of_the_newest() -> None:
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 1, "a"), load(1, 6, 2, "b"))))
    rank.handler.run(0)
    rank.handler.run(1, success=False)
    rank.worker.get_report()
    rank.worker.start_step(ConnectorMeta(loads=(load(2, 7, 1, "a"), load(3, 4, 2, "b"))))
    assert rank.worker.take_load_outcome() == LoadOutcome()
    rank.handler.run(2)
    rank.handler.run(3)
    assert rank.worker.take_load_outcome() == LoadOutcome(frozenset({"a", "b"}))


def test_the_layout_of_another_rank_is_refused() -> None:
    """Both workers would report as rank 0, and no transfer would ever end."""
    group = KVGroupLayout(GroupKind.FULL_ATTENTION, 16, 1024)
    layout = EngineLayout((group,), 16, "ranks", num_ranks=2, rank=1, num_processes=3)
    spec = make_spec(parse_config({"cpu_bytes_to_use": 64 << 10}), layout)
    with pytest.raises(LayoutError, match="rank 0, and the layout of its spec rank 1"):
        OffloadingConnectorWorker().register_kv_caches(spec, CanonicalKVCaches())


class BrokenHandler(ManualHandler):
    """Raises in the calls named in ``broken``."""

    broken: Collection[str] = ()

    def _call(self, name: str, *args: object) -> Any:
        if name in self.broken:
            raise RuntimeError(f"{name} is broken on plan")
        return getattr(super(), name)(*args)

    def flush(self, job_ids: Collection[int]) -> None:
        self._call("flush", job_ids)

    def wait(self, job_ids: Collection[int]) -> None:
        self._call("wait", job_ids)

    def get_finished(self) -> list[TransferResult]:
        return self._call("get_finished")

    def shutdown(self) -> None:
        self._call("shutdown")


def broken_rank() -> Rank:
    rank = Rank()
    rank.handler = BrokenHandler(rank.gpu, rank.slots, (4,), 1)
    rank.worker.register_kv_caches(ManualSpec(CPUOffloadingManager(SLOTS), rank.handler), CanonicalKVCaches())
    return rank


@pytest.mark.parametrize("broken", [("flush",), ("flush", "wait")])
def test_a_store_that_could_not_be_flushed_has_failed_unless_the_host_waited_for_it(broken: tuple[str, ...]) -> None:
    rank = broken_rank()
    rank.worker.start_step(ConnectorMeta(stores=(store(0, 5, 1), store(1, 6, 2))))
    rank.worker.end_step()
    rank.handler.broken = broken
    rank.worker.start_step(ConnectorMeta(flush_job_ids=frozenset({0})))
    rank.gpu[5] = 99  # the next forward pass writes the block
    rank.handler.broken = ()
    for job_id in rank.handler.pending:
        rank.handler.run(job_id)
    ends = {result.job_id: result.success for _, result in rank.worker.get_report().results}
    assert ends == {0: broken == ("flush",), 1: True}
    if ends[0]:
        assert rank.slots[1].tolist() == [5] * 4


def test_transfers_of_a_handler_that_cannot_say_what_ended_have_failed_once_it_has_waited_for_them() -> None:
    rank = broken_rank()
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 1, "a"), load(1, 6, 2, "b"))))
    rank.handler.broken = ("get_finished", "wait")
    assert rank.worker.get_report().results == (), "they may still write"
    rank.handler.broken = ("get_finished",)
    outcome = rank.worker.take_load_outcome()
    assert outcome.invalid_block_ids == {5, 6}
    assert {result.job_id: result.success for _, result in rank.worker.get_report().results} == {0: False, 1: False}
    rank.handler.broken = ()
    assert rank.worker.get_report().results == (), "each ends once"


@pytest.mark.parametrize("end", [None, (0, True), "0"])
def test_what_is_no_end_of_a_transfer_is_no_answer(end: object, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = broken_rank()
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 1),)))
    monkeypatch.setattr(rank.handler, "get_finished", lambda: [TransferResult(0, True), end])
    assert rank.worker.get_report().results == ((3, TransferResult(0, True)),)


def test_a_broken_handler_stops_neither_a_step_nor_the_shutdown() -> None:
    rank = broken_rank()
    rank.handler.broken = ("shutdown",)
    rank.worker.shutdown()


# ------------------------------------------------------------------------------------------------------------- sleep


class MovableHandler(BrokenHandler):
    moved = 0

    def take_addresses(self) -> None:
        self.moved += 1
        if "take_addresses" in self.broken:
            super(ManualHandler, self).take_addresses()


def movable_rank() -> tuple[Rank, MovableHandler]:
    rank = Rank()
    handler = MovableHandler(rank.gpu, rank.slots, (4,), 1)
    rank.worker.register_kv_caches(ManualSpec(CPUOffloadingManager(SLOTS), handler), CanonicalKVCaches())
    return rank, handler


def test_no_transfer_is_open_while_an_engine_sleeps() -> None:
    rank, handler = movable_rank()
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 1),), stores=(store(1, 6, 2),)))
    rank.worker.suspend()
    rank.worker.suspend()
    assert handler.pending == []
    assert rank.slots[2].tolist() == [6] * 4, "its compute was submitted"
    rank.worker.start_step(ConnectorMeta(loads=(load(2, 4, 2),), final_stores=(store(3, 5, 3),)))
    rank.worker.end_step()
    assert handler.pending == []
    ends = {result.job_id: result.success for _, result in rank.worker.get_report().results}
    assert ends == {0: True, 1: True, 2: False, 3: False}
    assert handler.moved == 0
    rank.worker.resume()
    rank.worker.resume()
    assert handler.moved == 1
    rank.worker.start_step(ConnectorMeta(loads=(load(4, 4, 2),)))
    assert handler.pending == [4]


def test_memory_whose_transfers_could_not_be_waited_for_is_not_given_up() -> None:
    rank, handler = movable_rank()
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 1),)))
    handler.broken = ("wait",)
    with pytest.raises(RuntimeError, match="wait is broken on plan"):
        rank.worker.suspend()


def test_a_handler_that_cannot_follow_its_memory_is_given_no_transfer_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank, handler = movable_rank()
    handler.broken = ("take_addresses",)
    rank.worker.suspend()
    rank.worker.resume()
    assert "does not know where an engine's memory lies after a sleep" in caplog.text
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 1),)))
    assert handler.pending == []
    assert rank.worker.get_report().results == ((3, TransferResult(0, False)),)


# -------------------------------------------------------------------------------------------- loads within the step


def awaited(job_id: int, gpu: int, slot: int) -> TransferJob:
    return TransferJob(job_id, "r", CPULoadStoreSpec([slot]), GPULoadStoreSpec([gpu], [1], [0]), within_step=True)


def test_a_load_within_the_step_has_ended_when_the_step_begins_and_no_request_is_told() -> None:
    rank = Rank()
    rank.slots[1] = 9
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 2, "a"), awaited(1, 6, 1))))
    assert rank.gpu[6].tolist() == [9] * 4
    assert rank.handler.pending == [0], "others are not waited for"
    report = rank.worker.get_report()
    assert [result[:2] for _, result in report.results] == [(1, True)]
    assert not report.undefined_loads
    assert rank.worker.take_load_outcome() == LoadOutcome()


@pytest.mark.parametrize("how", ["refused", "failed", "lost", "suspended"])
def test_a_load_within_the_step_that_fails_is_undefined_in_the_same_report(how: str) -> None:
    rank = Rank()
    rank.handler.refuse_next, rank.handler.fail_next_wait = how == "refused", how == "failed"
    if how == "suspended":
        rank.worker.suspend()
    job = awaited(1, 6, 1)
    if how == "lost":
        job.source = None
    rank.worker.start_step(ConnectorMeta(loads=(job,)))
    report = rank.worker.get_report()
    assert [result[:2] for _, result in report.results] == [(1, False)]
    assert report.undefined_loads == {1}
    assert rank.worker.take_load_outcome() == LoadOutcome()
    assert not rank.worker.get_report().undefined_loads, "once"
    merged = WorkerReport.merge((WorkerReport(), report))
    assert pickle.loads(pickle.dumps(merged)).undefined_loads == {1}


def test_a_load_within_the_step_that_nobody_could_wait_for_is_undefined_and_ends_when_it_has() -> None:
    rank = broken_rank()
    rank.handler.broken = ("flush", "wait")
    rank.worker.start_step(ConnectorMeta(loads=(awaited(0, 5, 1),)))
    report = rank.worker.get_report()
    assert (report.results, report.undefined_loads) == ((), {0})
    rank.handler.broken = ()
    rank.handler.run(0)
    assert [result[:2] for _, result in rank.worker.get_report().results] == [(0, True)]


class LateHandler(ManualHandler):
    """Tells of ends late: after ``polls`` calls."""

    polls = 0

    def get_finished(self) -> list[TransferResult]:
        self.polls -= 1
        return [] if self.polls >= 0 else super().get_finished()


@pytest.mark.parametrize(("polls", "is_undefined"), [(0, False), (3, False), (10_000, True)])
def test_a_handler_must_know_the_end_of_a_load_that_the_host_waited_for(polls: int, is_undefined: bool) -> None:
    rank = Rank()
    rank.handler = LateHandler(rank.gpu, rank.slots, (4,), 1)
    rank.worker.register_kv_caches(ManualSpec(CPUOffloadingManager(SLOTS), rank.handler), CanonicalKVCaches())
    rank.handler.polls = polls
    rank.worker.start_step(ConnectorMeta(loads=(awaited(0, 5, 1),)))
    assert (0 in rank.worker.get_report().undefined_loads) is is_undefined


def test_compute_waits_on_the_device_where_the_handler_can_have_it_wait() -> None:
    handler, worker = RecordingHandler(), OffloadingConnectorWorker()
    worker.register_kv_caches(
        ManualSpec(CPUOffloadingManager(SLOTS), handler), CanonicalKVCaches(), flushes_on_host=True
    )
    worker.start_step(ConnectorMeta(loads=(awaited(0, 5, 1),)))
    assert handler.calls == ["flush"]
    assert worker.get_report() == WorkerReport(), "it runs"
