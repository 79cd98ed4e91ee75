# SPDX-License-Identifier: Apache-2.0
"""A plugin that lets SGLang serve without a GPU. SGLang loads it in each of its processes.

SGLang finds it through an entry point, which ``write_entry_points`` installs. Each patch replaces something that only a
GPU has. No patch changes the radix cache, the HiCache controller or the storage backend.
"""

from __future__ import annotations

import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "kvoffload-cpu-device"


def write_entry_points(directory: Path) -> None:
    """Write entry points, so that a process with ``directory`` in its PYTHONPATH loads this plugin with SGLang.

    The process also loads kvoffload's plugin as this checkout declares it, whatever checkout is installed.
    """
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for name, plugins in (
        (NAME, {NAME: f"{__name__}:install"}),
        ("kvoffload-checkout", project["entry-points"]["sglang.srt.plugins"]),
    ):
        info = directory / f"{name.replace('-', '_')}-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        lines = [f"{plugin} = {where}\n" for plugin, where in plugins.items()]
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\n" + "".join(lines))


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Rotary embeddings import a kernel of vLLM's where there is neither CUDA nor AMX, and then use their native form.
    kernels = types.ModuleType("vllm._custom_ops")
    kernels.rotary_embedding = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels

    pool_host = "sglang.srt.mem_cache.pool_host"
    HookRegistry.register(f"{pool_host}.base.HostKVCache.__init__", _without_pinning, HookType.AROUND)
    mha = f"{pool_host}.mha.MHATokenToKVPoolHost"
    HookRegistry.register(f"{mha}.load_to_device_per_layer", _load_layer, HookType.REPLACE)
    HookRegistry.register(f"{mha}.backup_from_device_all_layer", _back_up_layers, HookType.REPLACE)


def _without_pinning(make: Callable[..., None], pool: Any, **options: Any) -> None:
    """Host memory is pinned for a GPU alone."""
    make(pool, **options | {"pin_memory": False})


def _load_layer(
    pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **_: Any
) -> None:
    for device, host in zip(_on_device(pool), _on_host(pool), strict=True):
        device[layer_id][device_indices] = host[layer_id][host_indices]


def _back_up_layers(pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    for device, host in zip(_on_device(pool), _on_host(pool), strict=True):
        for layer_id in range(pool.layer_num):
            host[layer_id][host_indices] = device[layer_id][device_indices]


def _on_device(pool: Any) -> tuple[Any, Any]:
    """Keys and values by layer, each a tensor by token."""
    return pool.device_k_buffers, pool.device_v_buffers


def _on_host(pool: Any) -> tuple[Any, Any]:
    return pool.k_data_refs, pool.v_data_refs
