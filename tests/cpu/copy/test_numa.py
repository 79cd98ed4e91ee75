# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from kvoffload.cpu.copy import numa
from kvoffload.cpu.copy.numa import cores_of_node, node_of_device, prefer_node


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("?", None), ("5000", None)])
def test_the_kernel_says_where_a_device_is(tmp_path: Path, text: str, node: int | None) -> None:
    (tmp_path / "0000:65:00.0").mkdir()
    (tmp_path / "0000:65:00.0" / "numa_node").write_text(text)
    assert node_of_device("0000:65:00.0", tmp_path) == node
    assert node_of_device("0000:66:00.0", tmp_path) is None


@pytest.mark.parametrize(("text", "cores"), [("0-2,8\n", {0, 1, 2, 8}), ("5\n", {5}), ("\n", set()), ("a-b\n", set())])
def test_the_kernel_says_which_cores_are_near(tmp_path: Path, text: str, cores: set[int]) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text(text)
    assert cores_of_node(1, tmp_path) == cores
    assert cores_of_node(2, tmp_path) == set()


def test_pages_are_asked_for_on_a_node() -> None:
    memory = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, dtype=np.uint8)
    if not prefer_node(array.ctypes.data, array.size, 0):
        pytest.skip("this kernel or container forbids mbind")
    rows = Path("/proc/self/numa_maps").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith(f"{array.ctypes.data:x} ")]
    assert row.split()[1] == "prefer:0"


def test_what_the_kernel_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not prefer_node(12345, 4096, 0)  # not a page
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    assert not prefer_node(0, 4096, 0)
