# SPDX-License-Identifier: Apache-2.0
"""Blocks in fixed slots of large preallocated files: the local disk at its own speed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from kvoffload.base import OffloadKey
from kvoffload.cpu.memory_limits import memory_file_system
from kvoffload.errors import ConfigError, reason_of
from kvoffload.tiering.stores.base import LossCause, StoreStats
from kvoffload.tiering.stores.direct_io import BLOCK_ERRORS, NO_SPACE, REFUSED
from kvoffload.tiering.stores.disk.allocator import SLAB_STRIDE, Run, runs_of
from kvoffload.tiering.stores.disk.directory import SlabDirectory
from kvoffload.tiering.stores.disk.file import check_preallocation
from kvoffload.tiering.stores.disk.format import (
    EMPTY_ENTRY,
    ENTRY_BYTES,
    LONGEST_KEY,
    PROBE_AT,
    HashedKey,
    SlabFormat,
)
from kvoffload.tiering.stores.disk.open_slab import BusyRun, FoundBlock, NewBlock, NewRun, Slab
from kvoffload.tiering.stores.disk.quota import Quota
from kvoffload.tiering.stores.disk.slabs import Slabs
from kvoffload.tiering.stores.disk.upkeep import Upkeep
from kvoffload.tiering.stores.root import RootedStore, directory_of
from kvoffload.tiering.stores.seal import SEAL_BYTES

_BESIDE_BYTES = 1 << 20
"""Smallest block whose checksum is computed in parallel with its write to a disk."""
_LOADING_S = 0.05
"""Seconds that one step of a scan waits while the store is still loading."""
_JUDGED_AT_MOST = 4
"""Maximum number of reads of a neighbour's block that does not verify while its entry stays the same."""


@dataclass(slots=True, eq=False)
class _ReadBatch:
    """The blocks of a read, and their outcomes so far."""

    keys: Sequence[HashedKey]
    blocks: Sequence[memoryview]
    answers: list[bool]
    errors: list[OSError] = field(default_factory=list)


