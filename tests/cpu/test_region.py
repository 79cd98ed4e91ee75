# SPDX-License-Identifier: Apache-2.0
"""Regions: exact, checked first, shared by real processes, and gone after a ``kill -9`` at any stage."""

from __future__ import annotations

import fcntl
import os
import re
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.cpu import partner
from tests.forks import Fork
from tests.leaks import open_in
from tests.memory_files import unbounded_directory
from tests.users import NOBODY, as_user, needs_root

from kvoffload.cpu.memory_limits import check_all_engines
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.errors import CapacityError, ConfigError

SHM = Path("/dev/shm") / f"tests-of-kvoffload-{os.getpid()}"
"""A mount of our own, because other users' engines may be starting on the real one."""
LOCK = SHM / f"kvoffload-{os.geteuid()}.lock"


def leftovers() -> list[str]:
    return sorted(path.name for path in SHM.iterdir())


@pytest.fixture(autouse=True)
def own_mount() -> Iterator[None]:
    SHM.mkdir()
    yield
    assert leftovers() == []
    assert not open_in(SHM)
    SHM.rmdir()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"test-{os.getpid()}-{request.node.name}"


def join(name: str, num_blocks: int, block_bytes: int, num_processes: int, **more: float) -> SharedOffloadRegion:
    return SharedOffloadRegion.shared(name, num_blocks, block_bytes, num_processes, mount=SHM, **more)  # type: ignore[arg-type]


def anonymous(num_blocks: int, block_bytes: int) -> SharedOffloadRegion:
    return SharedOffloadRegion.anonymous(num_blocks, block_bytes)


def shared(num_blocks: int, block_bytes: int) -> SharedOffloadRegion:
    return join(f"test-{os.getpid()}", num_blocks, block_bytes, num_processes=1)


@pytest.mark.parametrize("make", [anonymous, shared])
class TestEveryRegion:
    def test_it_has_the_shape_and_exactly_the_bytes_asked_for(self, make: type) -> None:
        region = make(7, 12_345)
        view = region.create_kv_memoryview()
        assert (view.shape, view.format, view.readonly) == ((7, 12_345), "B", False)
        assert view.nbytes == 7 * 12_345
        array = np.asarray(view)
        assert not array.any()
        assert array.ctypes.data % 4096 == 0
        array[3] = 9
        assert np.asarray(region.create_kv_memoryview())[3].sum() == 9 * 12_345
        region.close()

    def test_views_outlive_close(self, make: type) -> None:
        region = make(2, 4096)
        view = region.create_kv_memoryview()
        region.close()
        region.close()
        np.asarray(view)[1] = 5
        with pytest.raises(ValueError, match="closed"):
            region.create_kv_memoryview()
        assert "closed" in repr(region)

    @pytest.mark.parametrize("shape", [(0, 10), (10, 0), (-1, 10)])
    def test_empty_regions_are_refused(self, make: type, shape: tuple[int, int]) -> None:
        with pytest.raises(ConfigError, match="at least one block"):
            make(*shape)

    def test_more_than_the_host_has_is_refused_before_anything_is_taken(self, make: type) -> None:
        with pytest.raises(CapacityError, match="lower cpu_bytes_to_use"):
            make(1 << 20, 1 << 30)
        assert leftovers() == []


def test_nothing_of_a_shared_region_is_on_the_mount_once_all_have_mapped_it(name: str) -> None:
    first = join(name, 4, 4096, num_processes=3)
    second = join(name, 4, 4096, num_processes=3)
    assert len(leftovers()) == 1
    third = join(name, 4, 4096, num_processes=3)
    assert leftovers() == []
    np.asarray(first.create_kv_memoryview())[2] = 7
    for region in (second, third):
        assert np.asarray(region.create_kv_memoryview())[2].tolist() == [7] * 4096
    for region in (first, second, third):
        region.close()


def test_a_process_knows_whether_all_have_joined(name: str) -> None:
    first = join(name, 4, 4096, num_processes=3)
    assert first._shared is not None
    assert first._shared.num_joined() == 1
    second = join(name, 4, 4096, num_processes=3)
    assert first._shared.num_joined() == 2
    third = join(name, 4, 4096, num_processes=3)
    assert [each.wait_for_all(0) for each in (first, second, third)] == [None] * 3
    later = join(name, 4, 4096, num_processes=2)  # of another engine with the same name
    assert first.wait_for_all(0) is None
    assert later.wait_for_all(0.01) == 1
    # It gave up. A rank that is late finds nothing, instead of memory that nobody else uses.
    assert leftovers() == []
    for each in (first, second, third, later):
        each.close()
    assert SharedOffloadRegion.anonymous(1, 4096).wait_for_all(0) is None


