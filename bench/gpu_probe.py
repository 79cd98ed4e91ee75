# SPDX-License-Identifier: Apache-2.0
"""Probe a GPU for facts that the fake driver cannot show: ``python -m bench.gpu_probe --out FILE``.

Each part runs in its own process under a time limit and writes its findings line by line as JSON, so a part that hangs
or crashes does not affect the others. The last lines are a table of expected results, observed results and remedies.
``kvoffload doctor`` checks and times the copies themselves. The probe needs NVIDIA's driver and kvoffload's own
packages, but not torch.

``--small`` is for a rehearsal with the fake driver of the tests. Its figures are meaningless.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.cpu.copy.driver import Driver, Stream, load_driver
from kvoffload.cpu.copy.lane import OPEN_PIECES, PIECE_RUNS
from kvoffload.cpu.memory_limits import available_bytes
from kvoffload.cpu.populate import populate

MIB = 1 << 20
_BLOCKED_S = 0.005
"""If a call takes longer than this, it has waited for the device."""
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The amounts to copy, on a real device or in a rehearsal."""

    large_bytes: int = 256 * MIB
    compute_fills: int = 400
    compute_bytes: int = 1 << 30
    """Together, this is about 150 ms of a device's time."""
    pinned_bytes: int = 64 << 30
    counts: tuple[int, ...] = (1024, 4096, 8192, 16_384, 51_828, 131_072)
    repeats: int = 5


SMALL = Sizes(4 * MIB, 8, MIB, 16 * MIB, (16, 64), 2)


class Probe:
    """The driver and the findings of one part's process."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.driver: Driver = load_driver()
        self.driver.use_device(0)
        self.stream = self.driver.create_stream()
        self._kept: list[mmap.mmap] = []

    def say(self, **found: Any) -> None:
        print(json.dumps(found), flush=True)

    def host(self, num_bytes: int) -> int:
        """Return the address of new registered memory whose pages were touched."""
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._kept.append(memory)
        array: npt.NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        array[:] = 1
        address: int = array.ctypes.data
        self.driver.register(address, num_bytes)
        return address

    def compute(self, stream: Stream, memory: int) -> None:
        """Submit work that takes a while and copies nothing."""
        for _ in range(self.sizes.compute_fills):
            self.driver.fill(memory, 0, self.sizes.compute_bytes, stream)

    def seconds(self, submit: Callable[[], None]) -> tuple[float, float, float]:
        """Return medians of the CPU time of submitting, the time until all work has ended, and the device's time."""
        start, end = self.driver.create_event(), self.driver.create_event()
        rows = []
        for _ in range(self.sizes.repeats):
            self.driver.synchronize(self.stream)
            self.driver.record(start, self.stream)
            began_s, began_processor_s = time.perf_counter(), time.thread_time()
            submit()
            processor_s = time.thread_time() - began_processor_s
            self.driver.record(end, self.stream)
            self.driver.synchronize(self.stream)
            rows.append((processor_s, time.perf_counter() - began_s, self.driver.seconds_between(start, end)))
        processor_s, total_s, device_s = (statistics.median(column) for column in zip(*rows, strict=True))
        return processor_s, total_s, device_s


def scattered(device: int, host: int, page: int, count: int, pool: int, seed: int = 0) -> tuple[Int64s, Int64s, Int64s]:
    """Return addresses on both sides, and lengths, for scattered pages out of ``pool`` pages on each side."""
    random = np.random.default_rng(seed)
    on_device, on_host = (random.permutation(pool)[:count].astype(np.int64) * page for _ in range(2))
    return device + on_device, host + on_host, np.full(count, page, dtype=np.int64)


# ---------------------------------------------------------------------------------------------------------------- parts


def limits(probe: Probe) -> None:
    """Find how many copies a call accepts. Each count runs in its own process, because a driver may hang."""
    for count in probe.sizes.counts:
        found = run_child("limit", [str(count)], probe.sizes is SMALL, 20.0)
        said = [json.loads(line) for line in found.lines]
        probe.say(count=count, ended=found.ended, **(said[-1] if said else {}))


def limit(probe: Probe, count: str) -> None:
    num, page = int(count), 8192
    host = probe.host(2 * num * page)
    device = probe.driver.allocate(2 * num * page)
    probe.driver.copies_per_call = num
    for is_store in (True, False):
        for seed in range(10):
            on_device, on_host, lengths = scattered(device, host, page, num, 2 * num, seed)
            to, source = (on_host, on_device) if is_store else (on_device, on_host)
            processor_s, total_s, _ = probe.seconds(lambda: probe.driver.copy_runs(to, source, lengths, probe.stream))  # noqa: B023
        assert probe.driver.has_batch, "the driver rejected the batch"
    probe.say(processor_us=round(processor_s * 1e6), gb_per_s=round(num * page / total_s / 1e9, 1))


