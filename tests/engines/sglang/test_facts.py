# SPDX-License-Identifier: Apache-2.0
"""Test that the tables name every setting of the installed SGLang, and no removed ones."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import msgspec
import pytest
from tests.engines.sglang.counted import COUNTED

from kvoffload.engines.sglang import updates
from kvoffload.engines.sglang.facts import (
    ENVIRONMENT_IS_HARMLESS,
    FIELDS,
    POOL_IS_HARMLESS,
    WEIGHTS_FROM_ELSEWHERE,
)
from kvoffload.engines.sglang.storage import page_facts
from kvoffload.engines.sglang.versions import TRIED
from kvoffload.engines.variables import counted


def test_where_weights_may_come_from_counts() -> None:
    assert set(WEIGHTS_FROM_ELSEWHERE) <= set(COUNTED.split())


@pytest.mark.sglang
def test_the_tables_name_every_setting_once() -> None:
    from sglang.srt.server_args import ServerArgs

    listed = [name for names in (COUNTED, *FIELDS["ServerArgs"].values()) for name in names.split()]
    assert sorted(listed) == sorted(field.name for field in msgspec.structs.fields(ServerArgs))


@pytest.mark.sglang
def test_the_version_is_one_that_was_tried() -> None:
    from sglang.version import __version__

    assert __version__ in TRIED


@pytest.mark.sglang
def test_every_step_of_sglangs_updater_is_known() -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

    fields = {field.name for field in dataclasses.fields(Manager)}
    steps = {name for name in dir(Manager) if not name.startswith("_") and callable(getattr(Manager, name))} - fields
    assert steps == {*updates._REQUIRED, *updates._HARMLESS}


@pytest.mark.sglang
def test_sglang_reads_the_variables_of_the_tables() -> None:
    import sglang.srt

    (root,) = sglang.srt.__path__
    sources = "\n".join(path.read_text() for path in Path(root).rglob("*.py"))
    read = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", sources))
    assert ENVIRONMENT_IS_HARMLESS.keys() - read == set()
    set_by_itself = re.findall(r"environ(?:\[|\.setdefault\()\s*\"(\w+)\"(?:\] = |,)", sources)
    assert "TRITON_CACHE_DIR" in set_by_itself
    assert counted(set_by_itself) == []


@pytest.mark.sglang
def test_host_pools_have_the_attributes_that_are_called_harmless() -> None:
    import sglang.srt.mem_cache.pool_host as pools

    assigned = {
        node.attr
        for path in Path(pools.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert POOL_IS_HARMLESS.keys() - assigned == set()


@pytest.mark.sglang
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_host_pools_of_other_sizes_have_equal_pages(layout: str) -> None:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    def facts(tokens: int, ratio: float = 2.0, dtype: torch.dtype = torch.float32) -> dict[str, object]:
        device = MHATokenToKVPool(tokens, 16, dtype, 2, 64, 4, "cpu", enable_memory_saver=False)
        host = MHATokenToKVPoolHost(
            device._mha_buffer_info(),
            ratio,
            0,
            16,
            layout,
            pin_memory=False,
            device_capacity_tokens=tokens,
            start_layer=0,
            end_layer=3,
        )
        found = page_facts(host)
        host.alloc(32)
        assert page_facts(host) == found
        return found

    assert facts(64) == facts(128, 3.0)
    assert facts(64)["dtype"] == torch.float32
    assert facts(64, dtype=torch.bfloat16) != facts(64)
