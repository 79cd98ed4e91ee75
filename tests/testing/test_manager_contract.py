# SPDX-License-Identifier: Apache-2.0
"""Test that the contract of managers fails managers that break it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
from tests.testing.broken import EndsOnce, failures_of

from kvoffload.base import OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.testing import OffloadingManagerContract

Keys = Collection[OffloadKey]


class Manager(CPUOffloadingManager):
    """A correct manager."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, enable_events=True)


class FindsAll(Manager):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return True


class FindsWhatIsInFlight(Manager):
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return super().lookup(key, req_context) is not False


class LooksOn(Manager):
    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, ends: Any = None) -> list[bool | None]:
        return [self.lookup(key, req_context) for key in keys]


class LoadsInAnyOrder(Manager):
    def prepare_load(self, keys: Keys, req_context: ReqContext) -> CPULoadStoreSpec:
        return CPULoadStoreSpec(sorted(super().prepare_load(keys, req_context).block_ids.tolist()))


class WhereDenies(Manager):
    def where(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return [False] * len(keys)


class WhereFindsAll(Manager):
    def where(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        return [True] * len(keys)


class WhereBegins(Manager):
    has_been_asked = False

    def where(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        self.has_been_asked = True
        return super().where(keys, req_context)

    def has_pending_work(self) -> bool:
        return self.has_been_asked


class StoresAgain(Manager):
    def prepare_store(self, keys: Keys, req_context: ReqContext, give_way: object = None) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        return output and PrepareStoreOutput([*keys], output.store_spec, output.evicted_keys)


class StoresAPart(Manager):
    def prepare_store(self, keys: Keys, req_context: ReqContext, give_way: object = None) -> PrepareStoreOutput | None:
        return super().prepare_store([*keys][: self.num_blocks], req_context)


class PinsNothing(Manager):
    def prepare_load(self, keys: Keys, req_context: ReqContext) -> CPULoadStoreSpec:
        spec = super().prepare_load(keys, req_context)
        super().complete_load(keys, req_context)
        return spec

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        return


class KeepsPins(Manager):
    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        return


class KeepsWhatFailed(Manager):
    def complete_store(self, keys: Keys, req_context: ReqContext | None = None, success: bool = True) -> None:
        super().complete_store(keys, req_context)


class TouchesTailFirst(Manager):
    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        super().touch([*keys][::-1], req_context)


class TouchesNothing(Manager):
    def touch(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        return


class AnnouncesNothing(Manager):
    def take_events(self) -> list[Any]:
        return []


class AnnouncesTwice(Manager):
    def take_events(self) -> list[Any]:
        return super().take_events() * 2


class KeepsAtReset(Manager):
    def reset_cache(self) -> None:
        return


class GivesSlotsInUse(Manager):
    def reset_cache(self) -> None:
        events, self.slots = self.slots, Manager(self.num_blocks).slots
        events.reset()
        self.slots._events = events._events

    def complete_load(self, keys: Keys, req_context: ReqContext | None = None) -> None:
        return


class NeedsKeys(Manager):
    def prepare_store(self, keys: Keys, req_context: ReqContext, give_way: object = None) -> PrepareStoreOutput | None:
        return super().prepare_store(keys, req_context) if keys else None


class OneEnd(EndsOnce, Manager):
    pass


class IsUnsound(Manager):
    def check_invariants(self) -> None:
        raise AssertionError


def failures(make: type[Manager]) -> set[str]:
    class Contract(OffloadingManagerContract):
        def make_manager(self, num_blocks: int) -> OffloadingManager:
            return make(num_blocks)

        def check(self, manager: OffloadingManager) -> None:
            assert isinstance(manager, Manager)
            manager.check_invariants()

    return failures_of(Contract)


READY, WHERE = (
    "test_a_block_is_ready_after_its_store",
    "test_where_denies_nothing_that_a_lookup_finds_and_changes_nothing",
)
HERE, PINNED = "test_what_is_here_is_not_stored_again", "test_a_pinned_block_is_not_evicted"
LARGER, FAILED = "test_a_store_larger_than_the_tier_is_refused", "test_a_failed_store_leaves_nothing"
HEAD, EVENTS = "test_the_head_of_a_touched_prefix_outlives_its_tail", "test_events_fold_to_what_is_ready"
LATE, NONE = "test_completions_may_come_after_the_request_and_after_a_reset", "test_empty_calls"
TWICE = "test_shutdown_twice"


def test_a_right_manager_passes() -> None:
    assert failures(Manager) == set()


@pytest.mark.parametrize(
    ("make", "tests"),
    [
        (FindsAll, {READY}), (FindsWhatIsInFlight, {READY}), (LooksOn, {READY}), (LoadsInAnyOrder, {READY}),
        (WhereDenies, {WHERE}), (WhereFindsAll, {WHERE}), (WhereBegins, {WHERE}), (StoresAgain, {HERE}),
        (StoresAPart, {LARGER}), (PinsNothing, {PINNED, LATE}), (KeepsPins, {PINNED, LATE}),
        (KeepsWhatFailed, {FAILED}), (TouchesTailFirst, {HEAD}), (TouchesNothing, {HEAD}),
        (AnnouncesNothing, {EVENTS}), (AnnouncesTwice, {EVENTS}), (KeepsAtReset, {EVENTS, LATE}),
        (GivesSlotsInUse, {LATE}), (NeedsKeys, {NONE}), (OneEnd, {TWICE}),
        (IsUnsound, {READY, WHERE, HERE, PINNED, LARGER, FAILED, HEAD, EVENTS, LATE, NONE}),
    ],
)  # fmt: skip
def test_wrong_managers_fail(make: type[Manager], tests: set[str]) -> None:
    assert tests <= failures(make)
