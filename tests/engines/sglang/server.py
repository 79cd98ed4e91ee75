# SPDX-License-Identifier: Apache-2.0
"""Run ``sglang serve`` on a CPU as people do: in its own process, driven over HTTP, with kvoffload's metrics."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.greedy import Prompt, random_tokens
from tests.engines.scrape import series_in
from tests.engines.sglang.cpu_device import write_entry_points
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
PAGE_TOKENS = 16
PAGE_BYTES = 4 * 2 * PAGE_TOKENS * 2 * 64 * 4
"""The bytes per page of ``write_llama``: layers, keys and values, tokens, heads, and their width in float32."""
DEVICE_TOKENS, HOST_RATIO = 2048, 2.0
"""The host pool has room for a third of the pages of ``families()`` and its answers, and the device for a sixth."""
PATIENCE_S = 1200.0


def families(count: int = 150) -> list[Prompt]:
    """Prompts in families of ten that share the first half, of any length: two in three end inside a page."""
    prompts = []
    for n in range(count):
        family = n // 10
        shared = random_tokens(1000 + family, 96 + 17 * (family % 6))
        prompts.append(Prompt(f"family{family}-{n}", shared + random_tokens(2000 + n, 24 + 11 * (n % 7))))
    return prompts


def pages(prompts: Sequence[Prompt]) -> int:
    """Return the most distinct pages that SGLang reads for these prompts. It computes the last token of a prompt
    itself.

    Pages of stored answers are not included.
    """
    return len({p.token_ids[:end] for p in prompts for end in range(PAGE_TOKENS, len(p.token_ids), PAGE_TOKENS)})


def backend(*tiers: dict[str, Any], interface: int = 1, **options: Any) -> dict[str, Any]:
    """SGLang's ``--hicache-storage-backend-extra-config``."""
    example = json.loads((ROOT / "examples" / "sglang.json").read_text())
    return example | {
        "interface_v1": interface,
        "prefetch_threshold": PAGE_TOKENS,
        "kvoffload": {"secondary_tiers": list(tiers), "max_wait_s": 60} | options,
    }


class Answer(NamedTuple):
    tokens: list[int]
    gap: float
    """How close the two best tokens came; without ``gaps`` infinite."""
    cached: dict[str, int]
    """Tokens of the prompt by where they were found: ``device``, ``host``, ``storage``."""


