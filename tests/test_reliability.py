# SPDX-License-Identifier: Apache-2.0
"""The fault matrix names only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
NAMES = r"\| `(?:(tests/\S*/))?(test_\w+\.py)::(\w+)` \|$"


def rows() -> list[tuple[str, str]]:
    """File and name of the test in each row. A file without a folder is in the folder that its section names."""
    found, folder = [], ""
    for line in PAGE.read_text().splitlines():
        if named := re.match(r"In `(tests/\S+/)`", line):
            folder = named[1]
        elif line.startswith("| ") and not line.startswith(("| fault", "| ---")):
            test = re.search(NAMES, line)
            assert test, f"no test in this row: {line}"
            found.append(((test[1] or folder) + test[2], test[3]))
    return found


def test_the_matrix_has_rows() -> None:
    assert len(rows()) > 50


@pytest.mark.parametrize(("file", "name"), sorted(set(rows())))
def test_each_test_of_the_matrix_exists(file: str, name: str) -> None:
    path = ROOT / file
    assert path.exists()
    tree = ast.parse(path.read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert name in defined | assigned
