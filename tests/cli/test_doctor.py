# SPDX-License-Identifier: Apache-2.0
"""Test the output of ``kvoffload doctor``, without a device and over the fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cpu.copy import fake_cuda
from tests.cpu.copy.fake_cuda import FakeCuda, cuda

from kvoffload.cli import doctor, main
from kvoffload.cli.doctor import Effort, examine
from kvoffload.cpu.copy.cuda import CudaDevice
from kvoffload.cpu.copy.self_check import CopiesHang
from kvoffload.doctor.copies import DevicePlace
from kvoffload.doctor.findings import verdict
from kvoffload.doctor.report import PageSpeed, Speed

__all__ = ["cuda"]

TINY = Effort(check_s=0, pages=(4 << 10, 64 << 10), device_bytes=1 << 20, host_bytes=1 << 20, repeats=1)


@pytest.fixture(scope="module")
def with_fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which a process uses the fake driver instead of NVIDIA's."""
    if (reason := fake_cuda.missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cuda")
    fake_cuda.build(folder)
    return {"LD_LIBRARY_PATH": str(folder)}


def run_main(*options: str) -> int:
    """Run ``doctor`` and return its exit code. Each copy is measured once, not as long as for users."""
    with pytest.MonkeyPatch.context() as patch:
        check = doctor.check_copies_under_load
        patch.setattr(doctor, "check_copies_under_load", lambda place, seconds: check(place, seconds=0))
        with pytest.raises(SystemExit) as caught:
            main(["doctor", *options])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_without_a_device_it_says_so_and_checks_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.cli.doctor.cuda_device", lambda _: (None, "this machine has no driver"))
    file = tmp_path / "doctor.json"
    assert run_main("--quick", "--out", str(file)) == 0
    said = capsys.readouterr()
    assert "none: this machine has no driver" in said.out
    assert "all bytes match" in " ".join(said.out.split())
    assert said.out.splitlines()[-1].startswith("GPU path not checked: this machine has no driver.")
    assert "checks: 1 of 1 steps" in said.err
    written: dict[str, Any] = json.loads(file.read_text())
    assert written["verdict"] == said.out.splitlines()[-1]
    assert written["device"] is None
    assert written["checked"]["wrong"] is None
    assert {finding["severity"] for finding in written["findings"]} == {"note"}


def test_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.cli.doctor.cuda_device", lambda _: (None, "this machine has no driver"))
    assert run_main("--quick", "--json") == 0
    assert json.loads(capsys.readouterr().out)["device"] is None


def test_host_copies_are_timed_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.cli.doctor.cuda_device", lambda _: (None, "this machine has no driver"))
    report = examine(0, None, TINY)
    assert [page.page_bytes for page in report.pages] == [4 << 10, 64 << 10]


def test_copies_that_hang_while_they_are_timed_are_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*arguments: object) -> None:
        raise CopiesHang("Copies did not end.")

    monkeypatch.setattr("kvoffload.cli.doctor.cuda_device", lambda _: (None, "this machine has no driver"))
    monkeypatch.setattr("kvoffload.cli.doctor.page_speed", hang)
    assert verdict(examine(0, None, TINY)).startswith("Fault: Copies did not end: serve without kvoffload")


def test_more_memory_than_there_is_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload.cli.doctor.cuda_device", lambda _: (None, "this machine has no driver"))
    assert run_main("--quick", "--cpu-bytes", "900TiB") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Fault: you want 900 TiB")
    assert "lower cpu_bytes_to_use" in last


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--cpu-bytes", "much") == 2
    assert "--cpu-bytes must be a size" in capsys.readouterr().err
    assert run_main("--cpu-bytes", "64") == 2
    assert "--cpu-bytes is 64 B" in capsys.readouterr().err


def test_a_slow_size_of_page_is_timed_again_and_the_best_counts(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else used the machine for a while: two runs are to give one verdict."""
    asked: list[int] = []
    place = DevicePlace(CudaDevice(cuda.driver, 0, cuda.driver.create_stream))
    slow, fast = Speed(1e9, 0.1), Speed(50e9, 0.95)
    times = iter([(slow, fast), (fast, slow), (fast, fast)])

    def page_speed(_: object, page_bytes: int, *__: object) -> PageSpeed:
        asked.append(page_bytes)
        store, load = next(times)
        return PageSpeed(page_bytes, store, load, fast)

    monkeypatch.setattr("kvoffload.cli.doctor.page_speed", page_speed)
    page = doctor.measured_page(place, 64 << 10, 1 << 20, 1)
    assert (page.store, page.load, asked) == (fast, fast, [64 << 10] * 2)


@pytest.fixture
def fake(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fake driver the machine's driver."""
    monkeypatch.setattr("kvoffload.cpu.copy.driver.load_driver", lambda: cuda.driver)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.usefixtures("fake")
def test_over_the_fake_driver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doctor.json"
    assert run_main("--quick", "--cpu-bytes", "1MiB", "--out", str(file)) == 0
    said = capsys.readouterr().out
    assert "fake device" in said
    assert "all pages of a job in one call" in said
    assert "all bytes match" in " ".join(said.split())
    assert json.loads(file.read_text())["device"]["name"] == "fake device"


@pytest.mark.usefixtures("fake")
def test_a_device_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--device", "7") == 2
    assert "--device 7 does not exist: this process sees" in capsys.readouterr().err


@pytest.mark.long
def test_speeds_of_a_device_are_measured(with_fake: dict[str, str]) -> None:
    script = (
        "from tests.cli.test_doctor import TINY; from kvoffload.cli.doctor import examine;"
        "r = examine(0, 1 << 30, TINY);"
        "print(len(r.pages), r.device.name)"
    )
    environment = {**os.environ, **with_fake, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), "."])}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["2", "fake", "device"], done.stderr
