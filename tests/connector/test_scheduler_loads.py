# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tests.connector.rig import Request, Rig, key

from kvoffload.connector import StepOutcome


def test_a_stored_prefix_comes_back_by_an_asynchronous_load() -> None:
    rig = Rig()
    rig.store_prefix(12)
    request = rig.arrive(Request("r", 14))
    assert rig.ask(request) == (12, True)
    rig.alloc(request, [7, 8, 9, 10], external=12)
    meta = rig.step()
    (load,) = meta.loads
    assert load.request_id == "r"
    assert load.source.medium() == "CPU"
    assert load.destination.block_ids.tolist() == [7, 8, 9]
    assert load.destination.group_sizes == (3,)
    assert load.destination.block_indices == (0,)
    assert rig.step().loads == ()
    assert rig.end(load) == StepOutcome(frozenset({"r"}), {})
    rig.finish(request)
    rig.assert_drained()


def test_the_last_token_is_never_part_of_a_hit() -> None:
    rig = Rig()
    rig.store_prefix(12)
    assert rig.ask(rig.arrive(Request("exact", 12))) == (8, True)
    assert rig.ask(rig.arrive(Request("longer", 13))) == (12, True)


def test_the_device_hit_is_not_loaded_again_but_touched() -> None:
    rig = Rig()
    rig.store_prefix(12)
    request = rig.arrive(Request("r", 14))
    assert rig.ask(request, computed=8) == (4, True)
    rig.alloc(request, [100, 101, 9, 10], external=4)
    (load,) = rig.step().loads
    assert load.destination.block_ids.tolist() == [9]
    assert load.destination.block_indices == (2,)
    assert rig.manager.touched == [[key(0), key(1), key(2)]]
