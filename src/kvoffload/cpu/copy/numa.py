# SPDX-License-Identifier: Apache-2.0
"""Host memory on the socket of a device. Copies that cross sockets share the link between them with everything else."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call: the C library has no wrapper, and libnuma is not always there."""

_PREFERRED = 1
_MAX_NODES = 1024
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of_device(pci_bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node that a PCI device is attached to. ``None`` where the kernel does not say, as in many virtual
    machines."""
    try:
        node = int((devices / pci_bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MAX_NODES else None


def cores_of_node(node: int, nodes: Path = Path("/sys/devices/system/node")) -> set[int]:
    """Those of a NUMA node. Empty where the kernel does not say, or the node has none."""
    try:
        ranges = (nodes / f"node{node}" / "cpulist").read_text().strip().split(",")
        ends = [[int(end) for end in each.split("-")] for each in ranges if each]
    except (OSError, ValueError):
        return set()
    return {core for each in ends for core in range(each[0], each[-1] + 1)}


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Pages of this memory that do not exist yet will come from ``node`` as long as it has room. ``address`` is that of
    a page. Returns whether the kernel agreed: containers often forbid the call, and nothing is wrong then."""
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
