# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoffload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingSpec,
    ReqContext,
)
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, RankSlice, parse_config
from kvoffload.cpu import CPUOffloadingManager, CPUOffloadingSpec
from kvoffload.cpu.policies.base import BlockStatus
from kvoffload.errors import CapacityError, ConfigError, LayoutError
from kvoffload.specs import SPECS, make_spec
from kvoffload.testing import keys


def layout(**changes: Any) -> EngineLayout:
    group = KVGroupLayout(GroupKind.FULL_ATTENTION, 16, 1024)
    return EngineLayout(**({"groups": (group,), "hash_block_tokens": 16, "instance_id": "spec"} | changes))


def spec(**values: Any) -> CPUOffloadingSpec:
    made = make_spec(parse_config({"cpu_bytes_to_use": 64 << 10} | values), layout())
    assert isinstance(made, CPUOffloadingSpec)
    return made


def test_one_process_stores_and_loads_through_one_spec() -> None:
    made = spec(eviction_policy="arc")
    manager = made.get_manager()
    assert manager is made.get_manager()
    pool = torch.randint(0, 256, (8, 1024), dtype=torch.uint8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(pool, 1024)], [[CanonicalKVCacheRef(0, 1024)]])
    handlers = made.get_handlers(caches)
    request = ReqContext("r")
    manager.on_new_request(request)
    output = manager.prepare_store(keys(1, 2), request)
    assert output is not None
    handlers["GPU", "CPU"].transfer_async(1, (GPULoadStoreSpec([0, 1], [2], [0]), output.store_spec))
    handlers["GPU", "CPU"].wait([1])
    manager.complete_store(keys(1, 2), request)
    handlers["CPU", "GPU"].transfer_async(
        2, (manager.prepare_load(keys(2, 1), request), GPULoadStoreSpec([6, 7], [2], [0]))
    )
    handlers["CPU", "GPU"].wait([2])
    manager.complete_load(keys(2, 1), request)
    assert torch.equal(pool[[6, 7]], pool[[1, 0]])
    made.shutdown()
    made.shutdown()


def test_the_budget_becomes_blocks_and_is_never_exceeded() -> None:
    assert (spec().num_blocks, spec().block_bytes) == (64, 1024)
    assert (spec(cpu_bytes_to_use=10_000).num_blocks, spec(block_size=48).num_blocks) == (9, 21)
    two_ranks = CPUOffloadingSpec(parse_config({"cpu_bytes_to_use": 64 << 10}), layout(num_ranks=2))
    assert (two_ranks.num_blocks, two_ranks.block_bytes) == (32, 2048)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cpu_bytes_to_use": 1000}, "one block alone takes 1 KiB"),
        ({"block_size": 40}, "multiple of the engine's block"),
        ({"eviction_policy": "lur"}, "Did you mean 'lru'"),
        ({"spec_name": "CPUOffloadingSpek"}, "Did you mean 'CPUOffloadingSpec'"),
        ({"spec_module_path": "no.such.module"}, "cannot be imported"),
        ({"spec_module_path": "kvoffload.specs", "spec_name": "SPECS"}, "not a subclass of OffloadingSpec"),
    ],
)
def test_mistakes_are_refused_before_anything_is_allocated(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(**values)


def test_more_memory_than_the_host_has_is_refused_when_the_scheduler_starts() -> None:
    with pytest.raises(CapacityError, match="lower cpu_bytes_to_use"):
        spec(cpu_bytes_to_use="900TiB", block_size=16 << 20).get_manager()


def test_a_node_without_the_scheduler_has_a_process_for_each_of_its_ranks() -> None:
    config = parse_config({"cpu_bytes_to_use": 64 << 10})
    name = f"second-node-{os.getpid()}"
    of_four = layout(num_ranks=4, rank=3, rank_slice=RankSlice(1, 2), num_processes=2, instance_id=name)
    both = [CPUOffloadingSpec(config, of_four) for _ in range(2)]
    assert [spec.region.num_blocks for spec in both] == [32, 32]
    for spec in both:
        spec.shutdown()
    with pytest.raises(LayoutError, match="num_processes must be 3"):
        _ = CPUOffloadingSpec(config, replace(of_four, num_processes=4)).region


@pytest.mark.parametrize(("num_ranks", "num_processes"), [(1, 0), (1, 3), (2, 1), (2, 2)])
def test_processes_that_would_not_share_memory_are_refused(num_ranks: int, num_processes: int) -> None:
    config = parse_config({"cpu_bytes_to_use": 64 << 10})
    made = make_spec(config, layout(num_ranks=num_ranks, num_processes=num_processes))
    with pytest.raises(LayoutError, match=f"num_processes must be {1 + num_ranks}"):
        made.get_manager()


def test_kv_caches_of_other_groups_than_the_layouts_are_refused() -> None:
    made = spec()
    pool = torch.zeros((8, 1024), dtype=torch.uint8)
    refs = [CanonicalKVCacheRef(0, 1024)]
    for groups in ([], [refs, refs]):
        with pytest.raises(LayoutError, match="one entry for each"):
            made.get_handlers(CanonicalKVCaches([CanonicalKVCacheTensor(pool, 1024)], groups))
    made.shutdown()


def test_processes_meet_in_a_shared_region() -> None:
    config = parse_config({"cpu_bytes_to_use": 64 << 10})
    name = f"spec-{time.monotonic_ns()}"
    both = [CPUOffloadingSpec(config, layout(instance_id=name, num_processes=2)) for _ in range(2)]
    both[0].region.create_kv_memoryview()[3, 5] = 77
    assert both[1].region.create_kv_memoryview()[3, 5] == 77
    for made in both:
        made.shutdown()


def test_settings_reach_the_manager() -> None:
    made = CPUOffloadingSpec(
        parse_config({"cpu_bytes_to_use": 64 << 10, "store_threshold": 2}), layout(events_enabled=True)
    )
    manager = made.get_manager()
    assert isinstance(manager, CPUOffloadingManager)
    first, second = ReqContext("1"), ReqContext("2")
    for request, expected in ((first, 0), (second, 2)):
        manager.on_new_request(request)
        manager.lookup(keys(1)[0], request)
        output = manager.prepare_store(keys(1, 2), request)
        assert output is not None
        assert len(output.keys_to_store) == expected
        manager.complete_store(output.keys_to_store, request)
        manager.on_request_finished(request)
    assert [event.keys for event in manager.take_events()] == [keys(1, 2)]
    made.shutdown()


def test_a_spec_of_ones_own_by_module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_spec.py").write_text(
        "from kvoffload.cpu.spec import CPUOffloadingSpec\nclass OwnSpec(CPUOffloadingSpec): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = spec(spec_name="OwnSpec", spec_module_path="own_spec")
    assert type(made).__name__ == "OwnSpec"
    assert isinstance(made, OffloadingSpec)
    sys.modules.pop("own_spec")
    assert "CPUOffloadingSpec" in SPECS.names()


@pytest.mark.parametrize("spec_name", ["CPUOffloadingSpec", "TieringOffloadingSpec"])
def test_no_record_of_a_slot_is_made_after_the_start(spec_name: str) -> None:
    """An engine freezes all objects that exist at that time. A full collection would visit each record made later."""
    made = spec(spec_name=spec_name)
    manager, request = made.get_manager(), ReqContext("r")
    gc.freeze()
    output = manager.prepare_store(keys(1, 2, 3), request)
    assert output is not None
    manager.complete_store(output.keys_to_store, request)
    assert not any(type(each) is BlockStatus for each in gc.get_objects())
    made.shutdown()
