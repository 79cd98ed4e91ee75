# SPDX-License-Identifier: Apache-2.0
"""Each rule of the CUDA backend, taken out of its source, fails a scenario: so each scenario can fail, and each rule is
tested. A mutant whose text is no longer in the source fails too."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from tests.cpu.copy import scenarios
from tests.cpu.copy.cuda_rig import Make
from tests.cpu.copy.fake_cuda import FakeCuda, cuda
from tests.cpu.copy.scenarios import Scenario

from kvoffload.cpu.copy.driver import Driver
from kvoffload.errors import KVOffloadError

__all__ = ["cuda"]

CUDA, DRIVER, PINNING = "kvoffload.cpu.copy.cuda", "kvoffload.cpu.copy.driver", "kvoffload.cpu.copy.pinning"


@dataclass(frozen=True, slots=True)
class Mutant:
    rule: str
    fails: tuple[Scenario, ...]
    module: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "a job waits for compute",
        (
            scenarios.a_store_waits_for_the_compute_that_writes_its_blocks,
            scenarios.a_load_waits_for_the_compute_that_still_reads_its_blocks,
        ),
        CUDA,
        "            self.driver.wait_event(stream, now)\n",
        "            pass\n",
    ),
    Mutant(
        "a load waits for the mark",
        (scenarios.a_load_waits_for_the_compute_before_the_mark,),
        CUDA,
        "            self.driver.wait_event(stream, self._mark)\n",
        "",
    ),
    Mutant(
        "each mark is recorded",
        (scenarios.a_load_waits_for_the_compute_before_the_mark,),
        CUDA,
        "        self.driver.record(mark, self._device.compute_stream())\n",
        "",
    ),
    Mutant(
        "a load waits for the mark alone",
        (scenarios.a_load_does_not_wait_for_the_compute_after_the_mark,),
        CUDA,
        "direction is Direction.LOAD and self._mark is not None",
        "False",
    ),
    Mutant(
        "a store waits for compute after the mark too",
        (scenarios.a_store_waits_for_the_compute_after_the_mark,),
        CUDA,
        "direction is Direction.LOAD and self._mark is not None",
        "self._mark is not None",
    ),
    Mutant(
        "compute waits for what was flushed",
        (scenarios.compute_waits_on_the_device_for_flushed_stores,),
        CUDA,
        "            self.driver.wait_event(self._device.compute_stream(), job.end)\n",
        "            pass\n",
    ),
    Mutant(
        "jobs on one slot or block run in order",
        (
            scenarios.a_load_waits_for_the_store_into_its_slot,
            scenarios.a_store_into_a_slot_waits_for_the_load_from_it,
            scenarios.a_load_into_a_gpu_block_waits_for_the_store_of_it,
            scenarios.a_store_of_a_gpu_block_waits_for_the_load_into_it,
        ),
        CUDA,
        "                self._driver.wait_event(self._stream, job.end)\n",
        "                pass\n",
    ),
    Mutant(
        "slots conflict",
        (scenarios.a_load_waits_for_the_store_into_its_slot, scenarios.a_store_into_a_slot_waits_for_the_load_from_it),
        CUDA,
        "not extent.slots.isdisjoint(job.extent.slots) or not",
        "not",
    ),
    Mutant(
        "GPU blocks conflict",
        (
            scenarios.a_load_into_a_gpu_block_waits_for_the_store_of_it,
            scenarios.a_store_of_a_gpu_block_waits_for_the_load_into_it,
        ),
        CUDA,
        "or not extent.gpu_blocks.isdisjoint(job.extent.gpu_blocks)",
        "",
    ),
    Mutant(
        "sources are read in stream order",
        (scenarios.a_source_is_read_when_its_stream_comes_to_it,),
        DRIVER,
        "_ORDER_STREAM = 1 ",
        "_ORDER_STREAM = 3 ",
    ),
    Mutant(
        "a job that names a block twice is split",
        (scenarios.no_two_copies_of_a_batch_write_the_same_byte,),
        CUDA,
        "runs.without_overlaps(destinations) if is_repeated else [runs]",
        "[runs]",
    ),
    Mutant(
        "a job is one batch otherwise",
        (scenarios.a_job_takes_one_batch,),
        CUDA,
        "return runs.without_overlaps(destinations) if is_repeated else [runs]",
        "return runs.split(2)",
    ),
    Mutant(
        "the end is recorded after the copies",
        (scenarios.a_job_is_reported_when_its_copies_have_ended, scenarios.waiting_returns_when_the_copies_have_ended),
        CUDA,
        "            self._driver.record(start, self._stream)\n",
        "            self._driver.record(start, self._stream)\n            end = start\n",
    ),
    Mutant(
        "wait waits",
        (scenarios.waiting_returns_when_the_copies_have_ended,),
        CUDA,
        "                self._driver.synchronize_event(job.end)\n",
        "                pass\n",
    ),
    Mutant(
        "get_finished asks the device",
        (scenarios.a_job_is_reported_when_its_copies_have_ended,),
        CUDA,
        "            if not self._driver.is_done(job.end):\n                return None\n",
        "            return TransferResult(job.job_id, True, job.num_bytes)\n",
    ),
    Mutant(
        "events of open jobs are not used again",
        (scenarios.an_event_is_used_again_only_after_its_job,),
        CUDA,
        "        self._open.append(_Sub",
        "        self._copies.give_back(start, end)\n        self._open.append(_Sub",
    ),
    Mutant(
        "a failed job has ended",
        (scenarios.a_failed_job_is_reported_when_its_copies_have_ended,),
        CUDA,
        "            self._copies.drain(self._direction)\n            self._copies.give_back(start, end)\n",
        "",
    ),
    Mutant(
        "a job that cannot be asked about has ended",
        (scenarios.a_job_whose_end_cannot_be_seen_is_reported_when_its_copies_have_ended,),
        CUDA,
        "            self._copies.drain(self._direction)  # it is reported as ended, so it must have\n",
        "",
    ),
    Mutant(
        "shutdown waits",
        (scenarios.shutdown_waits_for_copies,),
        CUDA,
        "        self._copies.drain(self._direction)\n        self._finished = self.get_finished()\n",
        "        self._finished = self.get_finished()\n",
    ),
    Mutant(
        "memory stays registered until both directions have ended",
        (scenarios.shutdown_waits_for_copies,),
        CUDA,
        "        if self._streams:\n            return\n        self.region.unpin()\n",
        "        self.region.unpin()\n        if self._streams:\n            return\n",
    ),
    Mutant(
        "shutdown unregisters",
        (scenarios.shutdown_waits_for_copies,),
        CUDA,
        "        self.region.unpin()\n",
        "",
    ),
    Mutant(
        "shutdown destroys streams",
        (scenarios.shutdown_waits_for_copies,),
        CUDA,
        "            self.driver.destroy_stream(self._streams.pop(direction))\n",
        "            self._streams.pop(direction)\n",
    ),
    Mutant(
        "copies stop at borders",
        (scenarios.copies_stop_at_the_borders_of_registrations,),
        CUDA,
        "runs.cut_at(self._copies.region.borders)",
        "runs",
    ),
    Mutant(
        "pieces end where pages do",
        (scenarios.copies_stop_at_the_borders_of_registrations,),
        PINNING,
        "                piece_bytes = length // 2 // unit * unit\n",
        "                piece_bytes = length // 2 // unit * unit - 100\n",
    ),
    Mutant(
        "a refused piece is halved",
        (scenarios.copies_stop_at_the_borders_of_registrations,),
        PINNING,
        "                if piece_bytes < smallest_piece_bytes:\n",
        "                if True:\n",
    ),
    Mutant(
        "all of the region is registered",
        (scenarios.no_two_copies_of_a_batch_write_the_same_byte,),
        PINNING,
        "        while pinned_bytes < self.num_bytes:\n",
        "        while pinned_bytes < self.num_bytes and not pinned_bytes:\n            piece_bytes = unit\n",
    ),
    Mutant(
        "copies never use the null stream",
        (scenarios.a_job_takes_one_batch,),
        CUDA,
        "        self._streams[direction] = self.driver.create_stream()\n",
        "        self._streams[direction] = Stream(0)\n",
    ),
    Mutant(
        "calls have a context",
        (scenarios.a_thread_without_a_context_gets_one,),
        CUDA,
        "            self.driver.use_device(self._device.number)\n",
        "            pass\n",
    ),
)


@contextmanager
def mutated(mutant: Mutant) -> Iterator[ModuleType]:
    """The backend with one module in which the rule's text is replaced."""
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(mutant.old) == 1, f"the text of the rule {mutant.rule!r} is not in {mutant.module} once"
    kept = {name: sys.modules[name] for name in (CUDA, DRIVER, PINNING)}
    try:
        module = importlib.util.module_from_spec(spec)
        sys.modules[mutant.module] = module
        exec(compile(source.replace(mutant.old, mutant.new), spec.origin, "exec"), module.__dict__)
        if mutant.module == PINNING:
            kept[CUDA].PinnedRegion, original = module.PinnedRegion, kept[CUDA].PinnedRegion  # type: ignore[attr-defined]
            try:
                yield module
            finally:
                kept[CUDA].PinnedRegion = original  # type: ignore[attr-defined]
        else:
            yield module
    finally:
        sys.modules.update(kept)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule.replace(" ", "_"))
def test_a_rule_that_is_taken_out_is_missed(cuda: FakeCuda, mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    with mutated(mutant) as module:
        make: Make = importlib.import_module(CUDA).make_cuda_handlers
        if mutant.module == CUDA:
            monkeypatch.setattr(module, "check_copies", lambda *_: None)  # which would find some of them before
        else:
            monkeypatch.setattr(CUDA + ".check_copies", lambda *_: None)
        for scenario in mutant.fails:
            cuda.reset()
            if mutant.module == DRIVER:
                cuda.driver = module.Driver(str(cuda.path))
                assert not isinstance(cuda.driver, Driver)
                cuda.driver.use_device(0)
            with pytest.raises((AssertionError, KVOffloadError)):
                scenario(cuda, make)
    cuda.settle()
    cuda.reset()


def test_every_scenario_has_a_mutant() -> None:
    assert {scenario.__name__ for mutant in MUTANTS for scenario in mutant.fails} == {
        scenario.__name__ for scenario in scenarios.SCENARIOS
    }
