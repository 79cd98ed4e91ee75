# SPDX-License-Identifier: Apache-2.0
"""Blocks in fixed slots of large preallocated files: the local disk at its own speed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from kvoffload.base import OffloadKey
from kvoffload.cpu.memory_limits import memory_file_system
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, LossCause, StoreStats
from kvoffload.tiering.stores.root import check_root, check_type, directory_of
from kvoffload.tiering.stores.slab.allocator import SLAB_STRIDE, Run, runs_of
from kvoffload.tiering.stores.slab.directory import SlabDirectory
from kvoffload.tiering.stores.slab.format import (
    EMPTY_ENTRY,
    ENTRY_BYTES,
    LONGEST_KEY,
    PAGE_SLOTS,
    PROBE_AT,
    SEAL_BYTES,
    HashedKey,
    SlabFormat,
)
from kvoffload.tiering.stores.slab.index import ResidentKeys
from kvoffload.tiering.stores.slab.slabs import Slab, Slabs, hash_in
from kvoffload.tiering.stores.slab.upkeep import Growth, Upkeep

__all__ = ["SlabStore"]


_BESIDE_BYTES = 1 << 20
"""The least size of a block whose checksum is made while it is being written to a disk."""
_JUDGED_AT_MOST = 4
"""Reads of a neighbour's block that does not verify while its entry stays as it is."""


@dataclass(slots=True, eq=False)
class _NewBlock:
    """A block of a batch that is to be written."""

    key: HashedKey
    view: memoryview
    stamp_ns: int
    long_key: OffloadKey | None = None
    """The key itself, where an entry has only a digest of it."""
    is_written: bool = False


@dataclass(slots=True, eq=False)
class _WrittenRun:
    """A run on the disk, which is not yet in the index."""

    slab: Slab
    run: Run
    new: list[_NewBlock]
    entries: bytes
    good: list[Run]
    """Parts of ``new`` that are there, entries included."""
    bad: list[int]
    """Blocks that the disk fails to write."""


