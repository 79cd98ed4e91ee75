# SPDX-License-Identifier: Apache-2.0
"""The fake driver of ``fakecuda.c``: compiled, loaded, and made to misbehave.

``python -m tests.cpu.copy.fake_cuda DIRECTORY`` leaves it there as ``libcuda.so.1``. A process that is started with
``LD_LIBRARY_PATH=DIRECTORY`` takes it for NVIDIA's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvoffload.cpu.copy import self_check
from kvoffload.cpu.copy.cuda import CudaDevice
from kvoffload.cpu.copy.driver import LIBRARY, CudaError, Driver, Stream

SOURCE = Path(__file__).with_name("fakecuda.c")
BUILD = Path(__file__).parents[3] / "build" / "fake-cuda"
LONGEST_PAUSE_US = 100
BROKEN = 700  # an illegal address: every call fails from then on


def missing() -> str | None:
    """Why the fake driver cannot be compiled here, or ``None``."""
    if shutil.which("cc") is None:
        return "the fake CUDA driver needs a C compiler, and this machine has none"
    if _headers() is None:
        return "the fake CUDA driver needs cuda.h: install nvidia-cuda-runtime, of the dev extra"
    return None


def _headers() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((path.parent for folder in folders for path in Path(folder).glob("**/include/cuda.h")), None)


@functools.cache
def compiled() -> Path:
    """The library, compiled once for each state of its source. Only where nothing is ``missing``."""
    headers = _headers()
    assert headers is not None
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    made_of = [SOURCE.read_bytes(), (headers / "cuda.h").read_bytes(), " ".join(options).encode()]
    kept = BUILD / hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16] / LIBRARY
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            library = Path(folder) / LIBRARY
            subprocess.run(["cc", *options, f"-I{headers}", "-o", library, SOURCE, "-lpthread"], check=True)
            library.replace(kept)  # atomically, because another process may be compiling it
    return kept


def build(folder: Path) -> Path:
    """Leaves it in ``folder``."""
    return Path(shutil.copy(compiled(), folder))


class FakeCuda:
    """The fake driver of this process, seen from both sides. ``driver`` is the tested code's side."""

    def __init__(self, library: Path) -> None:
        self.calls = ctypes.CDLL(str(library))
        for name, types in {
            "fake_pace": (ctypes.c_uint64, ctypes.c_long),
            "fake_adopt": (ctypes.c_size_t, ctypes.c_size_t),
            "fake_disown": (ctypes.c_size_t,),
            "fake_hold": (ctypes.c_void_p, ctypes.c_int),
            "fake_fail": (ctypes.c_char_p, ctypes.c_int, ctypes.c_long),
            "fake_fail_often": (ctypes.c_long,),
            "fake_limit_registrations": (ctypes.c_size_t, ctypes.c_size_t),
            "fake_limit_queue": (ctypes.c_void_p, ctypes.c_size_t),
            "fake_limit_batch": (ctypes.c_size_t,),
            "cuMemcpyDtoDAsync_v2": (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p),
        }.items():
            getattr(self.calls, name).argtypes = types
        counts = (
            "faults batches copies fills pageable registrations narrow_registrations streams engine_copies "
            "engine_waits invalidated"
        )
        for name in counts.split():
            getattr(self.calls, f"fake_num_{name}").restype = ctypes.c_long
        self.path = library
        self.driver = Driver(str(library))

    def __repr__(self) -> str:
        return f"FakeCuda({self.driver!r})"

    def reset(self) -> None:
        self.calls.fake_reset()
        self.pace()
        self.driver = Driver(str(self.path))
        self.driver.use_device(0)

    def pace(self, seed: int = 0, longest_pause_us: int = LONGEST_PAUSE_US) -> None:
        """Choose, from ``seed``, how long streams pause before and within copies, and the order of their copies."""
        self.calls.fake_pace(seed, longest_pause_us)

    def device(self, compute: Stream) -> CudaDevice:
        return CudaDevice(self.driver, 0, lambda: compute)

    def adopt(self, *tensors: torch.Tensor) -> None:
        """Treat these tensors as device memory until ``disown``."""
        for tensor in tensors:
            self.calls.fake_adopt(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def disown(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.calls.fake_disown(tensor.data_ptr())

    def copy_on_device(self, to: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Copy on the device, like compute that reads ``source``."""
        code = self.calls.cuMemcpyDtoDAsync_v2(to.data_ptr(), source.data_ptr(), source.numel(), stream)
        assert code == 0

    @contextmanager
    def held(self, stream: Stream) -> Iterator[None]:
        """Let the stream finish its work, and then hold back all work submitted to it.

        At the end, all other streams have progressed as far as they can without it, and the stream continues.
        """
        self.settle()
        self.calls.fake_hold(stream, 1)
        try:
            yield
            self.calls.fake_settle()
        finally:
            self.calls.fake_hold(stream, 0)

    def settle(self) -> None:
        """Returns when no stream can go on."""
        self.calls.fake_settle()

    def fail(self, call: str, code: int = 1, after: int = 0, times: int = 1) -> None:
        """Make the next ``times`` such calls fail, after ``after`` that succeed."""
        self.calls.fake_fail(call.encode(), code, after)
        self.calls.fake_fail_often(times)

    def stop_failing(self) -> None:
        self.fail("")

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph on this thread, in the default mode."""
        self.calls.fake_capture(1)
        try:
            yield
        finally:
            self.calls.fake_capture(0)

    def break_device(self) -> None:
        self.calls.fake_break(BROKEN)

    def mend_device(self) -> None:
        self.calls.fake_break(0)
        self.calls.fake_settle()

    def limit_registrations(self, largest_bytes: int, most_bytes: int = 1 << 60) -> None:
        self.calls.fake_limit_registrations(largest_bytes, most_bytes)

    def refuse_registrations(self) -> None:
        """Register no memory at all, as under confidential computing. Copies use memory of the driver's own."""

        def register(address: int, num_bytes: int) -> None:
            raise CudaError("cuMemHostRegister", 801, "CUDA_ERROR_NOT_SUPPORTED")

        self.driver.register = register  # type: ignore[method-assign]

    def limit_queue(self, stream: Stream, longest: int) -> None:
        """Limit the operations that the stream accepts. A caller who submits another one waits."""
        self.calls.fake_limit_queue(stream, longest)

    def limit_batch(self, largest: int) -> None:
        """Larger batches fail."""
        self.calls.fake_limit_batch(largest)

    @contextmanager
    def engine(self) -> Iterator[None]:
        """Treat this thread as the engine's, and count its costs."""
        self.calls.fake_be_engine(1)
        try:
            yield
        finally:
            self.calls.fake_be_engine(0)

    def set_version(self, version: int) -> None:
        self.calls.fake_set_version(version)
        self.driver = Driver(str(self.path))

    def count(self, what: str) -> int:
        """Return the number of faults, batches, copies, fills, pageable copies, registrations, streams, registrations
        that not every context can use, invalidated captures, or copies or waits on the thread that is ``engine``."""
        return int(getattr(self.calls, f"fake_num_{what}")())


@functools.cache
def load() -> FakeCuda:
    """One for the process. Only where nothing is ``missing``."""
    return FakeCuda(compiled())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Yield the fake driver in its initial state.

    A test fails if it leaves a fault or a registration behind. Handlers check their copies at startup with one swap,
    because all swaps would take half of the tests' time.
    """
    if (reason := missing()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(self_check, "_SWAPS", 1)
    fake = load()
    fake.reset()
    yield fake
    fake.mend_device()
    assert fake.count("faults") == 0
    assert fake.count("registrations") == 0


if __name__ == "__main__":
    sys.exit(missing() or print(build(Path(sys.argv[1]))))
