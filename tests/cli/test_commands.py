# SPDX-License-Identifier: Apache-2.0
"""Test that every subcommand has a module that registers it, and its own help texts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
import typer

import kvoffload
from kvoffload import cli

NAMES = ("check-config", "demo", "doctor", "explain", "plan", "simulate", "store", "top")


def commands(name: str) -> Iterator[Any]:
    """Yield the subcommand's module contents, with the subcommands of a group."""
    group: Any = typer.main.get_command(cli.make_app([name]))
    (command,) = group.commands.values()
    yield command
    yield from getattr(command, "commands", {}).values()


@pytest.mark.parametrize("name", NAMES)
def test_a_command_has_its_name(name: str) -> None:
    assert next(commands(name)).name == name


@pytest.mark.parametrize("arguments", [["--version"], ["--version", "store"]])
def test_the_version(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvoffload {kvoffload.__version__}\n"


def loaded_by(*arguments: str) -> set[str]:
    """Return the modules that a process has loaded when it ends."""
    script = (
        "import sys\nfrom kvoffload.cli import main\ntry:\n    main()\n"
        "except SystemExit:\n    print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stderr.split())


def test_what_a_command_does_not_need_is_not_loaded() -> None:
    assert not {"typer", "numpy", "rich", "msgspec"} & loaded_by("--version")
    loaded = loaded_by("top", "--help")
    assert "kvoffload.cli.top" in loaded
    assert not [name for name in loaded if name.startswith(("kvoffload.sim.cluster", "kvoffload.tiering", "torch"))]


@pytest.mark.parametrize("command", ["", "simulate", "plan", "explain", "store", "store clear", "check-config", "demo"])
def test_help_is_whole_at_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rich's help cuts words where its columns are full."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main([*command.split(), "-h"])
    assert caught.value.code == 0
    usage, *texts = capsys.readouterr().out.splitlines()
    assert usage.startswith("Usage: ")
    assert not [line for line in texts if "…" in line or line.endswith("...") or len(line) > 80]


def test_a_shell_completes_the_commands() -> None:
    shell = {"_KVOFFLOAD_COMPLETE": "complete_bash", "COMP_WORDS": "kvoffload s", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "kvoffload"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **shell}, check=False)
    assert {*done.stdout.split()} == {"simulate", "store"}


@pytest.mark.parametrize("name", NAMES)
def test_help_texts_are_whole_phrases(name: str) -> None:
    for command in commands(name):
        texts = {"": command.help or ""}
        texts |= {parameter.name: parameter.help for parameter in command.params if parameter.name != "help"}
        for what, text in texts.items():
            assert re.match(r"[A-Z].+\.$", text, re.DOTALL), f"{command.name} {what}: {text!r}"
            assert len(text.split()) >= 3, f"{command.name} {what}: {text!r}"


def test_without_its_packages_the_command_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "extra 'cli'" in said
    assert said.count("\n") == 1


def test_what_lacks_a_package_names_the_extra_that_brings_it() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    sources = [path.read_text() for path in Path(kvoffload.__file__).parent.rglob("*.py")]
    messages = [text for source in sources for text in re.findall(r"raise MissingExtraError\(([^)]*)", source)]
    assert len(messages) > 5
    named = [re.findall(r"extra '(\w+)'", message) for message in messages]
    assert {extra for each in named for extra in each} <= project["optional-dependencies"].keys()
    assert not [message for message, extras in zip(messages, named, strict=True) if not extras]


OF_OTHERS = {
    *("--kv-transfer-config", "--shutdown-timeout", "--help", "--tensor-parallel-size"),
    *("--prefix-caching-hash-algo", "--kv-offloading-size", "--pipeline-parallel-size"),
}
"""Options of vLLM, and of every command."""


def test_options_that_sentences_name_exist() -> None:
    known = {option for name in NAMES for command in commands(name) for each in command.params for option in each.opts}
    sources = Path(kvoffload.__file__).parent
    files = [path for folder in ("sim", "cli") for path in (sources / folder).rglob("*.py") if path.name != "page.py"]
    named = {(option, path.name) for path in files for option in re.findall(r"--[a-z][a-z-]+", path.read_text())}
    assert {option for option, _ in named} - known - OF_OTHERS == {"--version"}, sorted(named)
