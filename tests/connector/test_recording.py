# SPDX-License-Identifier: Apache-2.0
"""Test ``record_trace``: the records that the scheduler side writes, and that its errors disturb no step."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.connector.rig import BT, FULL, SLIDING, Request, Rig, key

from kvoffload.base import ReqContext, TransferResult
from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout, parse_config
from kvoffload.connector import EngineStep, OffloadingConnectorScheduler, ScheduledRequest, WorkerReport
from kvoffload.connector.recording import TraceRecorder
from kvoffload.cpu.manager import CPUOffloadingManager
from kvoffload.errors import ConfigError
from kvoffload.lost_blocks import LostBlocks
from kvoffload.sim.explain import Machine, MachineTier
from kvoffload.sim.trace_files import load_trace


def scheduler_that_records(path: Path | str, **config: Any) -> OffloadingConnectorScheduler:
    values = {"cpu_bytes_to_use": 1 << 20, "record_trace": str(path), **config}
    layout = EngineLayout((FULL, SLIDING), BT, "rig")
    return OffloadingConnectorScheduler(CPUOffloadingManager(64, lost=LostBlocks()), layout, parse_config(values))


def test_whole_blocks_of_prompts_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    scheduler = scheduler_that_records(path, block_size=2 * BT)
    chat = Request("chat", 4 * BT + 3)
    longer = Request("longer", 6 * BT, num_prompt_tokens=5 * BT)
    aborted = Request("aborted", 2 * BT, stem="other")
    for request in (chat, longer, aborted):
        scheduler.on_new_request(request)
        scheduler.on_new_request(request)
    chat.num_tokens += 7
    for request in (longer, chat, aborted):
        scheduler.request_finished(request)
    trace = load_trace(path)  # without a shutdown, because a killed process leaves whole lines
    assert trace.block_tokens == 2 * BT
    assert trace.input_tokens.tolist() == [4 * BT + 3, 5 * BT, 2 * BT]
    assert trace.output_tokens.tolist() == [7, BT, 0]
    assert [trace.blocks(request).tolist() for request in range(3)] == [[0, 1], [0, 1], [2]]
    scheduler.shutdown()
    assert [json.loads(line)["request_id"] for line in path.read_text().splitlines()] == ["chat", "longer", "aborted"]
    assert key(0).hex() not in path.read_text()


def test_requests_in_flight_are_written_at_shutdown(tmp_path: Path) -> None:
    scheduler = scheduler_that_records(tmp_path / "t-{pid}.jsonl")
    scheduler.on_new_request(Request("r", 3 * BT))
    scheduler.shutdown()
    (line,) = (tmp_path / f"t-{os.getpid()}.jsonl").read_text().splitlines()
    assert len(json.loads(line)["hash_ids"]) == 3


def test_the_machine_says_when_its_tiers_are_written(tmp_path: Path) -> None:
    tiers = [
        {"type": "disk", "path": "/secret", "max_bytes": "1MiB", "cascade": "on_evict"},
        {"type": "memory", "offload_policy": "request_level"},
        {"type": "memory"},
        {"type": "disk", "path": ["/secret/a", "/secret/b"], "max_bytes": ["1MiB", "2MiB"]},
        {"type": "fs", "path": "/secret/fs", "max_bytes": "unlimited"},
    ]
    scheduler = scheduler_that_records(tmp_path / "t.jsonl", secondary_tiers=tiers)
    scheduler.on_new_request(Request("r", 3 * BT))
    scheduler.shutdown()
    text = (tmp_path / "t.jsonl").read_text()
    expected = (
        MachineTier("disk", 1 << 20, "on_evict"),
        MachineTier("memory", None, "on_store"),
        MachineTier("memory"),
        MachineTier("disk", 3 << 20),
        MachineTier("fs"),
    )
    assert msgspec.convert(json.loads(text)["machine"], Machine).tiers == expected
    assert "/secret" not in text


@pytest.mark.parametrize("method", ["arrived", "finished"])
def test_an_exception_ends_the_recording_and_nothing_else(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: TraceRecorder, *args: object) -> None:
        raise RuntimeError("a bug in the recorder")

    monkeypatch.setattr(TraceRecorder, method, fails)
    scheduler = scheduler_that_records(tmp_path / "t.jsonl")
    earlier = Request("earlier", 3 * BT)
    scheduler.on_new_request(earlier)
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            request = Request(str(number), 3 * BT)
            scheduler.on_new_request(request)
            assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
            scheduler.request_finished(request)
    assert ["continues to serve" in record.getMessage() for record in caplog.records] == [True]
    scheduler.request_finished(earlier)
    assert scheduler.get_stats()["requests_tracked",] == 0
    assert "0 requests" in repr(scheduler._observer), "those that it does not hear of any more are kept by nobody"
    scheduler.shutdown()


def test_a_recorder_that_cannot_be_closed_does_not_keep_the_manager_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = TraceRecorder.close

    def fails(self: TraceRecorder) -> None:
        close(self)
        raise RuntimeError("a bug in the recorder")

    scheduler = scheduler_that_records(tmp_path / "t.jsonl")
    closed: list[bool] = []
    monkeypatch.setattr(TraceRecorder, "close", fails)
    monkeypatch.setattr(CPUOffloadingManager, "shutdown", lambda self: closed.append(True))
    scheduler.shutdown()
    assert closed
    assert "could not be closed" in caplog.text


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("prompt_tokens", [7, 16, 17, 25, 40])
def test_an_explanation_has_all_tokens_of_its_prompt(factor: int, prompt_tokens: int, tmp_path: Path) -> None:
    """Also where offloaded blocks are larger than the device's."""
    values = {"cpu_bytes_to_use": 1 << 20, "record_trace": str(tmp_path / "t.jsonl"), "block_size": factor * BT}
    scheduler = OffloadingConnectorScheduler(
        CPUOffloadingManager(64, lost=LostBlocks()), EngineLayout((FULL,), BT, "rig"), parse_config(values)
    )
    request = Request("r", prompt_tokens)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, (tuple(range(20)),), 0)
    scheduler.request_finished(request)
    scheduler.shutdown()
    explanation = json.loads((tmp_path / "t.jsonl").read_text())["story"]
    assert sum(explanation["found"].values()) + sum(explanation["missed"].values()) == prompt_tokens


