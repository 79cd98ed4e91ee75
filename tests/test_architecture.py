# SPDX-License-Identifier: Apache-2.0
"""The control plane loads no torch. `make lint` sees to it that imports point down (``[tool.importlinter]``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "kvoffload"
DATA_PLANE = ("cpu/gpu_worker.py", "cpu/copy/", "engines/", "demo/", "__main__.py")


def test_control_plane_loads_neither_torch_nor_an_engine() -> None:
    paths = sorted(path.relative_to(SRC) for path in SRC.rglob("*.py"))
    parts = [path.with_suffix("").parts for path in paths if not path.as_posix().startswith(DATA_PLANE)]
    names = [".".join(("kvoffload", *each)).removesuffix(".__init__") for each in parts]
    assert len(names) > 100
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "bad = sorted({'torch', 'vllm', 'sglang', 'transformers'} & set(sys.modules))\n"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
