# SPDX-License-Identifier: Apache-2.0
"""Compare kvoffload's tiers with vLLM's own ``fs`` tier and LMCache's adapters. ``scripts/bench-peers`` runs this.

All of them keep the same blocks on the same disk, or in Valkey servers of this machine. Each one runs in a process of
its own, and they take turns. A process submits a batch of blocks and waits for its end, with the default options of
its system. Files are dropped from the page cache before they are read. CPU time is the time of the process, without the
server's.

After the rounds, each process is killed while it stores, and a new one counts the blocks that it finds and that are
right. Then one byte of each of some stored blocks is changed, and the new process loads these blocks.
``KVOFFLOAD_BENCH_DIR`` chooses the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.core import Row, bench_directory, leave_page_cache, report
from bench.stores import fio

Rows = npt.NDArray[np.uint8]
PEERS = {
    "disk": "kvoffload's disk",
    "fs": "kvoffload's fs",
    "vllm fs": "vLLM's fs",
    "lmcache fs": "LMCache's fs",
    "lmcache fs_native": "LMCache's fs_native",
    "redis": "kvoffload's redis",
    "lmcache resp": "LMCache's resp",
    "fio": "fio",
}
FLIPPED = 8


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little") * 2


def content(number: int, size: int) -> Rows:
    """Return the bytes of a block, which begin with its number."""
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


# -------------------------------------------------------------------------- the systems, each in a process of its own

Transfer = Callable[[Sequence[int], Sequence[int]], list[bool]]
"""Moves blocks by number from or to these rows, and returns whether each was moved."""


def tier(options: dict[str, Any], memory: Rows) -> tuple[Transfer, Transfer]:
    """Return how a tier of kvoffload stores and loads."""
    from kvoffload.base import ReqContext, make_offload_key
    from kvoffload.tiering.base import JobMetadata
    from kvoffload.tiering.options import build_tier

    made = build_tier(options, memoryview(memory), "bench")
    context, jobs = ReqContext("bench"), iter(range(1 << 30))

    def move(numbers: Sequence[int], rows: Sequence[int], is_load: bool) -> list[bool]:
        keys = [make_offload_key(key_of(number), 0) for number in numbers]
        job = JobMetadata(next(jobs), tuple(keys), np.array(rows, np.int64), is_load, context)
        (made.submit_load if is_load else made.submit_store)(job)
        made.on_schedule_end()
        while not (ended := list(made.get_finished_jobs())):
            time.sleep(0.0005)  # as an engine that asks once per step
        (result,) = ended
        moved = set(keys) if result.success else set(result.successful_keys or ())
        return [key in moved for key in keys]

    return (lambda numbers, rows: move(numbers, rows, False)), (lambda numbers, rows: move(numbers, rows, True))


def vllm_fs(folder: str, memory: Rows) -> tuple[Transfer, Transfer]:
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.base import TransferJob
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

    parallel = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer"])],
        parallel=SimpleNamespace(rank=0, is_parallelism_agnostic=True, **parallel),
        canonical_layout=False,
        replicated_layout=False,
        model=SimpleNamespace(name="bench", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16),
    )
    spec: Any = SimpleNamespace(config=config, blocks_per_chunk=1)
    made = FileSystemTierManager(spec, memoryview(memory), "fs", root_dir=folder)
    context, jobs = ReqContext(req_id="bench"), iter(range(1 << 30))

    def move(numbers: Sequence[int], rows: Sequence[int], is_load: bool) -> list[bool]:
        # One job for each part of the prefix, because vLLM's tier uses one thread for a job.
        keys = [make_offload_key(key_of(number), 0) for number in numbers]
        per_job = -(-len(keys) // 16)
        waiting = {}
        for first in range(0, len(keys), per_job):
            part = slice(first, first + per_job)
            job = TransferJob(next(jobs), keys[part], np.array(rows[part], np.int64), is_load, context)
            waiting[job.job_id] = keys[part]
            (made.submit_load if is_load else made.submit_store)(job)
        moved: set[bytes] = set()
        while waiting:
            for result in made.get_finished_jobs():
                part_keys = waiting.pop(result.job_id)
                moved |= set(part_keys if result.success else result.successful_keys or ())
            time.sleep(0.0005)
        return [key in moved for key in keys]

    return (lambda numbers, rows: move(numbers, rows, False)), (lambda numbers, rows: move(numbers, rows, True))


def lmcache(adapter: dict[str, Any], memory: Rows) -> tuple[Transfer, Transfer]:
    import torch
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.platform import consume_fd

    tensor = torch.from_numpy(memory)
    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(adapter)]))
    place = L1MemoryDesc(ptr=tensor.data_ptr(), size=tensor.numel(), align_bytes=4096)
    made = create_l2_adapter(config.adapters[0], l1_memory_desc=place)
    size = memory.shape[1]

    def object_in(row: int) -> TensorMemoryObj:
        data = tensor[row]
        known = MemoryObjMetadata(
            shape=data.shape,
            dtype=data.dtype,
            address=data.data_ptr(),
            phy_size=size,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        return TensorMemoryObj(data, known, parent_allocator=None)

    def keys_of(numbers: Sequence[int]) -> list[ObjectKey]:
        return [ObjectKey(chunk_hash=key_of(number), model_name="bench", kv_rank=0) for number in numbers]

    def wait(descriptor: int) -> None:
        if not select.select([descriptor], [], [], 100)[0]:
            raise TimeoutError("LMCache did not answer.")
        consume_fd(descriptor)

    def store(numbers: Sequence[int], rows: Sequence[int]) -> list[bool]:
        task = made.submit_store_task(keys_of(numbers), [object_in(row) for row in rows])
        wait(made.get_store_event_fd())
        return [made.pop_completed_store_tasks()[task].is_successful()] * len(numbers)

    def load(numbers: Sequence[int], rows: Sequence[int]) -> list[bool]:
        keys = keys_of(numbers)
        task = made.submit_lookup_and_lock_task(keys, {})
        wait(made.get_lookup_and_lock_event_fd())
        known = made.query_lookup_and_lock_result(task)
        found = [at for at in range(len(keys)) if known.test(at)]
        loaded = [False] * len(keys)
        if found:
            task = made.submit_load_task([keys[at] for at in found], [object_in(rows[at]) for at in found])
            wait(made.get_load_event_fd())
            came = made.query_load_result(task)
            for number, at in enumerate(found):
                loaded[at] = came.test(number)
            made.submit_unlock([keys[at] for at in found])
        return loaded

    return store, load


def open_peer(peer: str, folder: str, port: int, memory: Rows) -> tuple[Transfer, Transfer]:
    system, _, kind = peer.rpartition(" ")
    if system == "vllm":
        return vllm_fs(folder, memory)
    if system == "lmcache":
        server = {"host": "127.0.0.1", "port": port}
        return lmcache({"type": kind, **(server if kind == "resp" else {"base_path": folder})}, memory)
    if kind == "redis":
        patient = {"connect_timeout_s": 30, "window_timeout_s": 60}  # a busy machine must not cost blocks
        return tier({"type": "redis", "url": f"redis://127.0.0.1:{port}", **patient}, memory)
    return tier({"type": kind, "path": folder, "max_bytes": "4GiB"}, memory)


def serve(peer: str, folder: str, port: int, size: int, count: int) -> None:
    """Answer the questions of ``Child`` until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")  # libraries print on standard output
    os.dup2(2, 1)
    memory = np.frombuffer(memoryview(bytearray(2 * count * size + 4096)), np.uint8)
    start = -memory.ctypes.data % 4096  # direct I/O needs aligned memory
    rows = memory[start : start + 2 * count * size].reshape(2 * count, size)
    store, load = open_peer(peer, folder, port, rows)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        direction, first, last = json.loads(line)
        numbers = list(range(first, last))
        places = range(len(numbers)) if direction == "store" else range(count, count + len(numbers))
        for number, row in zip(numbers, places, strict=True):
            rows[row] = content(number, size) if direction == "store" else 0
        print(json.dumps("begun"), file=answers, flush=True)
        begun, cpu = time.perf_counter(), time.process_time()
        moved = (store if direction == "store" else load)(numbers, list(places))
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        right = [
            ok and np.array_equal(rows[row], content(number, size))
            for number, row, ok in zip(numbers, places, moved, strict=True)
        ]
        answer = {"seconds": seconds, "cpu_s": cpu, "moved": sum(moved), "right": sum(right)}
        print(json.dumps(answer), file=answers, flush=True)


