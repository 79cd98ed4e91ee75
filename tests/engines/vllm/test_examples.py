# SPDX-License-Identifier: Apache-2.0
"""``examples/vllm_offline.py`` prints the token counts that ``docs/tutorial.md`` shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.vllm.harness import ROOT, child_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_vllm_offline(tmp_path: Path) -> None:
    config = tmp_path / "offload.yaml"
    text = (ROOT / "examples" / "offload.yaml").read_text()
    config.write_text(text.replace("/tmp/kvoffload-example", str(tmp_path / "kv")))
    done = subprocess.run(
        [sys.executable, "examples/vllm_offline.py"],
        cwd=ROOT,
        env=child_environment() | {"KVOFFLOAD_CONFIG": str(config), "VLLM_CPU_KVCACHE_SPACE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    counts = r"^(first|second) round: ([\d,]+) of ([\d,]+) prompt tokens found"
    found = re.findall(counts, done.stdout, re.MULTILINE)
    assert len(found) == 2
    assert found == re.findall(counts, (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE)
