# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.base import NextUse
from kvoffload.errors import MissingExtraError
from kvoffload.sim.cluster import simulate
from kvoffload.sim.config import SimConfig
from kvoffload.sim.synthetic import synthesize
from kvoffload.sim.trace import NO_SESSION, Trace, TraceError
from kvoffload.sim.trace_files import load_trace


def line(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 9]} | changes


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_mooncake_form(tmp_path: Path) -> None:
    path = write(
        tmp_path / "chat.jsonl",
        line(),
        line(timestamp=2500, input_length=1300, hash_ids=[7, 9, 1 << 62], session="a"),
        line(timestamp=2500, input_length=0, hash_ids=[], session="a"),
        line(timestamp=2600, input_length=600, hash_ids=["x", "y"], session="b"),
    )
    trace = load_trace(path)
    assert trace.name == "chat"
    assert trace.block_tokens == 512
    assert trace.times_s.tolist() == [0, 2.5, 2.5, 2.6]
    assert trace.offsets.tolist() == [0, 2, 5, 5, 7]
    assert trace.ids.tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert trace.sessions.tolist() == [NO_SESSION, 0, 0, 1]
    assert (len(trace), trace.num_accesses, trace.num_unique) == (4, 7, 5)
    assert len(set(trace.hashes())) == 5


def test_what_clients_said_of_the_next_use(tmp_path: Path) -> None:
    said = [{}, {"next_use": "soon"}, {"next_use": None}, {"next_use": "never"}, {"next_use": "later"}]
    trace = load_trace(write(tmp_path / "trace.jsonl", *(line(**each) for each in said)))
    uses = [NextUse.UNKNOWN, NextUse.SOON, NextUse.UNKNOWN, NextUse.NEVER, NextUse.LATER]
    assert [trace.next_use(request) for request in range(5)] == uses
    assert [trace.stretched(2).next_use(request) for request in range(2)] == uses[:2]
    assert load_trace(write(tmp_path / "trace.jsonl", line(), line())).next_uses is None
    with pytest.raises(TraceError, match=r"line 2: next_use is soon, later or never, not 'now'"):
        load_trace(write(tmp_path / "trace.jsonl", line(), line(next_use="now")))


def test_the_device_of_our_own_traces_and_other_fields_of_that_name(tmp_path: Path) -> None:
    for machine, device_blocks in (({"device_blocks": 5}, 5), ({"device_blocks": 5.0}, 0), ({}, 0), ("host-1", 0)):
        path = write(tmp_path / "trace.jsonl", line(machine=machine))
        assert load_trace(path).device_blocks == device_blocks
    assert synthesize("chat", 4).device_blocks == 0


def test_bailian_form_chains_single_block_hashes(tmp_path: Path) -> None:
    def chat(number: int, parent: int, second: float, ids: list[int]) -> dict[str, Any]:
        lengths = {"input_length": 16 * len(ids) - 3, "output_length": 1}
        return {"chat_id": number, "parent_chat_id": parent, "timestamp": second, "hash_ids": ids, **lengths}

    path = write(
        tmp_path / "qwen.jsonl", chat(1, -1, 0.5, [4, 4, 5]), chat(2, 1, 1.5, [4, 4, 6]), chat(3, -1, 2.0, [5, 4])
    )
    trace = load_trace(path)
    assert trace.block_tokens == 16
    assert trace.times_s.tolist() == [0.5, 1.5, 2.0]
    assert trace.ids.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]  # the same hash after another prefix is another block
    assert trace.sessions[0] == trace.sessions[1] != trace.sessions[2]


def test_ids_of_single_blocks_are_chained_in_any_form(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(), line(hash_ids=[9, 7]), line(hash_ids=[7, 7]), line(hash_ids=[7, 9]))
    assert load_trace(path).ids.tolist() == [0, 1, 2, 3, 0, 4, 0, 1]


