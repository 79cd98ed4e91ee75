# SPDX-License-Identifier: Apache-2.0
"""vLLM's Ray executor on its CPU platform, which vLLM does not support: Ray counts two GPUs that nobody uses."""

from __future__ import annotations

from typing import Any


def prepare() -> None:
    """Let vLLM's CPU platform answer the questions of the Ray executor, in this process."""
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    platform.ray_device_key = "GPU"
    platform.device_control_id_to_physical_device_id = staticmethod(int)


def start(ranks: int) -> None:
    """Start Ray on this machine, on the loopback interface."""
    import ray

    prepare()
    ray.init(
        num_cpus=ranks,
        num_gpus=ranks,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=1 << 27,
        _system_config={"memory_monitor_refresh_ms": 0},  # otherwise it kills workers if others use much memory
        runtime_env={"worker_process_setup_hook": prepare},
        log_to_driver=True,
    )
