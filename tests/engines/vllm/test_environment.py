# SPDX-License-Identifier: Apache-2.0
"""Test which variables count, and that someone has judged every variable in the sources of the installed vLLM."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.engines.vllm.counted import COUNTED_VARIABLES
from tests.engines.vllm.sources import Sources

from kvoffload.engines.facts import UnclearError
from kvoffload.engines.variables import counted
from kvoffload.engines.vllm import environment as module
from kvoffload.engines.vllm.environment import HARMLESS, environment, kernels, plugins

SET_BY_ALL = {"VLLM_USE_DEEP_GEMM_E8M0"}
"""The variables that vLLM sets while it reads a model's configuration, in the process from which all others descend."""


SET_BY_WORKERS = ["AITER_BF16_FP8_MOE_BOUND"]
"""For models that need it. So an engine in one process and one in several do not share: a miss."""


CHANGING = """
VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_MARLIN_INPUT_DTYPE VLLM_CPU_INT4_W4A8
VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_PLUGINS VLLM_VIDEO_LOADER_BACKEND
VLLM_USE_MODELSCOPE VLLM_INVENTED VLLM_A_SERVICE
"""
SILENT = """
VLLM_LOGGING_LEVEL VLLM_PORT VLLM_DP_RANK VLLM_DIST_IDENT VLLM_CACHE_ROOT VLLM_HOST_IP VLLM_CPU_KVCACHE_SPACE
VLLM_SERVICE_HOST VLLM_SERVICE_PORT VLLM_SERVICE_PORT_HTTP VLLM_PORT_8000_TCP VLLM_PORT_8000_TCP_ADDR
VLLM_LLAMA_8B_SERVICE_HOST VLLM_LLAMA_8B_PORT_8000_TCP_PROTO VLLM_LLAMA_PORT PATH KVOFFLOAD_CONFIG_FILE
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)


def names_of(sources: Sources) -> set[str]:
    """Keys of ``environment_variables``."""
    for node in sources.module("vllm.envs").body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables":
            assert isinstance(node.value, ast.Dict)
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise LookupError("vLLM lists its variables elsewhere")


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_every_variable_counts_or_is_harmless_for_a_reason(sources: Sources) -> None:
    assert len(names_of(sources)) > 200
    assert unknown_names(sources) == set()


def unknown_names(sources: Sources) -> set[str]:
    return names_of(sources) - {name for names in (COUNTED_VARIABLES, *HARMLESS.values()) for name in names.split()}


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_what_vllm_sets_itself_does_not_count(sources: Sources) -> None:
    found = set()
    for file in (sources.root / "vllm").rglob("*.py"):
        found |= set(re.findall(r"environ(?:\[|\.setdefault\()\"(\w+)\"(?:\] = |,)", file.read_text()))
    assert {"VLLM_DIST_IDENT", "VLLM_WORKER_MULTIPROC_METHOD", "TRITON_CACHE_DIR"} <= found
    harmless = {name for names in HARMLESS.values() for name in names.split()}
    assert {name for name in found if name.startswith("VLLM_")} - harmless == SET_BY_ALL
    assert counted(found) == SET_BY_WORKERS


def test_a_variable_stands_in_one_list() -> None:
    names = [name for row in (COUNTED_VARIABLES, *HARMLESS.values()) for name in row.split()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name",
    CHANGING.split(),
)
def test_a_variable_that_changes_bytes_or_is_unknown_counts_when_it_is_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [environment()]
    for value in ("", "0", "secret"):
        monkeypatch.setenv(name, value)
        found.append(environment())
    assert len({str(each) for each in found}) == len(found)
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    "name",
    SILENT.split(),
)
def test_a_harmless_variable_does_not_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment()
    monkeypatch.setenv(name, "tcp://10.0.0.1:8000")
    assert environment() == before


def test_kernels_that_vllm_finds_count_with_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = ModuleType("vllm.utils.flashinfer")
    asks.__file__ = str(tmp_path / "flashinfer.py")
    for name in ("vllm", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, asks.__name__, asks)

    def found(has_flashinfer: bool, *files: tuple[str, str]) -> str:
        function = lambda: has_flashinfer  # noqa: E731
        function.__module__ = asks.__name__
        asks.has_flashinfer = function  # type: ignore[attr-defined]
        for file, text in files:
            (tmp_path / file).write_text(text)
        kernels.cache_clear()
        return kernels()

    with pytest.raises(UnclearError, match="choice of kernels is not known"):
        found(True, ("flashinfer.py", "nothing is looked for"))
    asked = (
        ("flashinfer.py", 'find_spec("pytest")'),
        ("import_utils.py", '_has_module("absent") or _has_module("vllm.x")'),
    )
    before = found(True, *asked)
    assert json.loads(before) == [{"pytest": [f"pytest {pytest.__version__}"]}, True]
    assert found(False) != before
    owners: Any = module.packages_distributions()
    monkeypatch.setattr(module, "packages_distributions", lambda: owners | {"pytest": ["pytest", None]})
    assert found(True) == before, "a package that is half removed has no name"
    monkeypatch.setattr(module, "version", lambda _: "another")
    assert found(True) != before
    kernels.cache_clear()


@pytest.mark.vllm
def test_vllm_says_which_kernels_it_looks_for() -> None:
    kernels.cache_clear()
    assert kernels()


def of_packages(monkeypatch: pytest.MonkeyPatch, *found: tuple[str, str, str, Any]) -> None:
    """Packages have these entry points: group, name, target, version."""
    entries: list[EntryPoint] = []
    for group, name, value, version in found:
        entry = EntryPoint(name, value, group)
        vars(entry)["dist"] = SimpleNamespace(version=version)
        entries.append(entry)
    monkeypatch.setattr(module, "entry_points", lambda group: [entry for entry in entries if entry.group == group])
    plugins.cache_clear()


def test_plug_ins_of_others_count_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    general, hardware = "vllm.general_plugins", "vllm.platform_plugins"
    ours = [
        (general, "kvoffload", "kvoffload.engines.vllm:register", "0.1"),
        (general, "lora_resolver", "vllm.plugins.lora:register", "0.32"),
        ("vllm.stat_logger_plugins", "stats", "mine:Stats", "1"),
    ]
    texts = []
    for theirs in (
        [],
        [(general, "mine", "mine:register", "1")],
        [(general, "mine", "mine:register", "2")],
        [(general, "mine", "vllm_mine:register", "1")],
        [(hardware, "mine", "mine:register", "1")],
    ):
        of_packages(monkeypatch, *ours, *theirs)
        texts.append(plugins())
    assert len(set(texts)) == len(texts)
    of_packages(monkeypatch)
    assert plugins() == texts[0]
    of_packages(monkeypatch, (general, "mine", "mine:register", None))
    with pytest.raises(UnclearError, match="'mine' has no version"):
        plugins()
    plugins.cache_clear()
