# SPDX-License-Identifier: Apache-2.0
"""Test the common behaviour of shared stores: when a batch counts as a failure of the store, and how bad blocks are
handled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.shared import SharedStore, outcomes


@pytest.mark.parametrize(
    ("answers", "num_failures", "there", "is_failure"),
    [
        ([], 0, (), False),
        ([False, False], 0, (), False),
        ([False, True], 1, (), False),
        ([False, False], 2, (), True),
        ([False, True], 1, (1,), True),
        ([True, True], 0, (0, 1), False),
        ([True, True, False], 1, (0,), False),
    ],
)
def test_a_store_fails_if_nothing_came_of_a_batch(
    answers: list[bool], num_failures: int, there: tuple[int, ...], is_failure: bool
) -> None:
    failures = [StoreError(f"failure {number}") for number in range(num_failures)]
    if is_failure:
        with pytest.raises(StoreError, match="failure 0"):
            outcomes(answers, failures, there)
    else:
        assert outcomes(answers, failures, there) == answers


class Discarding(SharedStore):
    """A store that only counts its deletions, and fails at them."""

    def __init__(self, block_bytes: int = 8) -> None:
        super().__init__(block_bytes, "ns", None)
        self.discarded: list[OffloadKey] = []

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        raise NotImplementedError

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        raise NotImplementedError

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        raise NotImplementedError

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self.discarded += keys
        raise StoreError("gone")

    def close(self) -> None:
        pass


def test_bad_blocks_are_deleted_and_reported_once_even_if_the_store_is_gone() -> None:
    store = Discarding()
    store._bad.remove([], store)
    store._bad.remove(keys(1, 2), store)
    assert store.discarded == keys(1, 2)
    assert store.stats().corrupt_blocks == 2
    assert store.take_lost() == dict.fromkeys(keys(1, 2), "corrupt")
    assert store.take_lost() == {}


def test_a_block_is_its_plain_bytes() -> None:
    block = memoryview(bytes(range(8)))
    assert Discarding()._bytes(block) is block
    assert Discarding()._bytes(block.cast("B", (2, 4))) == block
    with pytest.raises(AssertionError, match="a block of 4 bytes"):
        Discarding()._bytes(block[:4])


def test_a_block_has_bytes() -> None:
    with pytest.raises(ConfigError, match="block_bytes must be positive, not 0"):
        Discarding(0)