def test_processes_that_disagree_are_refused(name: str) -> None:
    first = join(name, 4, 4096, num_processes=2)
    with pytest.raises(ConfigError, match="disagree"):
        join(name, 5, 4096, num_processes=2)
    with pytest.raises(ConfigError, match=r"\[4, 4096, 2\] and \[8, 2048, 2\]"):
        join(name, 8, 2048, num_processes=2)  # as many bytes
    join(name, 4, 4096, num_processes=2).close()
    first.close()


def start_partner(name: str, processes: int, mark: int) -> Fork:
    """Start a process that maps the region and marks one of its eight blocks."""
    started = Fork(partner.join, name, processes, mark, str(SHM))
    assert started.pipe.recv() == "mapped"
    return started


def test_two_processes_see_each_others_bytes(name: str) -> None:
    region = join(name, 8, 4096, num_processes=2)
    np.asarray(region.create_kv_memoryview())[1] = 42
    other = start_partner(name, 2, 3)
    assert np.asarray(region.create_kv_memoryview())[3, 0] == 103
    other.pipe.send("what do you see?")
    assert other.pipe.recv() == [0, 42, 0, 103, 0, 0, 0, 0]
    other.end()
    region.close()


def test_kill_9_of_all_processes_after_the_start_leaves_nothing(name: str) -> None:
    others = [start_partner(name, 2, mark) for mark in (1, 2)]
    assert leftovers() == []
    for other in others:
        other.kill()
    again = join(name, 8, 4096, num_processes=1)
    assert not np.asarray(again.create_kv_memoryview()).any()
    again.close()


def test_kill_9_in_the_middle_of_the_start_is_cleaned_up_by_the_next_one(name: str) -> None:
    start_partner(name, 2, 1).kill()
    assert len(leftovers()) == 1
    other = join(name + "-other", 2, 4096, num_processes=1)
    assert leftovers() == []
    other.close()
    again = join(name, 8, 4096, num_processes=1)
    assert not np.asarray(again.create_kv_memoryview()).any()
    again.close()


def start_stuck(name: str, where: str) -> Fork:
    """Start a process that stops while it holds the start-up lock, or while it allocates pages."""
    started = Fork(partner.stop_at, name, str(SHM), where)
    assert started.pipe.recv() == "made"
    return started


def test_kill_9_while_the_segment_is_being_made_does_not_stop_the_next_start(name: str) -> None:
    stuck = start_stuck(name, "lock")
    assert len(leftovers()) == 2, "the segment and the lock"
    with pytest.raises(CapacityError, match="held the lock"):
        join(name, 8, 4096, num_processes=2, timeout_s=0.05)
    stuck.kill()
    both = [join(name, 8, 4096, num_processes=2) for _ in range(2)]
    for region in both:
        region.close()


def test_an_engine_that_allocates_for_minutes_holds_up_no_other(name: str) -> None:
    stuck = start_stuck(name, "allocation")
    other = join(name + "-other", 8, 4096, num_processes=1, timeout_s=0.05)
    other.close()
    own_part = join(name, 8, 4096, num_processes=2, timeout_s=0.05)  # allocates by itself
    np.asarray(own_part.create_kv_memoryview())[:] = 1
    stuck.kill()
    own_part.close()
    assert leftovers() == []


