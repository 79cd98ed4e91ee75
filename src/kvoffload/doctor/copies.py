# SPDX-License-Identifier: Apache-2.0
"""Time copies of blocks and compare them byte for byte, through the handlers that an engine's worker uses.
``DevicePlace`` keeps its GPU blocks in a GPU's memory, ``HostPlace`` in host memory, as a CPU engine does. One thread
calls all of this. Only a GPU needs torch."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingHandler, TransferResult
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.cpu.copy.host import make_host_handlers
from kvoffload.cpu.copy.plan import CopyLayout, PageRef
from kvoffload.cpu.copy.self_check import CopiesHang, check_copies, wait_for_copies
from kvoffload.cpu.region import SharedOffloadRegion
from kvoffload.doctor.report import Checked, PageSpeed, Speed
from kvoffload.doctor.timing import interleaved_medians
from kvoffload.errors import CapacityError, TransferError

if TYPE_CHECKING:
    from kvoffload.cpu.copy.cuda import CudaDevice

Bytes = npt.NDArray[np.uint8]
Handlers = dict[tuple[str, str], OffloadingHandler]


@dataclass(slots=True)
class Rig:
    """A pool of GPU blocks, the same number of slots, and the handlers between them."""

    store: OffloadingHandler
    load: OffloadingHandler
    view: memoryview
    layout: CopyLayout
    ends_of: Callable[[OffloadingHandler, list[int]], list[TransferResult]]
    """Function that waits for jobs."""
    _num_jobs: int = 0
    _open: dict[OffloadingHandler, list[int]] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """In the pool."""
        return self.layout.num_slots

    @property
    def slots(self) -> Bytes:
        """(num_blocks, block_bytes), the memory itself."""
        return np.asarray(self.view)

    def submit_store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._submit(self.store, (_gpu(blocks), CPULoadStoreSpec(slots)))

    def submit_load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._submit(self.load, (CPULoadStoreSpec(slots), _gpu(blocks)))

    def finish(self) -> int:
        """Wait for all jobs, and return the bytes that they copied. Raises ``TransferError`` if one failed or does not
        end."""
        results: list[TransferResult] = []
        for handler, job_ids in self._open.items():
            results += self.ends_of(handler, job_ids)
            job_ids.clear()
        if not all(result.success for result in results):
            raise TransferError("A copy failed.")
        return sum(result.num_bytes for result in results)

    def _submit(self, handler: OffloadingHandler, spec: tuple[GPULoadStoreSpec | CPULoadStoreSpec, ...]) -> None:
        self._num_jobs += 1
        self._open.setdefault(handler, []).append(self._num_jobs)
        source, destination = spec
        handler.transfer_async(self._num_jobs, (source, destination))


def _gpu(blocks: Sequence[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, [len(blocks)], [0])


class LargeCopies(NamedTuple):
    """Functions that make one copy of contiguous bytes in each direction: the most that the link between both memories
    can carry."""

    store: Callable[[], object]
    load: Callable[[], object]
    both: Callable[[], object]
    """Both directions at the same time."""


class Place(ABC):
    """The memory that contains the GPU blocks."""

    @contextmanager
    def rig(self, layers: int, page_bytes: int, num_blocks: int) -> Iterator[Rig]:
        """Return a rig in which every layer has its own area, so that no two pages of a block touch. All memory has
        been written."""
        area_bytes, block_bytes = num_blocks * page_bytes, layers * page_bytes
        region = SharedOffloadRegion.anonymous(num_blocks, block_bytes)
        with ExitStack() as stack:
            stack.callback(region.close)
            address = stack.enter_context(self._allocated(layers * area_bytes))
            view = region.create_kv_memoryview()
            slots = np.asarray(view)
            slots[:] = 1  # page faults belong to the first use, not to copying
            pages = tuple(
                PageRef(address + layer * area_bytes, page_bytes, num_blocks, page_bytes) for layer in range(layers)
            )
            layout = CopyLayout((pages,), 1, slots.ctypes.data, block_bytes, num_blocks)
            handlers = self._make_handlers(view, layout)
            for handler in handlers.values():
                stack.callback(handler.shutdown)
            rig = Rig(handlers["GPU", "CPU"], handlers["CPU", "GPU"], view, layout, self._ends_of)
            rig.submit_load(range(num_blocks), range(num_blocks))
            rig.finish()
            yield rig

    @abstractmethod
    def large_copies(self, num_bytes: int) -> AbstractContextManager[LargeCopies]: ...

    @abstractmethod
    def computing(self) -> AbstractContextManager[Callable[[], None]]:
        """Yield a function that submits some compute work that touches no block. All of it has ended when the context
        ends."""

    @abstractmethod
    def _allocated(self, num_bytes: int) -> AbstractContextManager[int]:
        """Return the address of memory for GPU blocks."""

    @abstractmethod
    def _make_handlers(self, view: memoryview, layout: CopyLayout) -> Handlers: ...

    @abstractmethod
    def _ends_of(self, handler: OffloadingHandler, job_ids: list[int]) -> list[TransferResult]: ...


def _pages(num_bytes: int) -> Bytes:
    """Return private memory that starts at a page boundary, as in engines, and that was written once."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # kernels without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    pages: Bytes = np.frombuffer(memory, dtype=np.uint8)
    pages[:] = 1
    return pages


