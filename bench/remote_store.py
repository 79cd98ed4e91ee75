# SPDX-License-Identifier: Apache-2.0
"""Compare the CPU time per byte of remote stores with a minimal client and with well-known clients.

Redis: the server is Valkey on this machine, with one client thread and windows of 4 MiB. The references are a bare loop
over a socket that moves the same bytes and checks nothing, the same loop with the seal's checksum, and redis-py with
its own pipelines, with and without checked seals. A real network would add its latency to all of them, but the client's
CPU time per byte would stay the same. Lookups are compared with the server's own time, measured with the bare loop.

Steps: 64 requests decode at 10 ms per step, and a tier below host memory writes the stored blocks. The time of a step
on the scheduler's thread is compared, in turn, with the same steps without a tier and with a memory tier, which shows
the cost of any tier. A second engine without a tier shows the noise.

Objects: an S3 server on this machine, with 16 requests in flight. The reference is obstore alone with as many threads.
``KVOFFLOAD_S3_SERVER`` names SeaweedFS's ``weed``. Without it, the server is moto, which is so slow that the ratio
means little.
"""

from __future__ import annotations

import gc
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import redis
from tests.redis_server import RedisServer
from tests.s3_server import BUCKET, S3Server

from bench.connector import BLOCK, STEP_S, Decoding
from bench.core import Row
from kvoffload.base import OffloadKey
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.testing.keys import keys as make_keys
from kvoffload.tiering import CPUPrimaryTierOffloadingManager, TieringOffloadingManager, build_tier
from kvoffload.tiering.stores.object import ObjectStore
from kvoffload.tiering.stores.object.client import Deadlines
from kvoffload.tiering.stores.redis import RedisStore
from kvoffload.tiering.stores.redis.wire import encode
from kvoffload.tiering.stores.seal import sealer_of

WINDOW_BYTES = 4 << 20
SEAL = bytes(16)
LOOKED_UP = 4000
REQUESTS = 16


def run(short: bool) -> list[Row]:
    sizes, repeats = ([64 << 10], 1) if short else ([256 << 10, 1 << 20, 2 << 20], 9)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        server = RedisServer(Path(name))
        try:
            for size in sizes:
                rows += _transfers(server, size, (4 << 20) if short else (64 << 20), repeats)
            rows += _lookups(server, repeats)
            rows += _steps(server, short)
        finally:
            server.stop()
        s3 = S3Server(Path(name))
        try:
            rows += _objects(s3, sizes[-1] if short else 1 << 20, (1 << 20) if short else (64 << 20), repeats)
        finally:
            s3.stop()
    return rows


class _Bare:
    """A minimal client on one blocking socket. ``checks`` adds the checksum of each block."""

    def __init__(self, port: int, size: int, *, checks: bool = False) -> None:
        self._sealer = sealer_of("bench", None) if checks else None
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._size = size
        self._tail = bytearray(len(SEAL) + 2)
        self._head = bytearray(len(b"$%d\r\n" % (size + len(SEAL))))

    def write(self, names: list[OffloadKey], rows: list[memoryview]) -> None:
        parts: list[bytes | memoryview] = []
        for name, row in zip(names, rows, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, self._size + len(SEAL))
            seal = self._sealer.seal(name, row)[1] if self._sealer else SEAL
            parts += (head, row, seal + b"\r\n")
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = memoryview(parts[0])[sent:]
        self._receive(memoryview(bytearray(5 * len(names))))

    def read(self, names: list[OffloadKey], rows: list[memoryview]) -> None:
        self._socket.sendall(b"".join(encode(b"GET", name) for name in names))
        for name, row in zip(names, rows, strict=True):
            self._receive(memoryview(self._head))
            self._receive(row)
            self._receive(memoryview(self._tail))
            if self._sealer:
                assert self._sealer.unseal(self._tail[: len(SEAL)], name, row, row)

    def exist(self, names: list[bytes]) -> None:
        self._socket.sendall(b"".join(encode(b"EXISTS", name) for name in names))
        self._receive(memoryview(bytearray(4 * len(names))))

    def close(self) -> None:
        self._socket.close()

    def _receive(self, target: memoryview) -> None:
        while target:
            target = target[self._socket.recv_into(target, 0, socket.MSG_WAITALL) :]


