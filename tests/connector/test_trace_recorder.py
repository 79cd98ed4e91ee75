# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import stat
import subprocess
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from kvoffload.base import NextUse, OffloadKey, make_offload_key
from kvoffload.connector.recording import TraceRecorder
from kvoffload.errors import ConfigError
from kvoffload.sim.trace_files import load_trace


def keys(*names: str) -> list[OffloadKey]:
    return [make_offload_key(name.encode() * 8, 0) for name in names]


@pytest.fixture
def full_disk() -> Path:
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("needs /dev/full")
    return device


def test_what_was_recorded_can_be_loaded(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t.jsonl", block_tokens=100)
    recorder.arrived("a", 50.0, keys("p", "q"), 230)
    recorder.arrived("b", 50.5, keys("p", "r", "s"), 350)
    recorder.arrived("a", 50.6, keys("z"), 130)
    recorder.finished("b", 7)
    assert recorder.num_written == 0  # in order of arrival, and a is not finished
    recorder.finished("a", 5)
    assert recorder.num_written == 2
    recorder.finished("nobody", 5)
    recorder.arrived("c", 49.0, keys("p"), 199)  # a clock that went back
    recorder.close()
    recorder.close()
    recorder.arrived("d", 60.0, keys("p"), 199)
    trace = load_trace(recorder.path)
    assert trace.block_tokens == 100
    assert trace.times_s.tolist() == [0, 0.5, 0.5]
    assert trace.ids.tolist() == [0, 1, 0, 2, 3, 0]
    assert trace.output_tokens.tolist() == [5, 7, 0]
    assert trace.sessions.tolist() == [-1, -1, -1]


def test_hints_of_clients_are_recorded(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t.jsonl", block_tokens=100)
    for use in NextUse:
        recorder.arrived(use.name, 1.0, keys("p"), 110, next_use=use)
    recorder.close()
    trace = load_trace(recorder.path)
    assert [trace.next_use(request) for request in range(len(trace))] == list(NextUse)


def test_holds_ids_hashes_and_lengths_only(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t.jsonl", block_tokens=16)
    recorder.arrived("cmpl-1", 1.0, keys("p"), 17)
    recorder.close()
    (line,) = recorder.path.read_text().splitlines()
    names = {"timestamp", "request_id", "input_length", "output_length", "block_tokens", "hash_ids"}
    assert set(json.loads(line)) == names


@pytest.mark.parametrize("exists", [False, True])
def test_its_owner_alone_may_read_it(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "trace.jsonl"
    if exists:
        path.touch()
        path.chmod(0o644)
    mask = os.umask(0o022)
    try:
        TraceRecorder(path, 16).close()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_pipe_keeps_its_mode(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o620)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    TraceRecorder(pipe, 16).close()
    os.close(reader)
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o620


def test_a_full_disk_ends_the_recording_and_nothing_else(full_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TraceRecorder(full_disk, block_tokens=16)
    for number in range(2000):
        recorder.arrived(str(number), float(number), keys("p", "q"), 33)
        recorder.finished(str(number), 1)
    recorder.close()
    assert len(caplog.records) == 1


def test_a_disk_that_is_full_at_the_end_does_not_keep_it_from_closing(
    full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TraceRecorder(full_disk, block_tokens=16)
    for number in range(2000):
        recorder.arrived(str(number), float(number), keys("p", "q"), 33)
    recorder.close()
    assert len(caplog.records) == 1


def test_an_id_may_be_used_again_while_its_first_line_waits(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t.jsonl", block_tokens=16)
    recorder.arrived("long", 1.0, keys("p"), 17)
    for number in (1, 2):
        recorder.arrived("x", 1.0 + number, keys("q"), 16 + number)
        recorder.finished("x", 10 * number)
    recorder.finished("long", 5)
    recorder.close()
    lines = [json.loads(line) for line in recorder.path.read_text().splitlines()]
    assert [(line["input_length"], line["output_length"]) for line in lines] == [(17, 5), (17, 10), (18, 20)]


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_trace"):
        TraceRecorder(tmp_path / "no" / "t.jsonl", 16)


def test_a_restart_keeps_the_trace_of_the_process_before(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for tokens in (100, 200, 300):
        recorder = TraceRecorder(path, 16)
        recorder.arrived("a", 0.0, [], tokens)
        recorder.close()
    lengths = {each.name: json.loads(each.read_text())["input_length"] for each in tmp_path.iterdir()}
    assert lengths == {"t.jsonl.1": 100, "t.jsonl.2": 200, "t.jsonl": 300}


def record(recorder: TraceRecorder, *names: str) -> None:
    for name in names:
        recorder.arrived(name, 1.0, keys(*"abcdefgh"), 130)
        recorder.finished(name, 1)


@pytest.mark.parametrize("num_recorders", [2, pytest.param(5, marks=pytest.mark.long)])
def test_processes_with_one_configuration_record_to_files_of_their_own(tmp_path: Path, num_recorders: int) -> None:
    """Engine cores of one server open the file at the same time, before any of them has written a line."""
    path = tmp_path / "served.jsonl"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_recorders)
    processes = [context.Process(target=record_together, args=(path, barrier, name)) for name in range(num_recorders)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * num_recorders
    traces = list(tmp_path.iterdir())
    assert len(traces) == num_recorders
    assert path in traces
    lines = [each.read_text().splitlines() for each in traces]
    owners = [{json.loads(line)["request_id"].partition("-")[0] for line in each} for each in lines]
    assert sorted(map(sorted, owners)) == [[str(name)] for name in range(num_recorders)]
    assert all(len(load_trace(each)) == 50 for each in traces)


def record_together(path: Path, barrier: Barrier, name: int) -> None:
    recorder = TraceRecorder(path, block_tokens=16)
    barrier.wait(120)
    record(recorder, *(f"{name}-{number}" for number in range(50)))
    recorder.close()


def test_a_file_that_is_recorded_to_is_not_renamed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "served.jsonl"
    first = TraceRecorder(path, block_tokens=16)
    record(first, "a")
    second = TraceRecorder(path, block_tokens=16)
    assert second.path == tmp_path / f"served.jsonl.pid{os.getpid()}"
    assert len(caplog.records) == 1
    record(second, "b", "c")
    record(first, "d")
    first.close()
    second.close()
    third = TraceRecorder(path, block_tokens=16)
    third.close()
    names = {each.name: each.read_text().count("\n") for each in tmp_path.iterdir()}
    assert names == {"served.jsonl.1": 2, second.path.name: 2, "served.jsonl": 0}


def test_containers_with_one_volume_and_equal_process_ids_record_to_files_of_their_own(tmp_path: Path) -> None:
    recorders = [TraceRecorder(tmp_path / "served.jsonl", block_tokens=16) for _ in range(4)]
    for number, recorder in enumerate(recorders):
        record(recorder, str(number))
        recorder.close()
    assert len({recorder.path for recorder in recorders}) == 4
    assert all(recorder.path.name.startswith("served.jsonl") for recorder in recorders)
    assert [len(load_trace(recorder.path)) for recorder in recorders] == [1] * 4


def test_without_locks_each_process_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    recorders = [TraceRecorder(tmp_path / "t.jsonl", block_tokens=16) for _ in range(2)]
    for number, recorder in enumerate(recorders):
        assert recorder.path.name.startswith(f"t.jsonl.pid{os.getpid()}")
        record(recorder, str(number))
        recorder.close()
    assert recorders[0].path != recorders[1].path
    assert [len(load_trace(recorder.path)) for recorder in recorders] == [1, 1]


def test_a_pipe_that_nobody_reads_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="record_trace"):
        TraceRecorder(pipe, block_tokens=16)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    recorder = TraceRecorder(pipe, block_tokens=16)
    record(recorder, *map(str, range(2000)))
    assert 0 < recorder.num_written < 2000
    assert [record for record in caplog.records if "ends after" in record.getMessage()]
    recorder.close()
    os.close(reader)


def test_a_file_that_was_emptied_meanwhile_has_the_lines_after_that(tmp_path: Path) -> None:
    """As logrotate does with ``copytruncate``."""
    recorder = TraceRecorder(tmp_path / "t.jsonl", block_tokens=16)
    record(recorder, "a", "b", "c")
    os.truncate(recorder.path, 0)
    record(recorder, "d", "e")
    recorder.close()
    assert len(load_trace(recorder.path)) == 2


def test_a_line_that_did_not_fit_is_cut_off(tmp_path: Path) -> None:
    """As on a full disk, the kernel writes the first part of a line and rejects the rest."""
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.connector.test_trace_recorder import TraceRecorder, record\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "recorder = TraceRecorder(Path(sys.argv[1]), 16)\n"
        "record(recorder, *map(str, range(100)))\n"
        "print(recorder.num_written)\n"
        "recorder.close()\n"
    )
    path = tmp_path / "t.jsonl"
    child = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    content = path.read_bytes()
    assert 4000 < len(content) <= 5000
    assert content.endswith(b"\n")
    trace = load_trace(path)
    assert (len(trace), trace.cut_line) == (int(child.stdout), None)
    assert len(trace) < 100
