# SPDX-License-Identifier: Apache-2.0
"""Test ``import kvoffload``: its names, its types for type checkers, and the modules that it loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvoffload
from kvoffload.cpu.manager import CPUOffloadingManager


def test_every_name_is_there_and_listed() -> None:
    for name in kvoffload.__all__:
        assert getattr(kvoffload, name) is not None
    assert set(kvoffload.__all__) <= set(dir(kvoffload))
    assert kvoffload.CPUOffloadingManager is CPUOffloadingManager


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(kvoffload.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        seen |= {alias.name: node.module for alias in node.names}
    loaded = {name: f"kvoffload.{module}" for name, module in vars(kvoffload)["_MODULE_OF"].items()}
    assert seen == loaded
    assert {*seen, "__version__"} == set(kvoffload.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'CPUOffloadManager'"):
        _ = kvoffload.CPUOffloadManager  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name"):
        exec("from kvoffload import CPUOffloadManager")


def test_it_loads_what_is_used_and_neither_torch_nor_an_engine() -> None:
    script = (
        "import sys, kvoffload\n"
        "assert 'numpy' not in sys.modules\n"
        "kvoffload.parse_config\n"
        "assert not {'kvoffload.cpu', 'kvoffload.tiering'} & set(sys.modules)\n"
        "kvoffload.OffloadingConnectorWorker\n"
        "assert 'kvoffload.tiering' not in sys.modules\n"
        "from kvoffload import *\n"
        "bad = sorted({'torch', 'vllm', 'transformers'} & set(sys.modules))\n"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
