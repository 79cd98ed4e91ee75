# SPDX-License-Identifier: Apache-2.0
"""Test that lost blocks leave the presence index, and are recorded with their cause."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.tiering.store_rig import BLOCK_BYTES, Region, Rig

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.cpu.manager import CPUPrimaryTierOffloadingManager
from kvoffload.lost_blocks import LostBlocks
from kvoffload.miss import Miss
from kvoffload.testing import ManualClock
from kvoffload.testing.keys import keys as keys_of
from kvoffload.tiering.losses import StoreLosses
from kvoffload.tiering.manager import TieringOffloadingManager
from kvoffload.tiering.presence import PresenceIndex
from kvoffload.tiering.stores.base import LossCause
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.tier import TierLimits


def test_corruption_is_logged_once_a_minute(make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = make()
    rig.store = FileSystemStore(tmp_path, BLOCK_BYTES)
    rig.start()
    keys = keys_of(*range(3))
    rig.store_blocks(keys)
    for path in tmp_path.rglob("*.kvb"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    # Each job has one block, because several threads may read the blocks of a job, and each thread counts.
    rig.load_blocks(keys[:1])
    assert "'mem' found corrupt blocks" in caplog.text
    assert "1 since startup" in caplog.text
    assert keys[0].hex() in caplog.text
    assert str(tmp_path) in caplog.text
    rig.load_blocks(keys[1:2])
    rig.load_blocks([*keys[:2], *keys_of(99)])  # absent is not corrupt
    assert len(caplog.records) == 1
    rig.clock.advance(61)
    rig.load_blocks(keys_of(99))
    assert len(caplog.records) == 1
    rig.load_blocks(keys[2:3])
    assert "3 since startup" in caplog.records[-1].getMessage()
    assert "(1 earlier warnings were not logged)" in caplog.records[-1].getMessage()


def test_the_corrupt_block_is_named_and_not_the_absent_one(
    make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(limits=TierLimits(threads=1))
    rig.store = FileSystemStore(tmp_path, BLOCK_BYTES)
    rig.start()
    corrupt, absent = keys = keys_of(1, 2)
    rig.store_blocks(keys)
    (path,) = tmp_path.rglob(f"*{corrupt.hex()}*.kvb")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    next(tmp_path.rglob(f"*{absent.hex()}*.kvb")).unlink()
    rig.load_blocks(keys)
    (message,) = [record.getMessage() for record in caplog.records]
    assert corrupt.hex() in message
    assert absent.hex() not in message


def test_blocks_that_the_store_evicts_are_removed(make) -> None:
    rig = make(max_blocks=10).start()
    for start in range(0, 40, 5):
        rig.store_blocks(keys_of(*range(start, start + 5)))
    rig.until(lambda: len(rig.resident) == 10)
    assert rig.resident == {key for batch in rig.inner.scan() for key in batch}
    assert rig.stat("tier_evicted_blocks") == 30


def test_losses_are_recorded_with_their_causes(make) -> None:
    lost = LostBlocks()
    rig = make(max_blocks=2, lost=lost).start()

    def causes(keys: Sequence[OffloadKey]) -> list[str | None]:
        return [loss and loss.cause for loss in lost.find(keys)]

    for number in (1, 2, 3):
        rig.store_blocks(keys_of(number))
    assert causes(keys_of(1, 2, 3)) == ["evicted mem", None, None]
    assert rig.tier.holds(keys_of(1, 2, 3)) == [False, True, True]
    rig.load_blocks(keys_of(1))
    assert causes(keys_of(1)) == ["evicted mem"], "a read that comes too late does not make it somebody else's deletion"
    rig.inner.discard(keys_of(2))
    rig.load_blocks(keys_of(2))
    assert causes(keys_of(2)) == ["removed mem"]


def test_what_a_server_with_a_policy_of_its_own_no_longer_has_was_evicted(make) -> None:
    class ServerLimits(TierLimits, frozen=True, kw_only=True):
        server_evicts = True

    lost = LostBlocks()
    rig = make(limits=ServerLimits(), lost=lost).start()
    rig.store_blocks(keys_of(1, 2))
    rig.inner.discard(keys_of(1))
    rig.load_blocks(keys_of(1))
    assert [loss and loss.cause for loss in lost.find(keys_of(1, 2))] == ["evicted mem", None]


def test_a_block_evicted_by_the_next_of_its_own_job_is_not_present(make) -> None:
    rig = make(max_blocks=1, limits=TierLimits(threads=2)).start()
    keys = keys_of(1, 2)
    rig.fill(range(2), keys)
    rig.submit(keys, range(2), load=False)  # a slice each
    rig.tier.drain_jobs()  # so that one step handles both results and the eviction between them
    rig.step()
    assert rig.resident == {key for batch in rig.inner.scan() for key in batch}
    assert len(rig.resident) == 1


def test_an_eviction_queued_while_results_are_taken_is_not_lost(make, monkeypatch) -> None:
    rig = make(max_blocks=1).start()
    rig.store_blocks(keys_of(1))
    rig.until_idle()
    rig.gate.close_gate("write")
    rig.submit(keys_of(2), [2], load=False)
    rig.gate.wait_for_arrivals(1)
    take_results = rig.runner.take_results

    def finish_and_take():
        rig.gate.open_gate()
        assert rig.runner.drain(30)
        return take_results()

    with monkeypatch.context() as patch:
        patch.setattr(rig.runner, "take_results", finish_and_take)
        rig.tier.on_schedule_end()
        assert [result.success for result in rig.tier.get_finished_jobs()] == [True]
    assert rig.stat("tier_blocks") == 2, "the eviction came when evictions had been taken in"
    rig.step()
    assert rig.resident == set(keys_of(2))


def test_a_loss_waits_until_it_is_taken_in() -> None:
    store, index, lost = MemoryStore(BLOCK_BYTES, BLOCK_BYTES), PresenceIndex("mem", 100), LostBlocks()
    losses = StoreLosses("mem", store, index, lost, server_evicts=False, clock=ManualClock())
    first, second = keys_of(1, 2)
    for key in (first, second):
        store.write([key], [memoryview(bytes(BLOCK_BYTES))])
        index.add([key])
        losses.queue()
    assert first in index
    assert lost.find([first]) == [None]
    losses.take_in()
    assert [key in index for key in (first, second)] == [False, True]
    assert [loss and loss.cause for loss in lost.find([first, second])] == ["evicted mem", None]


def test_a_step_takes_in_a_bounded_number_of_losses_however_many_there_are(make) -> None:
    keys = keys_of(*range(20_000))

    class LosesAll(MemoryStore):
        def take_lost(self) -> dict[OffloadKey, LossCause]:
            return dict.fromkeys(keys, "removed")

    lost = LostBlocks()
    rig = make(lost=lost)
    rig.store = LosesAll(BLOCK_BYTES)
    rig.start()
    rig.tier._index.add(keys)
    rig.tier._losses.queue()
    left = [len(keys)]
    while left[-1] and len(left) < 100:
        rig.tier.on_schedule_end()
        for _ in range(3):  # a step polls more than once
            rig.tier.get_finished_jobs()
        left.append(int(rig.stat("tier_blocks")))
    taken = [before - after for before, after in itertools.pairwise(left)]
    assert 0 < max(taken) <= 2000
    assert left[-1] == 0
    assert None not in lost.find(keys)


def test_what_a_tier_holds_does_not_take_in_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store asks what its tiers hold, and thousands of blocks may have been lost."""
    rig = Rig().start()
    rig.below(keys_of(1))
    taken: list[None] = []
    monkeypatch.setattr(rig.store, "take_lost", lambda: taken.append(None) or {}, raising=False)
    assert rig.tier.holds(keys_of(1, 2)) == [False, False]
    assert not taken
    rig.tier.note_losses()
    assert len(taken) == 1
    rig.tier.shutdown()


def test_an_explanation_names_what_a_store_has_lost_since_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(lost=(lost := LostBlocks())).start()
    primary = CPUPrimaryTierOffloadingManager(4, Region(rig.view), lost=lost)
    manager = TieringOffloadingManager(primary, [rig.tier])
    monkeypatch.setattr(rig.store, "take_lost", lambda: dict.fromkeys(keys_of(1), "evicted"), raising=False)
    (loss,) = manager.explain(keys_of(1), ReqContext("r"))
    assert loss is not None
    assert loss.miss is Miss.EVICTED
    manager.shutdown()


def test_an_explanation_asks_a_tier_once_whether_it_is_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(lost=LostBlocks()).start()
    manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(4, Region(rig.view)), [rig.tier])
    names, calls = keys_of(*range(1000)), list[None]()
    monkeypatch.setattr(rig.tier, "holds", lambda keys: [True] * len(keys))
    monkeypatch.setattr(rig.tier, "is_readable", lambda: calls.append(None) or False)
    assert all(loss is not None and loss.miss is Miss.TIER_OFF for loss in manager.explain(names, ReqContext("r")))
    assert len(calls) == 1
    manager.shutdown()