def behind_compute(probe: Probe) -> None:
    """Find whether submitting waits while the stream waits for compute."""
    driver, page = probe.driver, 65_536
    pool = probe.sizes.large_bytes // page
    host = probe.host(probe.sizes.large_bytes)
    device, scratch = driver.allocate(probe.sizes.large_bytes), driver.allocate(probe.sizes.compute_bytes)
    compute, done = driver.create_stream(), driver.create_event(is_timed=False)
    for copies_per_call in (4096, 1):
        driver.copies_per_call = copies_per_call
        for num_jobs in (1, 16, 64):
            driver.synchronize(compute)
            driver.synchronize(probe.stream)
            probe.compute(compute, scratch)
            driver.record(done, compute)
            driver.wait_event(probe.stream, done)
            began_s = time.perf_counter()
            for job in range(num_jobs):
                on_device, on_host, lengths = scattered(device, host, page, min(256, pool), pool, job)
                driver.copy_runs(on_host, on_device, lengths, probe.stream)
            took_s = time.perf_counter() - began_s
            probe.say(copies=driver.copies_by, jobs=num_jobs, ms=round(took_s * 1e3, 2), still=not driver.is_done(done))
            driver.synchronize(probe.stream)


def queue(probe: Probe) -> None:
    """Count the launches that a stream behind compute accepts until a call blocks, by kind of launch."""
    driver, most = probe.driver, 4 * max(probe.sizes.counts)
    host = probe.host(MIB)
    device, scratch = driver.allocate(MIB), driver.allocate(probe.sizes.compute_bytes)
    compute, done = driver.create_stream(), driver.create_event(is_timed=False)
    one = np.array([4096], dtype=np.int64)
    kinds: dict[str, Callable[[], None]] = {
        "single copies": lambda: driver.copy(device, host, 4096, probe.stream),
        "batches of one copy": lambda: driver.copy_runs(np.array([device]), np.array([host]), one, probe.stream),
        "memsets": lambda: driver.fill(device, 0, 1, probe.stream),
    }
    for kind, launch in kinds.items():
        driver.synchronize(compute)
        driver.synchronize(probe.stream)
        probe.compute(compute, scratch)
        driver.record(done, compute)
        driver.wait_event(probe.stream, done)
        num, blocked_s = 0, 0.0
        while num < most and blocked_s < _BLOCKED_S and not driver.is_done(done):
            began_s = time.perf_counter()
            launch()
            blocked_s = time.perf_counter() - began_s
            num += 1
        probe.say(kind=kind, launches=num, blocked_ms=round(blocked_s * 1e3, 2), has_blocked=blocked_s >= _BLOCKED_S)
        driver.synchronize(probe.stream)


