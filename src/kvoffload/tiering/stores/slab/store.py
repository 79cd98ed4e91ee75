# SPDX-License-Identifier: Apache-2.0
"""Blocks in fixed slots of large preallocated files: the local disk at its own speed."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvoffload.base import OffloadKey
from kvoffload.errors import ConfigError, StoreError
from kvoffload.tiering.stores.base import BlockStore, StoreStats
from kvoffload.tiering.stores.root import CONTROL_DIR, check_root, directory_of
from kvoffload.tiering.stores.slab.allocator import SLAB_STRIDE, Allocator, Run, runs_of
from kvoffload.tiering.stores.slab.directory import SlabDirectory
from kvoffload.tiering.stores.slab.file import SlabFile, SlabUnfit
from kvoffload.tiering.stores.slab.format import (
    EMPTY_ENTRY,
    ENTRY,
    ENTRY_BYTES,
    PAGE_SLOTS,
    PROBE_AT,
    SEAL_BYTES,
    HashedKey,
    SlabFormat,
    key_in,
)
from kvoffload.tiering.stores.slab.index import ResidentKeys, SlotIndex
from kvoffload.tiering.stores.slab.sharing import PostedRequest, requests_of_others

__all__ = ["SlabStore"]

_log = logging.getLogger(__name__)

_POLL_S = 0.4
"""How often neighbours are told of our new blocks, and asked for theirs: both within a second."""
_USES_S = 10.0
"""How often times of use are written down."""
_GROW_S = 1.0
"""A quota or disk that had no room for a slab is not asked again for so long."""
_LOADED_AT_ONCE = 1 << 18
"""Slots whose tables are read before the constructor returns. The rest follows in the store's own thread."""
_WANT_S = 10.0
"""For so long after it found no room, a process asks others for a slab."""
_GIVEN_S = 5.0
"""A slab that was given away is left to others for so long."""
_MAX_EVICTED = 1 << 18
_SCAN_BATCH = 1024
_LAST_SLAB = (1 << 12) - 1
_NS = 1_000_000_000


@dataclass(slots=True, eq=False)
class _Slab:
    """A slab that is open. A slot is in the index if its entry here is not empty.

    All but ``file`` belongs to the holder of the store's lock.
    """

    number: int
    file: SlabFile
    entries: bytearray
    changes: npt.NDArray[np.uint32]
    """Of our slab: as last written. Of a neighbour's: as last seen."""
    used_ns: npt.NDArray[np.int64] | None = None
    """Times of use, shared with the allocator. ``None``: a neighbour's slab."""
    changed_pages: set[int] = field(default_factory=set)
    """Of our slab: pages with changes that neighbours do not know of yet."""
    uses: dict[int, int] = field(default_factory=dict)
    """Of a neighbour's slab: slots that we have used, and when (seconds)."""
    given_until_s: float = 0.0
    """Of a slab that we gave away: until when it is others' to take."""
    num_bad: int = 0
    """Slots that are out of use because the disk failed to read or write them."""
    users: int = 0
    """Calls that do I/O on ``file`` just now. It is closed by the last of them."""
    is_dropped: bool = False

    @property
    def is_own(self) -> bool:
        return self.used_ns is not None

    def entry(self, index: int) -> bytearray:
        return self.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]

    def view(self) -> npt.NDArray[np.void]:
        return np.frombuffer(self.entries, ENTRY)