class _Library:
    """redis-py, used as in its documentation, with a pipeline per window."""

    def __init__(self, port: int, *, checks: bool = False) -> None:
        self._sealer = sealer_of("bench", None) if checks else None
        self._client = redis.Redis(port=port, protocol=2)

    def write(self, names: list[OffloadKey], rows: list[memoryview]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for name, row in zip(names, rows, strict=True):
            # redis-py sends one buffer per value, so the block and its seal must be joined.
            pipe.set(bytes(name), b"".join(self._sealer.seal(name, row)) if self._sealer else row)
        pipe.execute()

    def read(self, names: list[OffloadKey], rows: list[memoryview]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.get(bytes(name))
        for name, row, value in zip(names, rows, pipe.execute(), strict=True):
            if self._sealer:
                payload, seal = memoryview(value)[: len(row)], memoryview(value)[len(row) :]
                assert self._sealer.unseal(seal, name, payload, payload)
                row[:] = payload
            else:
                row[:] = value

    def close(self) -> None:
        self._client.close()


def _transfers(server: RedisServer, size: int, total: int, repeats: int) -> list[Row]:
    count = total // size
    shuffled = np.random.default_rng(0)
    flat = shuffled.integers(0, 256, (count, size), np.uint8)
    rows = [memoryview(row) for row in flat]
    names = make_keys(*range(count))
    step = max(1, WINDOW_BYTES // size)
    store = RedisStore(server.url, size, "bench")
    bare, checking = _Bare(server.port, size), _Bare(server.port, size, checks=True)
    library, sealing = _Library(server.port), _Library(server.port, checks=True)

    def seconds_of(call: Callable[[list[OffloadKey], list[memoryview]], object]) -> float:
        begun = time.process_time()
        for start in range(0, count, step):
            call(names[start : start + step], rows[start : start + step])
        return time.process_time() - begun

    def forget() -> None:
        with server.client() as client:
            client.flushall()

    figures: dict[str, list[list[float]]] = {"write": [], "read": []}
    ways = (
        (store.write, bare.write, checking.write, library.write, sealing.write),
        (store.read_into, bare.read, checking.read, library.read, sealing.read),
    )
    for direction, calls in zip(figures, ways, strict=True):
        for _ in range(repeats):
            taken = [0.0] * len(calls)
            for place in shuffled.permutation(len(calls)):  # in random order, because each call affects the next one
                forget()
                if direction == "read":
                    seconds_of(ways[0][place])
                taken[place] = seconds_of(calls[place])
            figures[direction].append(taken)
    for end in (store, bare, checking, library, sealing):
        end.close()
    found = []
    for direction, all_taken in figures.items():
        per_gb = statistics.median(taken[0] for taken in all_taken) * 1e9 / total
        case = f"redis: {direction} {size >> 10} KiB blocks, processor time"
        references = (
            ("a bare socket loop", "<= 1.5"),
            ("the same with checksums", ""),
            ("redis-py, blocks alone", ""),
            ("redis-py with seals", "<= 0.5"),
        )
        for place, (reference, target) in enumerate(references, start=1):
            ratio = statistics.median(taken[0] / taken[place] for taken in all_taken)
            found.append(Row(case, per_gb, "s/GB", reference, ratio, target))
    return found


def _lookups(server: RedisServer, repeats: int) -> list[Row]:
    store = RedisStore(server.url, 4096, "bench")
    bare = _Bare(server.port, 4096)
    wanted = make_keys(*range(LOOKED_UP))
    names = [store._name(key) for key in wanted]
    ours, its = [], []
    for _ in range(repeats):
        for call, log in ((lambda: store.contains(wanted), ours), (lambda: bare.exist(names), its)):
            begun = time.perf_counter()
            call()
            log.append(time.perf_counter() - begun)
    store.close()
    bare.close()
    ratio = statistics.median(one / other for one, other in zip(ours, its, strict=True))
    value = statistics.median(ours) * 1e3
    return [Row(f"redis: lookup of {LOOKED_UP:,} keys", value, "ms", "a bare socket loop", ratio, "<= 1.5")]


def _steps(server: RedisServer, short: bool) -> list[Row]:
    """Measure the CPU time of the scheduler's thread, and the elapsed time, per step."""
    running, num_blocks, size, rounds, pace_s = (4, 256, 4096, 1, 0.0) if short else (64, 2048, 256 << 10, 15, STEP_S)
    of_memory = {"type": "memory", "max_bytes": "256MiB"}
    ways: list[list[dict[str, str]]] = [[], [], [of_memory], [{"type": "redis", "url": server.url}]]
    engines = []
    for tiers in ways:
        primary = CPUPrimaryTierOffloadingManager(num_blocks, SharedOffloadRegion.anonymous(num_blocks, size))
        manager = TieringOffloadingManager(primary, [build_tier(tier, primary.kv_view) for tier in tiers])
        engines.append((manager, Decoding(running, 160, tiered=manager)))
    taken: list[list[tuple[float, float]]] = [[] for _ in ways]
    for number in range(rounds):
        for turn in range(len(ways)):
            place = (turn + number) % len(ways)
            manager, engine = engines[place]
            taken[place].append(_decode(engine, 1 if short else 6, pace_s))
            while manager.has_pending_work():  # so that the next engine has the machine to itself
                engine.step(())
                time.sleep(0.001)
            with server.client() as client:
                client.flushall()
    for _, engine in engines:
        engine.scheduler.shutdown()
    found = []
    for index, what in enumerate(("processor time", "time")):
        (alone, again, memory, tier) = ([pair[index] * 1e6 for pair in log] for log in taken)
        reference = f"no tier, {statistics.median(alone):.3g} us"
        case = f"a step of {running} requests, {what}"
        for name, mine in ((f"redis: {case}", tier), ("the same with a memory tier", memory), ("noise", again)):
            ratio = statistics.median(its / its_alone for its, its_alone in zip(mine, alone, strict=True))
            found.append(Row(name, statistics.median(mine), "us", reference, ratio))
        ratio = statistics.median(mine / its for mine, its in zip(tier, memory, strict=True))
        reference = f"a memory tier, {statistics.median(memory):.3g} us"
        found.append(Row(f"redis: {case}", statistics.median(tier), "us", reference, ratio))
    return found


def _decode(engine: Decoding, blocks: int, pace_s: float) -> tuple[float, float]:
    """Return the CPU seconds of this thread and the elapsed seconds, per step. Each request fills ``blocks``."""
    all_records = [engine.decode_records() for _ in range(blocks * BLOCK)]
    of_thread_s = passed_s = 0.0
    gc.collect()
    gc.disable()
    for records in all_records:
        thread_s, begun_s = time.thread_time(), time.perf_counter()
        engine.step(records)
        step_s = time.perf_counter() - begun_s
        of_thread_s += time.thread_time() - thread_s
        passed_s += step_s
        time.sleep(max(0.0, pace_s - step_s))
    gc.enable()
    return of_thread_s / len(all_records), passed_s / len(all_records)


def _objects(server: S3Server, size: int, total: int, repeats: int) -> list[Row]:
    """Compare the seconds for all blocks, one batch after the other, with obstore with 16 threads."""
    import obstore

    count = total // size
    rows = [memoryview(row) for row in np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)]
    store = ObjectStore(f"s3://{BUCKET}/store", size, config=server.config, deadlines=Deadlines(10.0, 60.0))
    client = store._client.bucket
    figures: dict[str, list[tuple[float, float]]] = {"write": [], "read": []}
    with ThreadPoolExecutor(REQUESTS) as pool:

        def put(name: str, row: memoryview) -> None:
            obstore.put(client, name, bytes(row), use_multipart=False)

        def get(name: str, row: memoryview) -> None:
            row[:] = memoryview(obstore.get(client, name).buffer())

        batches = [slice(start, start + 2 * REQUESTS) for start in range(0, count, 2 * REQUESTS)]

        def ours(call: Callable[..., list[bool]], keys: list[OffloadKey]) -> float:
            begun = time.perf_counter()
            for batch in batches:
                assert all(call(keys[batch], rows[batch]))
            return time.perf_counter() - begun

        def its(call: Callable[..., None], keys: list[OffloadKey]) -> float:
            names = [f"alone/{key.hex()}" for key in keys]
            begun = time.perf_counter()
            for batch in batches:
                list(pool.map(call, names[batch], rows[batch]))
            return time.perf_counter() - begun

        for number in range(repeats):
            keys = make_keys(*range(number * count, (number + 1) * count))
            for direction, store_does, client_does in (("write", store.write, put), ("read", store.read_into, get)):
                # The first reader finds the server still busy with earlier writes, so each client is first in turn.
                if number % 2:
                    alone_s = its(client_does, keys)
                    figures[direction].append((ours(store_does, keys), alone_s))
                else:
                    figures[direction].append((ours(store_does, keys), its(client_does, keys)))
    store.close()
    return [
        Row(
            f"object: {direction} {count} blocks of {size >> 10} KiB, {REQUESTS} in flight",
            statistics.median(ours for ours, _ in taken),
            "s",
            "obstore alone",
            statistics.median(ours / its for ours, its in taken),
            "<= 1.3",
        )
        for direction, taken in figures.items()
    ]
