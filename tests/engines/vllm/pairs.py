# SPDX-License-Identifier: Apache-2.0
"""Run two engines, one after the other, over one store on disk.

The second engine must find the blocks of the first, and must answer as vLLM alone does. Each call runs an engine in its
own process, as after a restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engines.greedy import Baseline
from tests.engines.vllm.harness import run_child

CACHED = 992
"""Tokens of each prompt that an engine with the same KV finds: 31 full blocks."""


def over_one_store(directory: Path, **more: Any) -> dict[str, Any]:
    """Return a ``kv_connector_extra_config`` with a disk tier in ``directory``. ``more`` contains other keys."""
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": "64MiB",
        "secondary_tiers": [{"type": "disk", "path": str(directory / "blocks"), "max_bytes": "512MiB"}],
        "load_policy": "always",  # the test counts hits, whatever the speed
        "max_wait_s": 300.0,
    } | more


def serve(model: str, extra: dict[str, Any], prompts: int = 4, **options: Any) -> dict[str, Any]:
    """The first ``prompts`` long prompts, one after the other: ``tokens`` and ``cached`` by prompt. ``options`` are
    vLLM's."""
    return run_child("disk", model=model, extra=extra, last=prompts, **options)  # type: ignore[no-any-return]


def alone(model: str, **options: Any) -> Baseline:
    """Return the answers of vLLM without a connector to all long prompts."""
    return Baseline(run_child("baseline", model=model, family="long", **options))
