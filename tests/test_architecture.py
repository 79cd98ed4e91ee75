# SPDX-License-Identifier: Apache-2.0
"""The house rules: imports point down only, the control plane loads no torch, and tests reach every module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "kvoffload"
TESTS = Path(__file__).parent
ROOT = TESTS.parent

FLOOR = {
    "errors": 0,
    "registry": 1,
    "logs": 1,
    "metrics": 1,
    "units": 1,
    "base": 2,
    "config": 2,
    "config_file": 2,
    "events": 3,
    "exporter": 2,
    "load_tiers": 1,
    "lost_blocks": 2,
    "miss": 1,
    "specs": 3,
    "cpu": 3,
    "tiering": 4,
    "connector": 5,
    "sim": 6,
    "engines": 6,
    "doctor": 4,
    "demo": 7,
    "testing": 7,
    "cli": 8,
    "__init__": 9,
    "__main__": 9,
}
"""A module imports from its own floor and from those below. ``__init__`` is the front door: it stands above all rooms,
and no room imports from it."""

NEIGHBOURS = {("sim", "engines"), ("engines", "sim"), ("demo", "testing"), ("testing", "demo")}
"""Rooms of one floor that do not know each other: (importing, imported)."""

TORCH_ROOMS = ("cpu/gpu_worker.py", "cpu/copy/", "engines/", "demo/", "testing/")
"""Where torch may be imported. ``testing`` only inside functions, checked by importing it."""


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def name_of(path: Path) -> str:
    return "kvoffload." + path.relative_to(SRC).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported(path: Path) -> list[tuple[str, bool]]:
    """(dotted module, whether the import runs when the module is imported) for every import in a file."""
    tree = ast.parse(path.read_text())
    lazy: set[ast.AST] = set()
    for node in ast.walk(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if is_function or is_typing:
            lazy.update(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node not in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            found.append((node.module or "", node not in lazy))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_down(path: Path) -> None:
    here = room(path)
    for name, _ in imported(path):
        assert name != "kvoffload", f"{path} imports the front door, which stands above it; import the module itself"
        if not name.startswith("kvoffload."):
            continue
        there = name.split(".")[1]
        assert FLOOR[there] <= FLOOR[here], f"{path} imports {name}, which lies above it"
        assert (here, there) not in NEIGHBOURS, f"{path} imports {name} sideways"


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in modules()} == set(FLOOR)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_torch_and_engines_stay_in_their_rooms(path: Path) -> None:
    where = path.relative_to(SRC).as_posix()
    for name, runs_on_import in imported(path):
        top = name.split(".")[0]
        if top in {"torch", "transformers"} and runs_on_import:
            assert where.startswith(TORCH_ROOMS), f"{where} imports {name}"
        if top in {"vllm", "sglang"} and runs_on_import:
            assert where.startswith(f"engines/{top}/"), f"{where} imports {name}"


def test_control_plane_loads_neither_torch_nor_an_engine() -> None:
    names = [
        name_of(path)
        for path in modules()
        if not path.relative_to(SRC).as_posix().startswith(("cpu/gpu_worker.py", "cpu/copy/", "engines/", "demo/"))
        and path.name != "__main__.py"
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {['kvoffload', *names]!r}: importlib.import_module(name)\n"
        "bad = sorted({'torch', 'vllm', 'sglang', 'transformers'} & set(sys.modules))\n"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------------------------------------- tests reach all


def imported_by_tests() -> Iterator[str]:
    """Every dotted name that a file of the tests imports; of ``from a.b import c`` both ``a.b`` and ``a.b.c``."""
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_is_imported_by_a_test() -> None:
    """A module that no test imports is either too small to be a room of its own, or untested."""
    names = {name_of(path) for path in modules() if path.name not in ("__init__.py", "__main__.py")}
    reached = names & set(imported_by_tests())
    assert names - reached == set(), "test these, or fold them into their callers"


# ------------------------------------------------------------------------------------------- definitions are in use


def defined_in(path: Path) -> Iterator[str]:
    """The names that a module defines for itself: functions, classes and constants."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def test_every_definition_is_referred_to() -> None:
    """By a word in the sources, tests, benchmarks, pages or build files besides its definition and ``__all__``."""
    exported = re.compile(r"^__all__ = \[.*?\]$", re.MULTILINE | re.DOTALL)
    texts = [path.read_text() for top in ("src", "tests", "bench") for path in (ROOT / top).rglob("*.py")]
    texts += [path.read_text() for path in (*(ROOT / "docs").rglob("*.md"), ROOT / "pyproject.toml")]
    words = Counter(word for text in texts for word in re.findall(r"\w+", exported.sub("", text)))
    words.subtract(name for path in modules() for name in defined_in(path))
    dead = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules()
        for name in defined_in(path)
        if words[name] <= 0 and not name.startswith("__")
    ]
    assert not dead, "\n".join(["delete these, or use them:", *dead])
