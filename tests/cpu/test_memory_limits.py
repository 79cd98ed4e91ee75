# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may allocate. ``test_region.py`` shows that regions are checked against it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cgroup_files import VERSIONS, Version

from kvoffload.cpu.cgroups import _folders, _mounts, _own_paths
from kvoffload.cpu.memory_limits import available_bytes, check_all_engines, limit_bytes, memory_bytes
from kvoffload.errors import CapacityError

KIB = 1024


@pytest.fixture(params=VERSIONS, ids=lambda version: version.name)
def version(request: pytest.FixtureRequest) -> Version:
    return request.param


@pytest.fixture
def machine(tmp_path: Path, version: Version) -> Path:
    """Make a machine with 100 KiB of memory, of which 50 KiB are available. Its process is in /pod/engine."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    version.mount(tmp_path, own="/pod/engine")
    return tmp_path


def test_the_sum_of_all_engines_must_fit_whatever_is_in_use(machine: Path, version: Version) -> None:
    version.group(machine, "/pod/engine", limit=60 * KIB, usage=59 * KIB)
    check_all_engines(30 * KIB, 2, root=machine)
    with pytest.raises(CapacityError, match=r"3 engines .* 30 KiB .* 90 KiB together, .*/pod/engine .* 60 KiB"):
        check_all_engines(30 * KIB, 3, root=machine)
    version.group(machine, "/pod/engine", limit=None)
    check_all_engines(30 * KIB, 3, root=machine)
    with pytest.raises(CapacityError, match=r"this machine has .*100 KiB; divide cpu_bytes_to_use among"):
        check_all_engines(30 * KIB, 4, root=machine)


def test_shared_memory_must_hold_the_sum(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    size = stats.f_blocks * stats.f_frsize
    check_all_engines(size // 2, 2, mount=tmp_path, root=tmp_path)
    check_all_engines(size, 2, mount=tmp_path / "missing", root=tmp_path)
    with pytest.raises(CapacityError, match=f"{tmp_path} holds"):
        check_all_engines(size // 2 + 1, 2, mount=tmp_path, root=tmp_path)


def test_the_machine_alone_is_the_bound_without_control_groups(machine: Path, tmp_path: Path) -> None:
    assert (available_bytes(machine), limit_bytes(machine), memory_bytes(machine)) == (50 * KIB, None, 100 * KIB)
    assert (available_bytes(tmp_path / "none"), limit_bytes(tmp_path / "none")) == (None, None)
    assert available_bytes() is not None


@pytest.mark.parametrize("place", ["/", "/pod", "/pod/engine"])
def test_a_limit_counts_wherever_it_is_set(place: str, machine: Path, version: Version) -> None:
    version.group(machine, place, limit=30_000, usage=10_000)
    assert (available_bytes(machine), limit_bytes(machine)) == (20_000, 30_000)
    version.group(machine, place, limit=None)
    assert (available_bytes(machine), limit_bytes(machine)) == (50 * KIB, None)
    version.group(machine, place, limit=5_000, usage=6_000)
    assert available_bytes(machine) == 0


def test_the_least_room_of_all_groups_counts(machine: Path, version: Version) -> None:
    version.group(machine, "/", limit=None, usage=90_000)
    version.group(machine, "/pod", limit=45_000, usage=40_000)
    version.group(machine, "/pod/engine", limit=30_000, usage=10_000)
    version.group(machine, "/pod/other", limit=1, usage=1)
    assert (available_bytes(machine), limit_bytes(machine)) == (5_000, 30_000)


def test_files_that_a_group_has_cached_use_no_memory(machine: Path, version: Version) -> None:
    version.group(machine, "/pod", limit=10_000, usage=9_000)
    assert available_bytes(machine) == 1_000
    version.group(machine, "/pod", limit=10_000, usage=9_000, cached=(3_000, 4_000))
    assert available_bytes(machine) == 8_000
    version.group(machine, "/pod", limit=10_000, usage=5_000, cached=(3_000, 4_000))  # read later than the rows
    assert available_bytes(machine) == 10_000


@pytest.mark.parametrize(
    ("mounted", "own"),
    [
        ("/kube pods/x", "/kube pods/x/inner"),  # the container's own group, seen from outside
        ("/", "/inner"),
    ],
)
def test_the_part_of_a_groups_path_above_the_mount_is_cut_off(
    mounted: str, own: str, machine: Path, version: Version
) -> None:
    version.mount(machine, own=own, mounted=mounted)
    version.group(machine, "/inner", limit=30_000, usage=10_000)
    assert available_bytes(machine) == 20_000


@pytest.mark.parametrize("own", ["/elsewhere/engine", "/../../outside", "/"])
def test_a_group_outside_of_the_mount_has_the_limit_of_the_mount(own: str, machine: Path, version: Version) -> None:
    version.mount(machine, own=own, mounted="/" if own.startswith("/..") or own == "/" else "/kubepods/x")
    version.group(machine, "/", limit=30_000, usage=10_000)
    assert available_bytes(machine) == 20_000


def test_a_mount_below_a_path_with_blanks_is_found(machine: Path, version: Version) -> None:
    version.mount(machine, own="/pod", at="sys/fs/c group")
    version.group(machine, "/pod", limit=30_000, usage=10_000, at="sys/fs/c group")
    assert available_bytes(machine) == 20_000


def test_version_2_slows_down_above_memory_high_so_that_is_a_limit(machine: Path) -> None:
    version = VERSIONS[1]
    version.mount(machine, own="/pod")
    version.group(machine, "/pod", limit=40_000, usage=10_000)
    (machine / "sys/fs/cgroup/pod/memory.high").write_text("25000\n")
    assert (available_bytes(machine), limit_bytes(machine)) == (15_000, 25_000)


def test_version_1_knows_limits_of_groups_that_are_not_mounted(machine: Path) -> None:
    version = VERSIONS[0]
    version.mount(machine, own="/slurm/job", mounted="/slurm/job")
    version.group(machine, "/", limit=None, usage=10_000)
    folder = machine / version.folder
    (folder / "memory.stat").write_text("cache 0\nhierarchical_memory_limit 30000\nhierarchical_memsw_limit 1\n")
    assert (available_bytes(machine), limit_bytes(machine)) == (20_000, 30_000)


def test_damaged_files_cost_nothing(machine: Path, version: Version) -> None:
    version.group(machine, "/pod", limit=30_000, usage=10_000)
    (machine / version.folder / "pod" / version.usage_name).write_text("")
    assert available_bytes(machine) == 30_000
    (machine / version.folder / "pod" / version.limit_name).write_text("-1\n")
    assert limit_bytes(machine) is None
    (machine / "proc/self/mountinfo").write_text("\n1 2\n - \n3 4 5:6 / /x rw - cgroup\n")
    (machine / "proc/self/cgroup").write_text("\n::\n0\n")
    assert limit_bytes(machine) is None


def test_a_limit_below_the_root_is_seen_in_a_real_group() -> None:
    """A child process joins a group that may use 512 MiB, as in a Slurm step or a systemd unit."""
    folder = next((folder for folder in own_groups() if os.access(folder, os.W_OK)), None)
    if folder is None:
        pytest.skip("this user may not make a control group that limits memory")
    group = folder / f"kvoffload-{os.getpid()}"
    group.mkdir()
    try:
        names = [name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()]
        if not names:
            pytest.skip("memory is not delegated to groups of this user")
        (group / names[0]).write_text(str(512 << 20))
        code = (
            "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
            "from kvoffload.cpu.memory_limits import available_bytes, check_host_memory, limit_bytes\n"
            "assert limit_bytes() == 512 << 20 >= available_bytes()\n"
            "try: check_host_memory(1 << 30)\n"
            "except ValueError as exc: print(exc)\n"
        )
        args = [sys.executable, "-c", code, str(group / "cgroup.procs")]
        child = subprocess.run(args, capture_output=True, text=True, check=False)
        assert str(group) in child.stdout, child.stderr
    finally:
        group.rmdir()


def own_groups() -> list[Path]:
    return [
        folder
        for version, *mount in _mounts(Path("/"))
        for path in _own_paths(Path("/"), version)
        for folder in _folders(*mount, path)[:1]
    ]
