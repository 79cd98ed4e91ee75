# SPDX-License-Identifier: Apache-2.0
"""The house rules of design section 3: imports point down only, and the control plane loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "kvoffload"

FLOOR = {
    "errors": 0,
    "registry": 1,
    "units": 1,
    "compiled": 1,
    "metrics": 1,
    "base": 2,
    "specs": 3,
    "config": 2,
    "cpu": 3,
    "tiering": 4,
    "connector": 5,
}
ROOF = {"sim": 6, "engines": 6, "demo": 7, "testing": 7, "cli": 8, "__main__": 9, "__init__": 9}
LEVEL = FLOOR | ROOF

TORCH_ROOMS = ("cpu/gpu_worker.py", "cpu/copy/", "engines/", "demo/", "testing/")
"""Where torch may be imported. ``testing`` only inside functions, checked by importing it."""

SAME_LEVEL_FORBIDDEN = {("sim", "engines"), ("engines", "sim")}


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


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
        assert LEVEL[there] <= LEVEL[here], f"{path} imports {name}, which lies above it"
        assert (here, there) not in SAME_LEVEL_FORBIDDEN, f"{path} imports {name} sideways"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_torch_and_engines_stay_in_their_rooms(path: Path) -> None:
    where = path.relative_to(SRC).as_posix()
    for name, runs_on_import in imported(path):
        top = name.split(".")[0]
        if top in {"torch", "vllm", "transformers"} and runs_on_import:
            assert where.startswith(TORCH_ROOMS), f"{where} imports {name}"
        if top == "vllm" and runs_on_import:
            assert where.startswith("engines/vllm/"), f"{where} imports {name}"


def test_control_plane_loads_neither_torch_nor_an_engine() -> None:
    names = [
        "kvoffload." + path.relative_to(SRC).with_suffix("").as_posix().replace("/", ".")
        for path in modules()
        if not path.relative_to(SRC).as_posix().startswith(("cpu/gpu_worker.py", "cpu/copy/", "engines/", "demo/"))
        and path.name != "__main__.py"
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {['kvoffload', *names]!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        "bad = sorted({'torch', 'vllm', 'transformers'} & set(sys.modules))\n"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