class SlabStore(BlockStore):
    """Blocks of ``block_bytes`` in slots of slab files under ``root`` (``format`` has the layout).

    No file is made, renamed or deleted per block. Neighbouring slots move in one call, straight from and to the
    caller's memory. A checksum bound to key, namespace and block size is verified on every read. What fails it is a
    miss: a block that was overwritten meanwhile, torn by a crash, or damaged.

    ``max_bytes`` bounds the slabs of all namespaces and processes of the root, as none is made beyond it. Then the
    least recently used blocks are written over, in an order that survives restarts. Slabs of namespaces that no process
    uses go first. Without ``max_bytes`` the store takes all but a tenth of the disk. With ``durability="fsync"`` a
    block is on the disk when ``write`` returns. With ``"none"`` a power failure may lose recent blocks.

    Several processes of one host may share a root; its file system must have locks. Each writes to slabs of its own,
    which the kernel unlocks when it dies, and reads all slabs of its namespace. A neighbour's new block is found within
    a second. Slabs of the dead are adopted with their blocks. No process waits for another's lock.

    On a memory file system (a tmpfs such as ``/dev/shm``) the store is a pool of memory that all processes of the host
    share, and no slab is made for which there is too little memory. ``directory.check_memory`` tells beforehand whether
    ``max_bytes`` fit.

    Only this user may read what is made under the root, whatever the umask. With ``mode="group"`` the root's group may
    read and write as well. Links under the root are never followed, and a root of another user is refused.

    Any number of threads. One lock guards the state; it is never held during I/O.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        block_bytes: int,
        namespace: str = "",
        max_bytes: int | None = None,
        *,
        durability: Literal["none", "fsync"] = "none",
        mode: Literal["private", "group"] = "private",
    ) -> None:
        if mode not in ("private", "group"):
            raise ConfigError(f"mode must be 'private' or 'group', not {mode!r}.")
        if durability not in ("none", "fsync"):
            raise ConfigError(f"durability must be 'none' or 'fsync', not {durability!r}.")
        if block_bytes < 1:
            raise ConfigError(f"block_bytes must be positive, not {block_bytes}.")
        self._layout = layout = SlabFormat(directory_of(namespace), block_bytes)
        if max_bytes is not None and max_bytes < layout.slab_bytes(1):
            raise ConfigError(
                f"max_bytes={max_bytes} has no room for one block: that takes {layout.slab_bytes(1)} bytes."
            )
        self._root = os.path.abspath(os.fspath(root))
        self._max_bytes = max_bytes
        self._durable = durability == "fsync"
        access = check_root(self._root, mode)
        check_type(self._root, "disk")
        try:
            self._directory = SlabDirectory(self._root, layout, max_bytes, access, durable=self._durable)
        except OSError as exc:
            raise ConfigError(f"The store cannot use {self._root}: {exc}; choose another directory.") from exc
        self._slabs = Slabs(self._root)
        self.resident = ResidentKeys(self._slabs.index, self._slabs.lock, layout.hashed, self._slabs.keys)
        self._growth = Growth(self._directory, self._slabs)
        self._upkeep = Upkeep(self._root, layout, self._directory, self._slabs, self._growth)
        self._beside: ThreadPoolExecutor | None = None
        if block_bytes >= _BESIDE_BYTES and memory_file_system(self._root) is None:
            self._beside = ThreadPoolExecutor(self.requests_in_flight, "kvoffload-slab-checksums")

    def __repr__(self) -> str:
        return (
            f"SlabStore({self._root!r}, {self._layout.directory!r}, block_bytes={self._layout.block_bytes}, "
            f"slabs={len(self._slabs.open)}, blocks={len(self._slabs.index)})"
        )

    # ------------------------------------------------------------------------------------------------ BlockStore

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        hashed = [self._layout.hashed(key) for key in keys]
        with self._slabs.lock:
            return [self._slabs.index.find(key) >= 0 for key in hashed]

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        hashed = [self._layout.hashed(key) for key in keys]
        new: dict[bytes, _NewBlock] = {}
        with self._slabs.lock:
            stamps_ns = self._slabs.stamps(len(hashed))
            slots = [self._slabs.index.find(key) for key in hashed]
            self._slabs.use(slots, stamps_ns)
            for name, key, slot, block, stamp_ns in zip(keys, hashed, slots, blocks, stamps_ns, strict=True):
                if slot < 0 and key.probe not in new:  # of a key that is given twice, the first block is written
                    long_key = name if len(name) > LONGEST_KEY else None
                    new[key.probe] = _NewBlock(key, self._bytes(block), stamp_ns, long_key)
            runs, slabs = self._slabs.take(len(new))
        if not new:
            return [True] * len(hashed)
        errors = list[OSError]()
        self._write_new(list(new.values()), runs, slabs, stamps_ns.start - 1, errors)
        answers = [slot >= 0 or new[key.probe].is_written for key, slot in zip(hashed, slots, strict=True)]
        self._raise_unless_any(answers, errors)
        return answers

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        hashed = [self._layout.hashed(key) for key in keys]
        answers, errors = [False] * len(hashed), list[OSError]()
        found = self._read_found(hashed, blocks, range(len(hashed)), answers, errors)
        if not found:
            return answers
        if failed := [at for at in found if not answers[at]]:
            # A block may have another copy, in the slab of another process.
            self._read_found(hashed, blocks, failed, answers, errors)
        self._raise_unless_any(answers, errors)
        return answers

    def _read_found(
        self,
        hashed: Sequence[HashedKey],
        blocks: Sequence[memoryview],
        asked: Sequence[int],
        answers: list[bool],
        errors: list[OSError],
    ) -> list[int]:
        """Reads those of the blocks ``asked`` that are in the index, and returns which these are."""
        wanted = list[tuple[int, int, bytes]]()
        with self._slabs.lock:
            slots = [self._slabs.index.find(hashed[at]) for at in asked]
            self._slabs.use(slots, self._slabs.stamps(len(slots)))
            for at, slot in zip(asked, slots, strict=True):
                if slot >= 0:
                    offset = slot % SLAB_STRIDE * ENTRY_BYTES
                    seal = bytes(self._slabs.open[slot // SLAB_STRIDE].entries[offset : offset + SEAL_BYTES])
                    wanted.append((slot, at, seal))
            slabs = self._slabs.pin([slot // SLAB_STRIDE for slot, _, _ in wanted])
        try:
            wanted.sort()
            begin = 0
            while begin < len(wanted):
                end = begin + 1
                while end < len(wanted) and wanted[end][0] == wanted[end - 1][0] + 1:
                    end += 1
                self._read_run(slabs, wanted[begin:end], hashed, blocks, answers, errors)
                begin = end
        finally:
            self._slabs.unpin(slabs)
        return [at for _, at, _ in wanted]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        hashed = [self._layout.hashed(key) for key in keys]
        removed = list[int]()
        with self._slabs.lock:
            for key in hashed:
                for slot in list(self._slabs.index.find_all(key)):
                    self._slabs.forget(slot)
                    removed.append(slot)
            slabs = self._slabs.pin(slot // SLAB_STRIDE for slot in removed)
            runs = [run for run in runs_of(sorted(removed)) if slabs[run.slab].is_own]
        try:
            self._slabs.clear(slabs, runs)
        finally:
            self._slabs.unpin(slabs)

    def close(self) -> None:
        self._upkeep.close()
        if self._beside is not None:
            self._beside.shutdown()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        self._upkeep.is_loaded.wait()
        yield from self._slabs.keys()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        hashed = [self._layout.hashed(key) for key in reversed(keys)]
        with self._slabs.lock:
            self._slabs.use([self._slabs.index.find(key) for key in hashed], self._slabs.stamps(len(hashed)))

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        return self._slabs.take_lost()

    def stats(self) -> StoreStats:
        used_bytes = len(self._slabs.index) * self._layout.block_bytes
        return StoreStats(used_bytes, self._slabs.num_corrupt, self._slabs.num_evicted, self._max_bytes)

    def refresh(self) -> None:
        """Publishes our changes and takes in those of other processes. The store's thread does so by itself, two times
        a second; a caller who cannot wait may as well."""
        self._upkeep.refresh()

    def check_invariants(self) -> None:
        """Recomputes the state from the tables. Raises ``AssertionError`` if it differs. For tests, between calls."""
        with self._upkeep.lock:  # its own I/O is not part of a call, but keeps slabs open too
            self._slabs.check_invariants()

    # ---------------------------------------------------------------------------------------------------- writing

    def _write_new(
        self, new: list[_NewBlock], runs: list[Run], slabs: dict[int, Slab], before_ns: int, errors: list[OSError]
    ) -> None:
        """Writes blocks to the free slots ``runs`` of ``slabs``, which are pinned, and to more if need be.

        Evicts nothing that was used after ``before_ns``.
        """
        begin = 0
        while True:
            written = list[_WrittenRun]()
            try:
                for run in runs:
                    one = self._write_run(slabs[run.slab], run, new[begin : begin + run.count], errors)
                    begin += run.count
                    if one is not None:
                        written.append(one)
                if self._durable:
                    self._sync(slabs, errors)
            finally:
                with self._slabs.lock:
                    for one in written:
                        self._record(one)
                    self._slabs.unpin_locked(slabs)
            if begin == len(new) or (not runs and not self._make_room(len(new) - begin, before_ns, errors)):
                return
            with self._slabs.lock:
                runs, slabs = self._slabs.take(len(new) - begin)

    def _write_run(self, slab: Slab, run: Run, new: list[_NewBlock], errors: list[OSError]) -> _WrittenRun | None:
        """Writes ``run.count`` blocks: payloads first, then their entries. So a process that dies in between leaves
        empty slots. ``None`` if the table failed, and with it the slab."""
        first, bad = run.first, list[int]()
        entries_of = self._begin_entries(new)
        try:
            whole = slab.file.write(first, [block.view for block in new])
            good = [Run(0, whole)] if whole else []
        except OSError as exc:
            errors.append(exc)
            good, bad = self._write_singly(slab, run, new) if exc.errno == errno.EIO else ([], [])
        entries = entries_of()
        try:
            for part in good:
                slab.file.write_entries(first + part.start, entries[part.start * ENTRY_BYTES : part.stop * ENTRY_BYTES])
        except OSError as exc:
            errors.append(exc)
            self._slabs.lose(slab, exc)
            return None
        return _WrittenRun(slab, run, new, entries, good, bad)

    def _begin_entries(self, new: list[_NewBlock]) -> Callable[[], bytes]:
        """Makes checksums and entries of blocks, and returns what waits for them."""
        if self._beside is not None:
            try:
                return self._beside.submit(self._entries, new).result
            except RuntimeError:
                pass  # the store is closed, or the interpreter ends
        # Before the write: they bring the payloads into the processor's caches, from which the kernel then takes them.
        entries = self._entries(new)
        return lambda: entries

    def _entries(self, new: list[_NewBlock]) -> bytes:
        return b"".join([self._layout.entry(block.key, block.view, block.stamp_ns) for block in new])

    def _record(self, written: _WrittenRun) -> None:
        """What was written is here now, and the other slots of its run are free again. With the lock held."""
        slab, run, new = written.slab, written.run, written.new
        used_ns = slab.used_ns
        if used_ns is None or slab.is_dropped:
            return
        first, add = run.first, self._slabs.index.add
        for part in written.good:
            begin, end = part.start, part.stop
            slab.entries[(first + begin) * ENTRY_BYTES : (first + end) * ENTRY_BYTES] = written.entries[
                begin * ENTRY_BYTES : end * ENTRY_BYTES
            ]
            slab.changed_pages.update(range((first + begin) // PAGE_SLOTS, (first + end - 1) // PAGE_SLOTS + 1))
            for at in range(begin, end):
                block = new[at]
                add(block.key.hash64 & 0xFFFF_FFFF, run.start + at)
                used_ns[first + at] = block.stamp_ns
                if block.long_key is not None:
                    self._slabs.long_keys[block.key.probe] = block.long_key
                block.is_written = True
        if len(written.good) == 1 and written.good[0].count == run.count:
            return
        left = {at for at, block in enumerate(new) if not block.is_written}
        if written.bad and self._slabs.may_leave_out(slab, len(written.bad), any_good=bool(written.good)):
            left.difference_update(written.bad)
        for part in runs_of(sorted(left)):
            self._slabs.allocator.release(Run(run.start + part.start, part.count))

    def _write_singly(self, slab: Slab, run: Run, new: list[_NewBlock]) -> tuple[list[Run], list[int]]:
        """Which blocks of a run can be written, and which the disk fails to write."""
        good, bad = list[int](), list[int]()
        for at, block in enumerate(new):
            try:
                if slab.file.write(run.first + at, [block.view]):
                    good.append(at)
            except OSError:
                bad.append(at)
        return runs_of(good), bad

    def _sync(self, slabs: dict[int, Slab], errors: list[OSError]) -> None:
        for slab in slabs.values():
            try:
                slab.file.sync()
            except OSError as exc:
                errors.append(exc)
                self._slabs.lose(slab, exc)  # what the kernel has dropped may be any block of it

    def _make_room(self, count: int, before_ns: int, errors: list[OSError]) -> bool:
        """Makes a new slab, or else evicts blocks that were used by ``before_ns`` for the last time.

        Returns whether that helped.
        """
        if self._growth.grow(errors):
            return True
        with self._slabs.lock:
            runs = self._slabs.allocator.evict(self._slabs.allocator.grain_of(count), before_ns)
            for run in runs:
                self._slabs.evict(run)
            slabs = self._slabs.pin(run.slab for run in runs)
        try:
            self._slabs.clear(slabs, runs)
        finally:
            self._slabs.unpin(slabs)
        return bool(runs)

    # ---------------------------------------------------------------------------------------------------- reading

    def _read_run(
        self,
        slabs: dict[int, Slab],
        wanted: Sequence[tuple[int, int, bytes]],
        hashed: Sequence[HashedKey],
        blocks: Sequence[memoryview],
        answers: list[bool],
        errors: list[OSError],
    ) -> None:
        slab, first = slabs[wanted[0][0] // SLAB_STRIDE], wanted[0][0] % SLAB_STRIDE
        views = [self._bytes(blocks[at]) for _, at, _ in wanted]
        failed: dict[int, OSError | None] = {}
        try:
            whole = slab.file.read(first, views)
        except OSError as exc:
            whole = len(wanted)
            if len(wanted) == 1:
                failed[0] = exc
            for index, view in enumerate(views) if len(wanted) > 1 else ():
                try:
                    slab.file.read(first + index, [view])
                except OSError as single:
                    failed[index] = single
        for index, ((slot, at, seal), view) in enumerate(zip(wanted, views, strict=True)):
            error = failed.get(index)
            if error is None and index < whole and self._layout.seal(hashed[at].hash64, view) == seal:
                answers[at] = True
                continue
            if error is not None:
                errors.append(error)
            answers[at] = self._judge(slab, slot, hashed[at], view, seal, error)

    def _judge(
        self, slab: Slab, slot: int, key: HashedKey, view: memoryview, seal: bytes, error: OSError | None
    ) -> bool:
        """A block did not verify, or could not be read. Finds out why, and whether a second read succeeds."""
        index = slot % SLAB_STRIDE
        with self._slabs.lock:
            entry = bytes(slab.entry(index))
        if slab.is_dropped or entry[:SEAL_BYTES] != seal or entry[PROBE_AT:] != key.probe:
            return False  # evicted meanwhile
        if error is not None and error.errno != errno.EIO:
            return False
        try:
            # Memory, bus or a passing fault may be to blame. Only a block that is wrong twice is wrong, and the second
            # read takes another way.
            for _ in range(_JUDGED_AT_MOST):
                if slab.file.read_buffered(index, view) and self._layout.seal(key.hash64, view) == seal:
                    return True
                if slab.is_own:
                    break
                if (now := slab.file.read_entries(index, 1)) != entry:
                    self._slabs.apply(slab, index, now)
                    return False
                # A neighbour may have evicted the block and written the same one again, within a second: another entry
                # that is equal. Then the next read finds it.
        except OSError as exc:
            error = exc
        with self._slabs.lock:
            if self._slabs.open.get(slab.number) is not slab or slab.entry(index) != entry:
                return False
            if not self._slabs.index.remove(hash_in(entry), slot):
                return False
            self._slabs.num_corrupt += 1
            self._slabs.note_lost(entry, "corrupt")
            slab.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES] = EMPTY_ENTRY
            if not slab.is_own:
                return False  # its own process will find out; here it is gone until its page changes
            run = Run(slot, 1)
            self._slabs.allocator.hold(run)
            if error is not None and self._slabs.may_leave_out(slab, 1, any_good=True):
                return False
            slabs = self._slabs.pin([slab.number])
        try:
            self._slabs.clear(slabs, [run])
        finally:
            self._slabs.unpin(slabs)
        return False

    # ---------------------------------------------------------------------------------------------------- helpers

    def _bytes(self, block: memoryview) -> memoryview:
        size = self._layout.block_bytes
        assert block.nbytes == size, f"a block of {block.nbytes} bytes for a store of {size}"
        return block if block.ndim == 1 and block.format == "B" else block.cast("B")

    def _raise_unless_any(self, answers: Sequence[bool], errors: Sequence[OSError]) -> None:
        if any(answers) or not answers:
            return
        if errors:
            raise StoreError(f"The store at {self._root} fails: {errors[0]}") from errors[0]
        if not os.path.isdir(self._root):
            raise StoreError(f"The store's directory {self._root} is gone.")
