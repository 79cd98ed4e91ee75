# SPDX-License-Identifier: Apache-2.0
"""Compare a ``disk`` tier over two disks with a tier over one disk, and with ``fio`` over the same disks.

If this user has the permission, the disks are loop devices with ext4 in memory. The kernel's block throttling limits
each of them to ``DISK_BYTES_PER_S``, so that CPU cores are not the bottleneck. Otherwise they are two directories, and
the ratio means little.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from bench.core import Row
from kvoffload.base import OffloadKey
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore

BLOCK_BYTES = 1 << 20
BATCH = 4
DISK_BYTES_PER_S = 150_000_000
_CGROUP = Path("/sys/fs/cgroup/blkio/kvoffload-bench")


def run(short: bool) -> list[Row]:
    num_blocks, rows = (16 if short else 384), list[Row]()
    with _directories() if short else _disks(512 << 20) as (disks, how):
        speeds: dict[str, list[dict[str, float]]] = {}
        for _ in range(1 if short else 3):
            for count in (1, 2):
                speeds.setdefault("kvoffload", []).append(_store_speeds(disks[:count], num_blocks))
                if shutil.which("fio") and not short:
                    speeds.setdefault("fio", []).append(_fio_speeds(disks[:count]))
        for who, found in speeds.items():
            for what in ("write", "read"):
                one, two = (sorted(each[what] for each in found[start::2])[len(found) // 4] for start in (0, 1))
                target = ">= 1.8" if who == "kvoffload" and how != "directories" else ""
                case = f"{who}, {what} blocks of 1 MiB, two {how}"
                rows.append(Row(case, two / 1e9, "GB/s", f"one: {one / 1e9:.2f}", two / one, target))
    return rows


def _store_speeds(disks: Sequence[Path], num_blocks: int) -> dict[str, float]:
    tier = {"type": "disk", "path": [str(disk / "kv") for disk in disks], "max_bytes": ["400MiB"] * len(disks)}
    num_blocks *= len(disks)
    store = parse_tier(tier).open_store(BLOCK_BYTES, "bench")
    region = SharedOffloadRegion.anonymous(64, BLOCK_BYTES)
    slots = [memoryview(row) for row in np.asarray(region.create_kv_memoryview())]
    for slot in slots:
        slot[:] = os.urandom(4096) * (BLOCK_BYTES // 4096)
    keys = [OffloadKey(b"block %8d" % number) for number in range(num_blocks)]
    try:
        found = dict[str, float]()
        for what, call in (("write", store.write), ("read", store.read_into)):
            began_s = time.perf_counter()
            done = _in_threads(store, call, keys, slots)
            found[what] = done * BLOCK_BYTES / (time.perf_counter() - began_s)
            assert done == num_blocks, f"{done} of {num_blocks} blocks"
        return found
    finally:
        store.close()
        for disk in disks:
            shutil.rmtree(disk / "kv")


def _in_threads(
    store: BlockStore, call: Callable[..., list[bool]], keys: Sequence[OffloadKey], slots: Sequence[memoryview]
) -> int:
    """Move blocks with ``call`` in batches, as the tier's threads do, and return their number."""
    batches, done, lock = list(range(0, len(keys), BATCH)), [0], threading.Lock()

    def work(own: Sequence[memoryview]) -> None:
        while True:
            with lock:
                if not batches:
                    return
                first = batches.pop(0)
            some = keys[first : first + BATCH]
            count = sum(call(some, own[: len(some)]))
            with lock:
                done[0] += count

    threads = [
        threading.Thread(target=work, args=(slots[number * BATCH : (number + 1) * BATCH],))
        for number in range(min(store.requests_in_flight, len(slots) // BATCH))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done[0]


def _fio_speeds(disks: Sequence[Path]) -> dict[str, float]:
    found = dict[str, float]()
    for what in ("write", "read"):
        words = ["fio", "--output-format=json", "--direct=1", "--bs=1M", "--size=48M", "--numjobs=4", "--thread"]
        words += ["--ioengine=psync", "--group_reporting", f"--rw=rand{what}"]
        for number, disk in enumerate(disks):
            words += [f"--name=d{number}", f"--directory={disk}"]
        report = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
        longest_s = max(job[what]["runtime"] for job in report["jobs"]) / 1e3
        found[what] = sum(job[what]["io_bytes"] for job in report["jobs"]) / longest_s
    for disk in disks:
        for file in disk.glob("d*.*.0"):
            file.unlink()
    return found


@contextmanager
def _directories() -> Iterator[tuple[list[Path], str]]:
    with tempfile.TemporaryDirectory() as place:
        disks = [Path(place, name) for name in ("a", "b")]
        for disk in disks:
            disk.mkdir()
        yield disks, "directories"


@contextmanager
def _disks(num_bytes: int) -> Iterator[tuple[list[Path], str]]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory() as place,
        ExitStack() as end,
    ):
        disks = [Path(place, name) for name in ("a", "b")]
        for disk in disks:
            disk.mkdir()
        if os.geteuid() or not all(map(shutil.which, ("mkfs.ext4", "losetup", "mount"))):
            yield disks, "directories"
            return
        bounds = list[str]()
        for disk in disks:
            image = Path(memory, disk.name)
            with image.open("wb") as file:
                file.truncate(num_bytes)
            _do("mkfs.ext4", "-q", str(image))
            _do("mount", "-o", "loop", str(image), str(disk))
            end.callback(_do, "umount", "-l", str(disk))
            device = disk.stat().st_dev
            bounds.append(f"{os.major(device)}:{os.minor(device)}")
        yield disks, "loop devices" + (", bounded" if _bound(bounds, end) else "")


def _bound(devices: Sequence[str], end: ExitStack) -> bool:
    """Limit this process and its children to ``DISK_BYTES_PER_S`` per device, and return whether that worked."""
    try:
        _CGROUP.mkdir(exist_ok=True)
        end.callback(_CGROUP.rmdir)
        for device in devices:
            for name in ("read", "write"):
                (_CGROUP / f"blkio.throttle.{name}_bps_device").write_text(f"{device} {DISK_BYTES_PER_S}")
        (_CGROUP / "cgroup.procs").write_text(str(os.getpid()))
        end.callback((_CGROUP.parent / "cgroup.procs").write_text, str(os.getpid()))
    except OSError:
        return False
    return True


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
