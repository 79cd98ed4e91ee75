# SPDX-License-Identifier: Apache-2.0
"""Test calls that wait: each ends in time, failures are misses, and late I/O never touches the caller's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.base import OffloadKey
from kvoffload.engines.sglang.tiers import Page, PageTiers
from kvoffload.errors import ConfigError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.testing.stores import GatedStore
from kvoffload.tiering.options import StoreOptions, parse_tiers
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.memory import MemoryStore
from kvoffload.tiering.tier import StoreTier

BYTES = 1000
"""The bytes of a page, in pieces of 300 and 700."""
PATIENT_S = 120.0


class Gated(StoreOptions, frozen=True, kw_only=True):
    """A store whose calls the test delays."""

    is_persistent: ClassVar[bool] = False
    stores: ClassVar[dict[str, GatedStore]] = {}

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        return self.stores.setdefault(self.label, GatedStore(MemoryStore(block_bytes)))


class Pages:
    """The caller's memory: a page in two pieces that do not touch."""

    def __init__(self, count: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.full((count, 2, 1024), 0xA5, np.uint8)

    def at(self, index: int) -> Page:
        return [(self.memory[index, 0].ctypes.data, 300), (self.memory[index, 1].ctypes.data, 700)]

    def all(self) -> list[Page]:
        return [self.at(index) for index in range(len(self.memory))]

    def read(self, index: int) -> bytes:
        return self.memory[index, 0, :300].tobytes() + self.memory[index, 1, :700].tobytes()

    def fill(self, keys: list[OffloadKey]) -> Pages:
        for index, key in enumerate(keys):
            content = np.frombuffer(block_of(key, BYTES), np.uint8)
            self.memory[index, 0, :300], self.memory[index, 1, :700] = content[:300], content[300:]
        return self

    @property
    def is_untouched(self) -> bool:
        return bool((self.memory == 0xA5).all())


@pytest.fixture
def make() -> Iterator[Callable[..., PageTiers]]:
    made: list[PageTiers] = []
    Gated.stores.clear()

    def build(
        *options: StoreOptions, max_wait_s: float = PATIENT_S, slots: int = 16, namespace: str = "ns"
    ) -> PageTiers:
        made.append(PageTiers(options, BYTES, namespace, max_wait_s=max_wait_s, staging_bytes=slots * BYTES))
        return made[-1]

    yield build
    for store in Gated.stores.values():
        store.open_gate()
    for tiers in made:
        tiers.close()


def gated(name: str = "gated", **values: float) -> Gated:
    return Gated(type="gated", name=name, **values)  # type: ignore[arg-type]


def write(tiers: PageTiers, keys: list[OffloadKey]) -> list[bool]:
    pages = Pages(len(keys)).fill(keys)  # addresses do not keep memory alive
    return tiers.store(keys, pages.all())


def check(tiers: PageTiers, keys: list[OffloadKey]) -> None:
    pages = Pages(len(keys))
    assert tiers.load(keys, pages.all()) == [True] * len(keys)
    assert [pages.read(index) for index in range(len(keys))] == [block_of(key, BYTES) for key in keys]
    assert (pages.memory[:, 0, 300:] == 0xA5).all() and (pages.memory[:, 1, 700:] == 0xA5).all()


@pytest.mark.parametrize("kind", ["memory", "disk", "fs"])
def test_more_pages_than_slots_go_down_and_come_back(kind: str, tmp_path: Path, make) -> None:
    path = {} if kind == "memory" else {"path": str(tmp_path), "max_bytes": "64MiB"}
    options = parse_tiers([{"type": kind, **path}])
    tiers = make(*options)
    keys = keys_of(*range(100))
    assert tiers.present(keys) == []
    assert write(tiers, keys) == [True] * 100
    assert tiers.present(keys) == [True] * 100
    check(tiers, keys)
    assert tiers.present([*keys[:7], *keys_of(500), *keys[7:9]]) == [True] * 7
    assert tiers.present(keys_of(500, 3), leading=False) == [False, True]
    if path:
        tiers.close()
        again = make(*options)
        assert again.present(keys) == [True] * 100
        check(again, keys)
        other = make(*parse_tiers([{"type": kind, "path": str(tmp_path), "max_bytes": "64MiB"}]), namespace="other")
        assert other.present(keys) == []


def test_all_tiers_are_written_and_the_first_that_has_a_page_is_read(make) -> None:
    tiers = make(gated("fast"), gated("slow"))
    keys = keys_of(*range(8))
    assert write(tiers, keys) == [True] * 8
    fast, slow = Gated.stores["fast"], Gated.stores["slow"]
    assert fast.contains(keys) == slow.contains(keys) == [True] * 8
    slow.close_gate("read_into")
    check(tiers, keys)  # which would not end if the second were read
    slow.open_gate()
    fast.inner.discard(keys[2:5])
    check(tiers, keys)


def test_a_tier_that_lacks_a_page_is_written_again(make) -> None:
    tiers = make(gated("fast"), gated("slow"))
    keys = keys_of(*range(6))
    Gated.stores["fast"].close_gate("write")
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(write, tiers, keys)
        Gated.stores["fast"].wait_for_arrivals(1)
        assert not written.done()
        Gated.stores["fast"].open_gate()
        assert written.result() == [True] * 6
    assert Gated.stores["fast"].contains(keys) == Gated.stores["slow"].contains(keys) == [True] * 6


def test_a_hung_look_up_is_a_miss_in_time(make) -> None:
    tiers = make(gated(), max_wait_s=0.2)
    Gated.stores["gated"].close_gate("contains", "scan")
    assert tiers.present(keys_of(1, 2)) == []
    assert tiers.present(keys_of(1, 2), leading=False) == [False, False]


def test_leading_pages_end_at_the_first_without_an_answer(make) -> None:
    patient, tiers, keys = make(gated()), make(gated(), max_wait_s=0.3), keys_of(1, 2, 3)
    store = Gated.stores["gated"]
    assert write(patient, [keys[0], keys[2]]) == [True, True]
    while tiers.present([keys[0], keys[2]]) != [True, True]:  # the answer of a loaded machine may be late
        pass
    store.close_gate("contains")
    assert tiers.present(keys) == [True]
    assert tiers.present(keys, leading=False) == [True, False, True]


def test_a_look_up_counts_each_page_once_however_long_it_waits(make) -> None:
    tiers, keys = make(gated(), max_wait_s=0.3), keys_of(1, 2)
    Gated.stores["gated"].close_gate("contains", "scan")
    assert tiers.present(keys) == []
    assert tiers.stats()["tier_lookups", "gated", "hit"] == 0
    Gated.stores["gated"].open_gate()
    assert write(tiers, keys) == [True, True]
    assert tiers.present(keys) == [True, True]
    assert tiers.stats()["tier_lookups", "gated", "hit"] == 2


def test_a_tier_that_hangs_keeps_no_other_from_being_written(make) -> None:
    tiers = make(gated("sound"), gated("hung"), max_wait_s=0.5, slots=8)
    sound, hung = Gated.stores["sound"], Gated.stores["hung"]
    hung.close_gate("write")
    keys, deadline_s = keys_of(*range(12)), time.monotonic() + PATIENT_S
    for number in range(0, 12, 2):  # the sound tier may be late too, on a loaded machine
        while write(tiers, keys[number : number + 2]) != [True, True]:
            assert time.monotonic() < deadline_s
    assert sound.contains(keys) == [True] * 12, "thrice as many as there are slots for writes"
    hung.open_gate()
    while write(tiers, keys) != [True] * 12 or hung.contains(keys) != [True] * 12:
        assert time.monotonic() < deadline_s


def test_a_tier_gets_no_more_writes_at_once_than_its_backlog_allows(make) -> None:
    tiers = make(gated("small", max_backlog_blocks=2), gated("large"), max_wait_s=0.5)
    Gated.stores["small"].close_gate("write")
    keys = keys_of(*range(6))
    assert write(tiers, keys) == [True] * 6, "the other tier has all"
    small = Gated.stores["small"]
    small.open_gate()
    deadline_s = time.monotonic() + PATIENT_S
    while sum(small.contains(keys)) < 2:
        assert time.monotonic() < deadline_s
    assert small.contains(keys) == [True] * 2 + [False] * 4


def test_a_read_that_ends_late_never_touches_the_callers_pages(make) -> None:
    tiers = make(gated(), max_wait_s=0.3)
    store, keys = Gated.stores["gated"], keys_of(*range(12))
    tiers_patient = make(gated(), max_wait_s=PATIENT_S)  # over the same store
    assert write(tiers_patient, keys) == [True] * 12
    while tiers.present(keys) != [True] * 12:  # the answer of a loaded machine may be late
        pass
    store.close_gate("read_into")
    pages = Pages(12)
    assert tiers.load(keys, pages.all()) == [False] * 12
    assert pages.is_untouched
    store.open_gate()
    deadline_s = time.monotonic() + PATIENT_S
    others = Pages(12)
    while tiers.load(keys, others.all()) != [True] * 12:  # the slots of the late reads become free again
        assert time.monotonic() < deadline_s
    assert pages.is_untouched


def test_a_write_that_is_late_stores_what_the_page_was(make) -> None:
    tiers = make(gated(), max_wait_s=0.3)
    store, keys = Gated.stores["gated"], keys_of(*range(4))
    store.close_gate("write")
    pages = Pages(4).fill(keys)
    assert tiers.store(keys, pages.all()) == [False] * 4
    store.wait_for_arrivals(1)
    pages.memory[:] = 0  # SGLang has given the pages to another prompt
    store.open_gate()
    reader = make(gated(), max_wait_s=PATIENT_S)
    deadline_s = time.monotonic() + PATIENT_S
    while store.contains(keys) != [True] * 4:
        assert time.monotonic() < deadline_s
        tiers.present(keys)
    check(reader, keys)


def test_while_all_slots_hang_calls_still_end(make) -> None:
    tiers = make(gated(), max_wait_s=0.2, slots=4)
    Gated.stores["gated"].close_gate("write")
    for first in range(0, 12, 4):
        assert write(tiers, keys_of(*range(first, first + 4))) == [False] * 4


def test_a_failing_store_trips_its_breaker_and_is_used_again(make) -> None:
    class Broken(GatedStore):
        is_broken = True

        def write(self, keys, blocks):
            if self.is_broken:
                raise OSError(28, "No space left on device")
            return self.inner.write(keys, blocks)

    Gated.stores["gated"] = broken = Broken(MemoryStore(BYTES))
    tiers = make(gated())
    tripped = ("tier_breaker_open", "gated", "write")
    number = 0
    while not tiers.stats()[tripped]:
        number += 1
        assert write(tiers, keys_of(number)) == [False]
    assert tiers.stats()["tier_breaker_trips", "gated", "write"] == 1
    broken.is_broken = False
    deadline_s = time.monotonic() + PATIENT_S
    while write(tiers, keys_of(1000)) != [True]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert not tiers.stats()[tripped]


@pytest.mark.parametrize(
    "call", ["lookup", "submit_load", "submit_store", "on_schedule_end", "get_finished_jobs", "holds"]
)
def test_a_tier_that_raises_keeps_no_slot(make, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = make(Gated(type="gated"), max_wait_s=0.2)
    keys = keys_of(*range(8))
    pages, others = Pages(8).fill(keys), Pages(8)
    assert tiers.store(keys, pages.all()) == [True] * 8
    with monkeypatch.context() as broken:
        broken.setattr(StoreTier, call, lambda *_: 1 / 0)
        for _ in range(3):  # more pages than there are slots
            tiers.load(keys, others.all())
            tiers.store(keys_of(*range(10, 18)), pages.all())
    patient = time.monotonic() + PATIENT_S
    while tiers.load(keys, pages.all()) != [True] * 8 or not all(tiers.store(keys_of(*range(20, 28)), pages.all())):
        assert time.monotonic() < patient


def test_a_tier_that_cannot_be_opened_ends_those_before_it(make) -> None:
    class Unopened(Gated, frozen=True, kw_only=True):
        def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
            raise ConfigError("no such disk")

    class Closed(MemoryStore):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    store = Closed(BYTES)
    Gated.stores["gated"] = GatedStore(store)
    with pytest.raises(ConfigError, match="no such disk"):
        make(gated(), Unopened(type="gated", name="other"))
    assert store.is_closed


def test_three_threads_at_once(make) -> None:
    tiers = make(gated(), slots=8)
    barrier = threading.Barrier(3)

    def work(first: int) -> None:
        keys = keys_of(*range(first, first + 40))
        barrier.wait()
        for begin in range(0, 40, 10):
            assert write(tiers, keys[begin : begin + 10]) == [True] * 10
            assert tiers.present(keys[: begin + 10]) == [True] * (begin + 10)
            check(tiers, keys[: begin + 10])

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work, first) for first in (0, 100, 200)]:
            done.result()


def test_closing_ends_calls_that_wait_and_later_ones_are_misses(make) -> None:
    tiers = make(gated(drain_timeout_s=0.1))
    store, keys = Gated.stores["gated"], keys_of(1, 2)
    store.close_gate("write")
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(write, tiers, keys)
        store.wait_for_arrivals(1)
        tiers.close()
        assert written.result() == [False, False]
    late = Pages(2)
    assert tiers.present(keys) == []
    assert tiers.load(keys, late.all()) == write(tiers, keys) == [False, False]
    assert tiers.stats() == {}
