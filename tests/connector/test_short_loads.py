# SPDX-License-Identifier: Apache-2.0
"""Loads within the step that computes their request: when they are promised, and what follows from their ends."""

from __future__ import annotations

import pytest
from tests.connector.rig import FULL, SLIDING, STATE, Request, Rig, key

from kvoffload.base import LoadStoreSpec, TransferResult
from kvoffload.config import KVGroupLayout
from kvoffload.connector.engine import NO_BLOCK
from kvoffload.connector.messages import ConnectorMeta, LoadOutcome, WorkerReport
from kvoffload.connector.short_loads import SHARE
from kvoffload.errors import TransferError

STEP_S = 0.03
BLOCK_S = SHARE * STEP_S / 4
"""Four GPU blocks are just short enough."""


class Clocked(Rig):
    now_s = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scheduler._short_loads._clock = lambda: self.now_s
        self.scheduler.load_within_steps()

    def decode(self, running: Request, seconds: float = STEP_S) -> ConnectorMeta:
        """A step that computes a token of ``running``."""
        self.now_s += seconds
        running.num_tokens += 1
        return self.step(self.run(running, [], computed=running.num_tokens - 1, new=False))

    def end_after(self, meta: ConnectorMeta, block_s: float = BLOCK_S) -> LoadOutcome:
        results = [
            (rank, TransferResult(job.job_id, True, 10, block_s * len(job.destination.block_ids)))
            for job in meta.loads
            for rank in range(self.num_ranks)
        ]
        return self.scheduler.update_connector_output(WorkerReport(tuple(results)))


def measured(**options: object) -> tuple[Clocked, Request]:
    """An engine that decodes one request, and has loaded once."""
    rig = Clocked(**options)  # type: ignore[arg-type]
    for stem in "abcd":
        rig.store_prefix(32, stem, 100 * ord(stem))
    tables = [range(500, 540) for _ in rig.groups]
    running = Request("running", 9, "other")
    rig.admit(running, *tables)
    for _ in range(20):
        rig.decode(running)
    first = rig.arrive(Request("first", 17, "d"))
    rig.ask(first)
    rig.alloc(first, *[range(600, 605) for _ in rig.groups], external=16)
    rig.end_after(rig.decode(running))
    rig.finish(first)
    return rig, running


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("blocks", "is_short"), [(1, True), (4, True), (5, False), (8, False)])
def test_a_load_is_short_by_the_means_of_steps_and_loads(blocks: int, is_short: bool, num_ranks: int) -> None:
    rig, _ = measured(num_ranks=num_ranks)
    request = rig.arrive(Request("r", 4 * blocks + 1, "a"))
    assert rig.ask(request) == (4 * blocks, not is_short)


@pytest.mark.parametrize(("block_s", "is_short"), [((9.0, BLOCK_S, 9.0), True), ((9.0, 8.0), False)])
def test_before_the_first_load_the_fastest_store_stands_for_it(block_s: tuple[float, ...], is_short: bool) -> None:
    rig = Clocked()
    running = Request("running", 9, "other")
    rig.admit(running, range(500, 540))
    for _ in range(20):
        rig.decode(running)
    for n, seconds in enumerate(block_s):
        request = Request(f"store{n}", 16, f"stem{n}")
        meta = rig.admit(request, range(10 * n, 10 * n + 4))
        results = tuple((0, TransferResult(job.job_id, True, 10, 4 * seconds)) for job in meta.stores)
        rig.scheduler.update_connector_output(WorkerReport(results))
        rig.finish(request)
    assert rig.ask(rig.arrive(Request("r", 17, "stem0"))) == (16, not is_short)


def test_loads_in_flight_and_those_of_the_same_step_come_first() -> None:
    rig, running = measured()
    for n, (stem, waits) in enumerate((("a", False), ("b", False), ("c", True))):
        request = rig.arrive(Request(f"r{n}", 9, stem))
        assert rig.ask(request) == (8, waits)
        rig.alloc(request, range(10 * n, 10 * n + 3), external=8)
    meta = rig.decode(running)
    assert [load.within_step for load in meta.loads] == [True, True, False]
    rig.end_after(meta)
    assert rig.ask(rig.arrive(Request("later", 9, "a"))) == (8, False)


def test_nothing_is_promised_before_the_engine_says_that_it_can_undo_a_step() -> None:
    rig = Rig()
    rig.store_prefix(8)
    assert rig.ask(rig.arrive(Request("r", 9))) == (8, True)


