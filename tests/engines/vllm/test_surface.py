# SPDX-License-Identifier: Apache-2.0
"""Test that the list in design note 8 equals the names of vLLM that the adapter uses.

``test_interface.py`` compares the whole list with vLLM.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.engines.vllm.sources import imports_of_vllm
from tests.engines.vllm.surface import PRIVATE

ROOT = Path(__file__).parents[3]
ADAPTER = ROOT / "src" / "kvoffload" / "engines" / "vllm"
READ_BY_VLLM = {"_cache_hit_source"}
"""The names that the adapter defines for vLLM."""
NOT_WRITTEN = {"_ModelRegistry", "_RegisteredModel", "_LazyRegisteredModel", "_load_adapter", "_inflight_prefills"}
"""Classes of objects that the adapter gets elsewhere, a method that it replaces, and a set that may be missing."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def names_of_others(path: Path) -> set[str]:
    """Private names that the file uses and that it does not define."""
    tree = ast.parse(path.read_text())
    used = {name for _, name in imports_of_vllm(path)}
    own = {"_replace", "_is_avx512_bf16_supported"}  # of named tuples, and of torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
    return {name for name in used - own if is_private(name)}


def test_each_private_name_that_the_adapter_touches_is_listed_with_its_reason() -> None:
    touched = {name for path in ADAPTER.glob("*.py") for name in names_of_others(path)}
    assert touched | READ_BY_VLLM | NOT_WRITTEN == set(PRIVATE)


def test_design_note_8_has_that_list() -> None:
    note = (ROOT / "docs" / "design" / "0008-vllm.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", note, flags=re.MULTILINE))
    assert {name: why for name, why in rows.items() if is_private(name)} == PRIVATE