class Server:
    """A server of ``model``; without HiCache unless ``hicache``. ``storage``: attached from the start."""

    def __init__(
        self,
        model: str,
        directory: Path,
        *,
        hicache: bool = True,
        storage: dict[str, Any] | None = None,
        layout: str = "page_first",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "server.log"
        self.metrics_port = free_port()
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        if not (entry_point := directory / "entry-point").exists():
            write_entry_points(entry_point)
        command = [
            *(str(Path(sys.executable).with_name("sglang")), "serve", "--model-path", model),
            *("--host", "127.0.0.1", "--port", str(port), "--admin-api-key", "admin", "--skip-server-warmup"),
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--dtype", "float32", "--random-seed", "0"),
            *("--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(DEVICE_TOKENS), "--context-length", "1024"),
            *("--max-running-requests", "8", "--enable-cache-report"),
        ]
        if hicache:
            command += ["--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)]
            command += ["--hicache-mem-layout", layout, "--hicache-storage-prefetch-policy", "wait_complete"]
        if storage is not None:
            command += ["--hicache-storage-backend", "dynamic"]
            command += ["--hicache-storage-backend-extra-config", json.dumps(self._with_metrics(storage))]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(entry_point)]),
            "SGLANG_USE_CPU_ENGINE": "0",
            "HF_HUB_OFFLINE": "1",
            # One thread: threads that spin at barriers are far slower than none on a machine that is shared.
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("a") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _with_metrics(self, storage: dict[str, Any]) -> dict[str, Any]:
        return storage | {"kvoffload": storage["kvoffload"] | {"metrics_port": self.metrics_port}}

    def wait_until_ready(self) -> Server:
        def is_ready() -> bool:
            assert self._process.poll() is None, f"sglang serve did not start:\n{self.log.read_text()[-8000:]}"
            try:
                self._call("GET", "/health")
            except OSError:
                return False
            return True

        try:
            self.wait_until(is_ready, "the server answers")
        except BaseException:
            self.kill()
            raise
        return self

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, f"waited in vain until {what}:\n{self.log.read_text()[-8000:]}"
            time.sleep(0.05)

    def _call(self, method: str, path: str, body: Any = None) -> str:
        headers = {"Content-Type": "application/json", "Authorization": "Bearer admin"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return str(response.read().decode())

    def generate(self, prompts: Sequence[Prompt], *, gaps: bool = False) -> dict[str, Answer]:
        """Greedy answers by the prompts' names, all asked at once."""
        parameters = [{"temperature": 0, "max_new_tokens": p.new_tokens, "ignore_eos": True} for p in prompts]
        body = {"input_ids": [list(p.token_ids) for p in prompts], "sampling_params": parameters}
        if gaps:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        found = json.loads(self._call("POST", "/generate", body))
        return {prompt.name: _answer(each) for prompt, each in zip(prompts, found, strict=True)}

    def generate_in_turn(self, prompts: Sequence[Prompt], at_once: int = 4) -> dict[str, Answer]:
        """Do the same, a few prompts at a time, because SGLang reads pages only for requests that fit into half of its
        host pool."""
        answers: dict[str, Answer] = {}
        for begin in range(0, len(prompts), at_once):
            answers |= self.generate(prompts[begin : begin + at_once])
        return answers

    def forget(self) -> None:
        """Empties SGLang's device and host pools; the storage stays."""
        self._call("POST", f"/flush_cache?timeout={PATIENCE_S}")

    def attach(self, storage: dict[str, Any], policy: str = "wait_complete", name: str = "dynamic") -> None:
        """``name``: SGLang's for the backend; kvoffload's is ``dynamic``."""
        extra = self._with_metrics(storage) if name == "dynamic" else storage
        self._call(
            "PUT",
            "/hicache/storage-backend",
            {
                "hicache_storage_backend": name,
                "hicache_storage_backend_extra_config_json": json.dumps(extra),
                "hicache_storage_prefetch_policy": policy,
            },
        )

    def detach(self) -> None:
        """Detach the storage as soon as SGLang allows it, after its last write has ended."""

        def is_detached() -> bool:
            try:
                self._call("DELETE", "/hicache/storage-backend")
            except urllib.error.HTTPError as error:
                if error.code == HTTPStatus.BAD_REQUEST:
                    return False
                raise
            return True

        self.wait_until(is_detached, "the storage is detached")

    def update_weights(self, model: str, version: str | None = None) -> None:
        """Update the weights in place, from the directory of another model of the same architecture."""
        named = {} if version is None else {"weight_version": version}
        answer = json.loads(self._call("POST", "/update_weights_from_disk", {"model_path": model} | named))
        assert answer["success"], answer["message"]

    def clear(self) -> None:
        """Nothing that was stored is found from now on."""
        self._call("POST", "/hicache/storage-backend/clear")

    def metrics(self) -> dict[str, float]:
        """kvoffload's series by name and own labels; empty as long as none is served."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=60) as response:
                text = response.read().decode()
        except OSError:
            return {}
        return series_in(text, ("rank",))

    def wait_until_stored(self, blocks: int, tier: str = "disk") -> None:
        self.wait_until(
            lambda: self.metrics().get(f"tier_blocks_stored|{tier}", 0) >= blocks, f"{blocks} pages are in {tier!r}"
        )

    def kill(self) -> None:
        """At once, with all of its processes. Harmless for one that has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)

    def stop(self) -> None:
        """Stop the server as an operator does, and kill processes that remain."""
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self.kill()


def _answer(found: dict[str, Any]) -> Answer:
    meta = found["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    best_two = [(first[0], second[0]) for first, second in meta.get("output_top_logprobs") or ()]
    return Answer(
        found["output_ids"],
        min((first - second for first, second in best_two), default=float("inf")),
        {place: details.get(place, 0) for place in ("device", "host", "storage")},
    )
