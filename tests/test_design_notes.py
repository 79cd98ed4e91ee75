# SPDX-License-Identifier: Apache-2.0
"""Design notes name files, functions and attributes: each of them exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTES = sorted((ROOT / "docs" / "design").glob("*.md"))
FILES = [path for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py")]
PLACE = re.compile(r"([\w/]+\.py)::([A-Za-z_]\w*(?:\.\w+)?)")
MEMBER = re.compile(r"`([A-Z][a-z]\w+)\.(\w+)`")


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names of functions, classes, methods and attributes:

    ``f``, ``C``, ``C.f``, and also ``f`` for a method.
    """
    found: set[str] = set()

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            names: list[str] = []
            inner = owner
            match child:
                case ast.ClassDef(name=name):
                    names, inner = [name], f"{name}."
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names = [name]
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    names = [name]
                case ast.AnnAssign(target=ast.Attribute(attr=name)) | ast.Assign(targets=[ast.Attribute(attr=name)]):
                    names = [name]
                case _:
                    pass
            found.update(names)
            found.update(owner + name for name in names)
            visit(child, inner)

    visit(ast.parse(path.read_text()), "")
    return frozenset(found)


def missing_places(text: str) -> list[str]:
    missing = []
    for file, name in PLACE.findall(text):
        named = [path for path in FILES if f"/{path}".endswith(f"/{file}")]
        if not any(name in names_in(path) for path in named):
            missing.append(f"{file}::{name}")
    return missing


@pytest.mark.parametrize("note", NOTES, ids=lambda path: path.stem)
def test_places_that_a_note_names_exist(note: Path) -> None:
    assert missing_places(note.read_text()) == []


def test_a_name_that_is_gone_is_found() -> None:
    text = "`waits.py::Waits.begin` and `waits.py::Waits.surely_gone` and `gone.py::Waits`"
    assert missing_places(text) == ["waits.py::Waits.surely_gone", "gone.py::Waits"]


def test_members_of_classes_in_the_way_of_a_hit_exist() -> None:
    found = MEMBER.findall((ROOT / "docs" / "design" / "0016-a-hit.md").read_text())
    assert found
    owners = re.compile(rf"^\s*class ({'|'.join({owner for owner, _ in found})})\b", re.MULTILINE)
    known = [names_in(path) for path in FILES if ROOT / "src" in path.parents and owners.search(path.read_text())]
    assert sorted({f"{owner}.{name}" for owner, name in found} - frozenset[str]().union(*known)) == []
