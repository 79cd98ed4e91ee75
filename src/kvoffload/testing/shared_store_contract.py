# SPDX-License-Identifier: Apache-2.0
"""Tests for a store that several hosts share, in addition to ``BlockStoreContract``. Subclass it in a test module::

class TestMySharedStore(SharedStoreContract):
    def make_host(self, directory, number):   # all hosts of one directory share its data
        return MyStore(directory, self.block_bytes)
"""

from __future__ import annotations

import random
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvoffload.base import OffloadKey
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import StoreCalls, at_once, block_of
from kvoffload.tiering.stores.base import BlockStore


class SharedStoreContract(StoreCalls, ABC):
    """The tests of the contract.

    ``contains`` and ``scan`` may report other hosts' changes late. A read must be correct at once: it returns the
    block, or a miss if the block was discarded.
    """

    @abstractmethod
    def make_host(self, directory: Path, number: int) -> BlockStore:
        """Open the store as host ``number``, with room for a thousand blocks. One thread calls it at a time."""

    # ---------------------------------------------------------------------------------------------------- tests

    def test_what_a_host_writes_the_others_read(self) -> None:
        with self._hosts(2) as (one, two):
            keys = keys_of(*range(20))
            assert self._read(two, keys) == [None] * 20
            assert self._write(one, keys) == [True] * 20
            assert self._read(two, keys) == self._blocks(keys)
            assert self._write(two, keys) == [True] * 20
            assert self._read(one, keys) == self._blocks(keys)

    def test_what_a_host_discards_is_a_miss_for_the_others_and_can_be_written_anew(self) -> None:
        with self._hosts(2) as (one, two):
            keys = keys_of(*range(6))
            self._write(one, keys)
            assert self._read(two, keys) == self._blocks(keys)
            one.discard(keys[:3])
            assert self._read(two, keys) == [None] * 3 + self._blocks(keys[3:])
            assert self._write(one, keys) == [True] * 6
            assert self._read(two, keys) == self._blocks(keys)
            assert one.stats().corrupt_blocks == two.stats().corrupt_blocks == 0

    def test_hosts_that_come_and_go_cost_the_others_no_write(self) -> None:
        with self._hosts(1) as (one,):
            keys, ends = keys_of(*range(200)), threading.Event()
            answers = list[bool]()

            def work() -> None:
                for key in keys:
                    answers.extend(self._write(one, [key]))
                ends.set()

            worker = threading.Thread(target=work)
            worker.start()
            while not ends.is_set():
                self.make_host(self._directory, 1).close()
            worker.join()
            assert answers == [True] * 200
            assert self._read(one, keys) == self._blocks(keys)

    def test_all_hosts_write_the_same_blocks_at_once(self) -> None:
        with self._hosts(3) as hosts:
            keys, wrong, start = keys_of(*range(40)), list[str](), threading.Barrier(3)

            def work(seed: int, host: BlockStore) -> None:
                mine = random.Random(seed).sample(keys, 40)
                start.wait()
                for first in range(0, 40, 4):
                    if self._write(host, mine[first : first + 4]) != [True] * 4:
                        wrong.append("a write failed")
                    if self._read(host, mine[: first + 4]) != self._blocks(mine[: first + 4]):
                        wrong.append("a block was wrong or gone")

            at_once(work, enumerate(hosts))
            assert not wrong
            for host in hosts:
                assert self._read(host, keys) == self._blocks(keys)
                assert host.stats().corrupt_blocks == 0

    def test_hosts_that_write_read_and_discard_at_once_read_no_wrong_byte(self) -> None:
        with self._hosts(3) as hosts:
            keys, wrong = keys_of(*range(12)), list[bytes]()

            def work(seed: int, host: BlockStore) -> None:
                chance = random.Random(seed)
                for _ in range(60):
                    some = chance.sample(keys, 3)
                    match chance.randrange(4):
                        case 0:
                            host.discard(some)
                        case 1:
                            found = zip(self._read(host, some), self._blocks(some), strict=True)
                            wrong.extend(block for block, right in found if block is not None and block != right)
                        case _:
                            self._write(host, some)

            at_once(work, enumerate(hosts))
            assert not wrong
            assert [host.stats().corrupt_blocks for host in hosts] == [0, 0, 0], (
                "a deletion does not count as corruption"
            )

    # -------------------------------------------------------------------------------------------------- helpers

    @contextmanager
    def _hosts(self, count: int) -> Iterator[list[BlockStore]]:
        with tempfile.TemporaryDirectory() as name:
            self._directory = Path(name)
            hosts = [self.make_host(self._directory, number) for number in range(count)]
            try:
                yield hosts
            finally:
                for host in hosts:
                    host.close()

    def _blocks(self, keys: Sequence[OffloadKey]) -> list[bytes | None]:
        return [block_of(key, self.block_bytes) for key in keys]
