# SPDX-License-Identifier: Apache-2.0
"""Traces for tests: real traces if they are in a folder beside the checkout, and small ones from plain lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvoffload.sim.trace import NO_SESSION, Trace
from kvoffload.sim.trace_files import load_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture(scope="session")
def shared_trace() -> Callable[..., Trace]:
    """``shared_trace(name, max_requests=None)``; skips the test where the folder is absent."""

    @functools.cache
    def load(name: str, max_requests: int | None = None) -> Trace:
        path = TRACES / f"{name}.jsonl.zst"
        if not path.exists():
            pytest.skip(f"needs the shared traces in {TRACES}")
        pytest.importorskip("zstandard")
        return load_trace(path, max_requests=max_requests)

    return load


@pytest.fixture(scope="session")
def trace_of() -> Callable[..., Trace]:
    """``trace_of([[0, 1], [0, 2]])``: paths of prefix-chained block numbers, a second apart."""

    def make(paths: Sequence[Sequence[int]], block_tokens: int = 16) -> Trace:
        counts = np.array([len(path) for path in paths], dtype=np.int64)
        numbers: dict[int, int] = {}
        ids = [numbers.setdefault(block, len(numbers)) for path in paths for block in path]
        return Trace(
            name="made",
            block_tokens=block_tokens,
            times_s=np.arange(len(paths), dtype=np.float64),
            input_tokens=counts * block_tokens,
            output_tokens=np.ones(len(paths), dtype=np.int64),
            sessions=np.full(len(paths), NO_SESSION, dtype=np.int64),
            offsets=np.concatenate(([0], np.cumsum(counts))),
            ids=np.array(ids, dtype=np.int32),
        )

    return make
