# SPDX-License-Identifier: Apache-2.0
"""Kill processes that store to and load from a pool: ``pool_killer ROOT KILLS``, which test_pool runs (``-m``).

Two processes at a time work on the pool and are killed at random times. Each reports the blocks that it has stored, and
another process then looks for all of them. After KILLS kills, this continues until more than half of the blocks were
stored. If processes store nothing, later ones live longer. Exit code 0 means that no byte was wrong and each block was
found.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.tiering.stores.disk.rig import slabs_of, upkeep_of

from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk.format import SlabFormat
from kvoffload.tiering.stores.disk.store import DiskStore

SIZE = 16 << 10
KEYS = keys_of(*range(400))
MAX_BYTES = 16 * SlabFormat("", SIZE).slab_bytes(200)
BLOCKS = [memoryview(block_of(key, SIZE)) for key in KEYS]


def open_store(root: Path) -> DiskStore:
    return DiskStore(root, SIZE, max_bytes=MAX_BYTES)


def load(store: DiskStore, numbers: list[int]) -> list[int]:
    """Return the blocks that were found."""
    buffers = [memoryview(bytearray(SIZE)) for _ in numbers]
    answers = store.read_into([KEYS[n] for n in numbers], buffers)
    found = [(n, buffer) for n, buffer, good in zip(numbers, buffers, answers, strict=True) if good]
    assert all(buffer == BLOCKS[n] for n, buffer in found), "wrong bytes"
    return [n for n, _ in found]


def work(root: Path, seed: float, report: int) -> None:
    rng, parent, store = random.Random(seed), os.getppid(), open_store(root)
    # There is room for all blocks. But a store that cannot make a slab just now, since the other process is making one,
    # would evict blocks, and only kills are to lose some here.
    slabs_of(store).evict = lambda count, before_ns: []  # type: ignore[method-assign]
    while os.getppid() == parent:  # who ends the script ends its processes
        numbers = rng.sample(range(len(KEYS)), rng.randrange(1, 9))
        if rng.randrange(2):
            answers = store.write([KEYS[n] for n in numbers], [BLOCKS[n] for n in numbers])
            stored = [n for n, good in zip(numbers, answers, strict=True) if good]
            os.write(report, b"".join(n.to_bytes(2, "little") for n in stored))
        else:
            load(store, numbers)


def look(root: Path, stored: set[int], report: int) -> None:
    store = open_store(root)
    upkeep_of(store).is_loaded.wait()
    found = set(load(store, sorted(stored)))
    store.check_invariants()
    assert store.stats().corrupt_blocks == 0, "a kill left an entry without its block"
    store.close()
    os.write(report, len(found).to_bytes(2, "little"))


def start(work: Callable[[int], None]) -> tuple[int, int]:
    """Process and pipe of its report."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reader)
            work(writer)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a forked child must not run on into its parent's code
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    os.close(writer)
    return pid, reader


def reported(reader: int) -> list[int]:
    content = b""
    while part := os.read(reader, 1 << 16):
        content += part
    os.close(reader)
    return [int.from_bytes(content[at : at + 2], "little") for at in range(0, len(content), 2)]


def main(root: Path, kills: int) -> None:
    rng, stored = random.Random(3), set[int]()
    longest_s, num_kills = 0.2, 0
    while num_kills < kills or len(stored) <= len(KEYS) // 2:
        num_before = len(stored)
        started = [start(partial(work, root, rng.random())) for _ in range(2)]
        for pid, reader in started:
            time.sleep(rng.random() * longest_s)
            os.kill(pid, signal.SIGKILL)
            num_kills += 1
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), "a process failed before it was killed"
            stored.update(reported(reader))
        if len(stored) == num_before < len(KEYS) // 2:
            longest_s *= 2
        pid, reader = start(partial(look, root, stored))
        (num_found,) = reported(reader)
        assert os.waitpid(pid, 0)[1] == 0
        assert num_found == len(stored), f"{len(stored) - num_found} of {len(stored)} stored blocks are gone"
    print(f"{num_kills} kills, {len(stored)} blocks stored, all found after each two kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
