# SPDX-License-Identifier: Apache-2.0
"""The order of use alone: what a walk found and what was used since, oldest first."""

from __future__ import annotations

import random

from kvoffload.tiering.stores.fs.recency import Recency
from kvoffload.tiering.stores.fs.usage_file import FileSeen


def drain(recency: Recency) -> list[str]:
    taken = []
    while (oldest := recency.take_oldest()) is not None:
        taken.append(oldest[0])
    return taken


def found(*files: tuple[str, int]) -> list[FileSeen]:
    return [FileSeen(path, 1, used_ns) for path, used_ns in files]


def test_used_files_come_back_oldest_first() -> None:
    recency = Recency()
    recency.record([("a", 1), ("b", 2), ("c", 3)])
    recency.record([("a", 4)])
    recency.forget("b")
    assert len(recency) == 2
    assert drain(recency) == ["c", "a"]


def test_a_walk_is_merged_with_what_was_used_since_it_began() -> None:
    recency = Recency()
    recency.record([("old", 5), ("gone", 6)])
    recency.begin_walk()
    recency.record([("new", 9), ("b", 10)])
    chunks = Recency.chunks_of(found(("b", 3), ("old", 5))) + Recency.chunks_of(found(("c", 4), ("a", 2)))
    assert recency.end_walk(chunks) == []
    assert drain(recency) == ["a", "c", "old", "new", "b"]


def test_a_walk_that_was_given_up_loses_nothing() -> None:
    recency = Recency()
    recency.record([("a", 1)])
    recency.begin_walk()
    recency.record([("b", 2)])
    recency.begin_walk()
    recency.record([("c", 3)])
    assert drain(recency) == ["a", "b", "c"]


def test_what_is_put_back_is_the_oldest_again_unless_it_was_used_meanwhile() -> None:
    recency = Recency()
    recency.record([("a", 1), ("b", 2), ("c", 3)])
    taken = [recency.take_oldest(), recency.take_oldest()]
    recency.record([("b", 4)])
    recency.put_back([one for one in taken if one])
    assert drain(recency) == ["a", "c", "b"]


def test_many_files_in_many_chunks() -> None:
    rng, recency = random.Random(0), Recency()
    files = [(f"f{number}", number) for number in range(5000)]
    rng.shuffle(files)
    chunks = [chunk for start in range(0, 5000, 1700) for chunk in Recency.chunks_of(found(*files[start:][:1700]))]
    recency.begin_walk()
    recency.end_walk(chunks)
    assert len(recency) == 5000
    assert drain(recency) == [f"f{number}" for number in range(5000)]