def ended(rig: Rig, *requests: Request) -> list[dict[str, dict[str, int]]]:
    """Return the explanations of ``requests``, which were the last ones, once all have ended."""
    for request in requests:
        rig.finish(request)
    rig.scheduler.shutdown()
    assert rig.record_trace is not None
    lines = Path(rig.record_trace).read_text().splitlines()
    return [json.loads(line)["story"] for line in lines[-len(requests) :]]


def test_a_prompt_that_evicts_its_own_blocks_for_want_of_room_is_not_called_longer_than_host_memory(
    tmp_path: Path,
) -> None:
    values = {"cpu_bytes_to_use": 8 * FULL.page_bytes, "record_trace": str(tmp_path / "t.jsonl")}
    manager = CPUOffloadingManager(8, lost=LostBlocks())
    layout = EngineLayout((FULL,), BT, "rig")
    scheduler = OffloadingConnectorScheduler(manager, layout, parse_config(values))
    assert layout.num_slots(parse_config(values)) == 8
    others = [key(n, stem="other") for n in range(5)]
    manager.prepare_store(others, ReqContext("others"))  # in flight: three slots are left
    for name in ("first", "second"):
        request = Request(name, 6 * BT + 1)
        scheduler.on_new_request(request)
        hit, _ = scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, (tuple(range(7)),), hit)
        steps = [EngineStep((ScheduledRequest(name, (tuple(range(7)),), hit, 6 * BT + 1 - hit, True),))]
        for step in [*steps, *[EngineStep()] * 8]:
            meta = scheduler.build_connector_meta(step)
            ends = [(0, TransferResult(job.job_id, True)) for job in (*meta.loads, *meta.stores)]
            scheduler.update_connector_output(WorkerReport(tuple(ends)))
        scheduler.request_finished(request)
    scheduler.shutdown()
    explanation = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[-1])["story"]
    assert "refused" in explanation["missed"]
    assert "too long" not in explanation["missed"]


