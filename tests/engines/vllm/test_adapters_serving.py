# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters over a persistent tier: the answers of real vLLM, also for adapters that were replaced."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.engines.models import SmallModel
from tests.engines.vllm.harness import run_child
from tests.engines.vllm.pairs import CACHED, over_one_store
from tests.engines.vllm.test_restarts import write_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_adapters_find_their_own_blocks_and_no_others(llama: SmallModel, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    root.mkdir()
    for seed, name in enumerate(("one", "two", "new-one", "new-two", "third"), start=1):
        write_adapter(root / name, seed)
    paths = {name: str(root / name) for name in ("one", "two", "new-one", "new-two")}
    right = run_child("adapters_alone", model=llama.path, paths=paths)
    assert len({str(tokens) for tokens in right.values()}) == 4, "the adapters differ"
    options: dict[str, Any] = {"model": llama.path, "directory": str(root), "extra": over_one_store(tmp_path)}
    first = run_child("adapters", passes=["load", "again"], **options)
    assert tokens_of(first["load"]) == tokens_of(first["again"]) == {name: right[name] for name in ("one", "two")}
    assert cached_of(first["load"]) == {"one": {0}, "two": {0}}
    assert cached_of(first["again"]) == {"one": {CACHED}, "two": {CACHED}}
    # A restarted engine finds them. Then it gets other content for ``one``, and later for ``two``.
    seen = run_child("adapters", passes=["load", "replace", "again", "evict"], **options)
    assert cached_of(seen["load"]) == {"one": {CACHED}, "two": {CACHED}}
    assert tokens_of(seen["load"]) == {name: right[name] for name in ("one", "two")}
    new = {"one": right["new-one"], "two": right["two"]}
    assert tokens_of(seen["replace"]) == tokens_of(seen["again"]) == new
    assert cached_of(seen["replace"]) == {"one": {0}, "two": {CACHED}}
    assert cached_of(seen["again"]) == {"one": {CACHED}, "two": {CACHED}}
    new["two"] = right["new-two"]
    assert tokens_of(seen["evict"]) == new
    assert cached_of(seen["evict"])["one"] == {CACHED}
    # A third process finds what each adapter has at last. Nothing is wrong in the store.
    shutil.copytree(root / "third", root / "new-one", dirs_exist_ok=True)
    last = run_child("adapters", passes=["load", "again"], **options)
    assert tokens_of(last["load"]) == tokens_of(last["again"]) == new
    assert cached_of(last["load"])["one"] == {CACHED}
    assert cached_of(last["again"]) == {"one": {CACHED}, "two": {CACHED}}


def tokens_of(seen: dict[str, Any]) -> dict[str, Any]:
    return {name: each["tokens"] for name, each in seen.items()}


def cached_of(seen: dict[str, Any]) -> dict[str, set[int]]:
    return {name: set(each["cached"].values()) for name, each in seen.items()}
