# SPDX-License-Identifier: Apache-2.0
"""Kill writers while keys, namespaces and lists of disks change, and check the remaining blocks. test_changes_kill runs
it (``-m``).

``changes_killer ROOT KILLS`` kills two writers at a time at random times. Each writer chooses its own keys, namespace
and disks. The bytes of a block depend on its key and namespace, so another namespace's block is wrong. Exit code 0
means that no block was wrong.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.integration.forks import in_child

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.options import parse_tier
from kvoffload.tiering.stores.base import BlockStore

SIZE = 4096
KEYS = keys_of(*range(60))
NAMESPACES = ("the model", "the model's next revision")
SECRETS = ("a key of the fleet", "the next key of the fleet", "the third key of the fleet")
OPTIONS = ("", "seal_key", "encryption_key")
BLOCKS = {
    namespace: [block_of(keys_of(1000 * number + each)[0], SIZE) for each in range(len(KEYS))]
    for number, namespace in enumerate(NAMESPACES)
}


def open_store(root: Path, namespace: str, disks: Sequence[str], option: str, secrets: Sequence[str]) -> BlockStore:
    tier = {"type": "disk", "path": [str(root / disk) for disk in disks], "max_bytes": ["16MiB"] * len(disks)}
    return parse_tier(tier | ({option: list(secrets)} if option else {})).open_store(SIZE, namespace)


def a_store(root: Path, namespace: str, rng: random.Random) -> BlockStore:
    disks = rng.sample("abc", rng.randrange(1, 4))
    return open_store(root, namespace, disks, rng.choice(OPTIONS), rng.sample(SECRETS, rng.randrange(1, 4)))


def work(root: Path, parent: int, has_begun: int, seed: float) -> None:
    rng = random.Random(seed)
    namespace = rng.choice(NAMESPACES)
    while os.getppid() == parent:  # who ends the script ends its writers
        store = a_store(root, namespace, rng)
        for _ in range(rng.randrange(1, 30)):
            some = rng.sample(range(len(KEYS)), rng.randrange(1, 9))
            try:
                if rng.random() < 0.6:
                    blocks = [memoryview(BLOCKS[namespace][at]) for at in some]
                    store.write([KEYS[at] for at in some], blocks)
                    with suppress(BlockingIOError):
                        os.write(has_begun, b".")
                elif rng.random() < 0.2:
                    store.discard([KEYS[at] for at in some])
                else:
                    check(store, namespace, some)
            except StoreError:  # others have all of a disk
                time.sleep(0.01)
        store.close()


def check(store: BlockStore, namespace: str, some: list[int]) -> int:
    """How many of these blocks are there. None of them is another."""
    targets = [bytearray(SIZE) for _ in some]
    answers = store.read_into([KEYS[at] for at in some], [memoryview(target) for target in targets])
    for at, is_good, target in zip(some, answers, targets, strict=True):
        assert not is_good or bytes(target) == BLOCKS[namespace][at], "wrong bytes"
    return sum(answers)


def main(root: Path, kills: int) -> None:
    rng, num_read, num_corrupt = random.Random(2), 0, 0
    for _ in range(-(-kills // 2)):
        begun, has_begun = os.pipe()
        os.set_blocking(has_begun, False)
        pids = [in_child(partial(work, root, os.getpid(), has_begun, rng.random())) for _ in range(2)]
        os.read(begun, 1)
        for pid in pids:
            time.sleep(rng.random() * 0.1)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), "the writer failed before it was killed"
        os.close(begun)
        os.close(has_begun)
        for namespace, option in itertools.product(NAMESPACES, OPTIONS):
            store = open_store(root, namespace, "cab", option, SECRETS)
            num_read += check(store, namespace, list(range(len(KEYS))))
            num_corrupt += store.stats().corrupt_blocks
            store.close()
    print(f"{kills} kills, {num_read} blocks read, {num_corrupt} corrupt, 0 wrong")
    assert num_corrupt == 0, "a kill left an entry without its block"
    assert num_read > kills


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
