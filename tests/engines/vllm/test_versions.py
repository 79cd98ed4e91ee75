# SPDX-License-Identifier: Apache-2.0
"""Test that versions of vLLM that are too old, or that lack names that the adapter uses, are rejected at import.

The error names the supported range.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.vllm.harness import ROOT

from kvoffload.engines.vllm import __getattr__, versions
from kvoffload.engines.vllm.versions import NEWEST, OLDEST, differences, release_of, untried_version, vllm_release
from kvoffload.errors import ConfigError


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0+cpu", (0, 32)),
        ("0.32.1rc1", (0, 32)),
        ("0.33.0.post1", (0, 33)),
        ("0.34.0", (0, 34)),
        ("1.31.0", (1, 31)),
    ],
)
def test_versions_of_the_range(version: str, release: tuple[int, int]) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize("version", ["0.31.2", "0.3.0", "0.1.dev1+g123", "dev", ""])
def test_other_versions_are_refused_in_one_sentence(version: str) -> None:
    with pytest.raises(ConfigError) as caught:
        release_of(version)
    assert str(caught.value) == (
        f"kvoffload works with vLLM 0.32 to 0.33 and newer, and this is vLLM {version}: install one of those versions."
    )


def run_beside(version: str, directory: Path, code: str, **modules: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a process whose vLLM has its version number and the given modules, by dotted name with ``__``."""
    package = directory / "vllm"
    sources = {"version": f"__version__ = {version!r}\n"} | modules
    for name, source in sources.items():
        path = package.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").touch()
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(directory), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        check=False,
    )


def import_beside(version: str, directory: Path) -> str:
    """Return the last line that an import of the connector prints."""
    result = run_beside(version, directory, "from kvoffload.engines.vllm import KVOffloadConnector")
    return result.stderr.strip().splitlines()[-1]


def test_the_import_of_the_connector_refuses_before_it_needs_anything_of_vllm(tmp_path: Path) -> None:
    assert import_beside("0.31.2", tmp_path).startswith(
        "kvoffload.errors.ConfigError: kvoffload works with vLLM 0.32 to 0.33 and newer, and this is vLLM 0.31.2"
    )


def test_a_newer_version_that_lacks_something_is_refused_by_its_name(tmp_path: Path) -> None:
    said = import_beside("0.34.0", tmp_path)
    assert "ConfigError: kvoffload works with vLLM 0.32 to 0.33, and vLLM 0.34.0 differs: " in said
    assert "'vllm.distributed'" in said


def test_the_import_of_the_connector_goes_on_with_a_version_of_the_range(tmp_path: Path) -> None:
    assert import_beside("0.32.0", tmp_path) == "ModuleNotFoundError: No module named 'vllm.distributed'"


FACTORY = """
class KVConnectorFactory:
    names = []
    @classmethod
    def register_connector(cls, name, module, class_name):
        cls.names.append(name)
"""
ENGINE_ARGS = """
class EngineArgs:
    def create_engine_config(self):
        return self.vllm_config
"""
SERVE_WITHOUT_US = """
from types import SimpleNamespace
from kvoffload.engines.vllm import register
register()
register()
from vllm.engine.arg_utils import EngineArgs
read, arguments = EngineArgs.create_engine_config, EngineArgs()
for transfer in (None, SimpleNamespace(kv_connector="LMCacheConnectorV1")):  # without the methods of today's
    arguments.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
    assert arguments.create_engine_config() is arguments.vllm_config
arguments.vllm_config = SimpleNamespace()
assert arguments.create_engine_config() is arguments.vllm_config
print("patched" if hasattr(read, "__wrapped__") else "untouched")
"""


@pytest.mark.parametrize(("version", "is_patched"), [("0.32.0", True), ("0.34.0", True), ("dev", False)])
@pytest.mark.parametrize("factory", [FACTORY, "", "raise RuntimeError"])
def test_servers_that_do_not_name_kvoffload_start(version: str, is_patched: bool, factory: str, tmp_path: Path) -> None:
    done = run_beside(
        version,
        tmp_path,
        SERVE_WITHOUT_US,
        distributed__kv_transfer__kv_connector__factory=factory,
        engine__arg_utils=ENGINE_ARGS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("patched" if is_patched and factory == FACTORY else "untouched")


def test_vllm_may_have_nothing_that_is_expected_of_it(tmp_path: Path) -> None:
    done = run_beside("0.32.0", tmp_path, "from kvoffload.engines.vllm import register; register()")
    assert done.returncode == 0, done.stderr


@pytest.mark.vllm
def test_a_newer_version_that_lacks_nothing_starts_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert untried_version() is None
    monkeypatch.setattr(versions, "NEWEST", (0, 31))  # the lane's is newer
    assert f"this is vLLM {versions.installed_version()}" in str(untried_version())


@pytest.mark.vllm
def test_a_newer_version_with_other_hooks_is_refused_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvoffload.engines.vllm import KVOffloadConnector

    assert differences(KVOffloadConnector) == []
    base = KVOffloadConnector.__base__
    monkeypatch.setattr(base, "on_new_request", lambda self, request, priority: None)
    monkeypatch.setattr(KVOffloadConnector, "__abstractmethods__", frozenset({"wait_for_all"}))
    assert differences(KVOffloadConnector) == ["wait_for_all is new", "on_new_request(self, request, priority)"]
    monkeypatch.setattr(versions, "NEWEST", (0, 31))
    monkeypatch.setattr("kvoffload.engines.vllm.NEWEST", (0, 31))
    with pytest.raises(ConfigError, match="wait_for_all is new"):
        __getattr__("KVOffloadConnector")


def test_hooks_of_a_class_are_compared_as_well() -> None:
    class OfVllm:
        def step(self, one: int) -> None: ...
        @classmethod
        def layout(cls, config: int, kind: str) -> None: ...
        @staticmethod
        def stats(data: int) -> None: ...

    class Ours(OfVllm):
        __abstractmethods__ = frozenset[str]()

        def step(self, one: int) -> None: ...
        @classmethod
        def layout(cls, config: int) -> None: ...  # type: ignore[override]
        @staticmethod
        def stats(other: int) -> None: ...

    assert differences(Ours) == ["layout(config, kind)", "stats(data)"]


@pytest.mark.vllm
def test_the_vllm_of_this_lane_is_one_of_them() -> None:
    import vllm

    assert vllm.__version__.startswith(".".join(map(str, vllm_release())) + ".")
    assert OLDEST <= vllm_release() <= NEWEST
