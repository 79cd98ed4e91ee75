# SPDX-License-Identifier: Apache-2.0
"""MLPerf Storage's KV-cache benchmark over a tier of kvoffload, with ``fio`` beside it::

    python -m bench.mlperf_kvcache --sources CHECKOUT/kv_cache_benchmark --cache-dir DIR \\
        --tier '{"type": "disk", "path": "DIR/kvoffload"}' -- OPTIONS OF ITS OWN

``CHECKOUT`` is a copy of mlcommons/storage (Apache 2.0): its code runs as it is, but for the backend of its lowest
tier, whose place ``TierBackend`` takes. Without ``--tier`` that stays, a file for each entry, written by numpy.

With ``--in-turn ROUNDS`` the benchmark does not run. Its own backend and that of the tier move the same entries, one
after the other, in as many threads as a tier has: on a busy machine only that compares them.

An entry, all KV of a prompt, becomes blocks of ``--block-bytes``, which move in the batches and as many at once as
below host memory. The benchmark chooses where entries are and what is evicted, so that the tier needs no quota.
Not among ``BENCHES``: its sources are elsewhere.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bench.core import interleaved_medians
from bench.stores import fio_in_file
from kvoffload.base import OffloadKey, make_offload_key
from kvoffload.tiering.options import StoreOptions, parse_tier
from kvoffload.units import parse_bytes

Array = np.ndarray[Any, Any]

_BATCH_BYTES, _BATCH_BLOCKS = 4 << 20, 64
"""Of one call, as ``StoreTier`` has it."""


class TierBackend:
    """What the benchmark calls a ``StorageBackend``. Any thread may call it, several at once."""

    def __init__(self, options: StoreOptions, block_bytes: int, timing: Callable[..., Any], base_path: str) -> None:
        """``timing`` makes the benchmark's times of a call; ``base_path`` is where it looks how large the disk is."""
        self.base_path = Path(base_path)
        self._store = options.open_store(block_bytes, "mlperf")
        self._block_bytes, self._timing = block_bytes, timing
        self._batch = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // block_bytes))
        self._threads = ThreadPoolExecutor(options.threads or self._store.requests_in_flight)
        self._local = threading.local()
        self._entries: dict[str, tuple[list[OffloadKey], np.dtype[Any], tuple[int, ...]]] = {}

    def write(self, key: str, data: Array) -> Any:
        begun = time.perf_counter()
        flat = data.reshape(-1).view(np.uint8)
        keys = _keys(key, -(-flat.nbytes // self._block_bytes))
        batches = range(0, len(keys), self._batch)
        if not all(list(self._threads.map(functools.partial(self._write, keys, flat), batches))):
            raise OSError(f"The tier did not write {key}.")
        self._entries[key] = keys, data.dtype, data.shape
        return self._took(begun)

    def _write(self, keys: list[OffloadKey], flat: Array, first: int) -> bool:
        """One batch, by way of whole pages: the entry begins anywhere."""
        if not hasattr(self._local, "pages"):
            self._local.pages = mmap.mmap(-1, self._batch * self._block_bytes)
        begin, names = first * self._block_bytes, keys[first : first + self._batch]
        part = flat[begin : begin + len(names) * self._block_bytes]
        np.frombuffer(self._local.pages, np.uint8)[: part.nbytes] = part
        return all(self._store.write(names, self._blocks(memoryview(self._local.pages), 0, len(names))))

    def read(self, key: str) -> tuple[Array, Any]:
        begun = time.perf_counter()
        keys, dtype, shape = self._entries[key]
        pages = memoryview(mmap.mmap(-1, len(keys) * self._block_bytes))

        def fill(first: int) -> bool:
            names = keys[first : first + self._batch]
            return all(self._store.read_into(names, self._blocks(pages, first, len(names))))

        if not all(list(self._threads.map(fill, range(0, len(keys), self._batch)))):
            raise OSError(f"The tier did not read {key}.")
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(pages, dtype, count).reshape(shape), self._took(begun)

    def delete(self, key: str) -> None:
        if key in self._entries:
            self._store.discard(self._entries.pop(key)[0])

    def clear(self) -> None:
        for key in list(self._entries):
            self.delete(key)

    def close(self) -> None:
        self._threads.shutdown()
        self.clear()
        self._store.close()

    def _blocks(self, pages: memoryview, first: int, count: int) -> list[memoryview]:
        size = self._block_bytes
        return [pages[at * size : (at + 1) * size] for at in range(first, first + count)]

    def _took(self, begun: float) -> Any:
        seconds = time.perf_counter() - begun
        return self._timing(total=seconds, device=seconds, host=0.0)


class Counted:
    """A backend, with what its calls moved and took. The benchmark counts a read that raises as a hit that took no
    time."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.num_bytes = {"read": 0, "write": 0}
        self.calls: dict[str, list[tuple[float, float]]] = {"read": [], "write": []}
        """When each began and ended."""
        self.failures: list[str] = []
        self.has_ended = False
        """The benchmark does not wait for its users."""
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def write(self, key: str, data: Array) -> Any:
        return self._call("write", key, data)

    def read(self, key: str) -> tuple[Array, Any]:
        found: tuple[Array, Any] = self._call("read", key)
        return found

    def _call(self, direction: str, *arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            answer = getattr(self.backend, direction)(*arguments)
        except Exception as exc:
            if not self.has_ended:
                self.failures.append(f"{direction} of {arguments[0]}: {exc!r}")
            raise
        with self._lock:
            self.calls[direction].append((begun, time.perf_counter()))
            self.num_bytes[direction] += (answer[0] if direction == "read" else arguments[1]).nbytes
        return answer

    def busy_s(self) -> float:
        """Seconds in which at least one call was under way."""
        total = last = 0.0
        for begun, ended in sorted(chain(*self.calls.values())):
            total += max(0.0, ended - max(begun, last))
            last = max(last, ended)
        return total


def _keys(name: str, count: int) -> list[OffloadKey]:
    return [make_offload_key(hashlib.sha256(f"{name}/{number}".encode()).digest(), 0) for number in range(count)]


def run_benchmark(sources: Path, arguments: list[str], options: StoreOptions | None, block_bytes: int) -> Counted:
    """Runs the benchmark of ``sources`` with its own ``arguments``. Returns its lowest tier, closed."""
    sys.path.insert(0, str(sources))
    cache: Any = importlib.import_module("kv_cache.cache")
    cli: Any = importlib.import_module("kv_cache.cli")
    make = cache.NVMeBackend
    if options is not None:
        make = functools.partial(TierBackend, options, block_bytes, cache.StorageBackend.IOTiming)
    made: list[Counted] = []

    def counted(base_path: str) -> Counted:
        made.append(Counted(make(base_path=base_path)))
        return made[-1]

    cache.NVMeBackend = counted
    sys.argv = ["kv-cache.py", *arguments]
    cli.main()
    (tier,) = made
    tier.has_ended = True
    if options is not None:
        tier.close()
    else:
        tier.clear()
    return tier


def in_turn(sources: Path, directory: Path, options: StoreOptions, block_bytes: int, rounds: int) -> Iterator[str]:
    """Lines of what both backends take for entries of 96 MiB, medians."""
    sys.path.insert(0, str(sources))
    backends: Any = importlib.import_module("kv_cache.backends")
    made = {
        "its own files": backends.NVMeBackend(str(directory)),
        options.label: TierBackend(options, block_bytes, backends.StorageBackend.IOTiming, str(directory)),
    }
    entries = {f"entry{seed}": np.random.default_rng(seed).integers(0, 255, 96 << 20, np.uint8) for seed in range(4)}
    num_bytes = sum(entry.nbytes for entry in entries.values())

    def renew(backend: Any, key: str) -> None:
        backend.delete(key)
        backend.write(key, entries[key])

    with ThreadPoolExecutor(len(entries)) as users:

        def each(call: Callable[..., object], backend: Any) -> list[object]:
            return list(users.map(functools.partial(call, backend), entries))

        for direction, call in {"write": renew, "read": lambda backend, key: backend.read(key)}.items():
            work = [functools.partial(each, call, backend) for backend in made.values()]
            speeds = [num_bytes / seconds / 1e9 for seconds in interleaved_medians(*work, repeats=rounds)]
            told = ", ".join(f"{name} {speed:.2f} GB/s" for name, speed in zip(made, speeds, strict=True))
            yield f"{direction}: {told}, {speeds[1] / speeds[0]:.2f} times"
    for backend in made.values():
        backend.clear()
    made[options.label].close()


def report(tier: Counted, name: str, directory: Path, block_bytes: int) -> Iterator[str]:
    """Lines of what the tier's calls moved and took, with ``fio``'s speed on the same disk."""
    moved = sum(tier.num_bytes.values()) / 1e9
    yield f"{name}: {moved / tier.busy_s():.2f} GB/s while calls were under way"
    file, span = directory / "fio", 64 * block_bytes
    fio_in_file(file, "write", 1 << 20, span, 4 * span)
    for direction, calls in tier.calls.items():
        speed = fio_in_file(file, f"rand{direction}", block_bytes, span, 4 * span)
        beside = "" if speed is None else f"; fio {speed.bytes_per_s / 1e9:.2f} GB/s"
        p50, p95 = np.percentile([ended - begun for begun, ended in calls] or [0.0], (50, 95)) * 1e3
        entries = f"{len(calls)} entries, {tier.num_bytes[direction] / 1e9:.2f} GB"
        yield f"{name}, {direction}: {entries}, p50 {p50:.0f} ms, p95 {p95:.0f} ms{beside}"
    file.unlink(missing_ok=True)
    yield from (f"{name}, failed: {failure}" for failure in tier.failures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="kv_cache_benchmark of a copy of mlcommons/storage")
    parser.add_argument("--tier", type=json.loads, help="an entry of kvoffload's secondary_tiers")
    parser.add_argument("--block-bytes", type=parse_bytes, default=4 << 20)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--in-turn", type=int, metavar="ROUNDS", help="compare the two backends alone")
    parser.add_argument("own", nargs="*", help="the benchmark's own options, after --")
    ours = parser.parse_args()
    ours.cache_dir.mkdir(parents=True, exist_ok=True)
    options = ours.tier and parse_tier(ours.tier, ours.block_bytes)
    if ours.in_turn:
        if options is None:
            parser.error("--in-turn compares with a --tier: name one.")
        for line in in_turn(ours.sources, ours.cache_dir, options, ours.block_bytes, ours.in_turn):
            print(line)
        return
    tier = run_benchmark(ours.sources, [*ours.own, "--cache-dir", str(ours.cache_dir)], options, ours.block_bytes)
    for line in report(tier, ours.tier["type"] if ours.tier else "its own files", ours.cache_dir, ours.block_bytes):
        print(line)
    sys.exit(1 if tier.failures else 0)


if __name__ == "__main__":
    main()