def spacers(probe: Probe) -> None:
    """Time pieces of copies while another stream computes, by the operation between two pieces."""
    driver, size = probe.driver, probe.sizes.large_bytes
    host = probe.host(size)
    device, scratch, spacer = driver.allocate(size), driver.allocate(probe.sizes.compute_bytes), driver.allocate(4)
    compute = driver.create_stream()
    write = driver._resolve(
        "cuStreamWriteValue32", 12_000, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    )

    def write_value() -> None:
        if code := write(probe.stream, spacer, 0, 0):
            raise driver._error("cuStreamWriteValue32", code)

    between: dict[str, Callable[[], None]] = {
        "nothing": lambda: None,
        "memset": lambda: driver.fill(spacer, 0, 1, probe.stream),
        "write value": write_value,
    }
    piece = max(1, size // 16)
    for is_busy in (False, True):
        for name, space in between.items():

            def submit() -> None:
                if is_busy:  # noqa: B023
                    probe.compute(compute, scratch)
                for start in range(0, size, piece):
                    driver.copy(host + start, device + start, min(piece, size - start), probe.stream)
                    space()  # noqa: B023

            probe.say(between=name, beside_compute=is_busy, ms=round(probe.seconds(submit)[2] * 1e3, 2))
            driver.synchronize(compute)


def beside(probe: Probe) -> None:
    """Time a small copy of the engine while a large job runs in the same direction.

    The job runs as a whole, and in pieces with and without a tiny operation between two pieces.
    """
    driver, page, size = probe.driver, 65_536, probe.sizes.large_bytes
    host = probe.host(size)
    device, spacer, small = driver.allocate(size), driver.allocate(1), driver.allocate(4096)
    small_host = probe.host(4096)
    engine = driver.create_stream()
    on_device, on_host, lengths = scattered(device, host, page, size // page, size // page)
    for is_store in (True, False):
        to, source = (on_host, on_device) if is_store else (on_device, on_host)
        small_to, small_from = (small_host, small) if is_store else (small, small_host)
        for piece_bytes in (size, 32 * MIB, 16 * MIB, 8 * MIB, 2 * MIB):
            for has_spacer in (False, True):
                step, waits = max(1, piece_bytes // page), []
                for _ in range(probe.sizes.repeats):
                    for low in range(0, len(to), step):
                        part = slice(low, low + step)
                        driver.copy_runs(to[part], source[part], lengths[part], probe.stream)
                        if has_spacer:
                            driver.fill(spacer, 0, 1, probe.stream)
                    began_s = time.perf_counter()
                    driver.copy(small_to, small_from, 4096, engine)
                    driver.synchronize(engine)
                    waits.append(time.perf_counter() - began_s)
                    driver.synchronize(probe.stream)
                us = round(statistics.median(waits) * 1e6)
                way = "store" if is_store else "load"
                probe.say(way=way, piece_mib=piece_bytes / MIB, spacer=has_spacer, small_copy_us=us)


def pinning(probe: Probe) -> None:
    """Measure the seconds per GiB for as much memory as a server pins, in huge pages that eight threads allocate."""
    most = probe.sizes.pinned_bytes
    size = min(most, (available_bytes() or most) // 2) // (2 * MIB) * 2 * MIB
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address, gib = ctypes.addressof(ctypes.c_char.from_buffer(memory)), size / (1 << 30)
    began_s = time.perf_counter()
    populate(address, size, 8)
    populated_s = time.perf_counter()
    probe.driver.register(address, size)
    registered_s = time.perf_counter()
    probe.driver.unregister(address)
    probe.say(
        gib=round(gib, 2),
        populate_s_per_gib=round((populated_s - began_s) / gib, 3),
        register_s_per_gib=round((registered_s - populated_s) / gib, 3),
    )


def leaving(probe: Probe) -> None:
    """Find whether a process can end while its copies are still running."""
    found = run_child("leave", [], probe.sizes is SMALL, 30.0)
    probe.say(ended=found.ended)


def leave(probe: Probe) -> None:
    host = probe.host(probe.sizes.large_bytes)
    device = probe.driver.allocate(probe.sizes.large_bytes)
    for _ in range(8):
        probe.driver.copy(host, device, probe.sizes.large_bytes, probe.stream)


PARTS: dict[str, tuple[Callable[..., None], float]] = {
    "limits": (limits, 130),
    "behind": (behind_compute, 40),
    "queue": (queue, 30),
    "spacers": (spacers, 30),
    "beside": (beside, 60),
    "pinning": (pinning, 75),
    "leaving": (leaving, 40),
}
"""The parts in order, each with its time limit in seconds."""
_CHILDREN: dict[str, Callable[..., None]] = {"limit": limit, "leave": leave}


@dataclass(frozen=True, slots=True)
class Ended:
    lines: list[str]
    ended: str
    """A description of how the process ended."""


def run_child(
    name: str, arguments: list[str], is_small: bool, limit_s: float, on_line: Callable[[str], None] | None = None
) -> Ended:
    """Run a part in its own process, and end it together with all processes that it started."""
    command = [sys.executable, "-m", "bench.gpu_probe", "--child", name, *arguments, *(["--small"] if is_small else [])]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    assert child.stderr is not None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        os.killpg(child.pid, signal.SIGKILL)

    timer = threading.Timer(limit_s, end)
    timer.start()
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(child.stderr))  # type: ignore[arg-type]
    reader.start()
    lines = []
    for line in child.stdout:
        lines.append(line)
        if on_line is not None:
            on_line(line)
    code = child.wait()
    timer.cancel()
    reader.join()
    ended = (
        "well"
        if not code
        else f"did not end in {limit_s:.0f} s"
        if is_late.is_set()
        else f"with {code}: {''.join(errors)[-300:]}"
    )
    return Ended(lines, ended)


# ----------------------------------------------------------------------------------------------------------- the table


def table(found: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows of name, expected result, observed result and remedy. Note 2 cites the sources of the expectations."""
    good = [row["count"] for row in found.get("limits", []) if row["ended"] == "well"]
    bad = [row["count"] for row in found.get("limits", []) if row["ended"] != "well"]
    if good or bad:
        largest = max(good, default=0)
        advice = "" if largest >= 4096 else f"KVOFFLOAD_COPIES_PER_CALL={max(largest, 1)}"
        yield (
            "copies in a call",
            "4,096 and more",
            f"{largest:,} work, {min(bad, default=0):,} fail" if bad else f"{largest:,} work",
            advice,
        )
    for row in found.get("behind", []):
        if row["jobs"] == 64:
            is_slow = row["ms"] > 50 and not row["still"]
            seen = f"{row['ms']} ms for 64 jobs" + (", until compute ended" if is_slow else "")
            yield f"submitting behind compute, {row['copies']}", "any, as a thread does it", seen, ""
    ours = OPEN_PIECES * (PIECE_RUNS + 2)
    for row in found.get("queue", []):
        seen = f"{row['launches']:,}" + (f", then {row['blocked_ms']} ms" if row["has_blocked"] else " and more")
        advice = f"lane.py: PIECE_RUNS below {row['launches'] // OPEN_PIECES - 2}" if row["has_blocked"] else ""
        yield (
            f"launches until a call blocks, {row['kind']}",
            f"> {ours}",
            seen,
            advice if row["launches"] <= ours else "",
        )
    rows = [row for row in found.get("spacers", []) if row["beside_compute"]]
    if rows:
        best = min(rows, key=lambda row: row["ms"])
        memset = next((row for row in rows if row["between"] == "memset"), best)
        advice = "" if memset["ms"] <= 1.1 * best["ms"] else f"lane.py: {best['between']} between pieces"
        seen = ", ".join(f"{row['between']} {row['ms']} ms" for row in rows)
        yield "between pieces, beside compute", "memset as fast as any", seen, advice
    for way in ("store", "load"):
        rows = [row for row in found.get("beside", []) if row["way"] == way]
        if rows:
            best = min(rows, key=lambda row: row["small_copy_us"])
            ours = next((row for row in rows if row["piece_mib"] == 16 and row["spacer"]), best)
            advice = (
                ""
                if ours["small_copy_us"] <= 2 * best["small_copy_us"]
                else f"lane.py: PIECE_BYTES of {best['piece_mib']} MiB, spacer {best['spacer']}"
            )
            yield (
                f"a small copy beside a {way}",
                "under 1,000 us",
                f"{ours['small_copy_us']} us; best {best['small_copy_us']}",
                advice,
            )
    for row in found.get("pinning", []):
        seen = f"{row['populate_s_per_gib']} + {row['register_s_per_gib']} s/GiB"
        yield f"pinning {row['gib']:.0f} GiB", "0.1 s/GiB", seen, ""
    for row in found.get("leaving", []):
        yield "a process ends amid copies", "well", row["ended"], "" if row["ended"] == "well" else "report this file"


def print_table(rows: Iterator[tuple[str, str, str, str]]) -> None:
    """Print rows of ``table``."""
    lines = [("what", "expected", "seen", "what to change"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    for line in lines:
        print("  ".join([*(text.ljust(width) for text, width in zip(line, widths)), line[3]]).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"Any of {', '.join(PARTS)}. Default: all.")
    parser.add_argument("--out", type=Path, default=Path("probe.jsonl"), help="Write a JSON line per finding here.")
    parser.add_argument("--seconds", type=float, default=400.0, help="Time limit for all parts together.")
    parser.add_argument("--small", action="store_true", help="a rehearsal")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = SMALL if options.small else Sizes()
    if options.child:
        function = _CHILDREN[options.child] if options.child in _CHILDREN else PARTS[options.child][0]
        function(Probe(sizes), *options.parts)
        return
    deadline_s = time.monotonic() + options.seconds
    found: dict[str, list[dict[str, Any]]] = {}
    failed = []
    with options.out.open("a") as file:
        for name in options.parts or [name for name in PARTS if name != "leaving" or not options.small]:
            rows = found.setdefault(name, [])

            def keep(line: str, name: str = name, rows: list[dict[str, Any]] = rows) -> None:
                rows.append(json.loads(line))
                file.write(json.dumps({"part": name, **rows[-1]}) + "\n")
                file.flush()

            left_s = deadline_s - time.monotonic()
            if left_s < 1:
                failed.append(f"{name}: no time was left")
                continue
            ended = run_child(name, [], options.small, min(PARTS[name][1], left_s), keep)
            file.write(json.dumps({"part": name, "ended": ended.ended}) + "\n")
            file.flush()
            print(f"{name}: {len(rows)} findings, ended {ended.ended}", flush=True)
            if ended.ended != "well":
                failed.append(f"{name}: {ended.ended}")
    print()
    print_table(table(found))
    for line in failed:
        print(f"not known: {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
