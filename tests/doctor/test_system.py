# SPDX-License-Identifier: Apache-2.0
"""Facts of a machine, from files as the kernel writes them."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.cgroup_files import VERSIONS

import kvoffload
from kvoffload.doctor.system import device_facts, host_facts, versions

FILES = {
    "proc/meminfo": "MemTotal:       8192 kB\nMemFree:        1024 kB\nMemAvailable:   4096 kB\n",
    "proc/self/status": "Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/node/node0/cpulist": "0-7\n",
    "sys/devices/system/node/node1/cpulist": "8-15\n",
    "sys/devices/system/node/possible": "0-1\n",
    "sys/module/nvidia/version": "570.86.15\n",
    "sys/bus/pci/devices/0000:65:00.0/numa_node": "1\n",
    "sys/bus/pci/devices/0000:65:00.0/current_link_speed": "2.5 GT/s PCIe\n",
    "sys/bus/pci/devices/0000:65:00.0/current_link_width": "16\n",
    "sys/bus/pci/devices/0000:65:00.0/max_link_speed": "32.0 GT/s PCIe\n",
    "sys/bus/pci/devices/0000:65:00.0/max_link_width": "16\n",
}


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def driver() -> Any:
    return SimpleNamespace(
        version=12_080, has_batch=True, device_name=lambda _: "a device", pci_bus_id=lambda _: "0000:65:00.0"
    )


def test_a_host(tmp_path: Path) -> None:
    machine(tmp_path, FILES)
    VERSIONS[1].mount(tmp_path, own="/pod/engine")
    VERSIONS[1].group(tmp_path, "/pod", limit=3 << 20, usage=1 << 20)
    host = host_facts(tmp_path)
    assert (host.memory_bytes, host.available_bytes, host.limit_bytes) == (8 << 20, 2 << 20, 3 << 20)
    assert (host.huge_pages, host.numa_nodes, host.allowed_nodes) == ("madvise", 2, "0-1")
    assert host.cores >= 1


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    host = host_facts(tmp_path)
    assert (host.memory_bytes, host.available_bytes, host.limit_bytes) == (None, None, None)
    assert (host.huge_pages, host.numa_nodes, host.allowed_nodes) == (None, 0, None)
    device = device_facts(driver(), 0, tmp_path)
    assert (device.driver, device.numa_node, device.link, device.link_bytes_per_s) == (None, None, None, None)


def test_a_device_and_the_most_that_its_link_gives(tmp_path: Path) -> None:
    device = device_facts(driver(), 0, machine(tmp_path, FILES))
    assert (device.name, device.driver, device.cuda, device.has_batch) == ("a device", "570.86.15", "12.8", True)
    assert (device.pci_bus_id, device.numa_node) == ("0000:65:00.0", 1)
    assert device.link == "PCIe, 2.5 GT/s x16"
    assert device.link_bytes_per_s == 16 * 3.938e9


def test_versions() -> None:
    found = versions()
    assert found.python == platform.python_version()
    assert found.kvoffload in (kvoffload.__version__, "from a checkout")