def test_numbers_beyond_64_bits_are_names_like_any_other(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(hash_ids=[1, 1 << 63]), line(hash_ids=[1, (1 << 63) + 1]))
    assert load_trace(path).ids.tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_compressed_by_content_not_by_name(tmp_path: Path, how: str) -> None:
    plain = write(tmp_path / "plain", line(), line(hash_ids=[7, 8])).read_bytes()
    packed = tmp_path / "packed.jsonl"
    if how == "gzip":
        packed.write_bytes(gzip.compress(plain))
    else:
        zstandard = pytest.importorskip("zstandard")
        # Two frames one after the other, as `cat a.zst b.zst` makes them.
        half = plain.index(b"\n") + 1
        packed.write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in (plain[:half], plain[half:])))
    assert load_trace(packed).ids.tolist() == [0, 1, 0, 2]


def test_zstd_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match="pip install zstandard"):
        load_trace(packed)


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in line().items() if name != field}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (without("timestamp"), "line 2: missing required field 'timestamp'"),
        (without("hash_ids"), "line 2: missing required field 'hash_ids'"),
        (without("input_length"), "line 2: missing required field 'input_length'"),
        (line(timestamp=-1), "line 2: .*timestamp"),
        (line(input_length=-4), "line 2: .*input_length"),
        (line(output_length=-4), "line 2: .*output_length"),
        (line(output_length="many"), "line 2: .*'int', got 'str' in 'output_length'"),
        (line(hash_ids=[1.5]), "line 2: .*hash_ids"),
        (line(chat_id=4), "line 2: chat_id appears"),
        (line(block_tokens=0), "line 2: .*block_tokens"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, second: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "bad.jsonl", line(), second)
    with pytest.raises(TraceError, match=words) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


def test_unsorted_times(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", line(timestamp=100), line(timestamp=300), line(timestamp=299))
    with pytest.raises(TraceError, match="line 3: timestamp 299 lies before"):
        load_trace(path)


def test_an_array_of_requests_says_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    path.write_text(json.dumps([line(), line()]))
    with pytest.raises(TraceError, match=r"line 1: .*write one JSON object in each line"):
        load_trace(path)


def test_times_may_be_milliseconds_since_1970(tmp_path: Path) -> None:
    now_ms = 1_764_400_000_000
    trace = load_trace(write(tmp_path / "dates.jsonl", line(timestamp=now_ms), line(timestamp=now_ms + 500)))
    assert np.diff(trace.times_s).tolist() == [0.5]
    server = SimConfig(0, 2**20, prefill_tokens_per_s=1000.0)
    late, early = simulate(trace, server), simulate(replace(trace, times_s=trace.times_s - trace.times_s[0]), server)
    assert late.ttft_s["max"] == pytest.approx(early.ttft_s["max"], abs=1e-5)
    assert late.utilisation == pytest.approx(early.utilisation, abs=1e-5)


def test_blank_lines_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"\n{json.dumps(line())}\n\n{json.dumps(line(output_length=-1))}\n")
    with pytest.raises(TraceError, match="line 4"):
        load_trace(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no requests"),
        (b"\n \n", "has no requests"),
        (b"\x00\x01\xff\xfe" * 100, "line 1: this is not a line of a trace"),
        (b'{"timestamp": 0, "input', "line 1: this is not a line of a trace"),
        (b"[1, 2]\n", "line 1: Expected 'object', got 'array'"),
        (json.dumps(line(hash_ids=[], input_length=3)).encode(), "hash_ids is empty in every line"),
        (gzip.compress(b"{}" * 9000)[:-12], "cannot be read"),
        (b"\x28\xb5\x2f\xfd" + bytes(range(40)), "cannot be read"),
    ],
    ids=["empty", "blank", "binary", "cut", "array", "no-hashes", "cut-gzip", "broken-zstd"],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words):
        load_trace(path)


def two_lines() -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in (line(), line(hash_ids=[7, 8], timestamp=5000)))


