# SPDX-License-Identifier: Apache-2.0
"""Versions that were not tried start with a warning, and are refused by name if they lack something."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

import pytest

import kvoffload.engines.sglang
from kvoffload.engines.sglang.versions import TRIED, sglang_version, untried_version
from kvoffload.errors import ConfigError


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cpu", "0.5.23.post2+g1234"])
def test_builds_of_a_tried_version_are_tried(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    assert untried_version() is None
    assert sglang_version() == version, "the namespace tells them apart"


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.230", "0.6.0", "0.5.23rc1", "0.5.23.dev3", "main"])
def test_others_are_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    assert untried_version() == f"kvoffload was tried with SGLang {TRIED[0]}, and this is SGLang {version}"


def test_a_version_that_lacks_something_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.9.0")
    monkeypatch.delitem(sys.modules, "kvoffload.engines.sglang.backend", raising=False)
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.model_override_base", ModuleType("model_override_base"))
    with pytest.raises(ConfigError, match=r"this is SGLang 0\.9\.0, which differs.*model_config_of"):
        kvoffload.engines.sglang.KVOffloadStorage  # noqa: B018 - SGLang gets it like this
