# SPDX-License-Identifier: Apache-2.0
"""What several engines on one machine may take together. ``test_region.py`` has the limits of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffload.cpu.memory_limits import check_all_engines
from kvoffload.errors import CapacityError

KIB = 1024


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, Path]:
    """With 100 KiB, of which a container may use 60 and has used most."""
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 1 kB\n")
    (tmp_path / "memory.max").write_text(f"{60 * KIB}\n")
    (tmp_path / "memory.current").write_text(f"{59 * KIB}\n")
    return {"proc": tmp_path, "cgroup": tmp_path}


def test_the_sum_of_all_engines_must_fit_whatever_is_in_use_now(machine: dict[str, Path]) -> None:
    check_all_engines(30 * KIB, 2, **machine)
    with pytest.raises(
        CapacityError, match=r"3 engines .* 30 KiB .* 90 KiB together, and this container may use 60 KiB"
    ):
        check_all_engines(30 * KIB, 3, **machine)
    (machine["cgroup"] / "memory.max").write_text("max\n")
    check_all_engines(30 * KIB, 3, **machine)
    with pytest.raises(CapacityError, match="this machine has 100 KiB; divide cpu_bytes_to_use among them"):
        check_all_engines(30 * KIB, 4, **machine)


def test_shared_memory_must_hold_the_sum(tmp_path: Path) -> None:
    nothing = {"proc": tmp_path, "cgroup": tmp_path}
    stats = os.statvfs(tmp_path)
    size = stats.f_blocks * stats.f_frsize
    check_all_engines(size // 2, 2, mount=tmp_path, **nothing)
    check_all_engines(size, 2, mount=tmp_path / "missing", **nothing)
    with pytest.raises(CapacityError, match=f"{tmp_path} holds"):
        check_all_engines(size // 2 + 1, 2, mount=tmp_path, **nothing)