class DiskStore(RootedStore):
    """Blocks of ``block_bytes`` in slots of slab files under ``root`` (``format`` has the layout).

    No file is created, renamed or deleted per block. Neighbouring slots move in one call, directly from and to the
    caller's memory. A checksum bound to key, namespace and block size is verified on every read. A block that fails it
    is a miss: it was overwritten meanwhile, torn by a crash, or damaged. With a ``secret`` the checksum is a message
    authentication code, so that nobody else can create a block that is served.

    ``max_bytes`` limits the slabs of all namespaces and processes of the root, because no slab is created beyond it.
    After that, the least recently used blocks are overwritten, in an order that survives restarts. Slabs of namespaces
    that no process uses are removed first. Without ``max_bytes`` the store uses four fifths of the disk.

    Several processes of one host may share a root; its file system must support locks. Each process writes to its own
    slabs, which the kernel unlocks when it dies, and reads all slabs of its namespace. A neighbour's new block is found
    within a second. Slabs of dead processes are adopted with their blocks. No process waits for another's lock.

    On a memory file system (a tmpfs such as ``/dev/shm``) the store is a pool of memory that all processes of the host
    share, and a slab is created only if there is enough memory. ``quota.check_memory`` checks in advance whether
    ``max_bytes`` fit.

    Only this user may read the files under the root, regardless of the umask. With ``mode="group"`` the root's group
    may also read and write. Links under the root are never followed, and a root of another user is rejected.

    Any number of threads may call it. One lock guards the state; it is never held during I/O.
    """

    _tier_type = "disk"
    _needs_locks = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        block_bytes: int,
        namespace: str = "",
        max_bytes: int | None = None,
        *,
        mode: Literal["private", "group"] = "private",
        secret: bytes | None = None,
    ) -> None:
        self._layout = layout = SlabFormat(directory_of(namespace, secret), block_bytes, secret)
        super().__init__(root, block_bytes, max_bytes, layout.slab_bytes(1), mode)
        try:
            check_preallocation(self._root, self._access)
            self._directory = SlabDirectory(self._root, layout, self._access)
        except OSError as exc:
            raise ConfigError(
                f"The store cannot use {self._root}: {reason_of(exc)}; choose another directory."
            ) from exc
        self._slabs = Slabs(self._root, layout)
        self.resident = self._slabs.resident
        self._quota = Quota(self._directory, self._slabs, layout, max_bytes)
        try:
            self._upkeep = Upkeep(self._directory, self._slabs, self._quota)
        except BaseException:  # nothing else would close the open, locked files
            self._slabs.close()
            self._directory.close()
            raise
        self._beside: ThreadPoolExecutor | None = None
        is_beside = block_bytes >= _BESIDE_BYTES and not layout.sealer.changes_blocks
        if is_beside and memory_file_system(self._root) is None:
            self._beside = ThreadPoolExecutor(self.requests_in_flight, "kvoffload-disk-checksums")

    def __repr__(self) -> str:
        return (
            f"DiskStore({self._root!r}, {self._layout.directory!r}, block_bytes={self._layout.block_bytes}, "
            f"slabs={len(self._slabs.open)}, blocks={len(self._slabs)})"
        )

    # ------------------------------------------------------------------------------------------------ BlockStore

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self._slabs.contains(self._hashed(keys))

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        hashed = self._hashed(keys)
        is_here, stamps_ns = self._slabs.use(hashed)
        new: dict[bytes, NewBlock] = {}
        for name, key, here, block, stamp_ns in zip(keys, hashed, is_here, blocks, stamps_ns, strict=True):
            if not here and key.probe not in new:  # if a key is given twice, the first block is written
                long_key = name if len(name) > LONGEST_KEY else None
                new[key.probe] = NewBlock(key, self._bytes(block), stamp_ns, long_key)
        errors = list[OSError]()
        self._look_at_disk()
        self._write_new(list(new.values()), stamps_ns.start - 1, errors)
        answers = [here or new[key.probe].is_written for key, here in zip(hashed, is_here, strict=True)]
        return self._outcomes(answers, errors, is_here)

    def read_into(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        batch = _ReadBatch(self._hashed(keys), blocks, [False] * len(keys))
        found = self._read_found(batch, range(len(keys)))
        if failed := [at for at in found if not batch.answers[at]]:
            # The slab of another process may contain another copy of a block.
            self._read_found(batch, failed)
        return self._outcomes(batch.answers, batch.errors) if found else batch.answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        self._clear(self._slabs.discard(self._hashed(keys)), [])

    def close(self) -> None:
        self._upkeep.close()
        if self._beside is not None:
            self._beside.shutdown()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        while not self._upkeep.is_loaded.wait(_LOADING_S):
            yield ()
        yield from self._slabs.keys()

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._slabs.touch(self._hashed(keys)[::-1])

    def retire(self) -> None:
        self._quota.is_retired = True

    def take_lost(self) -> dict[OffloadKey, LossCause]:
        return self._slabs.take_lost()

    def stats(self) -> StoreStats:
        used_bytes, free_bytes = len(self._slabs) * self._layout.block_bytes, self._free_bytes
        if free_bytes is not None:
            free_bytes += self._slabs.num_free * self._layout.block_bytes  # slabs have their space already
        num_corrupt, num_evicted = self._slabs.num_corrupt, self._slabs.num_evicted
        return StoreStats(used_bytes, num_corrupt, num_evicted, self._max_bytes, free_bytes)

    def drop_plain(self) -> None:
        self._quota.drops_plain = True
        with suppress(OSError):
            self._quota.drop_plain()  # otherwise the upkeep does it

    def refresh(self) -> None:
        """Publish our changes and read those of other processes. The store's thread does so twice a second; a caller
        who cannot wait may call this."""
        self._upkeep.refresh()

    def check_invariants(self) -> None:
        """Recompute the state from the tables. Raises ``AssertionError`` if it differs. For tests, between calls."""
        with self._upkeep.lock:  # the upkeep's own I/O is not part of a call, but also keeps slabs open
            self._slabs.check_invariants()

    # ---------------------------------------------------------------------------------------------------- writing

    def _write_new(self, new: list[NewBlock], before_ns: int, errors: list[OSError]) -> None:
        """Write blocks to free slots. Never evicts a block that was used after ``before_ns``."""
        while new:
            runs = self._slabs.take(new)
            if not runs and not self._make_room(len(new), before_ns, errors):
                return
            try:
                for run in runs:
                    self._write_run(run, errors)
            finally:
                self._slabs.record(runs)
            new = new[sum(run.slots.count for run in runs) :]

    def _write_run(self, run: NewRun, errors: list[OSError]) -> None:
        """Write blocks: payloads first, then their entries, so that a process that dies in between leaves empty slots.
        If the table fails, its slab is dropped, unless the file system rejects all writes."""
        slab, first = run.slab, run.slots.first
        sealing = self._begin_sealing(run.blocks)
        good = list[Run]()
        try:
            if whole := slab.file.write(first, [block.payload for block in run.blocks]):
                good = [Run(0, whole)]
        except OSError as exc:
            errors.append(exc)
            if exc.errno in BLOCK_ERRORS or exc.errno in NO_SPACE:
                good, bad = self._write_singly(run)
                run.bad = bad if exc.errno in BLOCK_ERRORS else []
        if sealing is not None:
            sealing.result()
        run.entries = b"".join([self._layout.entry(block.key, block.seal, block.stamp_ns) for block in run.blocks])
        try:
            for part in good:
                if self._layout.tail_bytes:
                    tails = b"".join([block.seal[SEAL_BYTES:] for block in run.blocks[part.start : part.stop]])
                    slab.file.write_tails(first + part.start, tails)
                entries = run.entries[part.start * ENTRY_BYTES : part.stop * ENTRY_BYTES]
                slab.file.write_entries(first + part.start, entries)
        except OSError as exc:
            errors.append(exc)
            good = []  # entries of some blocks may be on the disk: they fit until their slots are overwritten
            if exc.errno not in REFUSED:
                self._slabs.lose(slab, exc)
        run.good = good

    def _begin_sealing(self, new: Sequence[NewBlock]) -> Future[None] | None:
        """Seal blocks in another thread, or at once and return ``None``."""
        if self._beside is not None:
            try:
                return self._beside.submit(self._seal, new)
            except RuntimeError:
                pass  # the store is closed, or the interpreter is ending
        # Before the write, because sealing brings the payloads into the processor's caches, from which the kernel reads
        # them.
        self._seal(new)
        return None

    def _seal(self, new: Sequence[NewBlock]) -> None:
        for block in new:
            block.payload, block.seal = self._layout.sealer.seal(block.key.probe, block.payload)

    def _write_singly(self, run: NewRun) -> tuple[list[Run], list[int]]:
        """Write the blocks of a run one by one. Returns the blocks that were written, and the ones that the disk failed
        to write."""
        good, bad = list[int](), list[int]()
        for at, block in enumerate(run.blocks):
            try:
                if run.slab.file.write(run.slots.first + at, [block.payload]):
                    good.append(at)
            except OSError:
                bad.append(at)
        return runs_of(good), bad

    def _make_room(self, count: int, before_ns: int, errors: list[OSError]) -> bool:
        """Create a slab, or else evict blocks whose last use was by ``before_ns``. Returns whether that helped."""
        if self._quota.grow(errors):
            return True
        # If this loses a slab, the write ends, because the next slab may fail in the same way.
        return self._clear(self._slabs.evict(count, before_ns), errors)

    def _clear(self, runs: Sequence[BusyRun], errors: list[OSError]) -> bool:
        """Empty the entries of slots on the disk, then make the slots free. In the opposite order, a restart or a
        neighbour could find the old entry beside new bytes, and read them in vain. A file system that is read-only, or
        full with copy-on-write, rejects the empty entry. The old entry then stays, and its seal does not fit the new
        bytes. Returns whether any slots became free. Adds the reason to ``errors`` if a slab is lost."""
        for run in runs:
            try:
                run.slab.file.write_entries(run.slots.first, EMPTY_ENTRY * run.slots.count)
            except OSError as exc:
                if exc.errno not in REFUSED:
                    errors.append(exc)
                    self._slabs.lose(run.slab, exc)
        self._slabs.release(runs)
        return any(not run.slab.is_dropped for run in runs)

    # ---------------------------------------------------------------------------------------------------- reading

    def _read_found(self, batch: _ReadBatch, asked: Sequence[int]) -> list[int]:
        """Read the blocks in ``asked`` that are here, and return these."""
        found, slabs = self._slabs.find(batch.keys, asked)
        try:
            begin = 0
            for run in runs_of(block.slot for block in found):
                self._read_run(batch, slabs[run.start // SLAB_STRIDE], found[begin : begin + run.count])
                begin += run.count
        finally:
            self._slabs.unpin(slabs.values())
        return [block.at for block in found]

    def _read_run(self, batch: _ReadBatch, slab: Slab, found: Sequence[FoundBlock]) -> None:
        """Read and verify blocks in neighbouring slots of a slab."""
        first, views = found[0].slot % SLAB_STRIDE, [self._bytes(batch.blocks[block.at]) for block in found]
        failed: dict[int, OSError] = {}
        tails = [b""] * len(found)
        try:
            tails = self._tails(slab, first, len(found))
            whole = slab.file.read(first, views)
        except OSError as exc:
            whole = len(found)
            if len(found) == 1:
                failed[0] = exc
            else:
                failed = self._read_singly(slab, first, views)
        for index, (block, view, tail) in enumerate(zip(found, views, tails, strict=True)):
            key, error = batch.keys[block.at], failed.get(index)
            if error is not None:
                batch.errors.append(error)
            elif index < whole and self._layout.sealer.unseal(block.seal + tail, key.probe, view, view):
                batch.answers[block.at] = True
                continue
            batch.answers[block.at] = self._judge(slab, first + index, key, view, block.seal, error)

    def _tails(self, slab: Slab, first: int, count: int) -> list[bytes]:
        """Return the tails of the seals of neighbouring slots; empty if the entries contain whole seals. Raises
        ``OSError``."""
        if not (size := self._layout.tail_bytes):
            return [b""] * count
        tails = bytes(slab.file.read_tails(first, count))
        return [tails[at : at + size] for at in range(0, len(tails), size)]

    @staticmethod
    def _read_singly(slab: Slab, first: int, views: Sequence[memoryview]) -> dict[int, OSError]:
        """Read blocks in neighbouring slots one by one. Returns the errors of blocks that the disk could not read."""
        failed = dict[int, OSError]()
        for index, view in enumerate(views):
            try:
                slab.file.read(first + index, [view])
            except OSError as exc:
                failed[index] = exc
        return failed

    def _judge(
        self, slab: Slab, index: int, key: HashedKey, view: memoryview, seal: bytes, error: OSError | None
    ) -> bool:
        """Examine a block that did not verify or could not be read, and return whether a second read succeeds."""
        entry = self._slabs.entry(slab, index)
        if slab.is_dropped or entry[:SEAL_BYTES] != seal or entry[PROBE_AT:] != key.probe:
            return False  # evicted meanwhile
        if error is not None and error.errno not in BLOCK_ERRORS:
            return False
        try:
            # Memory, the bus or a temporary fault may be the cause. So a block counts as bad only after a second
            # failure, and the second read uses the page cache.
            for _ in range(_JUDGED_AT_MOST):
                (tail,) = self._tails(slab, index, 1)
                is_whole = slab.file.read_buffered(index, view)
                if is_whole and self._layout.sealer.unseal(seal + tail, key.probe, view, view):
                    return True
                if slab.is_own:
                    break
                if (now := slab.file.read_entries(index, 1)) != entry:
                    self._slabs.correct(slab, index, entry, now)
                    return False
                # A neighbour may have evicted the block and written it again within a second, with an equal entry. Then
                # the next read finds it.
        except OSError as exc:
            error = exc
        self._clear(self._slabs.remove_corrupt(slab, index, entry, is_unreadable=error is not None), [])
        return False

    # ---------------------------------------------------------------------------------------------------- helpers

    def _hashed(self, keys: Sequence[OffloadKey]) -> list[HashedKey]:
        return [self._layout.hashed(key) for key in keys]