# ------------------------------------------------------------------------------------------------------------- host


class HostPlace(Place):
    def __init__(self, threads: int) -> None:
        self._threads = threads

    @contextmanager
    def large_copies(self, num_bytes: int) -> Iterator[LargeCopies]:
        memory = [_pages(num_bytes) for _ in range(2)]
        target, source = (each.ctypes.data for each in memory)
        cuts = [num_bytes * part // self._threads for part in range(self._threads + 1)]
        parts = [(target + low, source + low, high - low) for low, high in itertools.pairwise(cuts)]
        with ThreadPoolExecutor(self._threads) as pool:

            def copy() -> list[int]:
                return list(pool.map(lambda part: ctypes.memmove(*part), parts))

            yield LargeCopies(copy, copy, lambda: (copy(), copy()))

    def computing(self) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(lambda: None)  # a CPU engine computes on the thread that submits

    @contextmanager
    def _allocated(self, num_bytes: int) -> Iterator[int]:
        memory = _pages(num_bytes)
        yield memory.ctypes.data

    def _make_handlers(self, view: memoryview, layout: CopyLayout) -> Handlers:
        return make_host_handlers(CanonicalKVCaches([], []), view, layout, self._threads)

    def _ends_of(self, handler: OffloadingHandler, job_ids: list[int]) -> list[TransferResult]:
        handler.wait(job_ids)
        return handler.get_finished()


# ----------------------------------------------------------------------------------------------------------- device


class DevicePlace(Place):
    """GPU blocks in the memory of a GPU. ``device.compute_stream`` may be idle; then copies do not wait for compute."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        device.driver.use_device(device.number)

    @contextmanager
    def large_copies(self, num_bytes: int) -> Iterator[LargeCopies]:
        driver = self._device.driver
        with ExitStack() as stack:
            on_device = [stack.enter_context(self._allocated(num_bytes)) for _ in range(2)]
            on_host = [_pages(num_bytes) for _ in range(2)]
            addresses = [memory.ctypes.data for memory in on_host]
            for address in addresses:
                driver.register(address, num_bytes)
                stack.callback(driver.unregister, address)
            streams = [driver.create_stream() for _ in range(2)]
            for stream in streams:
                stack.callback(driver.destroy_stream, stream)
            ways = [(addresses[0], on_device[0]), (on_device[1], addresses[1])]

            def run(*directions: int) -> None:
                for number in directions:
                    driver.copy(*ways[number], num_bytes, streams[number])
                for number in directions:
                    stream = streams[number]
                    wait_for_copies(lambda: driver.is_idle(stream), nap_s=0)  # noqa: B023 - called in this round

            try:
                yield LargeCopies(lambda: run(0), lambda: run(1), lambda: run(0, 1))
            except CopiesHang:
                _MEMORY_OF_COPIES_THAT_HANG.extend((on_host, stack.pop_all()))
                raise

    @contextmanager
    def computing(self) -> Iterator[Callable[[], None]]:
        driver, num_bytes = self._device.driver, 16 << 20
        with self._allocated(num_bytes) as address:

            def fill() -> None:
                for value in range(8):
                    driver.fill(address, value, num_bytes, self._device.compute_stream())

            yield fill
            wait_for_copies(lambda: driver.is_idle(self._device.compute_stream()))

    @contextmanager
    def _allocated(self, num_bytes: int) -> Iterator[int]:
        address = self._device.driver.allocate(num_bytes)
        with _unless_copies_hang(lambda: self._device.driver.free(address)):
            yield address

    def _make_handlers(self, view: memoryview, layout: CopyLayout) -> Handlers:
        from kvoffload.cpu.copy.cuda import make_cuda_handlers

        return make_cuda_handlers(CanonicalKVCaches([], []), view, layout, self._device)

    def _ends_of(self, handler: OffloadingHandler, job_ids: list[int]) -> list[TransferResult]:
        results: list[TransferResult] = []

        def have_ended() -> bool:
            results.extend(handler.get_finished())
            return len(results) == len(job_ids)

        wait_for_copies(have_ended)
        return results


_MEMORY_OF_COPIES_THAT_HANG: list[object] = []


@contextmanager
def _unless_copies_hang(undo: Callable[[], None]) -> Iterator[None]:
    """Call ``undo`` at the end, but not after ``CopiesHang``: on a device that hangs it would never return."""
    with ExitStack() as stack:
        stack.callback(undo)
        try:
            yield
        except CopiesHang:
            stack.pop_all()
            raise


# ------------------------------------------------------------------------------------------------------------ speed


def page_speed(place: Place, page_bytes: int, num_bytes: int, layers: int, repeats: int) -> PageSpeed:
    """Measure jobs of ``num_bytes`` each, in scattered blocks, as medians relative to large copies in the same rounds.
    Planning and submitting count as part of the copy."""
    num_blocks = max(1, num_bytes // page_bytes // layers)
    num_bytes = num_blocks * layers * page_bytes
    with place.rig(layers, page_bytes, 4 * num_blocks) as rig, place.large_copies(num_bytes) as large:
        store, load, both = scattered_jobs(rig)
        medians = interleaved_medians(large.store, store, large.load, load, large.both, both, repeats=repeats)
    sizes = num_bytes, num_bytes, 2 * num_bytes
    rows = zip(sizes, medians[::2], medians[1::2], strict=True)
    return PageSpeed(page_bytes, *(Speed(size / seconds, large_s / seconds) for size, large_s, seconds in rows))


def scattered_jobs(rig: Rig) -> tuple[Callable[[], None], ...]:
    """Return functions that run a store, a load, or both at once. Each uses a quarter of the pool, and blocks that are
    not adjacent."""
    order = np.random.default_rng(0).permutation(rig.num_blocks)
    stored, loaded, into, out_of = (part.tolist() for part in np.array_split(order, 4))

    def store() -> None:
        rig.submit_store(stored, into)
        rig.finish()

    def load() -> None:
        rig.submit_load(out_of, loaded)
        rig.finish()

    def both() -> None:
        rig.submit_store(stored, into)
        rig.submit_load(out_of, loaded)
        rig.finish()

    return store, load, both


# ------------------------------------------------------------------------------------------------------ byte for byte


def check_copies_under_load(place: Place, seconds: float, seed: int = 0) -> Checked:
    """Run chains of conflicting jobs and random jobs in turn, over pages of 4 KiB and 64 KiB, beside compute, and
    compare every byte. Runs at least one round of each, and ends early at the first wrong byte or failed copy."""
    end_s = time.monotonic() + seconds
    jobs = num_bytes = 0
    try:
        with (
            place.rig(4, 4 << 10, _BLOCKS) as small,
            place.rig(4, 64 << 10, _BLOCKS) as large,
            place.computing() as compute,
        ):
            for round_ in itertools.count():
                for rig in (small, large):
                    compute()
                    check_copies(rig.store, rig.load, rig.view, rig.layout, seed=seed + round_)
                    more = _random_jobs(rig, compute, np.random.default_rng([seed, round_]))
                    jobs, num_bytes = jobs + more[0], num_bytes + more[1]
                if time.monotonic() > end_s:
                    break
    except (TransferError, CapacityError) as exc:
        return Checked(jobs, num_bytes, str(exc))
    return Checked(jobs, num_bytes, None)


_BLOCKS, _JOBS = 32, 16
"""Number of jobs per round. It is small, so that later jobs do not overwrite the mistake of an earlier one."""


def _random_jobs(rig: Rig, compute: Callable[[], None], random: np.random.Generator) -> tuple[int, int]:
    """Run random jobs, and return the numbers of jobs and bytes. Raises ``TransferError`` unless every block ends with
    the same bytes as after running the jobs one by one."""
    contents = random.integers(0, 256, rig.slots.shape, dtype=np.uint8)
    rig.slots[:] = contents
    rig.submit_load(range(_BLOCKS), range(_BLOCKS))
    in_slots, in_blocks = np.arange(_BLOCKS), np.arange(_BLOCKS)  # which of ``contents``
    for number in range(_JOBS):
        size = int(random.integers(1, 9))
        blocks, slots = (random.permutation(_BLOCKS)[:size] for _ in range(2))
        if number % 8 == 0:
            compute()
        if random.random() < 0.5:
            rig.submit_store(blocks.tolist(), slots.tolist())
            in_slots[slots] = in_blocks[blocks]
        else:
            rig.submit_load(slots.tolist(), blocks.tolist())
            in_blocks[blocks] = in_slots[slots]
    num_bytes = rig.finish()
    is_right = np.array_equal(rig.slots, contents[in_slots])
    rig.submit_store(range(_BLOCKS), range(_BLOCKS))
    num_bytes += rig.finish()
    if not (is_right and np.array_equal(rig.slots, contents[in_blocks])):
        raise TransferError("Blocks that were copied out and back have wrong bytes.")
    return _JOBS + 2, num_bytes
