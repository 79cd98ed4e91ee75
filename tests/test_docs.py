# SPDX-License-Identifier: Apache-2.0
"""Test that names on the pages exist and that examples work: links, imports, names, configurations and code.

Every command line is run with small inputs, or parsed by the program's own parser.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
import zstandard
from tests import doc_commands
from tests.doc_commands import PAGES as ALL_PAGES
from tests.doc_commands import ROOT, Command, commands, fences, without_fences
from tests.integration.served_tiers import ServedTiers

from kvoffload import testing
from kvoffload.cli import check_config, main
from kvoffload.metrics import METRICS
from kvoffload.specs import read_config
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.fs import FileSystemStore

PAGES = [page for page in ALL_PAGES if page.parent.name != "design"]
ENTRY_POINT_GROUPS = {"kvoffload.policies", "kvoffload.stores"}
"""Dotted names that are not modules. ``tests/test_registry.py`` explains them."""


def imports_of(page: Path) -> list[tuple[str, str]]:
    """(module, name) of every import from kvoffload in the page's Python."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvoffload"
        for alias in node.names
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_imports_work(page: Path) -> None:
    for module, name in imports_of(page):
        if module.startswith("kvoffload.engines"):
            pytest.importorskip("transformers")
        assert hasattr(importlib.import_module(module), name), f"{page.name} imports {name} from {module}"


def test_links_lead_somewhere() -> None:
    """To a file, and to a heading in it. Outside of code."""
    for page in (*PAGES, *sorted((ROOT / "docs" / "design").glob("*.md"))):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"\w+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in headings_of(file), f"{page.name} links to {target}"


def headings_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown renderers make them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def test_every_page_is_in_the_site() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    docs = ROOT / "docs"
    assert listed == {str(path.relative_to(docs)) for path in docs.rglob("*.md")}


def test_the_package_is_not_said_to_be_on_an_index() -> None:
    for page in [*PAGES, *(ROOT / "src").rglob("*.py")]:
        assert "pip install kvoffload" not in page.read_text().replace("'", ""), page


def test_there_are_imports_to_check() -> None:
    assert sum(len(imports_of(page)) for page in PAGES) > 15


def test_dotted_names_exist() -> None:
    for page in PAGES:
        for name in set(re.findall(r"`(kvoffload(?:\.\w+)+)`", page.read_text())) - ENTRY_POINT_GROUPS:
            pkgutil.resolve_name(name)


def test_contracts_and_fakes_come_from_kvoffload_testing() -> None:
    for page in PAGES:
        for name in re.findall(r"\b(?:\w+Contract|Fake\w+|Manual\w+)\b", page.read_text()):
            assert name in testing.__all__, f"{page.name} names {name}"


# -------------------------------------------------------------------------------------------------- command lines

EVERY = [command for page in ALL_PAGES for command in commands(page)]
COMMANDS = list({command.words: command for command in EVERY}.values())

PARSED_ONLY = {
    "demo": "takes a minute; tests/cli/test_demo.py runs it",
    "doctor": "times copies for a minute; tests/cli/test_doctor.py runs it",
    "top": "needs a server; tests/cli/test_top.py has one",
}
"""Subcommands whose lines in fences are parsed and not run, and why."""


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_line_is_accepted(command: Command) -> None:
    doc_commands.check(command.words)


def test_there_are_command_lines_to_check() -> None:
    assert {command.words[0] for command in COMMANDS} >= {"kvoffload", "make", "python", "vllm", "pip"}
    assert sum(command.is_in_fence for command in EVERY) > 20


BAD = [
    "kvoffload plan trace.jsonl --hit-rates 60",
    "kvoffload store lst",
    "make demmo",
    "make demo ARGS=--polices",
    "python -m bench nosuch",
    "python -m tests.nosuch",
    "pip install .[nosuch]",
    "pip install kvoffload",
    "scripts/test-gpu --nosuch",
    "wget",
]


@pytest.mark.parametrize("bad", BAD)
def test_a_wrong_command_line_is_not_accepted(bad: str) -> None:
    usage_error = typer.BadParameter.__mro__[1]
    with pytest.raises((AssertionError, usage_error)):
        doc_commands.check(tuple(bad.split()))


