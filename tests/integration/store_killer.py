# SPDX-License-Identifier: Apache-2.0
"""Kill writers of a store repeatedly, and check the files that they leave. test_store_kill runs it (``-m``).

``store_killer KIND steps ROOT BLOCK_BYTES STRIDE`` kills one writer before every STRIDE-th system call of its work, and
in the middle of each such call that writes. ``store_killer KIND random ROOT BLOCK_BYTES KILLS`` kills two writers that
share the root, at random times. KIND is ``fs`` or ``disk``, optionally with the suffix ``-encrypted``. Exit code 0
means that nothing was wrong, or that this host does not permit tracing, which it prints.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.files import disk_bytes
from tests.integration.forks import in_child
from tests.integration.system_calls import NotPermitted, kill_at

from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk import format as slab_format
from kvoffload.tiering.stores.disk import store as disk_store
from kvoffload.tiering.stores.disk.format import NEW_PREFIX, SlabFormat
from kvoffload.tiering.stores.disk.store import DiskStore
from kvoffload.tiering.stores.fs.format import SUFFIX, TEMPORARY_PREFIX, BlockFormat
from kvoffload.tiering.stores.fs.quota import seen_in, sweep
from kvoffload.tiering.stores.fs.store import FileSystemStore
from kvoffload.tiering.stores.seal import EncryptionKey

Store = FileSystemStore | DiskStore

IS_SLAB = sys.argv[1].startswith("disk")
SECRET = EncryptionKey(b"what the writers share") if sys.argv[1].endswith("-encrypted") else None
SIZE = int(sys.argv[4])
KEYS = keys_of(*range(30))
MAX_BYTES = 8 * BlockFormat("", SIZE).file_bytes
if IS_SLAB:
    slab_format._MIN_SLAB_BYTES = SlabFormat("", SIZE, SECRET).slab_bytes(4)
    MAX_BYTES = 2 * slab_format._MIN_SLAB_BYTES
    if SIZE % 4096 == 0:
        disk_store._BESIDE_BYTES = SIZE  # checksums are made during the write, as for large blocks


def aligned(data: bytes) -> memoryview:
    """Return ``data`` in page-aligned memory, like slots of host memory, so that direct I/O is used where possible."""
    block = mmap.mmap(-1, len(data))
    block[:] = data
    return memoryview(block)


BLOCKS = [aligned(block_of(key, SIZE)) for key in KEYS]


def open_store(root: Path) -> Store:
    return (DiskStore if IS_SLAB else FileSystemStore)(root, SIZE, max_bytes=MAX_BYTES, secret=SECRET)


def write(store: Store, numbers: list[int]) -> list[bool]:
    return store.write([KEYS[n] for n in numbers], [BLOCKS[n] for n in numbers])


def check(store: Store, number: int) -> None:
    buffer = aligned(bytes(SIZE))
    if store.read_into([KEYS[number]], [buffer]) == [True]:
        assert buffer == BLOCKS[number], "wrong bytes"


def contents(root: Path) -> dict[Path, bytes]:
    found: dict[Path, bytes] = {}
    for path in root.rglob("*"):
        try:
            found |= {path: path.read_bytes()} if path.is_file() else {}
        except FileNotFoundError:  # another thread of a writer has removed it
            continue
    return found


def tear(root: Path, before: dict[Path, bytes]) -> None:
    """Undoes the second half of each file's changes since ``before``."""
    for path, new in contents(root).items():
        old = before.get(path, new)
        if len(new) > len(old):
            os.truncate(path, (len(old) + len(new)) // 2)
        elif new != old:
            path.write_bytes(new[: len(new) // 2] + old[len(new) // 2 :])


def check_root(root: Path, rng: random.Random) -> None:
    """Check that the next store on the root finds only right blocks, a kept quota and no remains of dead writers, and
    works."""
    # Files beyond the quota go when the batch that wrote them has ended, or with the next one.
    most_bytes = MAX_BYTES if IS_SLAB else MAX_BYTES + 2 * 9 * BlockFormat("", SIZE).file_bytes
    assert disk_bytes(root) <= most_bytes, f"{disk_bytes(root)} bytes after a crash"
    store = open_store(root)
    if not IS_SLAB:
        for left in root.rglob(TEMPORARY_PREFIX + "*"):
            os.utime(left, (0, 0))  # an hour and more later
        for directory in [each.relative_to(root) for each in root.rglob("*") if each.is_dir()]:
            sweep(str(root), seen_in(str(root), str(directory)))
        for _ in store.scan():  # in its own namespace, it also deletes files that nothing else proves ours
            pass
    leftovers = [*root.rglob(TEMPORARY_PREFIX + "*"), *root.glob(f"*/{NEW_PREFIX}*")]
    assert not leftovers, f"leftovers: {leftovers}"
    for n in rng.sample(range(30), 30):
        check(store, n)
    assert store.stats().corrupt_blocks == 0, "a crash left an incomplete file under a block's name"
    if not IS_SLAB:  # so that something is written, and the quota looked at
        store.discard([KEYS[29]])
    numbers = [29, rng.randrange(20)]
    answers = write(store, numbers)
    # Files keep no order of use: a block that was there may have been the oldest, and make room for the other.
    assert answers[0] and (answers[1] or not IS_SLAB)
    assert store.contains([KEYS[n] for n in numbers]) == answers
    assert disk_bytes(root) <= MAX_BYTES
    for _ in store.scan():
        pass
    if isinstance(store, DiskStore):
        store.check_invariants()
        assert all(write(store, list(range(20, 28)))), "a slot is lost"
    store.close()


def steps(root: Path, stride: int) -> None:
    """Starts each run from the same state, so that a call has the same number in every run and none is missed."""

    def fresh() -> None:
        shutil.rmtree(root, ignore_errors=True)

    def full() -> None:
        for path in root.rglob("*" + SUFFIX):
            path.unlink()
        store = open_store(root)
        assert all(write(store, list(range(12, 20))))
        store.close()

    def begin() -> None:
        store = open_store(root)
        write(store, [0, 1])
        store.close()

    def work() -> None:
        store = open_store(root)
        write(store, [0, 1, 2])
        write(store, list(range(3, 12)))  # evicts the others
        store.discard([KEYS[4]])
        store.close()

    at_calls(root, fresh, begin, stride, num_writes=3)
    work()  # makes all directories
    at_calls(root, full, work, stride, num_writes=12)


def at_calls(root: Path, prepare: Callable[[], None], work: Callable[[], None], stride: int, num_writes: int) -> None:
    rng, num_torn, copy = random.Random(0), 0, root.with_name(root.name + "-torn")
    for fatal_call in itertools.count(step=stride):
        prepare()
        before: dict[Path, bytes] = {}
        is_killed = kill_at(work, fatal_call, lambda: before.update(contents(root)))  # noqa: B023 - called within
        if any(before.get(path, data) != data for path, data in contents(root).items()):
            # The last call has written. Check the same again, cut off in the middle of that call.
            shutil.copytree(root, copy)
            tear(copy, {copy / path.relative_to(root): data for path, data in before.items()})
            check_root(copy, rng)
            shutil.rmtree(copy)
            num_torn += 1
        if root.exists():
            check_root(root, rng)
        if not is_killed:
            print(f"killed before {fatal_call // stride} system calls, and in the middle of {num_torn}")
            # Neighbouring slots are written in one call. The store's own thread makes calls at the same time, and
            # how many of ours are the last before a kill is a matter of chance.
            fewest = 0 if IS_SLAB else num_writes // 2
            assert stride > 1 or num_torn > fewest, "the calls that write are not recognised any more"
            return


def chaos(root: Path, kills: int) -> None:
    rng, parent = random.Random(1), os.getpid()

    def work(seed: float) -> None:
        mine, store = random.Random(seed), open_store(root)
        while os.getppid() == parent:  # who ends the script ends its writers
            numbers = mine.sample(range(30), mine.randrange(1, 7))
            match mine.randrange(5):
                case 0:
                    store.discard([KEYS[n] for n in numbers])
                case 1:
                    store.touch([KEYS[n] for n in numbers])
                case 2:
                    for n in numbers:
                        check(store, n)
                case _:
                    write(store, numbers)

    for _ in range(kills // 2):
        pids = [in_child(partial(work, rng.random())) for _ in range(2)]
        for pid in pids:
            time.sleep(rng.random() * 0.05)
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), "the writer failed before it was killed"
        check_root(root, rng)


if __name__ == "__main__":
    where = Path(sys.argv[3])
    if sys.argv[2] == "steps":
        try:
            steps(where, int(sys.argv[5]))
        except NotPermitted as exc:
            print(f"This host does not permit tracing: {exc}")
    else:
        chaos(where, int(sys.argv[5]))
