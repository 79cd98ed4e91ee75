# SPDX-License-Identifier: Apache-2.0
"""Weights that are replaced in place: pause, new weights, reset, resume. Blocks of the old ones serve nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.engines.vllm.harness import Baseline, run_child
from tests.engines.vllm.models import SmallModel
from tests.engines.vllm.test_serving import assert_idle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def extra_with(tier: str | None, directory: Path) -> dict[str, Any]:
    """Host memory for some of the prompts, so that a tier below it serves the others."""
    if tier is None:
        return {"cpu_bytes_to_use": "64MiB"}
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": "16MiB",
        "secondary_tiers": [{"type": tier, "path": str(directory / "blocks"), "cascade": "on_store"}],
        "load_policy": "always",
    }


@pytest.mark.parametrize("tier", [None, "disk"])
def test_after_a_reset_no_answer_comes_from_old_weights(
    tier: str | None, llama: SmallModel, other_llama: SmallModel, other_llama_baseline: Baseline, tmp_path: Path
) -> None:
    seen = run_child("new_weights", model=llama.path, other=other_llama.path, extra=extra_with(tier, tmp_path))
    # Without the connector's reset the answers are wrong: the comparison would notice blocks that survive it.
    assert set(seen["stale cached"].values()) == {992}
    assert len(other_llama_baseline.wrong(seen["stale"])) > 1

    assert other_llama_baseline.wrong(seen["replaced"]) == []
    assert other_llama_baseline.wrong(seen["again"]) == []
    assert max(seen["again cached"].values()) == 992  # a young disk tier may evict some
    assert seen["metrics"]["cache_resets|own"] == 1
    assert_idle(seen["idle"])


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
    assert seen["metrics"]["cache_resets|own"] == 0
    assert_idle(seen["idle"])
