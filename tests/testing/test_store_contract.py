# SPDX-License-Identifier: Apache-2.0
"""Test that the contract of stores fails stores that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.testing.broken import failures_of

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import BlockStoreContract, block_of
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.stores.wrappers import StoreWrapper

Blocks = Sequence[memoryview]
Keys = Sequence[OffloadKey]


class Resident(StoreWrapper):
    """A store that reports its resident keys. It passes each test of the contract."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.resident = inner._blocks.keys()


class HasAll(Resident):
    def contains(self, keys: Keys) -> list[bool]:
        return [True] * len(keys)


class ReadsNothing(Resident):
    def read_into(self, keys: Keys, blocks: Blocks) -> list[bool]:
        return self.inner.contains(keys)


class ReadsAnother(Resident):
    def read_into(self, keys: Keys, blocks: Blocks) -> list[bool]:
        super().read_into(keys, blocks)
        return super().read_into([keys[0]] * len(keys), blocks) if keys else []


class ReadsAllOrNone(Resident):
    def read_into(self, keys: Keys, blocks: Blocks) -> list[bool]:
        return [all(super().read_into(keys, blocks))] * len(keys)


class WritesNothing(Resident):
    def write(self, keys: Keys, blocks: Blocks) -> list[bool]:
        return [True] * len(keys)


class WritesTheFirst(Resident):
    def write(self, keys: Keys, blocks: Blocks) -> list[bool]:
        return super().write(keys[:1], blocks[:1]) + [True] * (len(keys) - 1)


class Renames(Resident):
    def name(self, key: OffloadKey) -> OffloadKey:
        raise NotImplementedError

    def contains(self, keys: Keys) -> list[bool]:
        return super().contains([*map(self.name, keys)])

    def write(self, keys: Keys, blocks: Blocks) -> list[bool]:
        return super().write([*map(self.name, keys)], blocks)

    def read_into(self, keys: Keys, blocks: Blocks) -> list[bool]:
        return super().read_into([*map(self.name, keys)], blocks)


class CutsKeys(Renames):
    def name(self, key: OffloadKey) -> OffloadKey:
        return OffloadKey(key[:1])


class IgnoresCase(Renames):
    def name(self, key: OffloadKey) -> OffloadKey:
        return OffloadKey(key.lower())


class StopsAtZero(Renames):
    def name(self, key: OffloadKey) -> OffloadKey:
        return OffloadKey(key.rstrip(b"\0") or b"\0")


class NoEmptyBatch(Resident):
    def discard(self, keys: Keys) -> None:
        super().discard([keys[0], *keys])


class NotAgain(Resident):
    def write(self, keys: Keys, blocks: Blocks) -> list[bool]:
        here = self.inner.contains(keys)
        return [is_written and not is_here for is_written, is_here in zip(super().write(keys, blocks), here)]


class NotTwice(Resident):
    def write(self, keys: Keys, blocks: Blocks) -> list[bool]:
        unique = dict(zip(keys, blocks))
        return super().write([*unique], [*unique.values()])


class KeepsAll(Resident):
    def discard(self, keys: Keys) -> None:
        return


class DiscardsWhatIsHere(Resident):
    def discard(self, keys: Keys) -> None:
        assert all(self.inner.contains(keys))
        super().discard(keys)


