# SPDX-License-Identifier: Apache-2.0
"""Test a pause during a load: vLLM's answer, and the remedy in the docs."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engines.greedy import Baseline
from tests.engines.models import SmallModel
from tests.engines.vllm.gated_spec import GATE, Gate
from tests.engines.vllm.prompts import long_prompts
from tests.engines.vllm.server import Server, ask, client_of, judge

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]

RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def status_of(call: Callable[[], Any]) -> int:
    try:
        call()
    except urllib.error.HTTPError as exc:
        return exc.code
    return 200


def test_a_pause_that_catches_a_load(
    llama: SmallModel, llama_baseline: Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv(GATE, str(tmp_path))
    gate = Gate(tmp_path)
    spec = {"spec_name": "GatedSpec", "spec_module_path": "tests.engines.vllm.gated_spec"}
    server = Server(llama.path, tmp_path, load_policy="always", max_wait_s=300.0, **spec)
    client = client_of(server.url, timeout=600)
    first, *others = long_prompts(4)
    answers: dict[str, tuple[list[int], int]] = {}

    def ask_and_record() -> None:
        answers[first.name] = ask(client, first)

    def paused_amid_a_load(mode: str, pool: ThreadPoolExecutor) -> Future[int]:
        """``first`` waits at the gate, and the pause waits for it."""
        # The device has room for three of the four: it forgets the first.
        answers.update({prompt.name: ask(client, prompt) for prompt in [first, *others]})
        judge(server, client, llama_baseline, answers)
        gate.close()
        running = threading.Thread(target=ask_and_record)
        running.start()
        threads.append(running)
        wait_until(gate.held.exists, "no load began")
        status = pool.submit(status_of, lambda: server.post(f"/pause?mode={mode}"))
        wait_until(lambda: bool(json.loads(server.get("/is_paused"))["is_paused"]), "the pause did not begin")
        assert not status.done()
        gate.open()
        return status

    threads: list[threading.Thread] = []
    try:
        server.wait_until_ready()
        with ThreadPoolExecutor() as pool:
            # `keep`: vLLM takes no request up while it is paused, so the one whose load has ended holds its blocks.
            assert paused_amid_a_load("keep", pool).result() == 500
            assert status_of(lambda: server.post(RESET)) == 500
            assert status_of(lambda: server.post(RESET)) == 500
            server.post("/resume")
            threads.pop().join()
            judge(server, client, llama_baseline, answers)
            # `wait` and `abort` end it, and reset all caches.
            for mode in ("wait", "abort"):
                assert paused_amid_a_load(mode, pool).result() == 200
                assert json.loads(server.post(RESET)) == {"success": True}
                server.post("/resume")
                threads.pop().join()
                if mode == "abort":
                    assert answers.pop(first.name)[0] == []
                judge(server, client, llama_baseline, answers)
                assert ask(client, first)[1] == 0
    finally:
        client.close()
        server.stop()
