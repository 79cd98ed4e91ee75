# SPDX-License-Identifier: Apache-2.0
"""Place host memory on the NUMA node of a device.

Copies that cross sockets share the link between the sockets with all other traffic.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the ``mbind`` system call by machine. The C library has no wrapper for it, and libnuma is optional."""

_PREFERRED = 1
_MAX_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of_device(pci_bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of a PCI device, or ``None`` if the kernel does not report one, as in many VMs."""
    try:
        node = int((devices / pci_bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MAX_NODES else None


def cores_of_node(node: int, nodes: Path = Path("/sys/devices/system/node")) -> set[int]:
    """Return the CPU cores of a NUMA node. The set is empty if the node has none or the kernel does not report them."""
    try:
        ranges = (nodes / f"node{node}" / "cpulist").read_text().strip().split(",")
        ends = [[int(end) for end in each.split("-")] for each in ranges if each]
    except (OSError, ValueError):
        return set()
    return {core for each in ends for core in range(each[0], each[-1] + 1)}


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Ask the kernel to allocate future pages of this memory on ``node`` while that node has room.

    ``address`` must be page-aligned. Returns whether the kernel accepted. Containers often forbid the call, which is
    harmless.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    nodes = (ctypes.c_ulong * (_MAX_NODES // _BITS))()
    nodes[node // _BITS] = 1 << node % _BITS
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    code = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(num_bytes),
        ctypes.c_int(_PREFERRED),
        nodes,
        ctypes.c_ulong(_MAX_NODES),
        ctypes.c_uint(0),
    )
    return bool(code == 0)
