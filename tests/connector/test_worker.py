# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import numpy as np
import pytest

from kvoffload.base import CanonicalKVCaches, GPULoadStoreSpec
from kvoffload.connector import ConnectorMeta, JobEnd, OffloadingConnectorWorker, TransferJob
from kvoffload.connector.worker import EndedLoads
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.testing.manual_handler import ManualHandler, ManualSpec

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


def test_stores_start_at_the_end_of_their_step() -> None:  # 1
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(stores=(store(0, 5, 1),)))
    assert rank.handler.pending == []
    rank.worker.end_step()
    assert rank.handler.pending == [0]
    rank.handler.run(0)
    assert rank.worker.get_report().ends == (JobEnd(0, 3, True, 4, 0.0),)
    assert rank.worker.get_report().ends == ()
    assert rank.slots[1].tolist() == [5] * 4


def test_flushes_come_before_the_loads_of_the_step() -> None:  # 2
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


def test_a_store_whose_step_was_never_ended_can_still_be_flushed() -> None:
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(stores=(store(0, 5, 1),)))
    rank.worker.start_step(ConnectorMeta(flush_job_ids=frozenset({0})))
    assert rank.slots[1].tolist() == [5] * 4
    assert [end.job_id for end in rank.worker.get_report().ends] == [0]


def test_finished_loads_for_engines_whose_workers_tell() -> None:
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(loads=(load(0, 5, 1, "a"), load(1, 6, 2, "b"), load(2, 7, 3, "c"))))
    rank.worker.end_step()
    rank.handler.run(0)
    rank.handler.run(1, success=False)
    assert rank.worker.take_ended_loads() == EndedLoads({"a", "b"}, {"b"}, {6})
    assert rank.worker.take_ended_loads() == EndedLoads()
    assert [(end.job_id, end.success) for end in rank.worker.get_report().ends] == [(0, True), (1, False)]


def test_a_lost_load_is_told_as_a_failure_at_once() -> None:
    rank = Rank()
    job = load(0, 5, 1, "a")
    rank.worker.start_step(ConnectorMeta(lost_loads=(TransferJob(0, "a", job.destination, job.destination),)))
    assert rank.worker.take_ended_loads() == EndedLoads({"a"}, {"a"}, {5})
    assert rank.worker.get_report().ends == (JobEnd(0, 3, False),)
    assert rank.handler.pending == []


def test_a_handler_that_raises_fails_the_job_and_not_the_step(caplog: pytest.LogCaptureFixture) -> None:  # 12
    rank = Rank()
    for job_id in range(3):
        rank.handler.refuse_next = True
        rank.worker.start_step(ConnectorMeta(loads=(load(job_id, 5, 1, "a"),)))
        rank.worker.end_step()
        assert rank.worker.get_report().ends == (JobEnd(job_id, 3, False),)
    assert len([each for each in caplog.records if each.levelno == logging.ERROR]) == 1, "not a line for each failure"


def test_media_without_a_handler_fail_the_job(caplog: pytest.LogCaptureFixture) -> None:
    worker = OffloadingConnectorWorker()
    worker.start_step(ConnectorMeta(loads=(load(0, 5, 1),)))
    assert worker.get_report().ends == (JobEnd(0, 0, False),)
    assert "from CPU to GPU could not be started" in caplog.text


def test_shutdown_twice() -> None:
    rank = Rank()
    rank.worker.start_step(ConnectorMeta(stores=(store(0, 5, 1),)))
    rank.worker.shutdown()
    rank.worker.shutdown()
    assert rank.worker.get_report().ends == ()
