# SPDX-License-Identifier: Apache-2.0
"""Test that the files that the Dockerfile copies suffice to build the package.

``make test-container`` builds the image.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COPIED = [
    source for line in re.findall(r"^COPY (.*)$", DOCKERFILE.read_text(), re.MULTILINE) for source in line.split()[:-1]
]


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == set(COPIED)


def test_the_package_builds_from_what_is_copied(tmp_path: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, tmp_path / "kvoffload" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(tmp_path / "kvoffload"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "kvoffload/engines/vllm/connector.py" in archive.namelist()
