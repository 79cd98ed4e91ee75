# SPDX-License-Identifier: Apache-2.0
"""Test the interface to CUDA's driver."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.cpu.copy.fake_cuda import FakeCuda, build, cuda

from kvoffload.cpu.copy.driver import COPIES_PER_CALL, CudaError, Driver
from kvoffload.cpu.copy.lane import EventPools
from kvoffload.errors import ConfigError

__all__ = ["cuda"]


def test_without_a_driver_one_sentence_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"needs NVIDIA's driver, but libabsent.so.1 cannot be loaded .*; install"):
        Driver("libabsent.so.1")


def test_a_driver_that_is_too_old_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs a driver for CUDA 12\.0 or newer, but libm.so.6 is older; update"):
        Driver("libm.so.6")


def test_what_the_driver_says_of_itself(cuda: FakeCuda) -> None:
    driver = cuda.driver
    assert (driver.version, driver.has_batch, driver.num_devices()) == (13_000, True, 1)
    assert (driver.device_name(0), driver.pci_bus_id(0)) == ("fake device", "fa:ke:00.0")
    assert repr(driver).endswith("CUDA 13.0, batched copies)")


def test_a_driver_without_batched_copies_copies_one_by_one(cuda: FakeCuda) -> None:
    cuda.set_version(12_070)
    assert repr(cuda.driver).endswith("CUDA 12.7, single copies)")
    _copy_scattered(cuda)
    assert cuda.count("batches") == 0


def test_scattered_copies_take_one_call(cuda: FakeCuda) -> None:
    _copy_scattered(cuda)
    assert cuda.count("batches") == 1


def test_no_call_takes_more_copies_than_drivers_take(cuda: FakeCuda) -> None:
    cuda.limit_batch(4096)
    driver, stream = cuda.driver, cuda.driver.create_stream()
    source, target = driver.allocate(20_000), driver.allocate(20_000)
    driver.fill(source, 7, 20_000, stream)
    starts = np.arange(0, 20_000, 2, dtype=np.int64)
    driver.copy_runs(target + starts, source + starts, np.ones(10_000, dtype=np.int64), stream)
    driver.synchronize(stream)
    assert cuda.count("batches") == 3
    assert bytes((ctypes.c_char * 4).from_address(target + 19_996))[::2] == b"\7\7"
    driver.destroy_stream(stream)


def test_the_environment_may_ask_for_single_copies(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COPIES_PER_CALL, "1")
    cuda.reset()
    _copy_scattered(cuda)
    assert cuda.count("batches") == 0
    for wrong in ("0", "5000", "many", "-1"):
        monkeypatch.setenv(COPIES_PER_CALL, wrong)
        with pytest.raises(ConfigError, match=COPIES_PER_CALL):
            cuda.reset()
    monkeypatch.delenv(COPIES_PER_CALL)
    cuda.reset()


def _copy_scattered(cuda: FakeCuda) -> None:
    driver, stream = cuda.driver, cuda.driver.create_stream()
    source, target = driver.allocate(1000), driver.allocate(1000)
    for start in range(0, 1000, 100):
        driver.fill(source + start, start // 100, 100, stream)
    driver.fill(target, 255, 1000, stream)
    starts = np.array([900, 300, 500], dtype=np.int64)
    driver.copy_runs(target + starts, source + starts, np.array([100, 50, 1]), stream)
    driver.copy_runs(starts[:0], starts[:0], starts[:0], stream)
    driver.synchronize(stream)
    found = np.frombuffer(ctypes.string_at(target, 1000), dtype=np.uint8)
    expected = np.full(1000, 255, dtype=np.uint8)
    expected[900:1000], expected[300:350], expected[500] = 9, 3, 5
    np.testing.assert_array_equal(found, expected)
    driver.destroy_stream(stream)
    driver.free(source)
    driver.free(target)


def test_events_order_streams_and_measure_time(cuda: FakeCuda) -> None:
    driver = cuda.driver
    first, second = driver.create_stream(), driver.create_stream()
    memory = driver.allocate(8)
    start, end = driver.create_event(), driver.create_event()
    driver.record(start, second)
    with cuda.held(first):
        driver.fill(memory, 1, 8, first)
        driver.record(end, first)
        driver.wait_event(second, end)
        driver.fill(memory, 2, 8, second)
        cuda.settle()
        assert not driver.is_done(end)
        assert not driver.is_idle(first)
    driver.synchronize_event(end)
    driver.synchronize(second)
    assert driver.is_done(end)
    assert driver.is_idle(second)
    assert driver.seconds_between(start, end) > 0
    assert ctypes.string_at(memory, 8) == b"\x02" * 8
    for event in (start, end):
        driver.destroy_event(event)
    for stream in (first, second):
        driver.destroy_stream(stream)
    driver.free(memory)


def test_events_for_order_alone_have_no_time(cuda: FakeCuda) -> None:
    stream, pools = cuda.driver.create_stream(), EventPools(cuda.driver)
    timed, untimed = pools.timed.moment(), pools.untimed.moment()
    for moment in (timed, untimed):
        cuda.driver.record(moment.event, stream)
    cuda.driver.synchronize(stream)
    cuda.driver.seconds_between(timed.event, timed.event)
    with pytest.raises(CudaError, match="cuEventElapsedTime"):
        cuda.driver.seconds_between(timed.event, untimed.event)
    timed.release()
    untimed.release()
    pools.close()
    cuda.driver.destroy_stream(stream)


def test_errors_name_the_call_and_the_code(cuda: FakeCuda) -> None:
    cuda.fail("cuMemAlloc", code=2)
    with pytest.raises(
        CudaError, match=r"^cuMemAlloc failed with CUDA error 2 \(CUDA_ERROR_OUT_OF_MEMORY\)\.$"
    ) as caught:
        cuda.driver.allocate(8)
    assert (caught.value.call, caught.value.code) == ("cuMemAlloc", 2)
    stream = cuda.driver.create_stream()
    memory = cuda.driver.allocate(8)
    starts = np.array([memory, memory + 4], dtype=np.int64)
    with pytest.raises(CudaError, match=r"cuMemcpyBatchAsync \(copy 1 of 2\) failed with CUDA error 1"):
        cuda.driver.copy_runs(starts, starts, np.array([4, 8]), stream)
    cuda.driver.synchronize(stream)  # the first was tried singly, and went
    cuda.driver.destroy_stream(stream)
    cuda.driver.free(memory)


def test_a_thread_has_a_context_only_once_it_asked_for_one(cuda: FakeCuda) -> None:
    def can_allocate() -> bool:
        try:
            cuda.driver.free(cuda.driver.allocate(8))
        except CudaError:
            return False
        return True

    def ask() -> tuple[bool, bool, bool, bool]:
        before = can_allocate()
        with cuda.driver.on_device(0):
            within = can_allocate()
        after = can_allocate()
        cuda.driver.use_device(0)
        return before, within, after, can_allocate()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ask).result() == (False, True, False, True)


def test_a_driver_without_a_device_is_refused(cuda: FakeCuda) -> None:
    cuda.fail("cuInit", code=100)
    with pytest.raises(ConfigError, match="NVIDIA's driver finds no device to offload from"):
        Driver(str(cuda.path))


def test_a_driver_before_cuda_12_0_has_no_calls_of_that_version(cuda: FakeCuda) -> None:
    with pytest.raises(ConfigError, match=r"needs a driver for CUDA 12\.0 or newer, but this one lacks cu\w+; update"):
        cuda.set_version(3_000)
    cuda.set_version(13_000)


def test_a_folder_with_the_fake_driver_serves_as_that_of_the_machine(tmp_path: Path, cuda: FakeCuda) -> None:
    build(tmp_path)
    script = "from kvoffload.cpu.copy.driver import load_driver; print(load_driver().device_name(0))"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    outcome = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert outcome.stdout == "fake device\n"


READER = """
import ctypes
import numpy as np
from cuda.bindings import driver as cuda