class KeepsBuffers(Resident):
    """A store that wrongly keeps the caller's buffers."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.kept: dict[OffloadKey, memoryview] = {}

    def write(self, keys: Keys, blocks: Blocks) -> list[bool]:
        for key, block in zip(keys, blocks):
            self.kept.setdefault(key, block)
        return super().write(keys, blocks)

    def read_into(self, keys: Keys, blocks: Blocks) -> list[bool]:
        answers = super().read_into(keys, blocks)
        for key, block, answer in zip(keys, blocks, answers):
            if answer:
                block[:] = bytes(self.kept[key])
        return answers


class WritesBeside(Resident):
    def read_into(self, keys: Keys, blocks: Blocks) -> list[bool]:
        answers = super().read_into(keys, blocks)
        for block in blocks:
            memoryview(block.obj)[-1] = 7
        return answers


class ScansTwice(Resident):
    def scan(self) -> Iterator[Keys]:
        yield from super().scan()
        yield from super().scan()


class ScansWhatIsGone(Resident):
    def scan(self) -> Iterator[Keys]:
        yield from super().scan()
        yield keys_of(7)


class ScansNothing(Resident):
    def scan(self) -> Iterator[Keys]:
        return iter(())


class ForgetsToSay(Resident):
    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.resident = ()


class SaysTooMuch(Resident):
    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.resident = keys_of(*range(30))


class NoTouch(Resident):
    def touch(self, keys: Keys) -> None:
        raise KeyError(keys)


class TouchDiscards(Resident):
    def touch(self, keys: Keys) -> None:
        self.discard(keys)


class CountsWrong(Resident):
    def stats(self) -> StoreStats:
        return replace(super().stats(), evicted_blocks=1)


class LosesWrong(Resident):
    def take_lost(self) -> dict[OffloadKey, LossCause]:
        return {keys_of(1)[0]: "evicted"}


class ClosesOnce(Resident):
    is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


def failures(
    make: Callable[[MemoryStore], BlockStore], again: Callable[[MemoryStore], BlockStore] = Resident
) -> set[str]:
    """Return the tests of the contract that ``make``'s stores fail.

    ``again`` opens a store that was closed. Blocks can be damaged, which the contract is told.
    """
    opened: dict[Path, MemoryStore] = {}

    class Contract(BlockStoreContract):
        def make_store(self, directory: Path) -> BlockStore:
            opened[directory] = memory = MemoryStore(self.block_bytes)
            memory.close = lambda: None  # type: ignore[method-assign]
            return make(memory)

        def reopen(self, directory: Path) -> BlockStore:
            return again(opened[directory])

    return failures_of(Contract)


def test_a_right_store_passes() -> None:
    assert failures(Resident) == set()


EMPTY, READ = "test_an_empty_store_has_nothing", "test_what_is_written_is_read"
BATCH, AGAIN = "test_a_batch_has_an_outcome_per_key", "test_writing_a_block_again_is_true"
KINDS, GONE = "test_keys_of_any_length_and_kind_are_kept_apart", "test_discarded_blocks_are_gone"
HARMLESS, SAYS = "test_touch_and_stats_are_harmless", "test_resident_keys_are_those_that_are_here"
SCAN, BUFFER = "test_a_scan_yields_only_what_is_here", "test_the_buffer_of_a_finished_write_may_change"


@pytest.mark.parametrize(
    ("make", "tests"),
    [
        (HasAll, {EMPTY, BATCH, GONE}), (ReadsNothing, {READ, KINDS, BATCH}), (ReadsAnother, {READ, KINDS}),
        (ReadsAllOrNone, {BATCH}), (WritesNothing, {READ, KINDS, AGAIN, BUFFER}), (WritesTheFirst, {READ, AGAIN}),
        (CutsKeys, {KINDS}), (IgnoresCase, {KINDS}), (StopsAtZero, {KINDS}),
        (NoEmptyBatch, {"test_an_empty_batch_changes_nothing"}), (NotAgain, {AGAIN}),
        (NotTwice, {AGAIN, "test_a_key_twice_in_one_batch"}), (KeepsAll, {GONE, SCAN, SAYS}),
        (DiscardsWhatIsHere, {GONE}), (KeepsBuffers, {BUFFER, "test_buffers_may_be_rows_of_a_larger_memory"}),
        (WritesBeside, {"test_buffers_may_be_rows_of_a_larger_memory"}), (ScansTwice, {SCAN}),
        (ScansWhatIsGone, {SCAN}), (ForgetsToSay, {SAYS}), (SaysTooMuch, {SAYS}), (NoTouch, {HARMLESS}),
        (TouchDiscards, {HARMLESS}), (CountsWrong, {HARMLESS}), (LosesWrong, {HARMLESS}),
        (ClosesOnce, {"test_close_twice"}),
    ],
)  # fmt: skip
def test_wrong_stores_fail(make: type[Resident], tests: set[str]) -> None:
    assert tests <= failures(make)


@pytest.mark.parametrize("again", [lambda memory: MemoryStore(512), ReadsNothing, ScansNothing])
def test_stores_that_forget_at_a_restart_fail(again: Callable[[MemoryStore], BlockStore]) -> None:
    assert failures(Resident, again) == {"test_a_restart_finds_what_was_written"}


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_store_that_does_not_notice_damage_fails(is_noticed: bool, tmp_path: Path) -> None:
    class Damaged(Resident):
        def __init__(self) -> None:
            super().__init__(MemoryStore(512))
            self.bad: set[OffloadKey] = set()
            self.lost: dict[OffloadKey, LossCause] = {}
            self.num_bad = 0

        def read_into(self, keys: Keys, blocks: Blocks) -> list[bool]:
            answers = super().read_into(keys, blocks)
            if is_noticed and (found := self.bad.intersection(keys)):
                self.lost, self.num_bad = dict.fromkeys(found, "corrupt"), self.num_bad + len(found)
                self.discard([*found])
                self.bad.clear()
                return [answer and key not in found for key, answer in zip(keys, answers)]
            return answers

        def take_lost(self) -> dict[OffloadKey, LossCause]:
            lost, self.lost = self.lost, {}
            return lost

        def stats(self) -> StoreStats:
            return replace(super().stats(), corrupt_blocks=self.num_bad)

    class Contract(BlockStoreContract):
        def make_store(self, directory: Path) -> BlockStore:
            return Damaged()

        def corrupt(self, store: BlockStore, directory: Path, key: OffloadKey) -> bool:
            assert isinstance(store, Damaged)
            store.bad.add(key)
            return True

    if is_noticed:
        Contract().test_wrong_bytes_are_a_miss_and_can_be_written_anew()
    else:
        with pytest.raises(AssertionError):
            Contract().test_wrong_bytes_are_a_miss_and_can_be_written_anew()


def test_a_block_is_a_function_of_its_key() -> None:
    one, two = keys_of(1, 2)
    assert block_of(one, 64) == block_of(one, 64) != block_of(two, 64)
    assert len(block_of(one, 64)) == 64
