# SPDX-License-Identifier: Apache-2.0
"""Kills writers of a file store, over and over, and looks at what they leave. Run as a script by test_store_kill.

``store_killer.py steps ROOT`` kills one before, and in the middle of, each system call of its work;
``store_killer.py random ROOT SECONDS`` kills two that share the root, at any time. Exit code 0: all was well.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores import fs, fs_writer
from kvoffload.tiering.stores.fs_format import CONTROL_DIR, BlockFormat
from kvoffload.tiering.stores.fs_ledger import LEDGER_BYTES

SIZE = 3000
KEYS = keys_of(*range(30))
MAX_BYTES = 8 * BlockFormat("", SIZE).file_bytes + LEDGER_BYTES

SYSTEM_CALLS = [
    "open",
    "close",
    "writev",
    "pwrite",
    "ftruncate",
    "utime",
    "stat",
    "mkdir",
    "rename",
    "unlink",
    "rmdir",
    "fsync",
]


def open_store(root: Path) -> fs.FileSystemStore:
    return fs.FileSystemStore(root, SIZE, max_bytes=MAX_BYTES)


def write(store: fs.FileSystemStore, numbers: list[int]) -> list[bool]:
    return store.write([KEYS[n] for n in numbers], [memoryview(block_of(KEYS[n], SIZE)) for n in numbers])


def disk_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(fatal_moment: int) -> None:
    """Counts the moments before and after each system call, and kills at one; a write is half done at its first."""
    moments = itertools.count()

    def deadly(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if next(moments) == fatal_moment:
                if name == "writev":
                    real(args[0], [args[1][0], args[1][1][: SIZE // 2]])
                die()
            result = real(*args, **options)
            if next(moments) == fatal_moment:
                die()
            return result

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, deadly(getattr(os, name), name))
    fs.publish = deadly(fs.publish, "publish")


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a forked child must not run on into its parent's code
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return pid


def look(root: Path, rng: random.Random) -> None:
    """What a successor finds: right blocks or none, room kept, nothing of the dead; and it can work."""
    assert disk_bytes(root) <= MAX_BYTES, f"{disk_bytes(root)} bytes after a crash"
    store = open_store(root)
    assert not list((root / CONTROL_DIR).glob(fs_writer._PREFIX + "*")), "leftovers"
    for key in rng.sample(KEYS, len(KEYS)):
        buffer = bytearray(SIZE)
        if store.read_into([key], [memoryview(buffer)]) == [True]:
            assert buffer == block_of(key, SIZE), "wrong bytes"
    assert store.stats().corrupt_blocks == 0, "a crash leaves no half under a block's name"
    assert write(store, [29, rng.randrange(20)]) == [True, True]
    assert disk_bytes(root) <= MAX_BYTES
    for _ in store.scan():
        pass
    store.close()
    assert store.stats().used_bytes == disk_bytes(root), "what dead writers had booked is found again"


def steps(root: Path) -> None:
    rng = random.Random(0)
    for fatal_moment in range(100_000):

        def work(fatal_moment: int = fatal_moment) -> None:
            store = open_store(root)
            arm(fatal_moment)
            write(store, [0, 1, 2])
            write(store, list(range(3, 12)))  # evicts
            store.discard([KEYS[4]])
            store.close()

        _, status = os.waitpid(in_child(work), 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed"
        look(root, rng)
        if not os.WIFSIGNALED(status):
            print(f"killed at {fatal_moment} moments")
            assert fatal_moment > 100
            return


def chaos(root: Path, seconds: float) -> None:
    rng, end, kills = random.Random(1), time.monotonic() + seconds, 0

    def work(seed: float) -> None:
        mine, store = random.Random(seed), open_store(root)
        while True:
            numbers = mine.sample(range(30), mine.randrange(1, 7))
            match mine.randrange(5):
                case 0:
                    store.discard([KEYS[n] for n in numbers])
                case 1:
                    store.touch([KEYS[n] for n in numbers])
                case 2:
                    for n in numbers:
                        buffer = bytearray(SIZE)
                        if store.read_into([KEYS[n]], [memoryview(buffer)]) == [True]:
                            assert buffer == block_of(KEYS[n], SIZE), "wrong bytes"
                case _:
                    write(store, numbers)

    while time.monotonic() < end:
        pids = [in_child(partial(work, rng.random())) for _ in range(2)]
        for pid in pids:
            time.sleep(rng.random() * 0.05)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), "the writer failed before it was killed"
            kills += 1
        look(root, rng)
    print(f"{kills} kills")


if __name__ == "__main__":
    where = Path(sys.argv[2])
    if sys.argv[1] == "steps":
        steps(where)
    else:
        chaos(where, float(sys.argv[3]))
