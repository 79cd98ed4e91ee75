# SPDX-License-Identifier: Apache-2.0
"""Run the examples that need no engine. Those of vLLM and SGLang run in their lanes."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import own_tier
from tests.doc_commands import ROOT

from kvoffload.config_file import load_config_file
from kvoffload.specs import read_config


def test_a_tier_of_your_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_tier.main(str(tmp_path))
    assert "4 of them came back" in capsys.readouterr().out
    (namespace,) = tmp_path.iterdir()
    assert len(list(namespace.iterdir())) == 16


def test_an_engine_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from examples import own_engine

    own_engine.main()
    assert "32 of 35 tokens" in capsys.readouterr().out


def test_every_example_is_listed_with_a_test_that_runs_it() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in (ROOT / "examples").iterdir():
        if path.is_file() and path.name != "README.md":
            assert f"({path.name})" in listed
            assert path.stem in tests


def test_the_configuration_is_accepted() -> None:
    read_config(load_config_file(ROOT / "examples" / "offload.yaml"))
