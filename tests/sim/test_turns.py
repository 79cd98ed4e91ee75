# SPDX-License-Identifier: Apache-2.0
"""Traces whose ids are not whole blocks, against prompts that are cut token by token."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvoffload.sim.trace import TraceError
from kvoffload.sim.trace_files import load_trace

SIZE = 16


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def same_prefixes(trace: Any, prompts: list[list[Any]]) -> None:
    """Requests share exactly the whole blocks that their prompts share."""
    for one in range(len(prompts)):
        for other in range(one):
            ours, theirs = trace.blocks(one).tolist(), trace.blocks(other).tolist()
            found = next((at for at, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
            found = min(len(ours), len(theirs)) if found is None else found
            a, b = prompts[one], prompts[other]
            common = next((at for at, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))
            whole = common // SIZE
            assert found >= whole
            assert found == whole or (a == b and found == len(ours)), "only an equal prompt shares its partial block"


def test_aiperfs_turns_are_joined(tmp_path: Path) -> None:
    chance = random.Random(1)
    lines: list[dict[str, Any]] = []
    prompts: list[tuple[float, list[Any]]] = []
    histories: dict[str, list[Any]] = {}
    clocks: dict[str, float] = {}
    fresh = 1000
    for row in range(40):
        session = f"s{chance.randrange(6)}"
        is_first = session not in histories
        length = chance.randint(1, 70)
        count = -(-length // SIZE)
        # Sessions begin alike: a shared system prompt.
        ids = [*range(count)] if is_first else [fresh + at for at in range(count)]
        fresh += 100
        output = chance.randint(1, 40)
        line: dict[str, Any] = {"session_id": session, "input_length": length, "output_length": output}
        line |= {"hash_ids": ids, "block_tokens": SIZE}
        if is_first:
            clocks[session] = 1000.0 * row
            line["timestamp"] = clocks[session]
        else:
            delay = chance.randint(1, 5000)
            clocks[session] += delay
            line["delay"] = delay
        lines.append(line)
        history = histories.setdefault(session, [])
        history += [(ids[at // SIZE], at % SIZE) for at in range(length)]
        prompts.append((clocks[session], [*history]))
        history += [(session, row, at) for at in range(output)]
    trace = load_trace(write(tmp_path / "aiperf.jsonl", lines))
    prompts.sort(key=lambda prompt: prompt[0])
    assert trace.block_tokens == SIZE
    assert trace.times_s.tolist() == pytest.approx([time / 1000 for time, _ in prompts])
    assert trace.input_tokens.tolist() == [len(prompt) for _, prompt in prompts]
    same_prefixes(trace, [prompt for _, prompt in prompts])


def test_partial_tails_of_earlier_turns_are_kept(tmp_path: Path) -> None:
    chance = random.Random(2)
    lines, prompts = [], []
    ids: list[int] = []
    prompt: list[Any] = []
    for turn in range(12):
        length = chance.randint(1, 60)
        new = [100 * turn + at for at in range(-(-length // SIZE))]
        ids = [*ids, *new]
        prompt = [*prompt, *[(new[at // SIZE], at % SIZE) for at in range(length)]]
        prompts.append(prompt)
        line = {"timestamp": 1000 * turn, "input_length": len(prompt), "output_length": 1, "hash_ids": ids}
        lines.append(line | {"block_tokens": SIZE})
    trace = load_trace(write(tmp_path / "tails.jsonl", lines))
    assert trace.input_tokens.tolist() == [len(prompt) for prompt in prompts]
    same_prefixes(trace, prompts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_length": 900}, "line 2: 1 hash_ids do not fit input_length 900 with blocks of 16 tokens"),
        ({"session_id": None}, "line 2: session_id is missing"),
        ({"session_id": "other"}, "line 2: the first turn of a session has a delay and no timestamp"),
        ({"delay": -5}, "line 2: .*delay"),
    ],
)
def test_turns_that_make_no_sense(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    first = {"session_id": "s", "timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}
    first["block_tokens"] = SIZE
    second = {"session_id": "s", "delay": 9, "input_length": 9, "output_length": 1, "hash_ids": [2]} | change
    with pytest.raises(TraceError, match=said):
        load_trace(write(tmp_path / "wrong.jsonl", [first, second]))
