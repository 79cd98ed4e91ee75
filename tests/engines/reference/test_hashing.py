# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.engines.reference.hashing import extend_block_hashes, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def hashes_of(tokens: list[int], block_tokens: int = 4, salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, root_hash(salt), tokens, block_tokens)
    return hashes


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    # Blocks on disk are found by these hashes. If you change them, change the version in hashing.py.
    assert [each.hex()[:16] for each in hashes_of(list(range(9)))] == ["92607fea73308151", "9d3dc1e10c1f61cc"]


@given(TOKENS, TOKENS)
def test_blocks_agree_exactly_as_far_as_all_tokens_before_them_do(first: list[int], second: list[int]) -> None:
    for index, (left, right) in enumerate(zip(hashes_of(first), hashes_of(second), strict=False)):
        stop = 4 * (index + 1)
        assert (left == right) == (first[:stop] == second[:stop])


@given(TOKENS, st.integers(0, 20))
def test_hashes_only_grow(tokens: list[int], cut: int) -> None:
    hashes: list[bytes] = []
    root = root_hash()
    extend_block_hashes(hashes, root, tokens[:cut], 4)
    extend_block_hashes(hashes, root, tokens, 4)
    assert hashes == hashes_of(tokens) and len(hashes) == len(tokens) // 4


def test_salts_share_no_block() -> None:
    assert not set(hashes_of(list(range(8)))) & set(hashes_of(list(range(8)), salt="x"))
