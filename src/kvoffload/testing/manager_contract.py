# SPDX-License-Identifier: Apache-2.0
"""Tests that every offloading manager must pass, to be inherited."""

from __future__ import annotations

from collections.abc import Collection

from kvoffload.base import (
    BlockIDsLoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from kvoffload.testing.keys import key, keys


def fold_events(resident: set[OffloadKey], events: Collection[OffloadingEvent]) -> None:
    """Apply ``events`` to ``resident``. Fails if a block is added twice, or removed while it is absent."""
    for event in events:
        if event.clears:
            resident.clear()
        for one in event.keys:
            if event.removed:
                assert one in resident, f"{one.hex()} was removed while it was absent"
                resident.remove(one)
            else:
                assert one not in resident, f"{one.hex()} was added twice"
                resident.add(one)


def _slots(spec: LoadStoreSpec) -> list[int]:
    assert isinstance(spec, BlockIDsLoadStoreSpec)
    slots: list[int] = spec.block_ids.tolist()
    return slots


class OffloadingManagerContract:
    """The tests. Inherit them in a class whose name starts with ``Test``, and implement ``make_manager``.

    The manager's transfers must name slots by block id (``BlockIDsLoadStoreSpec``). Tiers below host memory, if there
    are any, may contain only blocks that the test stored.
    """

    def make_manager(self, num_blocks: int) -> OffloadingManager:
        """Return a new manager with ``num_blocks`` slots and events, which stores a block at its first request."""
        raise NotImplementedError

    def check(self, manager: OffloadingManager) -> None:
        """Check the manager's invariants at the end of each test. Override it; the default does nothing."""

    def _request(self, manager: OffloadingManager, name: str = "r") -> ReqContext:
        context = ReqContext(name)
        assert isinstance(manager.on_new_request(context), RequestOffloadingContext)
        return context

    def _store(self, manager: OffloadingManager, context: ReqContext, *numbers: int) -> list[OffloadKey]:
        output = manager.prepare_store(keys(*numbers), context)
        assert output is not None
        manager.complete_store(output.keys_to_store, context)
        return output.evicted_keys

    def test_a_block_is_ready_after_its_store(self) -> None:
        manager = self.make_manager(4)
        context = self._request(manager)
        assert manager.lookup(key(1), context) is False
        output = manager.prepare_store(keys(1, 2), context)
        assert output is not None
        assert output.keys_to_store == keys(1, 2)
        assert output.evicted_keys == []
        assert len({*_slots(output.store_spec)}) == 2
        assert manager.lookup(key(1), context) is None
        manager.complete_store(output.keys_to_store, context)
        assert manager.lookup_prefix(keys(1, 2, 3, 1), context) == [True, True, False]
        assert [manager.lookup_prefix([each], context) for each in keys(1, 2, 3)] == [[True], [True], [False]]
        assert [manager.lookup(each, context) for each in keys(1, 2, 3)] == [True, True, False]
        load = manager.prepare_load(keys(2, 1), context)
        assert _slots(load) == _slots(output.store_spec)[::-1]
        manager.complete_load(keys(2, 1), context)
        self.check(manager)

    def test_where_denies_nothing_that_a_lookup_finds_and_changes_nothing(self) -> None:
        manager = self.make_manager(2)
        context = self._request(manager)
        output = manager.prepare_store(keys(1, 2), context)
        assert output is not None
        assert False not in manager.where(keys(2, 1), context)
        manager.complete_store(output.keys_to_store, context)
        first, second, absent, last = manager.where(keys(1, 2, 3, 1), context)
        assert False not in (first, second, last)
        assert absent is not True
        manager.on_schedule_end()
        assert not manager.has_pending_work()
        assert manager.lookup_prefix(keys(1, 2, 3), context) == [True, True, False]
        self.check(manager)

    def test_what_is_here_is_not_stored_again(self) -> None:
        manager = self.make_manager(4)
        context = self._request(manager)
        self._store(manager, context, 1)
        first = manager.prepare_store(keys(1, 2), context)
        second = manager.prepare_store(keys(1, 2), context)
        assert first is not None
        assert second is not None
        assert (first.keys_to_store, second.keys_to_store) == (keys(2), [])
        manager.complete_store(keys(2), context)
        self.check(manager)

    def test_a_pinned_block_is_not_evicted(self) -> None:
        manager = self.make_manager(2)
        context = self._request(manager)
        self._store(manager, context, 1, 2)
        manager.prepare_load(keys(1, 2), context)
        assert manager.prepare_store(keys(3), context) is None
        assert manager.lookup_prefix(keys(1, 2), context) == [True, True]
        manager.complete_load(keys(1, 2), context)
        manager.on_schedule_end()
        assert self._store(manager, context, 3) == keys(2)
        self.check(manager)

    def test_a_store_larger_than_the_tier_is_refused(self) -> None:
        manager = self.make_manager(3)
        context = self._request(manager)
        self._store(manager, context, 1, 2)
        assert manager.prepare_store(keys(3, 4, 5, 6), context) is None
        assert manager.lookup_prefix(keys(1, 2), context) == [True, True]
        self.check(manager)

    def test_a_failed_store_leaves_nothing(self) -> None:
        manager = self.make_manager(2)
        context = self._request(manager)
        output = manager.prepare_store(keys(1, 2), context)
        assert output is not None
        manager.complete_store(output.keys_to_store, context, success=False)
        assert manager.lookup(key(1), context) is False
        assert list(manager.take_events()) == []
        assert self._store(manager, context, 3, 4) == []
        self.check(manager)

    def test_the_head_of_a_touched_prefix_outlives_its_tail(self) -> None:
        manager = self.make_manager(4)
        context = self._request(manager)
        self._store(manager, context, 1, 2)
        self._store(manager, context, 3, 4)
        manager.touch(keys(1, 2, 3, 4), context)
        assert {*self._store(manager, context, 5, 6)} == {*keys(3, 4)}
        assert manager.lookup_prefix(keys(1, 2, 3), context) == [True, True, False]
        self.check(manager)

    def test_events_fold_to_what_is_ready(self) -> None:
        manager = self.make_manager(3)
        context = self._request(manager)
        resident: set[OffloadKey] = set()
        for number in range(10):
            self._store(manager, context, number, number + 1)
            fold_events(resident, list(manager.take_events()))
            ready = {key(other) for other in range(12) if manager.lookup(key(other), context)}
            assert resident == ready
        manager.reset_cache()
        fold_events(resident, list(manager.take_events()))
        assert resident == set()
        self.check(manager)

    def test_completions_may_come_after_the_request_and_after_a_reset(self) -> None:
        manager = self.make_manager(3)
        context = self._request(manager)
        self._store(manager, context, 1)
        manager.prepare_load(keys(1), context)
        output = manager.prepare_store(keys(2), context)
        assert output is not None
        manager.on_request_finished(context)
        manager.reset_cache()
        other = self._request(manager, "other")
        assert manager.prepare_store(keys(3, 4), other) is None
        manager.complete_store(keys(2))
        manager.complete_load(keys(1))
        assert [manager.lookup(key(number), other) for number in (1, 2)] == [False, False]
        assert self._store(manager, other, 3, 4, 5) == []
        self.check(manager)

    def test_empty_calls(self) -> None:
        manager = self.make_manager(1)
        context = self._request(manager)
        output = manager.prepare_store([], context)
        assert output is not None
        assert output.keys_to_store == []
        manager.complete_store([], context)
        assert _slots(manager.prepare_load([], context)) == []
        manager.complete_load([], context)
        manager.touch([], context)
        assert manager.lookup_prefix([], context) == []
        self.check(manager)

    def test_shutdown_twice(self) -> None:
        manager = self.make_manager(1)
        manager.on_schedule_end()
        manager.shutdown()
        manager.shutdown()