def test_a_device_hit_inside_a_lost_block_with_nothing_behind_it_ends_no_recording(tmp_path: Path) -> None:
    rig = Rig(num_blocks=1, block_size=2 * BT, record_trace=str(tmp_path / "t.jsonl"))
    rig.store_prefix(2 * BT)
    rig.store_prefix(2 * BT, stem="other")  # evicts the first one's block
    request = rig.arrive(Request("r", 2 * BT))
    assert rig.ask(request, computed=BT) == (0, False)
    rig.alloc(request, [100, 5])
    (explanation,) = ended(rig, request)
    assert (explanation["found"], explanation["missed"], explanation["lost_s"]) == ({"device": BT}, {"tail": BT}, {})


def test_what_a_speculative_head_cannot_use_has_the_cause_of_the_block_behind_it(tmp_path: Path) -> None:
    head = KVGroupLayout(GroupKind.FULL_ATTENTION, BT, 64, lookahead_tokens=1)
    rig = Rig((head,), record_trace=str(tmp_path / "t.jsonl"))
    rig.store_prefix(3 * BT)
    requests = [rig.arrive(Request(f"r{blocks}", blocks * BT + 1)) for blocks in (3, 5)]
    for request in requests:
        assert rig.ask(request) == (2 * BT, True)
        rig.alloc(request, range(6), external=2 * BT)
        rig.end(*rig.step().loads)
    explanations = ended(rig, *requests)
    assert [explanation["found"] for explanation in explanations] == [{"device": 0, "CPU": 2 * BT}] * 2
    assert [explanation["missed"] for explanation in explanations] == [
        {"tail": BT + 1},
        {"new": 2 * BT, "tail": BT + 1},
    ]


def test_a_limit_inside_a_block_is_the_cause_of_the_blocks_rest(tmp_path: Path) -> None:
    rig = Rig(block_size=2 * BT, record_trace=str(tmp_path / "t.jsonl"))
    rig.store_prefix(4 * BT)
    request = rig.arrive(Request("r", 4 * BT + 1, kv_transfer_params={"max_load_tokens": BT}))
    assert rig.ask(request) == (BT, True)
    rig.alloc(request, range(5), external=BT)
    rig.end(*rig.step().loads)
    (explanation,) = ended(rig, request)
    assert explanation["missed"] == {"load limit": 3 * BT, "tail": 1}


@pytest.mark.parametrize(("external", "cause"), [(BT, "unknown"), (BT + 1, "load failed")])
def test_an_engine_that_loads_less_than_it_may_has_no_loss_to_blame_unless_the_load_fails(
    external: int, cause: str, tmp_path: Path
) -> None:
    rig = Rig(record_trace=str(tmp_path / "t.jsonl"))
    rig.store_prefix(4 * BT)
    request = rig.arrive(Request("r", 4 * BT + 1))
    assert rig.ask(request) == (4 * BT, True)
    rig.alloc(request, range(5), external=external)
    meta = rig.step()
    is_lost = cause == "load failed"
    rig.end(*meta.loads, success=not is_lost)
    (explanation,) = ended(rig, request)
    assert explanation["found"] == {"device": 0} | ({} if is_lost else {"CPU": BT})
    assert explanation["missed"] == {cause: 4 * BT if is_lost else 3 * BT, "tail": 1}


def test_a_load_that_fails_after_its_request_is_not_a_part_of_the_explanation(tmp_path: Path) -> None:
    rig = Rig(record_trace=str(tmp_path / "t.jsonl"))
    rig.store_prefix(2 * BT)
    first = rig.arrive(Request("first", BT, stem="other"))  # while it is there, later requests' lines are not written
    aborted = rig.arrive(Request("aborted", 2 * BT))
    assert rig.ask(aborted) == (BT, True)
    rig.alloc(aborted, range(2), external=BT)
    (load,) = rig.step().loads
    rig.finish(aborted)
    rig.end(load, success=False)
    rig.finish(first)
    rig.scheduler.shutdown()
    explanation = json.loads((tmp_path / "t.jsonl").read_text().splitlines()[-1])["story"]
    assert (explanation["found"], explanation["missed"]) == ({"device": 0, "CPU": BT}, {"tail": BT})


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        parse_config({"cpu_bytes_to_use": 1, "record_trace": str(tmp_path / "no" / "t.jsonl")})
    with pytest.raises(ConfigError, match=r"record_trace is .* a directory"):
        scheduler_that_records(tmp_path)