@dataclass(slots=True, eq=False)
class _NewBlock:
    """A block of a batch that is to be written."""

    key: HashedKey
    view: memoryview
    stamp_ns: int
    is_written: bool = False


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
    a second. Slabs of the dead are adopted with their blocks. Nobody waits for anybody.

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
        self._durable = durability == "fsync"
        access = check_root(self._root, mode)
        if os.path.lexists(os.path.join(self._root, CONTROL_DIR, "ledger")):
            raise ConfigError(f"{self._root} belongs to an 'fs' tier; choose another directory.")
        try:
            self._max_bytes = max_bytes
            self._directory = SlabDirectory(self._root, layout, max_bytes, access)
        except OSError as exc:
            raise ConfigError(f"The store cannot use {self._root}: {exc}; choose another directory.") from exc
        self._lock = threading.Lock()
        self._growth = threading.Lock()
        self._no_growth_before_s = 0.0
        self._growth_error: OSError | None = None
        self._identity = layout.digest.hex()[:16]
        self._request = PostedRequest(self._root, self._identity, access)
        self._answered: dict[str, tuple[int, float]] = {}
        """Whom we gave a slab: how many it had then, and until when it has time to take it."""
        self._wants_until_s = 0.0
        self._growing = ""
        """The name of a slab that is being made."""
        self._upkeep = threading.Lock()
        """Held by whoever polls or closes. It may be held during I/O: calls of the store never take it."""
        self._is_closed = False
        # Guarded by _lock.
        self._index = SlotIndex()
        self.resident = ResidentKeys(self._index, self._lock, layout.hashed, self._keys)
        self._allocator = Allocator()
        self._slabs: dict[int, _Slab] = {}
        self._by_name: dict[str, _Slab] = {}
        self._unfit: set[str] = set()
        self._last_number = 0
        self._last_stamp_ns = 0
        self._evicted: list[OffloadKey] = []
        self._num_evicted = 0
        self._num_corrupt = 0

        self._is_loaded = threading.Event()
        self._stop = threading.Event()
        with self._upkeep:
            self._load(at_once=True)
        self._thread = threading.Thread(target=self._keep_up, name="kvoffload-slab-upkeep", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return (
            f"SlabStore({self._root!r}, {self._layout.directory!r}, block_bytes={self._layout.block_bytes}, "
            f"slabs={len(self._slabs)}, blocks={len(self._index)})"
        )

    # ------------------------------------------------------------------------------------------------ BlockStore

    def contains(self, keys: Sequence[OffloadKey]) -> list[bool]:
        hashed = [self._layout.hashed(key) for key in keys]
        with self._lock:
            return [self._index.find(key) >= 0 for key in hashed]

    def write(self, keys: Sequence[OffloadKey], blocks: Sequence[memoryview]) -> list[bool]:
        hashed = [self._layout.hashed(key) for key in keys]
        new: dict[bytes, _NewBlock] = {}
        with self._lock:
            stamps_ns = self._stamps(len(hashed))
            slots = [self._index.find(key) for key in hashed]
            self._use(slots, stamps_ns)
            for at, slot in enumerate(slots):
                if slot < 0 and hashed[at].probe not in new:  # of a key that is given twice, the first block is written
                    new[hashed[at].probe] = _NewBlock(hashed[at], self._bytes(blocks[at]), stamps_ns[at])
            runs, slabs = self._take(len(new))
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
        with self._lock:
            slots = [self._index.find(hashed[at]) for at in asked]
            self._use(slots, self._stamps(len(slots)))
            for at, slot in zip(asked, slots, strict=True):
                if slot >= 0:
                    offset = slot % SLAB_STRIDE * ENTRY_BYTES
                    seal = bytes(self._slabs[slot // SLAB_STRIDE].entries[offset : offset + SEAL_BYTES])
                    wanted.append((slot, at, seal))
            slabs = self._begin([slot // SLAB_STRIDE for slot, _, _ in wanted])
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
            self._end(slabs)
        return [at for _, at, _ in wanted]

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        hashed = [self._layout.hashed(key) for key in keys]
        removed = list[int]()
        with self._lock:
            for key in hashed:
                for slot in list(self._index.find_all(key)):
                    self._forget(slot)
                    removed.append(slot)
            slabs = self._begin(slot // SLAB_STRIDE for slot in removed)
            runs = [run for run in runs_of(sorted(removed)) if slabs[run.slab].is_own]
        try:
            self._clear(slabs, runs)
        finally:
            self._end(slabs)

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._upkeep:
            if self._is_closed:
                return
            self._is_closed = True
            self._flush_uses()
            self._flush_changes()
            with self._lock:
                for slab in list(self._slabs.values()):
                    self._drop(slab)
            self._request.withdraw()
            self._directory.close()
        self._is_loaded.set()

    def scan(self) -> Iterator[Sequence[OffloadKey]]:
        self._is_loaded.wait()
        yield from self._keys()

    def _keys(self) -> Iterator[Sequence[OffloadKey]]:
        """The keys that are known by now, in batches."""
        with self._lock:
            numbers = list(self._slabs)
        for number in numbers:
            first = 0
            while True:
                keys = list[OffloadKey]()
                with self._lock:
                    slab = self._slabs.get(number)
                    if slab is None or first >= slab.file.num_slots:
                        break
                    for index in range(first, min(first + _SCAN_BATCH, slab.file.num_slots)):
                        entry = slab.entry(index)
                        key = key_in(entry)
                        # Of several slots with one block, the one that is found counts.
                        if key is not None and self._index.find(_hashed_in(entry)) == number * SLAB_STRIDE + index:
                            keys.append(key)
                first += _SCAN_BATCH
                if keys:
                    yield keys

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        hashed = [self._layout.hashed(key) for key in reversed(keys)]
        with self._lock:
            self._use([self._index.find(key) for key in hashed], self._stamps(len(hashed)))

    def take_evicted(self) -> list[OffloadKey]:
        if not self._evicted:
            return []
        with self._lock:
            evicted, self._evicted = self._evicted, []
            return evicted

    def stats(self) -> StoreStats:
        used_bytes = len(self._index) * self._layout.block_bytes
        return StoreStats(used_bytes, self._num_corrupt, self._num_evicted, self._max_bytes)

    # ---------------------------------------------------------------------------------------------------- writing

    def _write_new(
        self, new: list[_NewBlock], runs: list[Run], slabs: dict[int, _Slab], before_ns: int, errors: list[OSError]
    ) -> None:
        """Writes blocks to the free slots ``runs`` of ``slabs``, which are begun, and to more if need be.

        Evicts nothing that was used after ``before_ns``.
        """
        begin = 0
        while True:
            try:
                for run in runs:
                    self._write_run(slabs[run.slab], run, new[begin : begin + run.count], errors)
                    begin += run.count
                if self._durable:
                    self._sync(slabs, new, errors)
            finally:
                self._end(slabs)
            if begin == len(new) or (not runs and not self._make_room(len(new) - begin, before_ns, errors)):
                return
            with self._lock:
                runs, slabs = self._take(len(new) - begin)

    def _write_run(self, slab: _Slab, run: Run, new: list[_NewBlock], errors: list[OSError]) -> None:
        """Writes ``run.count`` blocks: payloads first, then their entries. So a process that dies in between leaves
        empty slots."""
        first, bad = run.first, list[int]()
        try:
            whole = slab.file.write(first, [block.view for block in new])
            good = [Run(0, whole)] if whole else []
        except OSError as exc:
            errors.append(exc)
            good, bad = self._write_singly(slab, run, new) if exc.errno == errno.EIO else ([], [])
        entries = b"".join([self._layout.entry(block.key, block.view, block.stamp_ns) for block in new])
        try:
            for part in good:
                content = entries[part.start * ENTRY_BYTES : part.stop * ENTRY_BYTES]
                slab.file.write_entries(first + part.start, content)
        except OSError as exc:
            errors.append(exc)
            self._lose(slab, exc)
            return
        with self._lock:
            used_ns = slab.used_ns
            if used_ns is None or slab.is_dropped:
                return
            for part in good:
                begin, end = part.start, part.stop
                slab.entries[(first + begin) * ENTRY_BYTES : (first + end) * ENTRY_BYTES] = entries[
                    begin * ENTRY_BYTES : end * ENTRY_BYTES
                ]
                slab.changed_pages.update(range((first + begin) // PAGE_SLOTS, (first + end - 1) // PAGE_SLOTS + 1))
                for at in range(begin, end):
                    block = new[at]
                    self._index.add(block.key.hash64 & 0xFFFF_FFFF, run.start + at)
                    used_ns[first + at] = block.stamp_ns
                    block.is_written = True
            if not bad and good and good[0].count == run.count:
                return
            left = {at for at, block in enumerate(new) if not block.is_written}
            if bad and self._may_leave_out(slab, len(bad), any_good=bool(good)):
                left.difference_update(bad)
            for part in runs_of(sorted(left)):
                self._allocator.release(Run(run.start + part.start, part.count))

    def _write_singly(self, slab: _Slab, run: Run, new: list[_NewBlock]) -> tuple[list[Run], list[int]]:
        """Which blocks of a run can be written, and which the disk fails to write."""
        good, bad = list[int](), list[int]()
        for at, block in enumerate(new):
            try:
                if slab.file.write(run.first + at, [block.view]):
                    good.append(at)
            except OSError:
                bad.append(at)
        return runs_of(good), bad

    def _sync(self, slabs: dict[int, _Slab], new: list[_NewBlock], errors: list[OSError]) -> None:
        for slab in slabs.values():
            try:
                slab.file.sync()
            except OSError as exc:
                errors.append(exc)
                self._lose(slab, exc)  # what the kernel has dropped may be any block of it
                for block in new:
                    block.is_written = False

    def _make_room(self, count: int, before_ns: int, errors: list[OSError]) -> bool:
        """Makes a new slab, or else evicts blocks that were used by ``before_ns`` for the last time.

        Returns whether that helped.
        """
        if self._grow(errors):
            return True
        with self._lock:
            runs = self._allocator.evict(self._allocator.grain_of(count), before_ns)
            for run in runs:
                self._evict(run)
            slabs = self._begin(run.slab for run in runs)
        try:
            self._clear(slabs, runs)
        finally:
            self._end(slabs)
        return bool(runs)

    def _grow(self, errors: list[OSError]) -> bool:
        """Whether there are free slots now. One thread makes a slab; others wait for it, but not if it hangs."""
        if time.monotonic() < self._no_growth_before_s:
            if self._growth_error is not None and not self._allocator.num_slots:
                errors.append(self._growth_error)
            return False
        if not self._growth.acquire(timeout=_GROW_S):
            self._no_growth_before_s = time.monotonic() + _GROW_S
            return False
        try:
            if self._allocator.free.num_slots:
                return True
            # The store's thread must not take the new slab for a neighbour's, which it sees before we have it.
            self._growing = secrets.token_hex(8)
            file = self._directory.grow(self._growing)
            self._growth_error = None
            if file is not None:
                self._register(file, is_own=True)
                return True
            self._wants_until_s = time.monotonic() + _WANT_S
        except OSError as exc:
            self._growth_error = exc
            if not self._allocator.num_slots:
                errors.append(exc)
        finally:
            self._growing = ""
            self._growth.release()
        self._no_growth_before_s = time.monotonic() + _GROW_S
        return False

    def _clear(self, slabs: dict[int, _Slab], runs: Sequence[Run]) -> None:
        """Empties the entries of busy slots on the disk, and makes the slots free. In this order: nobody may write to a
        slot before its old entry is gone, or a crash or a neighbour would take the new bytes for the old block's."""
        for run in runs:
            slab = slabs[run.slab]
            try:
                slab.file.write_entries(run.first, EMPTY_ENTRY * run.count)
            except OSError as exc:
                self._lose(slab, exc)
        with self._lock:
            for run in runs:
                slab = slabs[run.slab]
                if slab.is_own and not slab.is_dropped:
                    self._allocator.release(run)
                    slab.changed_pages.update(
                        range(run.first // PAGE_SLOTS, (run.first + run.count - 1) // PAGE_SLOTS + 1)
                    )

    # ---------------------------------------------------------------------------------------------------- reading

    def _read_run(
        self,
        slabs: dict[int, _Slab],
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
        self, slab: _Slab, slot: int, key: HashedKey, view: memoryview, seal: bytes, error: OSError | None
    ) -> bool:
        """A block did not verify, or could not be read. Finds out why, and whether a second read succeeds."""
        index = slot % SLAB_STRIDE
        with self._lock:
            entry = bytes(slab.entry(index))
        if slab.is_dropped or entry[:SEAL_BYTES] != seal or entry[PROBE_AT:] != key.probe:
            return False  # evicted meanwhile
        if error is not None and error.errno != errno.EIO:
            return False
        try:
            # Memory, bus or a passing fault may be to blame. Only a block that is wrong twice is wrong, and the second
            # read takes another way.
            if slab.file.read_buffered(index, view) and self._layout.seal(key.hash64, view) == seal:
                return True
            if not slab.is_own and (now := slab.file.read_entries(index, 1)) != entry:
                self._apply(slab, index, now)
                return False
        except OSError as exc:
            error = exc
        with self._lock:
            if self._slabs.get(slab.number) is not slab or slab.entry(index) != entry:
                return False
            if not self._index.remove(_hash_in(entry), slot):
                return False
            self._num_corrupt += 1
            self._note_gone(entry)
            slab.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES] = EMPTY_ENTRY
            if not slab.is_own:
                return False  # its own process will find out; here it is gone until its page changes
            run = Run(slot, 1)
            self._allocator.hold(run)
            if error is not None and self._may_leave_out(slab, 1, any_good=True):
                return False
            slabs = self._begin([slab.number])
        try:
            self._clear(slabs, [run])
        finally:
            self._end(slabs)
        return False

    # -------------------------------------------------------------------------------------------------- upkeep

    def refresh(self) -> None:
        """Publishes our changes and takes in those of other processes. The store's thread does so by itself, two times
        a second; a caller who cannot wait may as well."""
        with self._upkeep:
            if not self._is_closed:
                self._flush_changes()
                self._poll()

    def _keep_up(self) -> None:
        uses_at_s, said = time.monotonic() + _USES_S, ""
        while True:
            try:
                if not self._is_loaded.is_set():
                    with self._upkeep:
                        self._load(at_once=False)
                self.refresh()
                if time.monotonic() >= uses_at_s:
                    uses_at_s = time.monotonic() + _USES_S
                    with self._upkeep:
                        self._flush_uses()
                said = ""
            except Exception as exc:  # noqa: BLE001 - the thread must outlive whatever a broken disk does
                if str(exc) != said:
                    said = str(exc)
                    _log.warning("The store at %s: %s", self._root, exc)
            if self._stop.wait(_POLL_S):
                return

    def _load(self, *, at_once: bool) -> None:
        """Takes in the slabs that are there, the last used first. With ``at_once`` stops after a quarter million slots,
        so that a large store does not delay its engine."""
        num_slots = 0
        try:
            for seen in reversed(self._directory.slabs()):
                if self._stop.is_set():
                    return
                if self._is_unknown(seen.name):
                    if at_once and num_slots >= _LOADED_AT_ONCE:
                        return
                    num_slots += self._take_in(seen.name)
            self._shrink()
        except OSError as exc:
            _log.warning("The slabs at %s cannot be listed: %s", self._root, exc)
        self._is_loaded.set()

    def _is_unknown(self, name: str) -> bool:
        # In this order: a slab that is being made is registered before it is no longer being made.
        return name != self._growing and name not in self._by_name and name not in self._unfit

    def _take_in(self, name: str) -> int:
        """Opens a slab and learns its blocks. Returns how many slots it has."""
        try:
            file = self._directory.open_slab(name)
            is_own = file.try_lock()
            if not file.is_linked(self._directory.fd):
                file.close()
                return 0
            self._register(file, is_own)
            return file.num_slots
        except FileNotFoundError:
            pass  # removed meanwhile
        except SlabUnfit:
            self._unfit.add(name)
        except OSError as exc:
            _log.warning("The slab %s at %s is left out: %s", name, self._root, exc)
            self._unfit.add(name)
        return 0

    def _register(self, file: SlabFile, is_own: bool) -> None:
        """Takes over ``file``. Raises ``OSError`` if the table cannot be read."""
        try:
            changes = file.read_changes().copy()  # before the entries: a later change is seen again
            entries = file.read_entries(0, file.num_slots)
            uses = file.read_uses() if is_own else None
        except OSError:
            file.close()
            raise
        with self._lock:
            number = self._next_number()
            slab = _Slab(number, file, entries, changes)
            self._slabs[number] = slab
            self._by_name[file.name] = slab
            self._index.tables[number] = entries
            table = slab.view()
            held = np.flatnonzero(table["length"])
            self._index.add_many(table["hash"][held], held + number * SLAB_STRIDE)
            if uses is not None:
                self._own(slab, uses)

    def _own(self, slab: _Slab, uses: npt.NDArray[np.uint32]) -> None:
        """Gives a slab's slots to the allocator. With the lock held."""
        table = slab.view()
        is_held = table["length"] != 0
        # Not in the future: a damaged entry would stay for ever.
        latest_s = np.maximum(table["written_s"], uses).astype(np.int64)
        used_s = np.clip(latest_s, 1, self._stamps(1).start // _NS - 1)
        # Within a second, blocks of a run are taken for a prefix: its tail was used before its head.
        slab.used_ns = np.where(is_held, used_s * _NS + np.arange(len(used_s))[::-1], 0)
        self._allocator.add_slab(slab.number, slab.used_ns)

    def _poll(self) -> None:
        is_same = self._directory.check()
        with self._lock:
            slabs = list(self._slabs.values())
        for slab in slabs:
            if not is_same or not slab.file.is_linked(self._directory.fd):
                with self._lock:
                    self._drop(slab)
        if self._directory.fd < 0:
            return
        self._share()
        names = [seen.name for seen in self._directory.slabs()]
        self._unfit.intersection_update(names)
        for name in names:
            if self._is_unknown(name):
                self._take_in(name)
            elif (slab_here := self._by_name.get(name)) is not None and not slab_here.is_own:
                self._poll_neighbour(slab_here)

    def _share(self) -> None:
        """Asks for a slab if we lack room, and gives one to a process that asks and has fewer than we. Raises
        ``OSError``."""
        with self._lock:
            own = [slab for slab in self._slabs.values() if slab.used_ns is not None]
        now_s = time.monotonic()
        if now_s < self._wants_until_s:
            self._request.post(len(own))
        else:
            self._request.withdraw()
        self._answered = {process: given for process, given in self._answered.items() if now_s < given[1]}
        for theirs in requests_of_others(self._root, self._directory.access, self._request.process):
            has_been_given = self._answered.get(theirs.process, (-1, 0.0))[0] == theirs.num_slabs
            if has_been_given or len(own) <= theirs.num_slabs + 1:
                continue
            with self._lock:
                slab = min(own, key=lambda one: -1 if one.used_ns is None else int(one.used_ns.max()))
                own.remove(slab)
                if slab.users:
                    continue  # somebody writes to it just now: perhaps at the next poll
                self._answered[theirs.process] = theirs.num_slabs, now_s + _GIVEN_S
                if theirs.identity != self._identity:
                    self._drop(slab)
                    is_removed = True
                else:
                    self._allocator.drop_slab(slab.number)
                    slab.used_ns, is_removed = None, False
                    slab.given_until_s = now_s + _GIVEN_S
            if is_removed:
                self._directory.remove(slab.file.name)
            else:
                slab.file.write_changes(slab.changes + 1)  # also what was not told yet
                slab.file.unlock()

    def _poll_neighbour(self, slab: _Slab) -> None:
        try:
            if time.monotonic() >= slab.given_until_s and slab.file.try_lock():
                # Its process is gone, and it is ours.
                changes = slab.file.read_changes().copy()  # neighbours have seen these: ours must be larger
                self._apply(slab, 0, slab.file.read_entries(0, slab.file.num_slots))
                uses = slab.file.read_uses()
                with self._lock:
                    slab.changes = changes
                    self._own(slab, uses)
                return
            changes = slab.file.read_changes()
            for pages in runs_of(np.flatnonzero(changes != slab.changes).tolist()):
                first = pages.start * PAGE_SLOTS
                count = min(pages.count * PAGE_SLOTS, slab.file.num_slots - first)
                self._apply(slab, first, slab.file.read_entries(first, count))
            slab.changes = changes.copy()
        except OSError as exc:
            self._lose(slab, exc)

    def _apply(self, slab: _Slab, first: int, entries: bytes | bytearray) -> None:
        """A neighbour's entries from slot ``first`` on are ``entries`` now."""
        with self._lock:
            if slab.is_dropped:
                return
            offset = first * ENTRY_BYTES
            old = np.frombuffer(bytes(slab.entries[offset : offset + len(entries)]), np.uint64).reshape(-1, 8)
            new = np.frombuffer(bytes(entries), np.uint64).reshape(-1, 8)
            for index in np.flatnonzero((old != new).any(axis=1)).tolist():
                slot = slab.number * SLAB_STRIDE + first + index
                before = bytes(slab.entry(first + index))
                after = entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]
                is_gone = before[24] and self._index.remove(_hash_in(before), slot)
                slab.entries[(first + index) * ENTRY_BYTES : (first + index + 1) * ENTRY_BYTES] = after
                if after[24]:
                    self._index.add(_hash_in(after), slot)
                if is_gone:
                    self._note_gone(before)

    def _flush_changes(self) -> None:
        with self._lock:
            slabs = self._begin(slab.number for slab in self._slabs.values() if slab.changed_pages)
            for slab in slabs.values():
                slab.changes[list(slab.changed_pages)] += 1
                slab.changed_pages.clear()
        try:
            for slab in slabs.values():
                try:
                    slab.file.write_changes(slab.changes)
                except OSError as exc:
                    self._lose(slab, exc)
        finally:
            self._end(slabs)

    def _flush_uses(self) -> None:
        """Writes down when blocks were used, and learns when neighbours used ours. The later time counts."""
        with self._lock:
            slabs = self._begin(slab.number for slab in self._slabs.values() if slab.is_own or slab.uses)
        try:
            for slab in slabs.values():
                try:
                    on_disk = slab.file.read_uses()
                    with self._lock:
                        uses = self._merge_uses(slab, on_disk)
                    if (uses != on_disk).any():
                        slab.file.write_uses(uses)
                except OSError as exc:
                    self._lose(slab, exc)
        finally:
            self._end(slabs)

    def _merge_uses(self, slab: _Slab, on_disk: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        uses = on_disk.copy()
        if slab.used_ns is not None:
            is_held = self._allocator.is_held(slab.number)
            later = is_held & (on_disk.astype(np.int64) * _NS > slab.used_ns)
            slab.used_ns[later] = on_disk[later].astype(np.int64) * _NS
            uses[is_held] = np.minimum(slab.used_ns[is_held] // _NS, 0xFFFF_FFFF)
        elif slab.uses:
            at = list(slab.uses)
            uses[at] = np.maximum(uses[at], np.array(list(slab.uses.values()), np.uint32))
            slab.uses.clear()
        return uses

    def _shrink(self) -> None:
        """A quota that is smaller than at the last start: removes our slabs, the one with the oldest uses first."""
        while (excess := self._directory.excess_bytes()) > 0:
            with self._lock:
                own = [slab for slab in self._slabs.values() if slab.used_ns is not None]
                if not own:
                    return
                slab = min(own, key=lambda one: int(one.used_ns.max()) if one.used_ns is not None else 0)
                self._drop(slab)
            _log.info("The slab %s at %s is removed: %d bytes above the quota.", slab.file.name, self._root, excess)
            self._directory.remove(slab.file.name)

    # --------------------------------------------------------------------------------------- with the lock held

    def _stamps(self, count: int) -> range:
        """Times for ``count`` uses now, each later than all before."""
        first = max(self._last_stamp_ns + 1, time.time_ns())
        self._last_stamp_ns = first + count - 1
        return range(first, first + count)

    def _use(self, slots: Sequence[int], stamps_ns: range) -> None:
        """Records uses of those slots that are one (not -1)."""
        for slot, stamp_ns in zip(slots, stamps_ns, strict=True):
            if slot < 0:
                continue
            slab = self._slabs[slot // SLAB_STRIDE]
            if slab.used_ns is not None:
                slab.used_ns[slot % SLAB_STRIDE] = stamp_ns
            else:
                slab.uses[slot % SLAB_STRIDE] = stamp_ns // _NS

    def _take(self, count: int) -> tuple[list[Run], dict[int, _Slab]]:
        """Free slots, at most ``count``, and their slabs, which are begun."""
        runs = self._allocator.take(count) if count else []
        return runs, self._begin([run.slab for run in runs])

    def _begin(self, numbers: Iterator[int] | Sequence[int]) -> dict[int, _Slab]:
        """The slabs of a call that is about to do I/O. They stay open until ``_end``."""
        slabs = {number: self._slabs[number] for number in set(numbers)}
        for slab in slabs.values():
            slab.users += 1
        return slabs

    def _forget(self, slot: int) -> None:
        """Takes a block out of the index. A slot of ours is busy then. A neighbour's block may come back when its page
        changes."""
        slab, index = self._slabs[slot // SLAB_STRIDE], slot % SLAB_STRIDE
        self._index.remove(_hash_in(slab.entry(index)), slot)
        slab.entries[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES] = EMPTY_ENTRY
        if slab.is_own:
            self._allocator.hold(Run(slot, 1))

    def _evict(self, run: Run) -> None:
        """The same for busy slots of ours whose blocks give way to others."""
        slab = self._slabs[run.slab]
        begin, end = run.first * ENTRY_BYTES, (run.first + run.count) * ENTRY_BYTES
        entries = bytes(slab.entries[begin:end])
        slab.entries[begin:end] = EMPTY_ENTRY * run.count
        for at in range(run.count):
            entry = entries[at * ENTRY_BYTES : (at + 1) * ENTRY_BYTES]
            self._index.remove(_hash_in(entry), run.start + at)
            self._note_gone(entry)
        self._num_evicted += run.count

    def _note_gone(self, entry: bytes) -> None:
        """A block is gone from its slot. It counts as evicted unless it is in another slot too."""
        if len(self._evicted) < _MAX_EVICTED and self._index.find(_hashed_in(entry)) < 0:
            key = key_in(entry)
            if key is not None:
                self._evicted.append(key)

    def _may_leave_out(self, slab: _Slab, count: int, *, any_good: bool) -> bool:
        """Whether slots that the disk cannot read or write are left out of use. Not if there are many: then it is not
        the slots that are bad."""
        if not any_good or slab.num_bad + count > max(1, slab.file.num_slots // 64):
            return False
        slab.num_bad += count
        return True

    def _drop(self, slab: _Slab) -> None:
        """Stops using a slab."""
        if slab.is_dropped:
            return
        slab.is_dropped = True
        table = slab.view()
        held = np.flatnonzero(table["length"]).tolist()
        del table
        self._index.drop_slab(slab.number)
        self._allocator.drop_slab(slab.number)
        del self._slabs[slab.number]
        del self._by_name[slab.file.name]
        if not self._is_closed:
            for index in held:
                self._note_gone(bytes(slab.entry(index)))
        if not slab.users:
            slab.file.close()

    def _next_number(self) -> int:
        for _ in range(_LAST_SLAB):
            self._last_number = self._last_number % _LAST_SLAB + 1
            if self._last_number not in self._slabs:
                return self._last_number
        raise OSError(errno.EMFILE, "too many slabs", self._root)

    def check_invariants(self) -> None:
        """Recomputes the state from the tables. Raises ``AssertionError`` if it differs. For tests, between calls."""
        with self._lock:
            num_found = 0
            for number, slab in self._slabs.items():
                assert self._by_name[slab.file.name] is slab
                assert not slab.is_dropped
                assert slab.users == 0
                table = slab.view()
                for index in np.flatnonzero(table["length"]).tolist():
                    num_found += 1
                    found = set(self._index.find_all(_hashed_in(slab.entry(index))))
                    assert number * SLAB_STRIDE + index in found, "a block is not in the index"
                if slab.used_ns is not None:
                    is_held = self._allocator.is_held(number)
                    assert ((table["length"] != 0) == is_held).all(), "a slot and its entry disagree"
            assert num_found == len(self._index)
            self._allocator.check_invariants()

    # ---------------------------------------------------------------------------------------------------- helpers

    def _end(self, slabs: dict[int, _Slab]) -> None:
        with self._lock:
            for slab in slabs.values():
                slab.users -= 1
                if slab.is_dropped and not slab.users:
                    slab.file.close()

    def _lose(self, slab: _Slab, error: OSError) -> None:
        """A table failed: its slab is not used any more."""
        with self._lock:
            if slab.is_dropped:
                return
            self._drop(slab)
            self._unfit.add(slab.file.name)
        _log.warning("The slab %s at %s is not used any more: %s", slab.file.name, self._root, error)

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


def _hash_in(entry: bytes | bytearray) -> int:
    return int.from_bytes(entry[PROBE_AT : PROBE_AT + 4], "little")


def _hashed_in(entry: bytes | bytearray) -> HashedKey:
    """As much of the key's hash as an entry has, which is as much as the index asks for."""
    return HashedKey(_hash_in(entry), bytes(entry[PROBE_AT:]))
