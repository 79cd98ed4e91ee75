# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU time per byte of sealing and opening a block, relative to HMAC-SHA256.

Blocks are in 64 MiB of memory, so that no block is in the CPU's caches when it is used. A row's ratio is relative to
HMAC-SHA256 over the same blocks in the same run.

The cost to an engine is measured as well: the CPU time of the whole process for a decode step in which four blocks are
stored, over a disk tier with each kind of seal in turn. ``KVOFFLOAD_BENCH_DIR`` chooses the
disk (default: the working directory).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator

import numpy as np

from bench.core import Row, bench_directory
from kvoffload.base import OffloadKey, ReqContext, make_offload_key
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.tiering import CPUPrimaryTierOffloadingManager, TieringOffloadingManager, build_tier
from kvoffload.tiering.base import SecondaryTierManager
from kvoffload.tiering.stores.seal import EncryptionKey, sealer_of

SECRET = b"the fleet's own secret, as long as it should be"
SIZES = (64 << 10, 256 << 10, 2 << 20)
PER_STEP = 4
"""The number of blocks that a step stores, each in its own job."""
PAUSE_S = 0.004
"""The time between two steps, in which the engine computes."""
NUM_SLOTS = 512


class Server:
    """An engine whose running requests each fill a block in every step, over a disk tier or over host memory alone."""

    def __init__(self, block_bytes: int, root: str | None, **options: str) -> None:
        region = SharedOffloadRegion.anonymous(NUM_SLOTS, block_bytes)
        primary = CPUPrimaryTierOffloadingManager(NUM_SLOTS, region)
        np.asarray(primary.kv_view)[:] = 1
        self.tiers: list[SecondaryTierManager] = []
        if root is not None:
            tier = {"type": "disk", "path": root, "max_bytes": 2 << 30, **options}
            self.tiers = [build_tier(tier, primary.kv_view, "bench")]
        self.manager = TieringOffloadingManager(primary, self.tiers)
        self.contexts = [ReqContext(f"r{number}") for number in range(PER_STEP)]
        for context in self.contexts:
            self.manager.on_new_request(context)
        self.num_blocks = 0

    def new_key(self) -> OffloadKey:
        self.num_blocks += 1
        return make_offload_key(self.num_blocks.to_bytes(32, "big"), 0)

    def step(self) -> None:
        wanted = [[self.new_key()] for _ in self.contexts]
        for context, keys in zip(self.contexts, wanted, strict=True):
            self.manager.prepare_store(keys, context)
        for context, keys in zip(self.contexts, wanted, strict=True):
            self.manager.complete_store(keys, context)
        self.manager.on_schedule_end()
        self.manager.has_pending_work()

    def decode(self, num_steps: int) -> float:
        """Return the CPU seconds of a step."""
        begun_s = time.process_time()
        for _ in range(num_steps):
            self.step()
            time.sleep(PAUSE_S)
        return (time.process_time() - begun_s) / num_steps


def run(short: bool) -> list[Row]:
    total, rounds = (4 << 20, 2) if short else (64 << 20, 7)
    memory = np.random.default_rng(1).integers(0, 256, total, np.uint8)
    rows = []
    for size in SIZES:
        blocks = [memoryview(memory[start : start + size]) for start in range(0, total, size)]
        times = measured(works(blocks, size), rounds)
        hmac_s = times.pop("HMAC-SHA256")
        for name, work_s in times.items():
            what = f"{name}, blocks of {size >> 10} KiB"
            target = "<= 2" if name.startswith("encryption") else "<= 1"
            rows.append(Row(what, work_s / total * 1e9, "s per GB", "HMAC-SHA256", work_s / hmac_s, target))
    return rows + [row for size in SIZES[:2] for row in _steps(size, short)]


def _steps(size: int, short: bool) -> Iterator[Row]:
    steps, rounds = (5, 1) if short else (40, 15)
    key = SECRET.decode()
    with bench_directory() as root:
        servers = {
            "no tier": Server(size, None),
            "a checksum": Server(size, f"{root}/checksum"),
            "seal_key": Server(size, f"{root}/seal", seal_key=key),
            "encryption_key": Server(size, f"{root}/encryption", encryption_key=key),
        }
        times: dict[str, list[float]] = {name: [] for name in servers}
        for server in servers.values():
            server.decode(steps)  # creates its files
        for _ in range(rounds):
            for name, server in servers.items():
                times[name].append(server.decode(steps))
        for server in servers.values():
            server.manager.shutdown()
    alone, checked = (np.array(times[name]) for name in ("no tier", "a checksum"))
    for name in ("a checksum", "seal_key", "encryption_key"):
        paid = np.array(times[name])
        case = f"decode step that stores {PER_STEP} blocks of {size >> 10} KiB, {name}"
        text = f"a checksum, {np.median(checked - alone) * 1e6:.0f} us"
        added_s, checked_s = (max(float(np.median(each - alone)), 1e-9) for each in (paid, checked))
        yield Row(case, added_s * 1e6, "us", text, added_s / checked_s)


def works(blocks: list[memoryview], size: int) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        "HMAC-SHA256": lambda: [hmac.digest(SECRET, block, "sha256") for block in blocks]
    }
    target = memoryview(bytearray(size))
    for name, secret in (("checksum", None), ("seal_key", SECRET), ("encryption_key", EncryptionKey(SECRET))):
        sealer = sealer_of("bench", secret)
        sealed = [sealer.seal(b"key", block) for block in blocks]

        def seal(sealer=sealer) -> None:
            for block in blocks:
                sealer.seal(b"key", block)

        def unseal(sealer=sealer, sealed=sealed) -> None:
            for stored, made in sealed:
                is_in_place = not sealer.changes_blocks  # like a store's read into a slot; ciphertext is needed again
                assert sealer.unseal(made, b"key", stored, stored if is_in_place else target)

        found[f"{name}: seal"], found[f"{name}: open"] = seal, unseal
    return found


def measured(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median CPU time of each task. The tasks run in turn."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            start_s = time.process_time()
            task()
            times[name].append(time.process_time() - start_s)
    return {name: float(np.median(found)) for name, found in times.items()}
