# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.base import (
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.lost_blocks import Loss
from kvoffload.miss import Miss
from kvoffload.testing.keys import key, keys


@given(st.binary(min_size=0, max_size=64), st.integers(0, 2**32 - 1))
def test_a_key_gives_back_its_parts(block_hash: bytes, group: int) -> None:
    key = make_offload_key(block_hash, group)
    assert len(key) == len(block_hash) + 4
    assert get_offload_block_hash(key) == block_hash
    assert get_offload_group_idx(key) == group


def test_the_group_is_four_bytes_big_endian() -> None:
    assert make_offload_key(b"h", 258) == b"h\x00\x00\x01\x02"


@pytest.mark.parametrize("group", [-1, 2**32])
def test_a_group_outside_of_four_bytes_is_refused(group: int) -> None:
    with pytest.raises(OverflowError):
        make_offload_key(b"h", group)


def test_events_carry_no_block_size() -> None:
    assert [field.name for field in dataclasses.fields(OffloadingEvent)] == ["keys", "medium", "removed"]


def test_policies_have_the_seeds_values_and_default() -> None:
    assert {policy.value for policy in OffloadPolicy} == {"block_level", "request_level"}
    assert RequestOffloadingContext().policy is OffloadPolicy.BLOCK_LEVEL


@pytest.mark.parametrize("spec", [CPULoadStoreSpec([3, 1, 3]), GPULoadStoreSpec([3, 1, 3], [2, 1], [5, 0])])
def test_specs_keep_int64_ids_in_order_and_travel(spec: BlockIDsLoadStoreSpec) -> None:
    there = pickle.loads(pickle.dumps(spec))
    assert there.block_ids.dtype == np.int64
    assert there.block_ids.tolist() == [3, 1, 3]
    assert repr(there) == repr(spec)


def test_media() -> None:
    assert (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium()) == ("GPU", "CPU")
    assert issubclass(BlockIDsLoadStoreSpec, LoadStoreSpec)


def test_group_sizes_must_cover_the_blocks() -> None:
    with pytest.raises(ValueError, match="add up"):
        GPULoadStoreSpec([1, 2, 3], [1, 1], [0, 0])
    with pytest.raises(ValueError, match="one entry per group"):
        GPULoadStoreSpec([1, 2], [1, 1], [0])


class LeastManager(OffloadingManager):
    """A manager with only the required methods. It contains block 1, and block 2 is on its way."""

    def lookup(self, key_: OffloadKey, req_context: ReqContext) -> bool | None:
        return {key(1): True, key(2): None}.get(key_, False)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return CPULoadStoreSpec([0])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        pass

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        return None

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        pass

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()


def test_a_manager_that_has_no_options_knows_and_tells_nothing() -> None:
    manager, context, asked = LeastManager(), ReqContext("r"), keys(1, 2, 3, 4)
    assert manager.lookup_prefix(asked, context) == [True, None, False]
    assert manager.where(asked, context) == [None] * 4, "it may have them"
    assert manager.explain(asked, context) == [Loss(Miss.NEW)] * 4
    assert [*manager.take_events()] == [*manager.weighed(context)] == []
    assert manager.get_stats() == manager.sources(context) == {}
    assert manager.has_pending_work() is False
