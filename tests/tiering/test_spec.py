# SPDX-License-Identifier: Apache-2.0
"""Both planes with tiers from a user's mapping: mistakes are sentences, and blocks outlive a restart."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoffload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
)
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, RankSlice, parse_config
from kvoffload.errors import ConfigError
from kvoffload.specs import make_spec
from kvoffload.testing.keys import keys
from kvoffload.tiering.spec import TieringOffloadingSpec
from kvoffload.units import format_bytes

PAGE_BYTES = 1024


def layout(**changes: Any) -> EngineLayout:
    group = KVGroupLayout(GroupKind.FULL_ATTENTION, 16, PAGE_BYTES)
    known = {"groups": (group,), "hash_block_tokens": 16, "instance_id": "spec", "identity": {"model": "m"}}
    return EngineLayout(**(known | changes))


def spec(*tiers: dict[str, Any], of: EngineLayout | None = None, **values: Any) -> TieringOffloadingSpec:
    config = {
        "cpu_bytes_to_use": 8 * PAGE_BYTES,
        "spec_name": "TieringOffloadingSpec",
        "secondary_tiers": list(tiers),
        "max_wait_s": 120.0,
    }
    made = make_spec(parse_config(config | values), of or layout())
    assert isinstance(made, TieringOffloadingSpec)
    return made


class Engine:
    """One process: a device of 16 blocks, and the two planes of a spec."""

    def __init__(self, made: TieringOffloadingSpec) -> None:
        self.spec = made
        self.manager: OffloadingManager = made.get_manager()
        self.pool = torch.zeros((16, PAGE_BYTES), dtype=torch.uint8)
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(self.pool, PAGE_BYTES)], [[CanonicalKVCacheRef(0, PAGE_BYTES)]]
        )
        self.handlers = made.get_handlers(caches)
        self.request = ReqContext("r")
        self.manager.on_new_request(self.request)

    def store(self, names: list[OffloadKey], blocks: torch.Tensor) -> None:
        self.pool[: len(names)] = blocks
        output = self.manager.prepare_store(names, self.request)
        assert output is not None
        assert output.keys_to_store == names
        source = GPULoadStoreSpec(range(len(names)), [len(names)], [0])
        self.handlers["GPU", "CPU"].transfer_async(1, (source, output.store_spec))
        self.handlers["GPU", "CPU"].wait([1])
        self.manager.complete_store(names, self.request)

    def find(self, names: list[OffloadKey]) -> int:
        deadline = time.monotonic() + 120
        while None in (answers := self.manager.lookup_prefix(names, self.request)):
            self.manager.on_schedule_end()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return answers.index(False) if False in answers else len(answers)

    def load(self, names: list[OffloadKey]) -> torch.Tensor:
        target = GPULoadStoreSpec(range(8, 8 + len(names)), [len(names)], [0])
        self.handlers["CPU", "GPU"].transfer_async(2, (self.manager.prepare_load(names, self.request), target))
        self.handlers["CPU", "GPU"].wait([2])
        self.manager.complete_load(names, self.request)
        return self.pool[8 : 8 + len(names)]

    def stop(self) -> None:
        deadline = time.monotonic() + 120
        self.manager.on_request_finished(self.request)
        while self.manager.has_pending_work():
            self.manager.on_schedule_end()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.spec.shutdown()


@pytest.fixture(autouse=True)
def _no_threads_are_left() -> Any:
    before = set(threading.enumerate())
    yield
    # The copy loop may still be compiled, once in a process and for all that follow.
    assert {thread for thread in threading.enumerate() if thread.name != "kvoffload-compile"} <= before


def test_blocks_come_back_from_disk_after_a_restart(tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (4, PAGE_BYTES), dtype=torch.uint8)
    names = keys(1, 2, 3, 4)
    tier = {"type": "fs", "path": str(tmp_path), "max_bytes": "1MiB"}
    first = Engine(spec(tier))
    first.store(names, blocks)
    first.stop()
    second = Engine(spec(tier))
    assert second.find(names) == 4
    assert torch.equal(second.load(names), blocks)
    second.stop()


@pytest.mark.parametrize("are_taken", [True, False])
def test_tiers_record_events_only_for_an_engine_that_takes_them(are_taken: bool, tmp_path: Path) -> None:
    tiers = [{"type": kind, "path": str(tmp_path / kind), "max_bytes": "1MiB"} for kind in ("disk", "fs")]
    engine = Engine(spec(*tiers, of=layout(events_enabled=are_taken)))
    engine.store(keys(1), torch.ones((1, PAGE_BYTES), dtype=torch.uint8))
    while engine.manager.has_pending_work():
        engine.manager.on_schedule_end()
        time.sleep(0.001)
    assert {event.medium for event in engine.manager.take_events()} == ({"CPU", "disk", "fs"} if are_taken else set())
    engine.stop()


def test_an_engine_with_another_layout_does_not_find_them(tmp_path: Path) -> None:
    names = keys(1, 2)
    tier = {"type": "fs", "path": str(tmp_path), "max_bytes": "unlimited"}
    first = Engine(spec(tier))
    first.store(names, torch.ones((2, PAGE_BYTES), dtype=torch.uint8))
    first.stop()
    other = Engine(spec(tier, of=layout(identity={"model": "m", "dtype": "fp8"})))
    assert other.find(names) == 0
    other.stop()


def test_tiers_are_built_with_their_options() -> None:
    made = spec(
        {"type": "memory", "max_bytes": 64 * PAGE_BYTES, "offload_policy": "request_level"},
        {"type": "memory"},
        max_wait_s=3.0,
        eviction_policy="arc",
    )
    manager = made.get_manager()
    assert manager is made.get_manager()
    assert manager.on_new_request(ReqContext("r")).policy is OffloadPolicy.REQUEST_LEVEL
    manager.on_request_finished(ReqContext("r"))
    made.shutdown()
    made.shutdown()


def test_each_tier_has_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvoffload")
    made = spec({"type": "memory", "max_bytes": 64 * PAGE_BYTES}, {"type": "disk", "path": str(tmp_path / "kv")})
    assert [record.getMessage() for record in caplog.records if "tier" in record.getMessage()] == []
    made.get_manager()
    made.shutdown()
    assert [record.getMessage() for record in caplog.records if record.name == "kvoffload.tiering.spec"] == [
        f"kvoffload: tier 'memory': at most {format_bytes(64 * PAGE_BYTES)}, written on_store",
        f"kvoffload: tier 'disk': {tmp_path}/kv, four fifths of the disk, written on_store",
    ]


def test_expected_speeds_reach_the_load_policy() -> None:
    made = spec(
        {"type": "memory"}, {"type": "memory", "name": "far", "read_bytes_per_s": "2MB"}, prefill_tokens_per_s=7
    )
    stats = made.get_manager().get_stats()
    made.shutdown()
    assert stats["prefill_tokens_per_second",] == 7
    assert stats["tier_read_bytes_per_second", "far"] == pytest.approx(2e6)
    assert ("tier_read_bytes_per_second", "memory") not in stats


def test_without_tiers_there_is_the_primary_tier_alone() -> None:
    engine = Engine(spec())
    engine.store(keys(1), torch.ones((1, PAGE_BYTES), dtype=torch.uint8))
    assert engine.find(keys(1, 2)) == 1
    engine.stop()


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"type": "memry"}, r"'memry'.*Did you mean 'memory'"),
        ({"type": "fs", "path": "/x", "max_byte": 1}, r"'max_byte'.*Did you mean 'max_bytes'"),
        ({"type": "fs"}, "path"),
        ({"type": "fs", "path": "/x", "max_bytes": "many"}, "must be a size"),
        ({"type": "fs", "path": "/x", "max_bytes": 10}, "too little"),
        ({"type": "memory", "offload_policy": "all"}, "block_level, request_level"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_touched(
    tier: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        spec({"type": "memory"}, tier)
    assert not list(tmp_path.iterdir())


def test_unstable_hashes_are_refused_for_persistent_tiers_only(tmp_path: Path) -> None:
    unstable = layout(hashes_are_stable=False)
    with pytest.raises(ConfigError, match="'fs' keeps blocks for other processes"):
        spec({"type": "fs", "path": str(tmp_path), "max_bytes": "unlimited"}, of=unstable)
    made = spec({"type": "memory"}, of=unstable)
    made.get_manager()
    made.shutdown()


def test_tiers_imply_tiering_unless_the_configuration_names_another_spec() -> None:
    config = {"cpu_bytes_to_use": 8 * PAGE_BYTES, "secondary_tiers": [{"type": "memory"}]}
    assert isinstance(make_spec(parse_config(config), layout()), TieringOffloadingSpec)
    with pytest.raises(ConfigError, match="to use secondary_tiers, leave out spec_name"):
        make_spec(parse_config(config | {"spec_name": "CPUOffloadingSpec"}), layout())


def test_a_tier_that_cannot_be_built_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload.tiering.options import MemoryOptions

    made = spec({"type": "memory"}, {"type": "memory", "threads": 2})
    build = MemoryOptions.build

    def fails_once(self: MemoryOptions, view: memoryview, namespace: str) -> Any:
        if self.threads == 2:
            raise OSError("no room")
        return build(self, view, namespace)

    monkeypatch.setattr(MemoryOptions, "build", fails_once)
    with pytest.raises(OSError, match="no room"):
        made.get_manager()
    made.shutdown()


def test_the_first_rank_of_a_node_has_its_agent(tmp_path: Path) -> None:
    tier = {"type": "disk", "path": str(tmp_path), "max_bytes": "8MiB"}
    for num_ranks, rank, slices, has_one in ((2, 1, 1, True), (4, 3, 2, False), (2, 1, 2, False)):
        part = RankSlice(rank % slices, slices)
        made = spec(tier, of=layout(num_ranks=num_ranks, rank=rank, rank_slice=part))
        assert (made.make_agent() is not None) is has_one
        made.shutdown()  # its stores too, as the threads show


def test_a_node_whose_second_store_cannot_be_opened_keeps_no_first_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tiers = [{"type": "disk", "path": str(tmp_path / name), "max_bytes": "8MiB"} for name in ("disk", "file")]
    made = spec(*tiers, of=layout(num_ranks=2, rank=1, rank_slice=RankSlice(0, 1)))
    with pytest.raises(ConfigError):
        made.make_agent()
    made.shutdown()
