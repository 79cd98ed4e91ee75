# SPDX-License-Identifier: Apache-2.0
"""Compare LMCache's adapters with kvoffload's tiers: GB/s from submitting a batch of blocks to its end.

Both keep 32 blocks of 2 MiB in the same Valkey server of this machine, or in files of one directory, with their default
numbers of threads. kvoffload's figures include its connections and checksums. LMCache's figures come from its own check
(``python -m lmcache.v1.basic_check --mode test_l2_adapter``), which submits one batch. ``KVOFFLOAD_LMCACHE_PYTHON``
names an interpreter with LMCache (``scripts/bench-lmcache`` makes one). Without it, only kvoffload is measured.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.redis_server import RedisServer

from bench.core import Row
from kvoffload.base import ReqContext
from kvoffload.testing.keys import keys as make_keys
from kvoffload.tiering.base import JobMetadata
from kvoffload.tiering.options import build_tier

_MODE = ["-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--kv-dtype", "float32"]
_TIMES = re.compile(r"^\| (STORE|LOAD) +\| +([\d.]+)", re.MULTILINE)

Figures = dict[str, float]
"""The seconds of "STORE" and "LOAD"."""


def run(short: bool) -> list[Row]:
    size, count, repeats = (64 << 10, 4, 1) if short else (2 << 20, 32, 5)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        server = RedisServer(directory)

        def forget() -> None:
            with server.client() as client:
                client.flushall()
            shutil.rmtree(directory / "files", ignore_errors=True)
            (directory / "files").mkdir()

        files = str(directory / "files")
        cases: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
            (
                "Redis",
                {"type": "redis", "url": server.url},
                [{"type": "resp", "host": "127.0.0.1", "port": server.port}],
            ),
            (
                "files",
                {"type": "fs", "path": files, "max_bytes": "unlimited"},
                [{"type": "fs", "base_path": files}, {"type": "fs_native", "base_path": files}],
            ),
        ]
        try:
            for case, ours, theirs in cases:
                rows += _compare(case, ours, theirs, size, count, repeats, forget)
        finally:
            server.stop()
    return rows


def _compare(
    case: str,
    ours: dict[str, Any],
    theirs: list[dict[str, Any]],
    size: int,
    count: int,
    repeats: int,
    forget: Callable[[], None],
) -> list[Row]:
    python = os.environ.get("KVOFFLOAD_LMCACHE_PYTHON")
    own, others = list[Figures](), [list[Figures]() for _ in theirs]
    for _ in range(repeats):  # in turn, so that a slow minute affects all of them
        forget()
        own.append(_kvoffload(ours, size, count))
        for adapter, log in zip(theirs, others, strict=True):
            if python:
                forget()
                log.append(_lmcache(python, adapter, size, count))
    rows = []
    for direction in ("STORE", "LOAD"):
        title = f"{case}: {direction.lower()} {count} blocks of {size >> 10} KiB"
        value = size * count / 1e9 / statistics.median(figures[direction] for figures in own)
        if not python:
            rows.append(Row(title, value, "GB/s"))
            continue
        for adapter, log in zip(theirs, others, strict=True):
            ratio = statistics.median(it[direction] / us[direction] for us, it in zip(own, log, strict=True))
            rows.append(Row(title, value, "GB/s", f"LMCache's {adapter['type']}", ratio))
    return rows


def _kvoffload(options: dict[str, Any], size: int, count: int) -> Figures:
    blocks = np.random.default_rng(0).integers(0, 256, (2 * count, size), np.uint8)
    tier = build_tier(options, memoryview(blocks), "bench")
    names, request = make_keys(*range(count)), ReqContext("bench")
    figures = {}
    try:
        for number, (direction, submit, first) in enumerate(
            (("STORE", tier.submit_store, 0), ("LOAD", tier.submit_load, count))
        ):
            job = JobMetadata(number, names, np.arange(first, first + count), direction == "LOAD", request)
            begun = time.perf_counter()
            submit(job)
            tier.on_schedule_end()
            while not (ended := list(tier.get_finished_jobs())):
                time.sleep(0.001)  # an engine asks once per step; asking more often would slow the I/O threads
            figures[direction] = time.perf_counter() - begun
            assert [result.success for result in ended] == [True], f"{direction} failed"
        assert np.array_equal(blocks[:count], blocks[count:])
    finally:
        tier.shutdown()
    return figures


def _lmcache(python: str, adapter: dict[str, Any], size: int, count: int) -> Figures:
    words = [
        python,
        *_MODE,
        "--num-keys",
        str(count),
        "--obj-size",
        str(size // 4),
        "--l2-adapter",
        json.dumps(adapter),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    if f"Validation (content): {count}/{count}" not in done.stdout:
        raise RuntimeError(f"LMCache's check failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = {direction: float(milliseconds) / 1e3 for direction, milliseconds in _TIMES.findall(done.stdout)}
    assert found.keys() == {"STORE", "LOAD"}, done.stdout
    return found
