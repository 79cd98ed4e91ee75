# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import stat
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
    with pytest.raises(ConfigError, match="cannot be recorded"):
        TraceRecorder(tmp_path / "no" / "t.jsonl", 16)


def test_a_restart_keeps_the_trace_of_the_process_before(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for tokens in (100, 200, 300):
        recorder = TraceRecorder(path, 16)
        recorder.arrived("a", 0.0, [], tokens)
        recorder.close()
    lengths = {each.name: json.loads(each.read_text())["input_length"] for each in tmp_path.iterdir()}
    assert lengths == {"t.jsonl.1": 100, "t.jsonl.2": 200, "t.jsonl": 300}