@pytest.mark.parametrize("cut", ["anywhere", "zeros", "zeros after a part", "only zeros after a newline"])
def test_the_whole_lines_of_a_file_with_a_torn_end_are_used(tmp_path: Path, cut: str) -> None:
    """Its server was killed, its disk was full, or it was copied while it grew."""
    path, whole = tmp_path / "torn.jsonl", two_lines()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    ends = {
        "anywhere": [whole[:end] for end in range(last + 1, len(whole) - 1)],
        "zeros": [whole + bytes(4096)],
        "zeros after a part": [whole[:end] + bytes(4096) for end in range(last + 1, len(whole) - 1, 7)],
        "only zeros after a newline": [whole[:last] + bytes(4096)],
    }
    for content in ends[cut]:
        path.write_bytes(content)
        trace = load_trace(path)
        num_whole = 2 if content.startswith(whole) else 1
        assert (len(trace), trace.cut_line) == (num_whole, num_whole + 1)
    path.write_bytes(whole)
    assert load_trace(path).cut_line is None


def test_a_torn_line_in_the_middle_is_left_out(tmp_path: Path) -> None:
    """Files of servers that were killed were joined, or zeros took the place of a lost page."""
    path = tmp_path / "t.jsonl"
    first, second = two_lines().splitlines(keepends=True)
    for torn in (first[:-20] + first, bytes(100) + first, b"\xff\xfe\n", b"{\n"):
        path.write_bytes(first + torn + second)
        trace = load_trace(path)
        assert (len(trace), trace.cut_line) == (2, 2)
    path.write_bytes(first + b"torn\n" * 100 + second)
    with pytest.raises(TraceError, match="line 10: this is not a line"):
        load_trace(path)
    path.write_bytes(b"torn\n" + first + second)
    with pytest.raises(TraceError, match="line 1: this is not a line"):
        load_trace(path)


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + two_lines())
    assert len(load_trace(path)) == 2
    for encoding in ("utf-16", "utf-16-be"):
        path.write_bytes(("\ufeff" * (encoding != "utf-16") + two_lines().decode()).encode(encoding))
        with pytest.raises(TraceError, match="UTF-16"):
            load_trace(path)


def test_a_last_line_without_a_line_break_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for end in (b"", bytes(100)):
        path.write_bytes(two_lines()[:-1] + end)
        trace = load_trace(path)
        assert (len(trace), trace.cut_line) == (2, None)


def test_zeros_at_the_end_may_be_longer_than_any_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(two_lines())
    os.truncate(path, 80 << 20)
    trace = load_trace(path)
    assert (len(trace), trace.cut_line) == (2, 3)


@pytest.mark.parametrize("num_zeros", [0, 1, 3, 5, 4096, 3 << 20])
@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_whole_compressed_file_may_have_zeros_at_its_end(tmp_path: Path, how: str, num_zeros: int) -> None:
    path = tmp_path / "t"
    packed = gzip.compress if how == "gzip" else pytest.importorskip("zstandard").ZstdCompressor().compress
    path.write_bytes(packed(two_lines()) + bytes(num_zeros))
    trace = load_trace(path)
    assert (len(trace), trace.cut_line) == (2, None)


