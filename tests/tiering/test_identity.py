# SPDX-License-Identifier: Apache-2.0
"""Two engines share a namespace exactly if they can share blocks."""

from __future__ import annotations

import dataclasses
import re

import pytest

from kvoffload.config import EngineLayout, GroupKind, KVGroupLayout
from kvoffload.tiering import spec
from kvoffload.tiering.spec import persistent_namespace

FULL = KVGroupLayout(GroupKind.FULL_ATTENTION, 16, 4096)
LAYOUT = EngineLayout(
    (FULL,),
    16,
    "instance-1",
    num_ranks=2,
    identity={"model": "Qwen/Qwen3-8B", "revision": "abc", "dtype": "bfloat16", "tp": "2"},
)


def change(**what: object) -> EngineLayout:
    return dataclasses.replace(LAYOUT, **what)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        *(
            change(identity=dict(LAYOUT.identity) | {name: "other"})
            for name in ("model", "revision", "dtype", "tp", "new")
        ),
        change(num_ranks=4),
        change(hash_block_tokens=8),
        change(groups=(FULL, FULL)),
        change(groups=(KVGroupLayout(GroupKind.FULL_ATTENTION, 16, 8192),)),
        change(groups=(KVGroupLayout(GroupKind.FULL_ATTENTION, 32, 4096),)),
        change(groups=(KVGroupLayout(GroupKind.SINGLE_STATE, 16, 4096),)),
        change(groups=(KVGroupLayout(GroupKind.SLIDING_WINDOW, 16, 4096, 64),)),
    ],
)
def test_what_changes_bytes_changes_the_namespace(other: EngineLayout) -> None:
    assert persistent_namespace(other, 1) != persistent_namespace(LAYOUT, 1)


def test_block_size_and_format_change_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = persistent_namespace(LAYOUT, 1)
    assert persistent_namespace(LAYOUT, 2) != before
    monkeypatch.setattr(spec, "CACHE_FORMAT_VERSION", spec.CACHE_FORMAT_VERSION + 1)
    assert persistent_namespace(LAYOUT, 1) != before


def test_windows_of_different_length_are_different() -> None:
    one, other = (change(groups=(KVGroupLayout(GroupKind.SLIDING_WINDOW, 16, 4096, n),)) for n in (64, 128))
    assert persistent_namespace(one, 1) != persistent_namespace(other, 1)


def test_what_does_not_change_bytes_does_not_change_the_namespace() -> None:
    same = change(instance_id="instance-2", rank=1, identity=dict(reversed(LAYOUT.identity.items())))
    assert persistent_namespace(same, 1) == persistent_namespace(LAYOUT, 1)


def test_a_namespace_begins_with_readable_words_and_can_name_a_directory() -> None:
    assert re.fullmatch(r"Qwen3-8B-bfloat16-[0-9a-f]{32}", persistent_namespace(LAYOUT, 1))
    odd = persistent_namespace(change(identity={"model": "../../örk spaces/" + "x" * 300}), 1)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,80}", odd)
    assert not odd.startswith(".")
    assert re.fullmatch(r"[0-9a-f]{32}", persistent_namespace(change(identity={}), 1))


def test_a_namespace_of_a_model_without_a_path_begins_with_its_class() -> None:
    """The hash of the weights is their name, so that a server with another path finds the blocks."""
    identity = {"model": "", "class": "vllm.model_executor.models.llama:LlamaForCausalLM", "dtype": "bfloat16"}
    namespace = persistent_namespace(change(identity=identity), 1)
    assert namespace.startswith("LlamaForCausalLM-bfloat16-")
    identity["class"] += " transformers 5.1.0"
    assert persistent_namespace(change(identity=identity), 1).startswith("LlamaForCausalLM-bfloat16-")
