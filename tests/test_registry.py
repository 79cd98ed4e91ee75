# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvoffload.errors import ConfigError
from kvoffload.registry import Registry


def test_values_and_dotted_paths() -> None:
    registry: Registry[object] = Registry("thing", "kvoffload.nothing")
    registry.register("one", 1)
    registry.register("path", "pathlib:Path")
    assert registry.get("one") == 1
    assert registry.get("path") is Path
    assert registry.names() == ["one", "path"]


def test_an_unknown_name_is_a_value_error_that_lists_the_choices() -> None:
    registry: Registry[object] = Registry("thing", "kvoffload.nothing")
    registry.register("lru", 1)
    registry.register("arc", 2)
    with pytest.raises(ValueError, match=r"Unknown thing: 'lur'\. Did you mean 'lru'\?"):
        registry.get("lur")


def test_a_name_is_registered_once() -> None:
    registry: Registry[object] = Registry("thing", "kvoffload.nothing")
    registry.register("a", 1)
    registry.register("a", 1)
    with pytest.raises(ConfigError, match="already registered"):
        registry.register("a", 2)


def test_entry_points_of_installed_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outsider_plugin.py").write_text("VALUE = 'from outside'\n")
    info = tmp_path / "outsider-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvoffload.test_things]\ngood = outsider_plugin:VALUE\nbad = outsider_missing:VALUE\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[object] = Registry("thing", "kvoffload.test_things")
    assert registry.names() == ["bad", "good"]
    assert registry.get("good") == "from outside"
    with pytest.raises(ConfigError, match="outsider_missing"):
        registry.get("bad")
    sys.modules.pop("outsider_plugin", None)
