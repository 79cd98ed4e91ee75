# SPDX-License-Identifier: Apache-2.0
"""Other versions of vLLM are refused when the connector is imported, in a sentence that names the range."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.vllm.harness import ROOT

from kvoffload.engines.vllm.versions import NEWEST, OLDEST, release_of, vllm_release
from kvoffload.errors import ConfigError


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.30.0", (0, 30)),
        ("0.31.2", (0, 31)),
        ("0.32.0+cpu", (0, 32)),
        ("0.32.1rc1", (0, 32)),
        ("0.33.0.post1", (0, 33)),
    ],
)
def test_versions_of_the_range(version: str, release: tuple[int, int]) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize("version", ["0.29.1", "0.3.0", "0.34.0", "0.330.0", "1.31.0", "0.1.dev1+g123", "dev", ""])
def test_other_versions_are_refused_in_one_sentence(version: str) -> None:
    with pytest.raises(ConfigError) as caught:
        release_of(version)
    assert str(caught.value) == (
        f"kvoffload works with vLLM 0.30 to 0.33, and this is vLLM {version}: install one of those versions."
    )


def import_beside(version: str, directory: Path) -> str:
    """The last line that an import of the connector says beside a vLLM that has nothing but its version number."""
    package = directory / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__version__ = {version!r}\n")
    result = subprocess.run(
        [sys.executable, "-c", "from kvoffload.engines.vllm import KVOffloadConnector"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(directory), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stderr.strip().splitlines()[-1]


def test_the_import_of_the_connector_refuses_before_it_needs_anything_of_vllm(tmp_path: Path) -> None:
    assert import_beside("0.29.0", tmp_path).startswith(
        "kvoffload.errors.ConfigError: kvoffload works with vLLM 0.30 to 0.33, and this is vLLM 0.29.0"
    )


def test_the_import_of_the_connector_goes_on_with_a_version_of_the_range(tmp_path: Path) -> None:
    assert import_beside("0.31.0", tmp_path) == "ModuleNotFoundError: No module named 'vllm.distributed'"


@pytest.mark.vllm
def test_the_vllm_of_this_lane_is_one_of_them() -> None:
    import vllm

    assert vllm.__version__.startswith(".".join(map(str, vllm_release())) + ".")
    assert OLDEST <= vllm_release() <= NEWEST