# ------------------------------------------------------------------------------------------------------ the comparison


class Child:
    """The process of one system."""

    def __init__(self, peer: str, folder: Path, port: int, size: int, count: int) -> None:
        words = [peer, str(folder), str(port), str(size), str(count)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers", "--child", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def begin(self, direction: str, first: int, last: int) -> None:
        """Return when the transfer has begun."""
        assert self.process.stdin is not None
        print(json.dumps([direction, first, last]), file=self.process.stdin, flush=True)
        assert self.answer() == "begun"

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"A system ended with {self.process.wait()}.")
        return json.loads(line)

    def ask(self, direction: str, first: int, last: int) -> Any:
        self.begin(direction, first, last)
        return self.answer()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def flip(folder: Path, client: Any, size: int, numbers: Sequence[int]) -> int:
    """Change a byte in the middle of each of these blocks where it is stored. Returns the number of changed blocks."""
    begins = [content(number, size)[:64].tobytes() for number in numbers]
    changed = 0
    for path in folder.rglob("*"):
        if path.is_file():
            stored = path.read_bytes()
            for at in [stored.find(begin) for begin in begins]:
                if at >= 0:
                    with path.open("r+b") as file:
                        file.seek(at + size // 2)
                        file.write(bytes([stored[at + size // 2] ^ 0xFF]))
                    changed += 1
    for key in client.keys("*") if client else ():
        if client.type(key) == b"string":
            stored = client.get(key)
            for at in [stored.find(begin) for begin in begins]:
                if at >= 0:
                    client.setrange(key, at + size // 2, bytes([stored[at + size // 2] ^ 0xFF]))
                    changed += 1
    return changed


@dataclass
class Found:
    """The figures of one system."""

    speeds: dict[str, list[float]]
    cpu_s_per_gb: dict[str, list[float]]
    killed: dict[str, int]
    flipped: dict[str, int]


def compare(size: int, count: int, rounds: int, peers: Sequence[str]) -> dict[str, Found]:
    from tests.redis_server import RedisServer

    found = {peer: Found({"store": [], "load": []}, {"store": [], "load": []}, {}, {}) for peer in [*peers, "fio"]}
    with bench_directory() as folder_name, ExitStack() as stack:
        place = Path(folder_name)
        servers = {peer: RedisServer(place) for peer in ("redis", "lmcache resp") if peer in peers}
        for server in servers.values():
            stack.callback(server.stop)
        ports = {peer: servers[peer].port if peer in servers else 0 for peer in peers}
        folders = {peer: place / peer.replace(" ", "-") for peer in peers}
        children = {}
        for peer, folder in folders.items():
            folder.mkdir()
            children[peer] = stack.enter_context(Child(peer, folder, ports[peer], size, count))
        for child in children.values():
            assert child.answer() == "ready"
        for round_ in range(rounds):
            for peer, child in children.items():
                for direction in ("store", "load"):
                    if direction == "load":
                        leave_page_cache(folders[peer])
                    answer = child.ask(direction, round_ * count, (round_ + 1) * count)
                    if answer["right"] != count:
                        raise RuntimeError(f"{PEERS[peer]}: {direction} gave {answer} of {count} blocks.")
                    found[peer].speeds[direction].append(count * size / 1e9 / answer["seconds"])
                    found[peer].cpu_s_per_gb[direction].append(answer["cpu_s"] / count / size * 1e9)
            for direction, name in (("store", "write"), ("load", "read")):
                if (figures := fio(place / "fio", name, size, count * size)) is not None:
                    found["fio"].speeds[direction].append(figures[0])
                    found["fio"].cpu_s_per_gb[direction].append(figures[1])
        for peer, child in children.items():
            first = rounds * count
            child.begin("store", first, first + count)
            time.sleep(count * size / 1e9 / statistics.median(found[peer].speeds["store"]) / 2)
            child.kill()
            with Child(peer, folders[peer], ports[peer], size, count) as again:
                assert again.answer() == "ready"
                answer = again.ask("load", first, first + count)
                found[peer].killed = {"wrong": answer["moved"] - answer["right"], "found": answer["moved"]}
                with servers[peer].client() if peer in servers else nullcontext() as client:
                    changed = flip(folders[peer], client, size, range(FLIPPED))
                leave_page_cache(folders[peer])
                answer = again.ask("load", 0, FLIPPED)
                found[peer].flipped = {"wrong": answer["moved"] - answer["right"], "changed": changed}
    return {peer: each for peer, each in found.items() if each.speeds["store"]}


def rows_of(found: dict[str, Found], size: int, count: int) -> Iterator[Row]:
    for ours, others in {
        "disk": ("fio", "vllm fs", "lmcache fs", "lmcache fs_native"),
        "fs": ("vllm fs", "lmcache fs", "lmcache fs_native"),
        "redis": ("lmcache resp",),
    }.items():
        for direction in ("store", "load"):
            for what, figure, unit in (("", "speeds", "GB/s"), (", CPU time", "cpu_s_per_gb", "s/GB")):
                mine = getattr(found[ours], figure)[direction]
                for other in (each for each in others if each in found):
                    theirs = getattr(found[other], figure)[direction]
                    ratio = statistics.median(a / max(b, 1e-9) for a, b in zip(mine, theirs, strict=True))
                    reference = f"{PEERS[other]}, {statistics.median(theirs):.3g} {unit}"
                    case = f"{PEERS[ours]}: {direction} {count} blocks of {size >> 10} KiB{what}"
                    yield Row(case, statistics.median(mine), unit, reference, ratio)
    for peer, each in found.items():
        yield Row(
            f"{PEERS[peer]}: killed during a store, wrong blocks", each.killed["wrong"], f"of {each.killed['found']}"
        )
        changed = each.flipped["changed"]
        yield Row(f"{PEERS[peer]}: one byte changed, wrong blocks", each.flipped["wrong"], f"of {changed}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare kvoffload's tiers with those of vLLM and LMCache.")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--short", action="store_true", help="only check that everything runs")
    systems = [peer for peer in PEERS if peer != "fio"]
    parser.add_argument("--peers", nargs="+", choices=systems, default=systems, help="the systems to compare")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        peer, folder, *numbers = options.child
        serve(peer, folder, *map(int, numbers))
        os._exit(0)  # without waiting for the threads of other libraries
    size, count, rounds = (64 << 10, 16, 1) if options.short else (2 << 20, 64, 5)
    report(rows_of(compare(size, count, rounds, options.peers), size, count), options.json)


if __name__ == "__main__":
    main()