def test_command_lines_are_in_fences_that_say_so() -> None:
    starts = tuple(f"{program} " for program in doc_commands.PROGRAMS)
    for page in ALL_PAGES:
        for fence in fences(page):
            if fence.language not in ("sh", "console"):
                assert not [line for line in fence.text.splitlines() if line.startswith(starts)], str(fence)
        indented = re.findall(r"(?<=\n\n)    (.*)", without_fences(page))
        assert not [line for line in indented if line.startswith(starts)], page


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that a server writes with ``record_trace``."""
    root = tmp_path_factory.mktemp("recorded")
    served = ServedTiers(root, num_blocks=16, record_trace=str(root / "t.jsonl"))
    served.serve(rounds=2)
    served.close()
    return root / "t.jsonl"


MODEL = {
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "head_dim": 128,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
"""The sizes of Qwen3-8B, which the pages take for their examples."""


@pytest.fixture
def inputs(tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the files that a command line names, small ones, and returns its words with paths below ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def make(command: Command) -> list[str]:
        words = []
        if command.words[1] == "store":
            kv = FileSystemStore(tmp_path / command.words[3].lstrip("/"), 1000, "NAMESPACE")
            kv.write(keys(1, 2), [memoryview(bytes(1000))] * 2)
            kv.close()
        for word in command.words[1:]:
            path = tmp_path / word.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            if word.endswith(".jsonl"):
                shutil.copy(recorded, path)
            elif word.endswith(".jsonl.zst"):
                path.write_bytes(zstandard.compress(_trace().encode()))
            elif word.endswith("config.json"):
                path.write_text(json.dumps(MODEL))
            elif word.startswith("/models/"):
                path.mkdir()
                (path / "config.json").write_text(json.dumps(MODEL))
            elif word.endswith(".yaml"):
                texts = [fence.text for fence in fences(command.page) if fence.language == "yaml"]
                texts = [text for text in texts if text.startswith(f"# {path.name}\n")] or texts
                (text,) = texts
                path.write_text(text.replace("GiB", "MiB").replace("/mnt/", f"{tmp_path}/"))
            words.append(str(path) if word.startswith("/") else word)
        return words

    return make


def _trace() -> str:
    """Return a trace in the form of Mooncake, with two turns of many chats."""
    rows = [
        {"timestamp": 1000 * turn + chat, "input_length": 512 * (turn + 1), "output_length": 8, "hash_ids": ids}
        for turn in range(2)
        for chat in range(8)
        for ids in [[100 * chat + block for block in range(turn + 1)]]
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


SIMULATIONS = ("simulate", "plan", "explain")
RUN = [
    command
    for command in EVERY
    if command.is_in_fence and command.words[0] == "kvoffload" and command.words[1] not in PARSED_ONLY
]


@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_line_of_a_fence_runs(command: Command, inputs: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*inputs(command), *(["--processes", "1"] if command.words[1] in SIMULATIONS else [])])
    reached = (0, 1) if command.words[1] == "plan" else (0,)  # such a small trace may not offer the goal
    assert (caught.value.code or 0) in reached


def test_the_answer_of_check_config_is_that_of_the_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = [fence.text for fence in fences(ROOT / "docs" / "quickstart.md") if fence.language == "console"]
    (file,) = [fence.text for fence in fences(ROOT / "docs" / "quickstart.md") if fence.language == "yaml"]
    (tmp_path / "offload.yaml").write_text(file)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    monkeypatch.setattr(check_config, "_probe", lambda *_: [])  # the page's machine has the memory and the disk
    monkeypatch.setattr(check_config, "check_shared_memory", lambda *_: None)
    main_of_page = ["check-config", str(tmp_path / "offload.yaml"), "--model", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(main_of_page)
    answer = capsys.readouterr().out
    for line in shown.splitlines()[1:]:
        assert line.partition("...")[0] in answer


# ------------------------------------------------------------------------------------------- configurations and code


def configurations() -> list[tuple[str, dict[str, Any]]]:
    """(place, configuration) of each fence of JSON and YAML, and of each line for vLLM."""
    found = []
    for page in ALL_PAGES:
        texts = [fence.text for fence in fences(page) if fence.language in ("json", "yaml")]
        for command in commands(page):
            texts += [word for word in command.words if word.startswith("{") and "kv_connector" in word]
        for text in texts:
            values = yaml.safe_load(text)
            if isinstance(values, dict) and "apiVersion" not in values and not {"servers", "hints"} & values.keys():
                found.append((f"{page.name}: {text[:40]!r}", values))
    return found


@pytest.mark.parametrize(("place", "values"), configurations(), ids=[place for place, _ in configurations()])
def test_a_configuration_would_be_taken(place: str, values: dict[str, Any], tmp_path: Path) -> None:
    if "kv_connector" in values:
        assert (values["kv_role"], values["kv_load_failure_policy"]) == ("kv_both", "recompute")
        values = values["kv_connector_extra_config"]
        for each in values.pop("connectors", ()):
            values |= each.get("kv_connector_extra_config", {})
    if "weights_version" in values:
        (tmp_path / "VERSION").write_text("1\n")
        values["weights_version"] = {"file": str(tmp_path / "VERSION")}
    if values.pop("config_file", None) is None or values:
        read_config({"cpu_bytes_to_use": "1GiB"} | values)


def test_there_are_configurations_to_check() -> None:
    assert len(configurations()) > 12


def test_python_compiles_and_a_test_of_its_own_runs_it() -> None:
    """The test that runs it names the page."""
    for page in ALL_PAGES:
        blocks = [fence.text for fence in fences(page) if fence.language == "python"]
        for block in blocks:
            compile(block, page.name, "exec")
        if blocks:
            own = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
            assert [path for path in own if page.name in (text := path.read_text()) and "exec(" in text], page


def test_the_series_it_names_exist() -> None:
    series = {f"kvoffload_{name}" for name in METRICS}
    for page in PAGES:
        for name in re.findall(r"\bkvoffload_\w+", page.read_text()):
            base = re.sub(r"_(?:total|bucket|count|sum)$", "", name)
            assert base in series or any(each.startswith(base) for each in series), f"{page.name} names {name}"


def test_the_tests_that_the_page_of_faults_names_exist() -> None:
    page = (ROOT / "docs/contributing/faults.md").read_text()
    tests = {path.relative_to(ROOT / "tests").as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    names, missing, file = 0, list[str](), ""
    for token in re.findall(r"`([a-z_0-9/.]*(?:test_[a-z_0-9]+\.py)?(?:::test_[a-z_0-9]+)?)`", page):
        path, _, name = token.partition("::")
        if path.rpartition("/")[2].startswith("test_"):
            file = path.removeprefix("../")
            missing += [] if any(f"/{known}".endswith(f"/{file}") for known in tests) else [token]
        if name:
            names += 1
            missing += [] if file in tests and f"def {name}(" in tests[file].read_text() else [token]
    assert names > 50
    assert not missing