@pytest.mark.parametrize("num_zeros", [0, 4096])
@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_compressed_file_may_be_torn_too(tmp_path: Path, how: str, num_zeros: int) -> None:
    lines = [
        line(timestamp=1000 * n, input_length=2500, hash_ids=[7, *(1000 * n + m for m in range(1, 5))])
        for n in range(2000)
    ]
    plain = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    packed = (
        gzip.compress(plain) if how == "gzip" else pytest.importorskip("zstandard").ZstdCompressor().compress(plain)
    )
    path = tmp_path / "torn"
    path.write_bytes(packed[: len(packed) * 3 // 4] + bytes(num_zeros))
    trace = load_trace(path)
    assert 100 < len(trace) < 2000
    assert trace.cut_line == len(trace) + 1


def test_a_damaged_gzip_file_is_one_sentence(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(two_lines() * 500))
    packed[len(packed) // 2 :] = os.urandom(len(packed) - len(packed) // 2)
    path = tmp_path / "bad.gz"
    path.write_bytes(packed)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot be read: No such file or directory; check its path"):
        load_trace(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("lines", "tokens"),
    [
        ([line(input_length=330, hash_ids=[1, 2, 3, 4, 5])], 64),  # whole blocks only, as some engines hash
        ([line(input_length=330, hash_ids=[1, 2, 3, 4, 5, 6])], 64),
        ([line(block_tokens=100, input_length=250, hash_ids=[1, 2, 3])], 100),
    ],
)
def test_block_size_is_found_or_stated(tmp_path: Path, lines: list[dict[str, Any]], tokens: int) -> None:
    assert load_trace(write(tmp_path / "t.jsonl", *lines)).block_tokens == tokens


def test_block_size_that_is_ambiguous(tmp_path: Path) -> None:
    usual = write(tmp_path / "usual.jsonl", line(input_length=1, hash_ids=[1]))
    assert load_trace(usual).block_tokens == 512
    several = write(tmp_path / "several.jsonl", line(input_length=130, hash_ids=[1, 2]))
    with pytest.raises(TraceError, match=r"several sizes fit \(64, 128\); give block_tokens"):
        load_trace(several)
    unclear = write(tmp_path / "unclear.jsonl", line(input_length=100, hash_ids=[1]))
    assert load_trace(unclear, block_tokens=128).block_tokens == 128
    with pytest.raises(TraceError, match="line 1: 1 hash_ids do not fit input_length 100 with blocks of 16"):
        load_trace(unclear, block_tokens=16)
    none = write(
        tmp_path / "none.jsonl", line(input_length=600, hash_ids=[1, 2, 3]), line(input_length=9, hash_ids=[1])
    )
    assert load_trace(none, block_tokens=200).block_tokens == 200
    odd = write(tmp_path / "odd.jsonl", line(input_length=1000, hash_ids=list(range(10))))
    with pytest.raises(TraceError, match="give block_tokens"):
        load_trace(odd)


def test_reads_only_as_far_as_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line(), line(hash_ids=[7, 8]))
    path.write_bytes(path.read_bytes() + b"garbage")
    assert len(load_trace(path, max_requests=2)) == 2


def test_bytes_per_access(tmp_path: Path) -> None:
    """8 while reading, 4 kept, and numpy's sort in between: far below 1 GB for 10 million accesses."""
    ids = list(range(1000))
    path = write(tmp_path / "t.jsonl", *(line(timestamp=n, input_length=512_000, hash_ids=ids) for n in range(300)))
    tracemalloc.start()
    try:
        trace = load_trace(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak / trace.num_accesses < 60


@pytest.mark.long
def test_shared_traces_are_what_their_readme_says(shared_trace: Callable[..., Trace]) -> None:
    chat = shared_trace("mooncake_conversation")
    assert (len(chat), chat.num_accesses, chat.num_unique, chat.block_tokens) == (12_031, 288_500, 182_790, 512)
    agents = shared_trace("lmcache_agent_b256")
    assert (len(agents), agents.num_accesses, agents.num_unique, agents.block_tokens) == (1_619, 61_828, 6_243, 64)
    coding = shared_trace("weka_cc_64_s60", max_requests=50)
    assert coding.block_tokens == 64
    assert coding.sessions.min() >= 0


@pytest.mark.parametrize(
    "second",
    [
        line(hash_ids=[7, -1]),
        line(hash_ids=[7, 1 << 64]),
        line(hash_ids=[7, int("9" * 400)]),
        line(input_length=1 << 62),
        line(output_length=1 << 62),
        line(input_length=int("9" * 400)),
        line(block_tokens=1 << 62),
        line(timestamp=1e300),
        line(session=int("9" * 400)),
        {**line(), "chat_id": 1 << 70, "parent_chat_id": -1},
    ],
    ids=range(10),
)
def test_what_no_server_could_have_served_is_one_sentence(tmp_path: Path, second: dict[str, Any]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (line(), second)))
    if "session" in second:  # a name is taken as it is
        assert len(load_trace(path)) == 2
        return
    with pytest.raises(TraceError, match="line 2") as caught:
        load_trace(path)
    assert len(str(caught.value)) < len(str(path)) + 200
