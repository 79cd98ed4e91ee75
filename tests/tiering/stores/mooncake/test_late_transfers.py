# SPDX-License-Identifier: Apache-2.0
"""Mooncake's library gives up waiting for a transfer, which then may still write: never to a slot, and never to memory
that another transfer uses."""

from __future__ import annotations

import socket
import sys
import types
from collections.abc import Iterator

import numpy as np
import pytest
from tests.redis_server import wait_until
from tests.tiering.stores.blocks import BLOCK_BYTES, buffers, read, write
from tests.tiering.stores.mooncake.late_client import LateClient

from kvoffload.base import ReqContext
from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.base import JobMetadata, JobResult
from kvoffload.tiering.stores.mooncake import store as module
from kvoffload.tiering.stores.mooncake.store import MooncakeStore
from kvoffload.tiering.tier import StoreTier


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> LateClient:
    made = LateClient()
    monkeypatch.setitem(sys.modules, "mooncake", types.SimpleNamespace(store=made))
    return made


@pytest.fixture
def store(client: LateClient) -> Iterator[MooncakeStore]:
    with socket.create_server(("127.0.0.1", 0)) as master:
        made = MooncakeStore(f"127.0.0.1:{master.getsockname()[1]}", "P2PHANDSHAKE", BLOCK_BYTES)
        yield made
        made.close()


def test_a_read_that_failed_and_ends_later_writes_to_no_slot(client: LateClient, store: MooncakeStore) -> None:
    slots = np.zeros((2, BLOCK_BYTES), np.uint8)
    tier = StoreTier(memoryview(slots), "mooncake", store)
    try:
        assert write(store, keys(1, 2)) == [True, True]
        client.is_late = True
        assert not load(tier, slot=0).success
        slots[0] = np.frombuffer(block_of(keys(3)[0], BLOCK_BYTES), np.uint8)  # it is another block's by now
        client.write_late()
        assert bytes(slots[0]) == block_of(keys(3)[0], BLOCK_BYTES)
    finally:
        tier.shutdown()


def load(tier: StoreTier, slot: int) -> JobResult:
    results: list[JobResult] = []
    tier.submit_load(JobMetadata(0, keys(1), np.array([slot]), True, ReqContext("r")))

    def has_ended() -> bool:
        results.extend(tier.get_finished_jobs())
        return bool(results)

    wait_until(has_ended, "the load has ended")
    return results[0]


def test_memory_that_a_transfer_may_still_write_is_used_by_no_other(client: LateClient, store: MooncakeStore) -> None:
    """The client asserts this."""
    wanted = keys(*range(4))
    assert write(store, wanted) == [True] * 4
    for _ in range(3):
        client.is_late = True
        with pytest.raises(StoreError, match="-800"):
            read(store, wanted)
        client.is_late = False
        assert read(store, wanted) == [True] * 4
        client.write_late()
        assert read(store, wanted) == [True] * 4
        assert write(store, keys(10, 11)) == [True, True]
    assert store.stats().corrupt_blocks == 0


def test_reads_are_refused_once_too_much_memory_is_in_unknown_hands(
    client: LateClient, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_STAGED_BYTES", 5 * BLOCK_BYTES)
    assert write(store, keys(1, 2)) == [True, True]
    client.is_late = True
    texts = set()
    for _ in range(10):
        with pytest.raises(StoreError) as caught:
            read(store, keys(1, 2))
        texts.add(str(caught.value))
    assert client.num_registered <= 4
    assert any("restart the engine" in text for text in texts)


def test_memory_that_a_transfer_may_still_write_outlives_its_store(
    client: LateClient, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    retired: list[np.ndarray] = []
    monkeypatch.setattr(module, "_RETIRED", retired)
    assert write(store, keys(1, 2)) == [True, True]
    assert retired == []
    client.is_late = True
    with pytest.raises(StoreError):
        read(store, keys(1, 2))
    late = [address for write in client._late for address in write.addresses]
    store.close()
    assert [row.ctypes.data for row in retired] == late


@pytest.mark.parametrize("call", ["seal", "unseal"])
def test_a_block_that_cannot_be_sealed_or_opened_keeps_no_memory(
    client: LateClient, store: MooncakeStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(store, keys(1, 2)) == [True, True]
    monkeypatch.setattr(store._sealer, call, lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            read(store, keys(1, 2)) if call == "unseal" else write(store, keys(1, 2))
    assert client.num_registered == 1


@pytest.mark.parametrize("how", ["absent", "the master is mute", "read", "read twice at once", "bad"])
def test_a_read_whose_end_is_known_gives_its_memory_back(client: LateClient, store: MooncakeStore, how: str) -> None:
    wanted = keys(1, 1) if how == "read twice at once" else keys(1, 2)
    for _ in range(5):
        if how != "absent":
            assert write(store, keys(1, 2)) == [True, True]
        if how == "bad":
            client.pool = {name: value[::-1] for name, value in client.pool.items()}
        client.is_mute = how == "the master is mute"
        if client.is_mute:
            with pytest.raises(StoreError):
                store.read_into(wanted, buffers(2))
            client.is_mute = False
        else:
            assert read(store, wanted) == [how.startswith("read")] * 2
    assert client.num_registered <= 1


@pytest.mark.parametrize("url", ["http://me:hush@127.0.0.1/metadata", "http://127.0.0.1:hush/", "http://[hush/"])
def test_an_error_shows_no_part_of_the_metadata_services_url(client: LateClient, url: str) -> None:
    """It may have a password."""
    with socket.create_server(("127.0.0.1", 0)) as master:
        made = MooncakeStore(f"127.0.0.1:{master.getsockname()[1]}", url, BLOCK_BYTES)
        with pytest.raises(StoreError, match=r"The metadata service of Mooncake at .* does not answer: ") as caught:
            made.contains(keys(1))
        seen = caught.value
        while seen is not None:
            assert "hush" not in str(seen)
            seen = seen.__cause__
        made.close()
