# SPDX-License-Identifier: Apache-2.0
"""Versions that were not tried are refused in one sentence, before anything of SGLang's is imported."""

from __future__ import annotations

from importlib import metadata

import pytest

import kvoffload.engines.sglang
from kvoffload.engines.sglang.versions import TRIED, release_of, sglang_version
from kvoffload.errors import ConfigError


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cpu", "0.5.23.post2+g1234"])
def test_builds_of_what_was_tried(version: str) -> None:
    assert release_of(version) == "0.5.23"


def test_builds_of_one_release_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The namespace contains this text."""
    for version in ("0.5.23", "0.5.23.post1"):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        assert sglang_version() == version


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.230", "0.6.0", "0.5.23rc1", "0.5.23.dev3", "main"])
def test_others_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=TRIED[-1]):
        release_of(version)


def test_the_backend_is_refused_before_sglang_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.9.0")
    with pytest.raises(ConfigError, match=r"this is SGLang 0\.9\.0"):
        kvoffload.engines.sglang.KVOffloadStorage  # noqa: B018 - SGLang gets it like this
