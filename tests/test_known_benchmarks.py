# SPDX-License-Identifier: Apache-2.0
"""What stands between benchmarks that others wrote and kvoffload. Their own code is not here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bench.kv_cache_tester import scaled
from bench.lmcache_simulator import write_lookups
from bench.mlperf_kvcache import Counted, TierBackend

from kvoffload.sim.synthetic import synthesize
from kvoffload.tiering.options import parse_tier

BLOCK_BYTES = 1 << 16


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[TierBackend]:
    options = parse_tier({"type": "disk", "path": str(tmp_path / "blocks"), "max_bytes": "32MiB"}, BLOCK_BYTES)
    made = TierBackend(options, BLOCK_BYTES, SimpleNamespace, str(tmp_path))
    yield made
    made.close()


def entry(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 2, tokens, 4, 16)).astype(np.float16)


def test_a_tier_gives_mlperfs_entries_back(backend: TierBackend) -> None:
    entries = {f"user{seed}": entry(seed, tokens) for seed, tokens in enumerate((1, 256, 257, 10_000))}
    for key, data in entries.items():
        assert backend.write(key, data).total > 0
    for key, data in entries.items():
        found, timing = backend.read(key)
        assert found.dtype == data.dtype
        assert np.array_equal(found, data), key
        assert timing.device == timing.total > 0


def test_an_entry_that_is_gone_is_a_failure_and_no_fast_hit(backend: TierBackend) -> None:
    counted = Counted(backend)
    counted.write("kept", entry(1, 300))
    counted.write("lost", entry(2, 300))
    counted.write("deleted", entry(3, 300))
    backend._store.discard(backend._entries["lost"][0])
    counted.delete("deleted")
    for key in ("lost", "deleted"):
        with pytest.raises((OSError, KeyError)):
            counted.read(key)
    counted.read("kept")
    assert [failure.split(":")[0] for failure in counted.failures] == ["read of lost", "read of deleted"]
    assert len(counted.calls["read"]) == 1
    assert counted.num_bytes == {"read": entry(1, 300).nbytes, "write": 3 * entry(1, 300).nbytes}


def test_calls_side_by_side_count_once(backend: TierBackend) -> None:
    counted = Counted(backend)
    counted.calls = {"read": [(1.0, 4.0), (2.0, 3.0)], "write": [(3.5, 5.0), (7.0, 8.0)]}
    assert counted.busy_s() == 5.0


def test_lookups_are_chains_of_whole_blocks(tmp_path: Path) -> None:
    trace = synthesize("chat", 20, 3)
    write_lookups(trace, tmp_path / "lookups")
    events = [json.loads(line) for line in (tmp_path / "lookups").read_text().splitlines()]
    assert [event["seq_len"] for event in events] == trace.input_tokens.tolist()
    before: dict[str, str | None] = {}
    for event in events:
        hashes = event["chunk_hashes"]
        assert len(hashes) == event["seq_len"] // event["chunk_size"]
        for one, previous in zip(hashes, [None, *hashes], strict=False):
            assert before.setdefault(one, previous) == previous


def test_a_scaled_replay_keeps_what_prompts_share() -> None:
    ids = list(range(100))
    request = {"in": 6400, "out": 5, "hash_ids": ids}
    shorter = request | {"hash_ids": ids[:50], "in": 3200}
    agent = {"type": "subagent", "tool_tokens": 80, "system_tokens": 8, "requests": [request]}
    small = scaled({"tool_tokens": 1600, "system_tokens": 800, "requests": [request, shorter, agent]}, 8)
    assert (small["tool_tokens"], small["system_tokens"]) == (200, 100)
    one, other, inner = small["requests"]
    assert (one["in"], one["out"]) == (800, 1)
    assert len(one["hash_ids"]) == 800 // 64
    assert other["hash_ids"] == one["hash_ids"][:6]
    assert inner["requests"] == [one]
