# SPDX-License-Identifier: Apache-2.0
"""Call the part of CUDA's driver API that copying needs, through ctypes.

We call the driver and not the runtime library for two reasons. A driver call reports an error only as its return value,
but the runtime keeps it as the "last error" for the engine's next kernel. And the driver accepts whole batches of
copies as the arrays that ``plan.py`` makes.

Calls release the GIL and act on the calling thread's context. Each of our own threads calls ``use_device`` once. The
engine's thread may be using another device, so it makes its calls inside ``on_device``. This module does not import
torch.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ConfigError, TransferError

logger = logging.getLogger(__name__)

LIBRARY = "libcuda.so.1"
"""The library that NVIDIA's driver installs. The dynamic loader finds it."""

COPIES_PER_CALL = "KVOFFLOAD_COPIES_PER_CALL"
"""The environment variable that lowers the number of copies per call for drivers that need it; 1 disables batches. It
depends on the machine and not on the model, so it is not part of the configuration."""
_COPIES_PER_CALL = 4096
"""The default and the largest allowed value. A batch of 51,828 copies failed, and then hung, on driver 580.159.04 (vLLM
issue 49276)."""

Stream = NewType("Stream", int)
Event = NewType("Event", int)
Int64s = npt.NDArray[np.int64]

_INVALID_VALUE, _NOT_SUPPORTED = 1, 801
_NOT_READY = 600
_CAPTURING = range(900, 909)  # a graph is being captured, and CUDA rejects some calls until that ends
_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC = 1  # a waiting thread sleeps; without it, it spins
_EVENT_DISABLE_TIMING = 2
_REGISTER_PORTABLE = 1  # pinned for every context of the process
_REGISTER_DEVICEMAP = 2
_CAN_USE_HOST_POINTER = 91  # an attribute: registered memory has one address on both sides
_ORDER_STREAM = 1  # a source is read in stream order; with "any" order, it may be read before it was written


