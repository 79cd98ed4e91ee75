# SPDX-License-Identifier: Apache-2.0
"""Compare the file store with ``fio``, in turn, with the same directory, block size, threads and direct I/O.

Checksums are on. ``fio`` runs in two ways: with one large file per thread, and with a file per block like the store.
``KVOFFLOAD_BENCH_DIR`` chooses the disk (default: the working directory). The benchmark temporarily uses 25 GiB.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from bench.core import Row, bench_directory
from bench.stores import THREADS, Blocks, Call, batches_of, fio, in_threads
from kvoffload.base import OffloadKey
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import NUM_FANS

BATCH = 16


def run(short: bool) -> list[Row]:
    sizes = [64 << 10] if short else [64 << 10, 256 << 10, 1 << 20, 4 << 20]
    repeats = 1 if short else 5
    with bench_directory() as name:
        place = Path(name)
        if not short:
            _wait_for_cheap_files(place)
        return [row for size in sizes for row in _against_fio(place, size, _total(size, short), repeats)]


def _total(size: int, short: bool) -> int:
    return 4 << 20 if short else 128 << 20 if size < 1 << 20 else 256 << 20


def _wait_for_cheap_files(place: Path) -> None:
    """Wait until creating a file is cheap.

    For a minute after many files were deleted, ext4 steps over their inodes one by one, which makes each new file ten
    times as expensive. For the same reason, this benchmark deletes nothing before the end.
    """
    for number in range(30):
        directory = place / f"probe{number}"
        directory.mkdir()
        begun = time.perf_counter()
        for file in range(200):
            (directory / str(file)).touch()
        if time.perf_counter() - begun < 200 * 60e-6:
            return
        time.sleep(3)


def _fio(place: Path, size: int, total: int, direction: str, *, file_per_block: bool = False) -> float | None:
    """Return fio's bytes per second in ``place``, where its files stay, or ``None`` if fio is not installed."""
    place.mkdir(exist_ok=True)
    per_thread, options = total // THREADS, list[str]()
    if file_per_block:
        options = [f"--nrfiles={per_thread // size}", f"--filesize={size}", "--openfiles=1"]
        options += ["--file_service_type=sequential", *(["--create_on_open=1"] if direction == "write" else [])]
    sizes = f"--bs={size}", f"--size={per_thread}", "--fallocate=none"
    speed = fio(direction, f"--directory={place}", *sizes, *options)
    return None if speed is None else speed.bytes_per_s


def _batch(blocks: Blocks) -> int:
    """Return the number of blocks per call, such that each thread makes several calls."""
    return max(1, min(BATCH, blocks.count // (4 * THREADS)))


class _Versus:
    """One case: the store and both ways of fio, in turn.

    Ratios compare consecutive measurements, because a disk's speed drifts.
    """

    def __init__(self, case: str) -> None:
        self._case = case
        self._speeds: list[float] = []
        self._ratios: dict[str, list[float]] = {"fio, one file": [], "fio, a file per block": []}

    def add(self, store: float, one_file: float | None, file_per_block: float | None) -> None:
        self._speeds.append(store)
        for ratios, theirs in zip(self._ratios.values(), (one_file, file_per_block), strict=True):
            if theirs is not None:
                ratios.append(store / theirs)

    def rows(self) -> list[Row]:
        speed = statistics.median(self._speeds) / 1e9
        rows = [
            Row(self._case, speed, "GB/s", reference, statistics.median(ratios), ">= 0.9")
            for reference, ratios in self._ratios.items()
            if ratios
        ]
        return rows or [Row(self._case, speed, "GB/s", "fio is not installed")]


def _against_fio(place: Path, size: int, total: int, repeats: int) -> list[Row]:
    """Compare writing new files, reading, and writing with a full quota, where each block evicts another one.

    fio writes new files, reads, and overwrites its files, respectively. A full quota is the usual state of a cache.
    """
    blocks, label = Blocks(size, total), f"{size >> 10} KiB, {THREADS} threads"
    place = place / str(size)
    place.mkdir()
    new, read, full = _Versus(f"write, new files, {label}"), _Versus(f"read, {label}"), _Versus(f"write, full, {label}")

    def speed_of(call: Call, keys: list[OffloadKey]) -> float:
        return in_threads(call, batches_of(keys, blocks.rows, _batch(blocks))).bytes_per_s

    # There are as many blocks as in a production quota, so that a write lists one directory instead of all of them.
    num_kept = blocks.count if repeats == 1 else 16 * NUM_FANS
    bounded = FileSystemStore(place / "full", size, max_bytes=num_kept * (size + 4096))
    for _ in range(-(-num_kept // blocks.count)):
        speed_of(bounded.write, blocks.keys())
    for number in range(repeats):
        one, many = place / f"one{number}", place / f"many{number}"
        store, keys = FileSystemStore(place / str(number), size, max_bytes=1 << 40), blocks.keys()
        for case, direction, call, wanted in (
            (new, "write", store.write, keys),
            (read, "read", store.read_into, keys),
            (full, "write", bounded.write, blocks.keys()),
        ):
            first = _fio(one, size, total, direction)
            ours = speed_of(call, wanted)
            case.add(ours, first, _fio(many, size, total, direction, file_per_block=True))
        store.close()
    bounded.close()
    return [*new.rows(), *read.rows(), *full.rows()]