def test_what_a_starting_engine_has_still_to_allocate_is_not_given_away(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    monkeypatch.setattr("kvoffload.cpu.memory_limits.available_bytes", lambda: None)
    stuck = start_stuck(name, "allocation")
    segment = next(path for path in SHM.iterdir() if not path.suffix)
    os.truncate(segment, free // 2)  # larger than this machine's memory
    with pytest.raises(CapacityError, match="enlarge that mount"):
        join(name + "-other", 1, free * 3 // 4, num_processes=1)
    stuck.kill()
    join(name + "-other", 1, 4096, num_processes=1).close()


def test_a_start_in_progress_is_never_reclaimed(name: str) -> None:
    starting = start_partner(name, 2, 1)
    other = join(name + "-other", 2, 4096, num_processes=1)
    assert len(leftovers()) == 1
    region = join(name, 8, 4096, num_processes=2)
    assert np.asarray(region.create_kv_memoryview())[1, 0] == 101
    starting.kill()
    region.close()
    other.close()


def test_a_full_mount_is_refused_and_left_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    monkeypatch.setattr("kvoffload.cpu.region.check_host_memory", lambda *_: None)
    with pytest.raises(CapacityError, match="enlarge that mount"):
        join(name, 1, free + (1 << 30), num_processes=1)


def test_a_mount_that_fills_up_between_check_and_allocation_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    monkeypatch.setattr("kvoffload.cpu.region.check_host_memory", lambda *_: None)
    monkeypatch.setattr("kvoffload.cpu.region.check_shared_memory", lambda *_: None)
    with pytest.raises(CapacityError, match="could not give"):
        join(name, 1, free + (1 << 40), num_processes=1)


def test_a_start_up_lock_that_is_held_is_waited_for_only_so_long(name: str) -> None:
    descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(CapacityError, match="held the lock"):
            join(name, 1, 4096, num_processes=1, timeout_s=0.05)
    finally:
        os.close(descriptor)
    join(name, 1, 4096, num_processes=1).close()  # and removes the file


def test_a_lock_on_the_mount_stalls_nobody(name: str) -> None:
    """Everybody may lock /dev/shm itself."""
    descriptor = os.open(SHM, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        join(name, 1, 4096, num_processes=1, timeout_s=0.05).close()
    finally:
        os.close(descriptor)


@needs_root
@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_a_lock_that_another_user_has_made_stops_nobody(name: str, kind: str) -> None:
    """Only that user may remove it from /dev/shm."""
    taken, held = [LOCK, LOCK.with_name(f"{LOCK.stem}-1.lock")], list[int]()
    for path in taken:
        if kind == "directory":
            path.mkdir(0o777)
        elif kind == "link":
            path.symlink_to(os.devnull)
        else:
            path.touch()
            held.append(os.open(path, os.O_RDWR))
            fcntl.flock(held[-1], fcntl.LOCK_EX)
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    first = join(name, 1, 4096, num_processes=2, timeout_s=5)
    second = join(name, 1, 4096, num_processes=2, timeout_s=5)
    second.create_kv_memoryview()[0, 0] = 7
    assert first.create_kv_memoryview()[0, 0] == 7
    first.close()
    second.close()
    for path in taken:
        path.rmdir() if kind == "directory" else path.unlink()
    for descriptor in held:
        os.close(descriptor)
    assert leftovers() == []


@pytest.mark.parametrize("kind", ["anonymous", "shared"])
def test_a_core_file_has_no_block(name: str, kind: str) -> None:
    """It may go anywhere, and blocks are made from prompts."""
    region = (
        SharedOffloadRegion.anonymous(4, 1 << 20) if kind == "anonymous" else join(name, 4, 1 << 20, num_processes=1)
    )
    view = region.create_kv_memoryview()
    address = np.frombuffer(view.cast("B"), np.uint8).__array_interface__["data"][0]
    flags, is_here = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_here and line.startswith("VmFlags"):
            flags = line
    assert " dd" in flags
    del view
    region.close()


def test_a_lock_that_lost_its_name_excludes_nobody(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder unlinks the file and releases the lock, and another process creates the file again."""
    real, taken = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not taken:
            taken.append(descriptor)
            LOCK.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    join(name, 1, 4096, num_processes=1).close()
    assert taken


def segment_of(name: str) -> Path:
    first = join(name, 1, 4096, num_processes=2)
    (segment,) = (SHM / path for path in leftovers())
    join(name, 1, 4096, num_processes=2).close()
    first.close()
    return segment


@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_a_link_leads_nowhere(name: str, tmp_path: Path, suffix: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"p" * 4096)
    victim.chmod(0o600)
    segment = segment_of(name)
    link = LOCK if suffix == ".lock" else segment
    link.symlink_to(victim)
    with pytest.raises(ConfigError, match="cannot be used as a private file"):
        join(name, 1, 4096, num_processes=3)
    assert victim.read_bytes() == b"p" * 4096
    for path in SHM.iterdir():
        path.unlink()


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o666])
def test_a_segment_that_others_may_touch_is_neither_joined_nor_removed(name: str, mode: int) -> None:
    segment = segment_of(name)
    segment.write_bytes(bytes(4096))
    segment.chmod(mode)
    with pytest.raises(ConfigError, match="wrong owner or mode"):
        join(name, 1, 4096, num_processes=2)
    join(name + "-other", 1, 4096, num_processes=1).close()
    assert leftovers() == [segment.name]
    for path in SHM.iterdir():
        path.unlink()


@pytest.mark.parametrize("stray", ["notes", "0123456789abcdef01234567.old", "0123456789ABCDEF01234567"])
def test_a_file_that_only_begins_like_a_segment_is_left_alone(name: str, stray: str) -> None:
    (SHM / f"kvoffload-{stray}").touch(0o600)
    join(name, 1, 4096, num_processes=1).close()
    assert leftovers() == [f"kvoffload-{stray}"]
    (SHM / f"kvoffload-{stray}").unlink()


@needs_root
def test_a_segment_of_another_user_is_neither_joined_nor_removed(name: str) -> None:
    segment = segment_of(name)
    SHM.chmod(0o1777)

    def leave() -> None:
        segment.touch(0o600)
        segment.write_bytes(bytes(4096))
        (SHM / f"kvoffload-{'0' * 24}").touch(0o600)

    as_user(NOBODY, leave)
    with pytest.raises(ConfigError, match="cannot be used as a private file"):
        join(name, 1, 4096, num_processes=2)
    join(name + "-other", 1, 4096, num_processes=1).close()
    assert set(leftovers()) == {segment.name, f"kvoffload-{'0' * 24}"}
    for path in SHM.iterdir():
        path.unlink()


@needs_root
def test_the_lock_of_another_user_is_another_lock(name: str) -> None:
    SHM.chmod(0o1777)
    region = join(name, 1, 4096, num_processes=2)

    def start() -> int:
        other = SharedOffloadRegion.shared(name, 1, 4096, 1, 0.05, SHM)
        other.close()
        return 1

    with open(os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert as_user(NOBODY, start) == 1
    join(name, 1, 4096, num_processes=2).close()
    region.close()


def test_a_mount_without_a_size_has_room(name: str, tmp_path: Path) -> None:
    with unbounded_directory(tmp_path / "shm") as mount:
        check_all_engines(1 << 20, 2, mount=mount)
        region = SharedOffloadRegion.shared(name, 16, 4096, 1, mount=mount)
        np.asarray(region.create_kv_memoryview())[:] = 1
        region.close()


@pytest.mark.parametrize(
    ("limit", "kinds"), [(resource.RLIMIT_AS, ("anonymous", "shared")), (resource.RLIMIT_FSIZE, ("shared",))]
)
def test_a_limit_of_the_process_is_one_sentence(limit: int, kinds: tuple[str, ...], name: str) -> None:
    """Batch systems set such limits. The region is larger than the limit, and memory suffices."""
    child = Fork(partner.make_beyond, limit, kinds, name, SHM)
    found = child.pipe.recv()
    child.end()
    assert [kind for kind, _ in found] == ["CapacityError"] * len(kinds)
    assert all("ulimit" in text for _, text in found)


def test_a_machine_without_shared_memory_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist or cannot be written to; mount a tmpfs there"):
        SharedOffloadRegion.shared(name, 1, 4096, 1, mount=tmp_path / "absent")


@needs_root
def test_shared_memory_that_a_user_may_not_write_is_one_sentence(name: str) -> None:
    SHM.chmod(0o755)
    with pytest.raises(ConfigError, match="does not exist or cannot be written to; mount a tmpfs there"):
        as_user(NOBODY, partial(join, name, 1, 4096, num_processes=1))


def mapping_of(address: int) -> dict[str, str]:
    """Return the kernel's facts about the mapping at an address."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if found:
                break
            is_it = int(span[1], 16) <= address < int(span[2], 16)
        elif is_it:
            name, _, value = line.partition(":")
            found[name] = value
    return found


def test_memory_of_one_process_has_huge_pages_where_the_kernel_gives_them() -> None:
    region = anonymous(16, 1 << 20)
    slots = np.asarray(region.create_kv_memoryview())
    slots[:] = 1
    huge_kib = int(mapping_of(slots.ctypes.data)["AnonHugePages"].split()[0])
    del slots
    region.close()
    if not huge_kib:
        pytest.skip("this kernel gives no huge pages")
    assert huge_kib >= 12 << 10  # its ends need not be at borders of huge pages


def test_a_fork_does_not_take_the_memory_along() -> None:
    """Else the next write after a fork would move a page away from under a device that copies to it."""
    region = anonymous(4, 4096)
    slots = np.asarray(region.create_kv_memoryview())
    assert "dc" in mapping_of(slots.ctypes.data)["VmFlags"].split()
    del slots
    region.close()