def ok(answer):
    assert answer[0] == cuda.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) == 2 else answer[1:]

ok(cuda.cuInit(0))
context = ok(cuda.cuDevicePrimaryCtxRetain(ok(cuda.cuDeviceGet(0))))
ok(cuda.cuCtxSetCurrent(context))
assert ok(cuda.cuDriverGetVersion()) == 13000
host = np.arange(65536, dtype=np.uint8)
device = ok(cuda.cuMemAlloc(65536))
stream = ok(cuda.cuStreamCreateWithPriority(1, 0))
start, end = ok(cuda.cuEventCreate(1)), ok(cuda.cuEventCreate(1))
ok(cuda.cuMemHostRegister(host.ctypes.data, host.nbytes, 0))
ok(cuda.cuEventRecord(start, stream))
ok(cuda.cuMemcpyAsync(int(device), host.ctypes.data, 65536, stream))
attributes = cuda.CUmemcpyAttributes()
attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
to = [cuda.CUdeviceptr(host.ctypes.data + offset) for offset in (0, 4096)]
source = [cuda.CUdeviceptr(int(device) + offset) for offset in (100, 200)]
ok(cuda.cuMemcpyBatchAsync(to, source, [50, 60], 2, [attributes], [0], 1, stream))
ok(cuda.cuEventRecord(end, stream))
ok(cuda.cuStreamWaitEvent(stream, end, 0))
ok(cuda.cuEventSynchronize(end))
ok(cuda.cuEventQuery(end))
assert ok(cuda.cuEventElapsedTime(start, end)) > 0
ok(cuda.cuStreamSynchronize(stream))
assert host[:50].tolist() == list(range(100, 150)) and host[4096:4156].tolist() == [n % 256 for n in range(200, 260)]
ok(cuda.cuMemHostUnregister(host.ctypes.data))
ok(cuda.cuStreamDestroy(stream)); ok(cuda.cuEventDestroy(end)); ok(cuda.cuMemFree(device))
print("read")
"""


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs NVIDIA's cuda-bindings")
def test_nvidias_own_bindings_read_the_fake_driver_as_we_do(tmp_path: Path, cuda: FakeCuda) -> None:
    build(tmp_path)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    outcome = subprocess.run(
        [sys.executable, "-c", READER], env=environment, capture_output=True, text=True, check=False
    )
    assert outcome.stdout == "read\n", outcome.stderr