def test_the_only_request_waits_for_any_load_and_others_for_none_that_was_not_measured() -> None:
    rig = Clocked()
    rig.store_prefix(16)
    alone = rig.arrive(Request("alone", 17))
    assert rig.ask(alone) == (16, False)
    rig.alloc(alone, range(5), external=16)
    second = rig.arrive(Request("second", 17))
    assert rig.ask(second) == (None, False), "the first one brings its blocks"
    meta = rig.step(rig.run(alone, range(5), computed=16))
    assert [load.within_step for load in meta.loads] == [True]
    rig.end_after(meta)
    assert rig.ask(second) == (16, True)


@pytest.mark.parametrize(("groups", "waits"), [((FULL, SLIDING), False), ((FULL, STATE), True), ((STATE,), True)])
def test_models_with_states_load_before_the_step(groups: tuple[KVGroupLayout, ...], waits: bool) -> None:
    rig = Clocked(groups=groups)
    rig.store_prefix(16)
    assert rig.ask(rig.arrive(Request("r", 17))) == (16, waits)


def test_the_request_stores_beside_its_load_and_waits_for_no_end() -> None:
    rig = Clocked()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 17))
    assert rig.ask(request) == (8, False)
    rig.alloc(request, range(5), external=8)
    meta = rig.step(rig.run(request, range(5), computed=8))
    assert [store.source.block_ids.tolist() for store in meta.stores] == [[2, 3]]
    rig.finish(request)
    assert rig.end(*meta.loads, *meta.stores) == LoadOutcome()
    rig.assert_drained()
    assert rig.ask(rig.arrive(Request("later", 17))) == (16, False)


def test_a_preempted_request_waits_for_the_end_of_its_load() -> None:
    rig = Clocked()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 9))
    rig.ask(request)
    rig.alloc(request, range(3), external=8)
    (load,) = rig.step(rig.run(request, range(3), computed=8)).loads
    assert rig.step(preempted=["r"]).flush_job_ids == {load.job_id}
    assert rig.ask(request) == (None, False)
    rig.end(load)
    assert rig.ask(request) == (8, False)


def test_an_abort_before_the_step_calls_the_load_back() -> None:
    rig = Clocked()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 9))
    rig.ask(request)
    rig.alloc(request, range(3), external=8)
    rig.finish(request)
    assert rig.step().is_empty()
    rig.assert_drained()


def test_after_a_failure_nothing_that_the_step_computed_is_stored_and_no_other_is_tried() -> None:
    rig, running = measured()
    request = rig.arrive(Request("r", 17, "a"))
    assert rig.ask(request) == (16, False)
    rig.alloc(request, range(5), external=16)
    while not (stores := rig.decode(running).stores):  # until a block of the running request is full
        pass
    in_flight = rig.scheduler._jobs.in_flight.values()
    (load,) = [job for job in in_flight if job.within_step]
    results = ((0, TransferResult(stores[0].job_id, True)), (0, TransferResult(load.job_id, False)))
    report = WorkerReport(results, frozenset({load.job_id}))
    assert rig.scheduler.update_connector_output(report).failed_loads == {"r": frozenset(range(4))}
    last = len(running.block_hashes) - 1
    assert rig.manager.slots.get(key(last, stem="other")) is None
    rig.step(preempted=["r", "running"])
    assert rig.ask(request) == (0, False), "it gets no other load"
    assert rig.ask(rig.arrive(Request("later", 9, "b"))) == (8, True)


def test_blocks_that_vanish_before_they_are_pinned_are_a_load_that_fails_within_the_step() -> None:
    rig = Clocked()
    rig.store_prefix(8)
    request = rig.arrive(Request("r", 9))
    assert rig.ask(request) == (8, False)

    def vanished(*_: object) -> LoadStoreSpec:
        raise TransferError("they were evicted meanwhile")

    rig.manager.prepare_load = vanished  # type: ignore[method-assign]
    rig.alloc(request, range(3), external=8)
    meta = rig.step(rig.run(request, range(3), computed=8))
    (load,) = meta.loads
    assert load.within_step and load.source is None
    report = WorkerReport(((0, TransferResult(load.job_id, False)),), frozenset({load.job_id}))
    assert rig.scheduler.update_connector_output(report).failed_loads == {"r": frozenset({0, 1})}


def test_a_within_step_table_has_the_blocks_that_the_step_computes_too() -> None:
    """A window's table has holes, and the load goes to the blocks of its own positions."""
    rig = Clocked(groups=(SLIDING,))
    rig.store_prefix(16)
    request = rig.arrive(Request("r", 24))
    assert rig.ask(request) == (16, False)
    rig.alloc(request, [NO_BLOCK, NO_BLOCK, 2, 3, 4, 5], external=16)
    meta = rig.step(rig.run(request, [NO_BLOCK, NO_BLOCK, 2, 3, 4, 5], computed=16))
    assert [load.destination.block_ids.tolist() for load in meta.loads] == [[2, 3]]
    assert meta.flush_job_ids == frozenset()
