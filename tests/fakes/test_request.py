# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.fakes.device import chain_hash
from tests.fakes.request import FakeRequest, Status


def test_block_hashes_grow_with_the_tokens_and_name_their_prefix() -> None:
    request = FakeRequest("r", list(range(10)), max_new_tokens=2, hash_tokens=4)
    assert (request.status, request.num_prompt_tokens, request.has_blocks) == (Status.WAITING, 10, False)
    assert len(request.block_hashes) == 2
    request.tokens += [10, 11]
    request.extend_hashes()
    assert len(request.block_hashes) == 3
    other = FakeRequest("other", [*range(8), 99, 98, 97, 96], max_new_tokens=1, hash_tokens=4)
    assert other.block_hashes[:2] == request.block_hashes[:2]
    assert other.block_hashes[2] != request.block_hashes[2]


def test_a_prefix_hash_is_that_of_its_last_block_or_covers_the_rest() -> None:
    request = FakeRequest("r", list(range(10)), max_new_tokens=1, hash_tokens=4)
    assert request.prefix_hash(8) == request.block_hashes[1]
    assert request.prefix_hash(9) == chain_hash(request.block_hashes[1], [8])
    assert request.prefix_hash(0) == b""