class CudaError(TransferError):
    """A call of the driver failed."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed with CUDA error {code} ({name}).")
        self.call = call
        self.code = code


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [
        ("source_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    ]


_P, _N, _I, _U, _S = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p

_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_U,),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGet": (_P, _I),
    "cuDeviceGetAttribute": (_P, _I, _I),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGetName": (_P, _I, _I),
    "cuDeviceGetPCIBusId": (_P, _I, _I),
    "cuDevicePrimaryCtxRetain": (_P, _I),
    "cuCtxPopCurrent": (_P,),
    "cuCtxPushCurrent": (_P,),
    "cuCtxSetCurrent": (_P,),
    "cuGetErrorName": (_I, _P),
    "cuMemAlloc": (_P, _N),
    "cuMemFree": (_P,),
    "cuMemsetD8Async": (_P, ctypes.c_ubyte, _N, _P),
    "cuMemHostRegister": (_P, _N, _U),
    "cuMemHostUnregister": (_P,),
    "cuStreamCreateWithPriority": (_P, _U, _I),
    "cuStreamDestroy": (_P,),
    "cuStreamQuery": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuStreamWaitEvent": (_P, _P, _U),
    "cuEventCreate": (_P, _U),
    "cuEventDestroy": (_P,),
    "cuEventRecord": (_P, _P),
    "cuEventQuery": (_P,),
    "cuEventSynchronize": (_P,),
    "cuEventElapsedTime": (_P, _P, _P),
    "cuMemcpyAsync": (_P, _P, _N, _P),
    "cuThreadExchangeStreamCaptureMode": (_P,),
}
"""Argument types as of ``_BASE_VERSION``. All return an ``int``."""

_BASE_VERSION = 12_000
_BATCH_VERSION = 12_080
_BATCH_TYPES = (_P, _P, _P, _N, _P, _P, _N, _P, _P)
"""The arguments of ``cuMemcpyBatchAsync`` in CUDA 12.8. In 13.0, it no longer reports the index of the failed copy."""


class Driver:
    """The driver of this process. Any thread may call it, and calls use that thread's context.

    Addresses on the host and on the device are integers, because CUDA has one address space. Every method raises
    ``CudaError`` if its call fails. The constructor raises ``ConfigError``, with a remedy, if there is no driver, no
    device, or only a driver older than CUDA 12.0.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        """Load ``library``, a file or a name for the dynamic loader."""
        self.copies_per_call = _copies_per_call()
        """The largest batch that ``copy_runs`` makes. 1 means that each copy is a call."""
        try:
            self._library = ctypes.CDLL(library)
            find = self._library.cuGetProcAddress_v2
        except OSError as exc:
            raise ConfigError(
                f"Offloading from a CUDA device needs NVIDIA's driver, but {library} cannot be loaded ({exc}); install "
                "the driver, or give the container access to it."
            ) from exc
        except AttributeError as exc:
            raise ConfigError(
                f"Offloading from a CUDA device needs a driver for CUDA 12.0 or newer, but {library} is older; update "
                "the driver."
            ) from exc
        find.argtypes = (_S, _P, _I, ctypes.c_uint64, _P)
        self._find = find
        self._calls = {name: self._resolve(name, _BASE_VERSION, types) for name, types in _CALLS.items()}
        if code := self._calls["cuInit"](0):
            raise ConfigError(
                f"NVIDIA's driver finds no device to offload from ({self._error_name(code)}); check that nvidia-smi "
                "lists one here."
            )
        self.version: int = self._get_int("cuDriverGetVersion")
        """The newest CUDA version that the driver supports, for example 12080 for 12.8."""
        self._batch = self._resolve_batch()
        self._attributes = _CopyAttributes(source_order=_ORDER_STREAM)
        self._first_copy = _N(0)  # the index of the first copy that the attributes apply to
        self._contexts: dict[int, int] = {}  # keyed by device
        self.library = library

    def __repr__(self) -> str:
        return f"Driver({self.library!r}, CUDA {self.version // 1000}.{self.version % 1000 // 10}, {self.copies_by})"

    @property
    def has_batch(self) -> bool:
        """Whether one call can make many copies (driver 12.8 and newer)."""
        return self._batch is not None and self.copies_per_call > 1

    @property
    def copies_by(self) -> str:
        return "batched copies" if self.has_batch else "single copies"

    # -------------------------------------------------------------------------------------------------- devices

    def num_devices(self) -> int:
        return self._get_int("cuDeviceGetCount")

    def device_name(self, device: int) -> str:
        return self._get_text("cuDeviceGetName", device)

    def pci_bus_id(self, device: int) -> str:
        """Return, for example, ``0000:65:00.0``, in lower case as the kernel names it in ``/sys/bus/pci/devices``."""
        return self._get_text("cuDeviceGetPCIBusId", device).lower()

    def use_device(self, device: int) -> None:
        """Make the primary context of ``device``, which torch also uses, current in this thread. The process keeps the
        context until it ends."""
        self._call("cuCtxSetCurrent", self._context(device))

    @contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make the primary context of ``device`` current in this thread for a while, then restore the previous one.

        If a broken device rejects this, the calls inside fail and report the error.
        """
        has_failed = self._calls["cuCtxPushCurrent"](self._context(device))
        try:
            yield
        finally:
            if not has_failed:
                popped = _P()
                self._calls["cuCtxPopCurrent"](ctypes.addressof(popped))

    def _context(self, device: int) -> int:
        if device not in self._contexts:
            self._contexts[device] = self._get_handle("cuDevicePrimaryCtxRetain", self._get_int("cuDeviceGet", device))
        return self._contexts[device]

    def allow_captures(self) -> None:
        """Let other threads capture CUDA graphs while this thread calls the driver.

        Without this, a call of this thread that CUDA considers unsafe, such as the query of an event, invalidates a
        capture that another thread made in CUDA's default mode. Applies to the calling thread.
        """
        mode = _I(_CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))

    def has_one_address(self, device: int) -> bool:
        """Return whether a batch may name registered host memory by its address on the host.

        Where this is false (WSL 2), such an address is illegal in a batch and breaks the device. A single copy finds
        the memory anyway.
        """
        return bool(self._get_int("cuDeviceGetAttribute", _CAN_USE_HOST_POINTER, self._get_int("cuDeviceGet", device)))

    # --------------------------------------------------------------------------------------------------- memory

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory, at about 10 GB per second, and map it for the device.

        Until ``unregister``, no copy may cross the border of this registration.
        """
        self._call("cuMemHostRegister", address, num_bytes, _REGISTER_PORTABLE | _REGISTER_DEVICEMAP)

    def unregister(self, address: int) -> None:
        """Undo the registration that starts at ``address``. No copy may be running in it."""
        self._call("cuMemHostUnregister", address)

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new device memory, which is not initialised. Free it with ``free``."""
        return self._get_handle("cuMemAlloc", num_bytes)

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def fill(self, address: int, value: int, num_bytes: int, stream: Stream) -> None:
        """Set all bytes of device memory to ``value``, in stream order."""
        self._call("cuMemsetD8Async", address, value, num_bytes, stream)

    # ---------------------------------------------------------------------------------------- streams and events

    def create_stream(self) -> Stream:
        """Return a new stream of ordinary priority that is independent of the null stream."""
        return Stream(self._get_handle("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, 0))

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy the stream. Work that was already submitted to it still runs."""
        self._call("cuStreamDestroy", stream)

    def synchronize(self, stream: Stream) -> None:
        """Return when all work submitted to the stream has ended."""
        self._call("cuStreamSynchronize", stream)

    def is_idle(self, stream: Stream) -> bool:
        """Return whether all work submitted to the stream has ended. Does not block.

        Raises once the device is broken, as every call then does. Nothing runs on a broken device.
        """
        return self._is_done("cuStreamQuery", stream)

    def create_event(self, is_timed: bool = True) -> Event:
        """Return a new event. A thread that waits for it sleeps. An event without timing costs the device less."""
        return Event(
            self._get_handle("cuEventCreate", _EVENT_BLOCKING_SYNC | (0 if is_timed else _EVENT_DISABLE_TIMING))
        )

    def destroy_event(self, event: Event) -> None:
        self._call("cuEventDestroy", event)

    def record(self, event: Event, stream: Stream) -> None:
        """Record the event: it is done when all work submitted to the stream so far has ended.

        An event may be recorded again. Streams that already wait for it keep waiting for the earlier recording.
        """
        self._call("cuEventRecord", event, stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Make all work submitted to the stream from now on start after the event. Does not block.

        An event that was never recorded counts as done.
        """
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize_event(self, event: Event) -> None:
        """Return when the event is done."""
        self._call("cuEventSynchronize", event)

    def is_done(self, event: Event) -> bool:
        return self._is_done("cuEventQuery", event)

    def _is_done(self, call: str, handle: int) -> bool:
        code = self._calls[call](handle)
        if code and code != _NOT_READY and code not in _CAPTURING:
            raise self._error(call, code)
        return not code

    def seconds_between(self, start: Event, end: Event) -> float:
        """Return the seconds between two events that are done, on the device's clock, to half a microsecond."""
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.addressof(milliseconds), start, end)
        return milliseconds.value / 1e3

    # --------------------------------------------------------------------------------------------------- copies

    def copy(self, destination: int, source: int, num_bytes: int, stream: Stream) -> None:
        """Submit one copy, in stream order. If the host memory is not registered, the call reads it at once, or waits
        until the copy has written it."""
        self._call("cuMemcpyAsync", destination, source, num_bytes, stream)

    def copy_runs(self, destinations: Int64s, sources: Int64s, lengths: Int64s, stream: Stream) -> None:
        """Copy ``lengths[i]`` bytes, more than 0, from ``sources[i]`` to ``destinations[i]`` for each ``i``.

        All copies start after earlier work of the stream. *They have no order among themselves*: no two may write the
        same byte, and none may read a byte that another one writes. The caller may drop the arrays when the call
        returns. ``stream`` must not be the null stream. If the call fails, some of the copies may be running.
        """
        columns = [np.ascontiguousarray(column, dtype=np.int64) for column in (destinations, sources, lengths)]
        assert {column.shape for column in columns} == {(len(lengths),)}, "as many sources as destinations and lengths"
        if not len(lengths):
            return
        for start in range(0, len(lengths), self.copies_per_call):
            part = [column[start : start + self.copies_per_call] for column in columns]
            batch = self._batch  # another thread may find out that the driver rejects batches
            if batch is None or self.copies_per_call == 1:
                self._copy_singly(part, stream)
            else:
                self._copy_batch(batch, part, stream)

    def _copy_singly(self, columns: list[Int64s], stream: Stream) -> None:
        for destination, source, length in zip(*(column.tolist() for column in columns), strict=True):
            self.copy(destination, source, length, stream)

    def _copy_batch(self, batch: Callable[..., int], columns: list[Int64s], stream: Stream) -> None:
        """Make the copies in one call.

        If the driver does not support the batch, but accepts its copies one by one, use single copies from now on. A
        copy that had started is then made twice, which is harmless, because nobody touches either side until all copies
        have ended. Any other error, such as a lack of memory, says nothing about batches and is raised.
        """
        failed = _N(0)
        destinations, sources, lengths = (column.ctypes.data for column in columns)
        attributes, first, num_attributes = ctypes.addressof(self._attributes), ctypes.addressof(self._first_copy), 1
        num = len(columns[0])
        where = ctypes.addressof(failed)
        code = batch(destinations, sources, lengths, num, attributes, first, num_attributes, where, stream)
        if not code:
            return
        error = self._error(f"cuMemcpyBatchAsync (copy {failed.value} of {num})", code)
        if code not in (_INVALID_VALUE, _NOT_SUPPORTED):
            raise error
        try:
            self._copy_singly(columns, stream)
        except CudaError:
            raise error from None
        logger.warning(
            "%s Single copies work on this machine, so kvoffload uses them from now on; small pages copy more slowly.",
            error,
        )
        self._batch = None

    # ---------------------------------------------------------------------------------------------------- calls

    def _resolve(self, name: str, version: int, types: tuple[Any, ...]) -> Callable[..., int]:
        """Return the function of the given CUDA version, because signatures changed while names stayed the same."""
        address, status = _P(), _I()
        code = self._find(name.encode(), ctypes.addressof(address), version, 0, ctypes.addressof(status))
        if code or not address.value:
            raise ConfigError(
                f"Offloading from a CUDA device needs a driver for CUDA {version // 1000}.{version % 1000 // 10} or "
                f"newer, but this one lacks {name}; update the driver."
            )
        return ctypes.CFUNCTYPE(_I, *types)(address.value)

    def _resolve_batch(self) -> Callable[..., int] | None:
        if self.version < _BATCH_VERSION:
            return None
        try:
            return self._resolve("cuMemcpyBatchAsync", _BATCH_VERSION, _BATCH_TYPES)
        except ConfigError:
            return None

    def _call(self, name: str, *arguments: int | bytes) -> None:
        if code := self._calls[name](*arguments):
            raise self._error(name, code)

    def _get_int(self, name: str, *arguments: int) -> int:
        value = _I()
        self._call(name, ctypes.addressof(value), *arguments)
        return value.value

    def _get_handle(self, name: str, *arguments: int | bytes) -> int:
        """Call a function whose first argument returns a pointer, and return that pointer, or 0 if it is null."""
        value = _P()
        self._call(name, ctypes.addressof(value), *arguments)
        return value.value or 0

    def _get_text(self, name: str, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call(name, ctypes.addressof(text), len(text), self._get_int("cuDeviceGet", device))
        return text.value.decode()

    def _error(self, call: str, code: int) -> CudaError:
        return CudaError(call, code, self._error_name(code))

    def _error_name(self, code: int) -> str:
        name = _S()
        self._calls["cuGetErrorName"](code, ctypes.addressof(name))
        return (name.value or b"unknown").decode()


def _copies_per_call() -> int:
    text = os.environ.get(COPIES_PER_CALL, str(_COPIES_PER_CALL))
    if not text.isdecimal() or not 1 <= int(text) <= _COPIES_PER_CALL:
        raise ConfigError(f"{COPIES_PER_CALL} must be a number from 1 to {_COPIES_PER_CALL}, not {text!r}.")
    return int(text)


@functools.cache
def load_driver() -> Driver:
    """Return the driver of this process, loaded at the first call. Raises ``ConfigError`` as ``Driver`` does."""
    return Driver(LIBRARY)
