# SPDX-License-Identifier: Apache-2.0
"""Compare the ``disk`` tier below SGLang's HiCache with SGLang's own ``file`` backend, on the same work in turn.

Run it in the environment of ``make test-sglang``::

    .venv-sglang/bin/python -m bench.sglang_storage [--short]

* CPU time per byte of the calls with which SGLang's controller writes and reads pages: its own code, host pool and
  batches of 128 pages, without a server. ``file`` does not check data that it reads, and grows without bound.
* Time to first token, and hits, of prompts that a server on the CPU finds only in storage.

``KVOFFLOAD_BENCH_DIR`` chooses the disk. This is not one of ``BENCHES``, because the development environment lacks
SGLang.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.core import Row, bench_directory, leave_page_cache, report

PAGE_TOKENS = 16
BATCH_PAGES = 128
"""The number of pages in SGLang's own batches."""


def run(short: bool) -> list[Row]:
    with bench_directory() as name:
        return [*processor_time(Path(name), short), *first_token(Path(name), short)]


# ------------------------------------------------------------------------------------------------- without a server


def processor_time(directory: Path, short: bool) -> list[Row]:
    from sglang.srt.runtime_context import get_context
    from tests.engines.models import write_llama

    model = write_llama(directory / "model").path
    with get_context().override_server_args(model_path=model, device="cpu", weight_version="bench"):
        return [row for layers in ((2,) if short else (2, 8, 32)) for row in _calls(directory, model, layers, short)]


def _calls(directory: Path, model: str, layers: int, short: bool) -> list[Row]:
    """Measure calls with pages of ``layers`` layers with eight heads of 128 in bfloat16, as in a model of 8B."""
    from sglang.srt.managers.cache_controller import HiCacheController

    pool = _host_pool(layers)
    page_bytes = pool.get_size_per_token() * PAGE_TOKENS
    batches, rounds = (1, 1) if short else ((512 << 20) // (BATCH_PAGES * page_bytes), 7)
    tokens = pool.kv_buffer.shape[1]
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number in range(rounds + 1):  # the first round is a warm-up
        for name in ("disk", "file") if number % 2 else ("file", "disk"):
            with tempfile.TemporaryDirectory(dir=directory) as path:
                storage = _open(name, path, model, pool)
                controller: Any = SimpleNamespace(
                    storage_backend=storage, storage_host_pool=pool, page_size=PAGE_TOKENS
                )
                put, get = (
                    (HiCacheController._page_set_zero_copy, HiCacheController._page_get_zero_copy)
                    if name == "disk"
                    else (HiCacheController._generic_page_set, HiCacheController._generic_page_get)
                )
                operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)

                def work(call: Callable[..., Any], *first: Any, controller: Any = controller) -> tuple[float, float]:
                    begun, begun_cpu = time.perf_counter(), time.process_time()
                    for batch in range(batches):
                        keys = [hashlib.sha256(f"{batch}-{n}".encode()).hexdigest() for n in range(BATCH_PAGES)]
                        assert call(controller, *first, keys, _indices(tokens)) in (True, BATCH_PAGES)
                    return time.process_time() - begun_cpu, time.perf_counter() - begun

                written = work(put)
                leave_page_cache(Path(path))
                for direction, each in (("write", written), ("read", work(get, operation))):
                    if number:
                        taken.setdefault((direction, name), []).append(each)
                getattr(storage, "close", lambda: None)()
    total = batches * BATCH_PAGES * page_bytes
    rows = []
    for direction in ("write", "read"):
        ours, theirs = taken[direction, "disk"], taken[direction, "file"]
        for index, (clock, target) in enumerate((("processor time", "<= 0.5"), ("wall clock", "<= 1"))):
            ratio = statistics.median(our[index] / their[index] for our, their in zip(ours, theirs, strict=True))
            value = statistics.median(our[index] for our in ours) * 1e9 / total
            case = f"{direction} pages of {page_bytes >> 10} KiB, {clock}"
            rows.append(Row(case, value, "s/GB", "SGLang's file backend", ratio, target))
    return rows


def _host_pool(layers: int) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, 8, 128, layers, "cpu", False)
    pool = MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        1.0,
        0,
        PAGE_TOKENS,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=BATCH_PAGES * PAGE_TOKENS,
        start_layer=0,
        end_layer=layers,
    )
    pool.kv_buffer.view(torch.int16).random_()
    return pool


def _indices(tokens: int) -> Any:
    import torch

    return torch.arange(min(tokens, BATCH_PAGES * PAGE_TOKENS))


def _open(name: str, path: str, model: str, pool: Any) -> Any:
    from tests.engines.sglang.pools import open_storage
    from tests.engines.sglang.server import backend

    if name == "file":
        return open_storage(name, model, pool, {"file_storage_path": path})
    return open_storage("dynamic", model, pool, backend({"type": "disk", "path": path, "max_bytes": "8GiB"}))


# ---------------------------------------------------------------------------------------------------- with a server


def first_token(directory: Path, short: bool) -> list[Row]:
    from tests.engines.greedy import Prompt, random_tokens
    from tests.engines.models import write_llama
    from tests.engines.sglang.server import Server, backend, pages

    count, rounds = (2, 1) if short else (12, 7)
    tier = {"type": "disk", "path": str(directory / "disk"), "max_bytes": "1GiB"}
    storages = {
        "disk": ("dynamic", backend(tier)),
        "file": ("file", {"file_storage_path": str(directory / "file"), "prefetch_threshold": PAGE_TOKENS}),
    }
    prompts = [Prompt(f"{n}", random_tokens(n, 900), new_tokens=1) for n in range(count)]
    server = Server(write_llama(directory / "served").path, directory / "server").wait_until_ready()
    seconds: dict[str, list[float]] = {name: [] for name in storages}
    hits = dict.fromkeys(storages, 0)
    try:
        for number in range(rounds + 1):  # the first round writes
            for name in storages if number % 2 else reversed(storages):
                kind, extra = storages[name]
                server.attach(extra, name=kind)
                server.forget()
                for prompt in prompts:
                    leave_page_cache(directory / name)
                    begun = time.perf_counter()
                    [answer] = server.generate([prompt]).values()
                    if number:
                        seconds[name].append(time.perf_counter() - begun)
                        hits[name] += answer.cached["storage"]
                server.detach()
    finally:
        server.kill()
    ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds["disk"], seconds["file"], strict=True))
    case, reference = "first token of 900 tokens from storage", "SGLang's file backend"
    found, possible = hits["disk"], rounds * pages(prompts) * PAGE_TOKENS
    return [
        Row(case, statistics.median(seconds["disk"]) * 1e3, "ms", reference, ratio, "<= 1"),
        Row("tokens found in it", found / possible, "of all", reference, found / hits["file"], ">= 1"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    report(run(parser.parse_args().short), None)


if __name__ == "__main__":
    main()
