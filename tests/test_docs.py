# SPDX-License-Identifier: Apache-2.0
"""What the pages name exists: every import of their code, every dotted name, every class of ``kvoffload.testing``."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from kvoffload import testing

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ENTRY_POINT_GROUPS = {"kvoffload.policies", "kvoffload.stores"}
"""Dotted names that are no modules. ``tests/test_registry.py`` has what they are."""


def imports_of(page: Path) -> list[tuple[str, str]]:
    """(module, name) of every import from kvoffload in the page's Python."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvoffload"
        for alias in node.names
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_work(page: Path) -> None:
    for module, name in imports_of(page):
        if module.startswith("kvoffload.engines"):
            pytest.importorskip("transformers")
        assert hasattr(importlib.import_module(module), name), f"{page.name} imports {name} from {module}"


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs" / "design").glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file, and to a heading in it. Outside of code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings_of(file), f"{page.name} links to {target}"


def headings_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown renderers make them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    docs = ROOT / "docs"
    assert listed == {str(path.relative_to(docs)) for path in docs.rglob("*.md")}


def test_the_package_is_not_said_to_be_on_an_index() -> None:
    for page in [*PAGES, *(ROOT / "src").rglob("*.py")]:
        assert "pip install kvoffload" not in page.read_text().replace("'", ""), page


def test_there_are_imports_to_check() -> None:
    assert sum(len(imports_of(page)) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_exist(page: Path) -> None:
    for name in set(re.findall(r"`(kvoffload(?:\.\w+)+)`", page.read_text())) - ENTRY_POINT_GROUPS:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_contracts_and_fakes_come_from_kvoffload_testing(page: Path) -> None:
    for name in re.findall(r"\b(?:\w+Contract|Fake\w+|Manual\w+)\b", page.read_text()):
        assert name in testing.__all__, f"{page.name} names {name}"
