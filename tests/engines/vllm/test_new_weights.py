# SPDX-License-Identifier: Apache-2.0
"""Test weights that are replaced in place: pause, load, reset, resume. Blocks of the old weights are never served."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.engines.greedy import Baseline, Prompt, random_tokens
from tests.engines.models import SmallModel
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.prompts import long_prompts
from tests.engines.vllm.server import Server, ask, client_of, judge
from tests.engines.vllm.test_serving import assert_idle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def extra_with(tier: str | None, directory: Path) -> dict[str, Any]:
    """Host memory for some of the prompts, so that a tier below it serves the others."""
    if tier is None:
        return {"cpu_bytes_to_use": "64MiB"}
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": "16MiB",
        "secondary_tiers": [
            {"type": tier, "path": str(directory / "blocks"), "cascade": "on_store", "max_bytes": "256MiB"}
        ],
        "load_policy": "always",
        "max_wait_s": 300.0,
    }


@pytest.mark.parametrize("tier", [None, "disk"])
def test_after_a_reset_no_answer_comes_from_old_weights(
    tier: str | None, llama: SmallModel, other_llama: SmallModel, other_llama_baseline: Baseline, tmp_path: Path
) -> None:
    seen = run_child("new_weights", model=llama.path, other=other_llama.path, extra=extra_with(tier, tmp_path))
    assert other_llama_baseline.wrong(seen["replaced"]) == []
    assert other_llama_baseline.wrong(seen["again"]) == []
    assert max(seen["again cached"].values()) == 992  # a young disk tier may evict some
    assert seen["metrics"]["cache_resets|own"] == 2  # the update, and the reset
    assert_idle(seen["idle"])


@pytest.mark.parametrize("tier", [None, "disk"])
def test_an_update_without_a_reset_is_seen(
    tier: str | None,
    llama: SmallModel,
    llama_baseline: Baseline,
    other_llama: SmallModel,
    other_llama_baseline: Baseline,
    tmp_path: Path,
) -> None:
    seen = run_child(
        "weights_without_a_reset", model=llama.path, other=other_llama.path, extra=extra_with(tier, tmp_path)
    )
    weights = {
        "first": llama_baseline,
        "reloaded": other_llama_baseline,
        "back": llama_baseline,
        "reloaded by the executor": other_llama_baseline,
    }
    for name, baseline in weights.items():
        assert baseline.wrong(seen[name]) == [], name
        assert set(seen[f"{name} cached"].values()) == {0}, name
        # Blocks computed since then are found by this engine.
        assert baseline.wrong(seen[f"{name} again"]) == [], name
        assert max(seen[f"{name} again cached"].values()) == 992, name
    assert max(seen["looked cached"].values()) == 992, "looking changes nothing"
    assert seen["metrics"]["cache_resets|own"] == 3
    assert_idle(seen["idle"])
    if tier is not None:  # another engine has the first weights
        restarted = run_child("disk", model=llama.path, extra=extra_with(tier, tmp_path), last=4)
        assert llama_baseline.wrong(restarted["tokens"]) == []
        assert max(restarted["cached"].values()) == 992


def test_weights_with_names_find_their_blocks_again(
    llama: SmallModel,
    llama_baseline: Baseline,
    other_llama: SmallModel,
    other_llama_baseline: Baseline,
    tmp_path: Path,
) -> None:
    seen = run_child(
        "new_weights",
        model=llama.path,
        other=other_llama.path,
        extra=extra_with("disk", tmp_path),
        version_file=str(tmp_path / "version"),
    )
    assert llama_baseline.wrong(seen["first"]) == []
    assert other_llama_baseline.wrong(seen["replaced"]) == []
    assert other_llama_baseline.wrong(seen["again"]) == []
    assert llama_baseline.wrong(seen["back"]) == []
    assert max(seen["back cached"].values()) == 992
    assert seen["metrics"]["cache_resets|named"] == 2
    assert seen["metrics"]["cache_resets|own"] == 2  # from the update to its name
    assert_idle(seen["idle"])


RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"


def test_a_server_is_paused_gets_new_weights_is_reset_and_resumed(
    llama: SmallModel,
    llama_baseline: Baseline,
    other_llama: SmallModel,
    other_llama_baseline: Baseline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Update weights as training loops do, with vLLM's own calls.

    One run freezes a request that continues later. The other run uses the pause that aborts requests and resets all
    caches by itself.
    """
    import openai

    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    tier = {"type": "disk", "path": str(tmp_path / "pool"), "max_bytes": "256MiB", "cascade": "on_store"}
    server = Server(llama.path, tmp_path, secondary_tiers=[tier], load_policy="always", max_wait_s=300.0)
    client = client_of(server.url, timeout=600)
    # Beside the prompts that are judged: its tokens are from both models, or it was aborted.
    beside = Prompt("beside", random_tokens(4711, 600))

    def run_beside() -> None:
        try:
            ask(client, beside)
        except openai.APIError:
            pass

    def replace_weights(path: str, pause: str, reset: bool) -> None:
        running = threading.Thread(target=run_beside)
        running.start()
        server.post(pause)
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        if reset:
            assert json.loads(server.post(RESET)) == {"success": True}
        server.post("/resume")
        running.join()

    def answers() -> dict[str, tuple[list[int], int]]:
        return {prompt.name: ask(client, prompt) for prompt in long_prompts(4)}

    try:
        server.wait_until_ready()
        judge(server, client, llama_baseline, answers())
        assert {cached for _, cached in answers().values()} == {992}
        replace_weights(other_llama.path, "/pause?mode=keep", reset=True)
        replaced = answers()
        judge(server, client, other_llama_baseline, replaced)
        assert {cached for _, cached in replaced.values()} == {0}
        again = answers()
        judge(server, client, other_llama_baseline, again)
        assert {cached for _, cached in again.values()} == {992}
        replace_weights(llama.path, "/pause?mode=abort", reset=False)
        back = answers()
        judge(server, client, llama_baseline, back)
        assert {cached for _, cached in back.values()} == {0}
        assert server.metrics()["cache_resets|own"] >= 2  # vLLM 0.32 resets in the first pause as well
    finally:
        client.close()
        server.stop()
