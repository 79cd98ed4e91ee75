# SPDX-License-Identifier: Apache-2.0
"""Test two ``DiskStore`` objects on one root, as in two processes, against an oracle of their possible answers.

The stores' own threads do not run; rules decide when a store notices the other one's changes. A store may lose a block
if it announces that. Blocks that it has not announced as lost must be readable, and all read blocks must be right.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.files import disk_bytes
from tests.sizes import by_size
from tests.tiering.stores.disk.rig import aligned, damage, slab_of, slabs_of, upkeep_of

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk.store import DiskStore

SIZE = 64
KEYS = keys_of(*range(40))
BLOCKS = {key: aligned(block_of(key, SIZE)) for key in KEYS}
SLOTS = 6
MAX_BYTES = 2 * slab_of(SLOTS, SIZE)
WHO = st.integers(0, 1)
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=9)


class SlabMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.stores: list[DiskStore] = []
        self.known: list[set[OffloadKey]] = [set(), set()]
        """Blocks that each store has, as far as it has said."""
        self.slabs_are_small = patch("kvoffload.tiering.stores.disk.format._MIN_SLAB_BYTES", slab_of(SLOTS, SIZE))
        self.slabs_are_small.start()

    @initialize(beside_bytes=st.sampled_from([1 << 20, 1]))
    def each_takes_a_slab(self, beside_bytes: int) -> None:
        self.checksums = patch("kvoffload.tiering.stores.disk.store._BESIDE_BYTES", beside_bytes)
        self.checksums.start()
        for who in (0, 1):
            self.stores.append(self.open())
            self.write(who, [KEYS[who]])

    def open(self) -> DiskStore:
        store = DiskStore(self.root, SIZE, max_bytes=MAX_BYTES)
        upkeep_of(store).lock.acquire()  # from now on the store's thread waits
        return store

    def close(self, who: int) -> None:
        upkeep_of(self.stores[who]).lock.release()
        self.stores[who].close()

    def take_news(self, who: int) -> None:
        self.known[who] -= set(self.stores[who].take_lost())

    def scan(self, who: int) -> set[OffloadKey]:
        return {key for batch in self.stores[who].scan() for key in batch}

    def read_all(self, who: int, keys: Sequence[OffloadKey]) -> list[bool]:
        buffers = [aligned(bytes(SIZE)) for _ in keys]
        answers = self.stores[who].read_into(keys, buffers)
        self.take_news(who)
        for key, answer, buffer in zip(keys, answers, buffers, strict=True):
            assert not answer or buffer == BLOCKS[key], "wrong bytes"
        return answers

    @rule(who=WHO, keys=SOME)
    def write(self, who: int, keys: list[OffloadKey]) -> None:
        answers = self.stores[who].write(keys, [BLOCKS[key] for key in keys])
        self.take_news(who)
        self.known[who].update(key for key, answer in zip(keys, answers, strict=True) if answer)
        assert all(answers) or len(set(keys)) > SLOTS

    @rule(who=WHO, keys=SOME)
    def read(self, who: int, keys: list[OffloadKey]) -> None:
        for key, answer in zip(keys, self.read_all(who, keys), strict=True):
            # A copy in a neighbour's slab may be gone while there is another one.
            while not answer and self.stores[who].contains([key]) == [True]:
                (answer,) = self.read_all(who, [key])
            if answer:
                self.known[who].add(key)  # perhaps found while looking at a neighbour's slot
            else:
                assert key not in self.known[who], "a block is lost, which was not announced"

    @rule(who=WHO, keys=SOME)
    def touch(self, who: int, keys: list[OffloadKey]) -> None:
        self.stores[who].touch(keys)

    @rule(who=WHO, keys=SOME)
    def discard(self, who: int, keys: list[OffloadKey]) -> None:
        self.stores[who].discard(keys)
        self.known[who] -= set(keys)
        assert self.stores[who].contains(keys) == [False] * len(keys)

    @rule(who=WHO)
    def tell_and_ask(self, who: int) -> None:
        upkeep_of(self.stores[who]).flush_changes()
        upkeep_of(self.stores[who]).poll()
        self.take_news(who)
        self.known[who] |= self.scan(who)

    @rule(who=WHO)
    def write_uses(self, who: int) -> None:
        upkeep_of(self.stores[who]).flush_uses()

    @rule(who=WHO, key=st.sampled_from(KEYS))
    def written_is_found_by_the_neighbour(self, who: int, key: OffloadKey) -> None:
        self.write(who, [key])
        self.tell_and_ask(who)
        self.stores[who].discard([key])  # also if it is only in the neighbour's slab
        self.write(who, [key])  # so that it is in our own slab
        self.tell_and_ask(who)
        self.tell_and_ask(1 - who)
        assert key in self.known[1 - who]

    @rule(who=WHO, key=st.sampled_from(KEYS))
    def damage(self, who: int, key: OffloadKey) -> None:
        try:
            damage(self.root, key, SIZE)
        except AssertionError:
            return  # it is in no slab
        for reader in (who, 1 - who):
            self.read(reader, [key])

    @rule(who=WHO)
    def restart(self, who: int) -> None:
        self.close(who)
        self.stores[who] = self.open()
        self.known[who] = self.scan(who)

    @rule(who=WHO)
    def crash(self, who: int) -> None:
        """Leave the store as after ``kill -9``: nothing more is written, and the kernel drops all locks."""
        upkeep = upkeep_of(self.stores[who])
        with patch.object(upkeep, "flush_uses"), patch.object(upkeep, "flush_changes"):
            self.close(who)
        self.stores[who] = self.open()
        self.known[who] = self.scan(who)

    @invariant()
    def is_sound(self) -> None:
        for who, store in enumerate(self.stores):
            slabs_of(store).check_invariants()  # of the store: with the lock, which is ours
            found = {key for key, is_here in zip(KEYS, store.contains(KEYS), strict=True) if is_here}
            assert self.known[who] <= found, "a block is lost, which was not announced"
        assert disk_bytes(self.root) <= MAX_BYTES

    def teardown(self) -> None:
        for who in range(len(self.stores)):
            self.close(who)
        self.checksums.stop()
        self.slabs_are_small.stop()
        shutil.rmtree(self.root)


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(
    max_examples=by_size(quick=25, thorough=400), stateful_step_count=by_size(quick=40, thorough=80), deadline=None
)
