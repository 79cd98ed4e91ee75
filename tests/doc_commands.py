# SPDX-License-Identifier: Apache-2.0
"""Find the command lines of the README and of ``docs/``, and run the same parsers on them as users do.

A command line is a line of a fence marked ``sh`` or ``console`` (after ``$`` there), or a code span that starts with a
program of ``PROGRAMS``. There are no other command lines on pages.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvoffload.cli import make_app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

PROGRAMS = ("kvoffload", "make", "python", "vllm", "pip", "scripts/")
"""The words with which a code span with arguments starts if it is a command line."""

OF_OTHERS = {
    "cd": "the shell's",
    "mkdir": "the shell's; the page's line was run by hand in a fresh environment",
    "printf": "the shell's; the same",
    ".": "the shell's",
    "(": "the shell's",
    ")": "the shell's",
    "kubectl": "needs a cluster; its manifests are checked by tests/deploy/test_kubernetes.py",
    "curl": "needs the server of the page; its lines were run by hand with vLLM 0.32",
    "jq": "reads lines of JSON; tests/connector/test_trace_recorder.py has these lines",
    "docker": "needs a daemon, which the machines of the tests do not have",
    "valkey-server": "needs certificates; its options are those of the servers that make test-remote starts",
}
"""Programs that are not this project's, and why their arguments are not checked here."""


@dataclass(frozen=True)
class Fence:
    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text[:60]!r}"


@dataclass(frozen=True)
class Command:
    page: Path
    words: tuple[str, ...]
    is_in_fence: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {shlex.join(self.words)}"


def fences(page: Path) -> list[Fence]:
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [
        Fence(page, language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)) for indent, language, text in found
    ]


def section(page: Path, heading: str) -> str:
    """Return a page's text under a heading of the second level."""
    found = re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    return dict(found)[heading]


def without_fences(page: Path) -> str:
    return re.sub(r"^ *```\w*\n.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[Command]:
    for fence in fences(page):
        if fence.language == "sh":
            for words in _split(fence.text):
                yield Command(page, words, True)
        elif fence.language == "console":
            for line in re.findall(r"^\$ (.*(?:\\\n.*)*)", fence.text, re.MULTILINE):
                yield Command(page, tuple(shlex.split(line.replace("\\\n", " "))), True)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", without_fences(page)):
        text = " ".join(span.split())
        if " " in text and text.startswith(PROGRAMS) and not text.startswith("kvoffload offloads"):
            yield Command(page, tuple(shlex.split(text.rstrip("."))), False)


def _split(script: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command of a script. A command ends with its line, at ``&&`` or at ``|``."""
    line = ""
    for each in script.splitlines(keepends=True):
        if each.endswith("\\\n"):
            line += each.removesuffix("\\\n")
            continue
        line += each
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation continues in the next line
            continue
        line = ""
        command: list[str] = []
        for word in words:
            if word in ("&&", "|"):
                yield tuple(command)
                command = []
            else:
                command.append(word)
        if command:
            yield tuple(command)
    assert not line, f"a quotation without an end: {line}"


def check(words: tuple[str, ...]) -> None:
    """Raises if the program of ``words`` would refuse them, or cannot be checked and is not known."""
    words = tuple(words[next(at for at, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :])
    program, arguments = words[0].rpartition("/")[2], words[1:]
    if program == "kvoffload":
        parse_kvoffload(arguments)
    elif program == "make":
        for line in make_lines(arguments):
            check(line)
    elif program in ("python", "python3"):
        _check_python(arguments)
    elif program == "vllm":
        assert arguments[0] == "serve"
        assert not arguments[1:] or not arguments[1].startswith("-"), "it names no model"
    elif program == "sglang":
        assert arguments[:2] == ("serve", "--model-path")
    elif program == "pip":
        _check_pip(arguments)
    elif words[0].startswith("scripts/"):
        text = (ROOT / words[0]).read_text()
        unknown = [word for word in arguments if word.startswith("-") and word not in text]
        assert not unknown, f"{words[0]} has no {unknown}"
    else:
        assert program in OF_OTHERS, f"{program}: nothing checks it; give OF_OTHERS the reason, or check it here"


def parse_kvoffload(arguments: tuple[str, ...]) -> Any:
    """Parse the arguments and return the context of the subcommand.

    A mention of a subcommand, such as ``kvoffload store``, needs no arguments.
    """
    command = _kvoffload()
    if arguments[0] == "--version":
        return None
    for at, name in enumerate(arguments):
        if not hasattr(command, "commands"):
            return command.make_context(name, list(arguments[at:])) if "--help" not in arguments else None
        assert name in command.commands or name == "--help", f"kvoffload has no {name}"
        command = command.commands.get(name, command)
    return None


@functools.cache
def _kvoffload() -> Any:
    import typer

    return typer.main.get_command(make_app())


def make_lines(arguments: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the command lines of this project's modules that ``make`` would run."""
    # Ignore variables that a `make test ARGS=...` around this test passes on.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "ARGS")}
    command = ["make", "-n", *arguments]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    lines = [
        shlex.split(line) for line in made.stdout.splitlines() if re.search(r"python -m (?:kvoffload|tests)", line)
    ]
    return [tuple(line[line.index("-m") - 1 :]) for line in lines]


class _Parsed(Exception):
    pass


def _check_python(arguments: tuple[str, ...]) -> None:
    if arguments[0] == "-c":
        ast.parse(arguments[1])
        return
    if arguments[0].endswith(".py"):
        ast.parse((ROOT / arguments[0]).read_text())  # the server that it is has a test in the lane of vLLM
        return
    assert arguments[0] == "-m", arguments
    module, *rest = arguments[1:]
    if module in ("venv", "lmcache.v1.basic_check"):  # not this project's
        return
    if module == "kvoffload":
        parse_kvoffload(tuple(rest))
        return
    if module == "bench":
        from bench import BENCHES

        assert {name for name in rest if name != "..."} <= {*BENCHES}, rest
        return
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"there is no module {module}"
    source = Path(spec.origin).read_text()
    assert '__name__ == "__main__"' in source, f"{module} is not a program"
    if "ArgumentParser(" not in source:
        assert not [word for word in rest if word.startswith("-")], f"{module} takes no options"
        return

    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser, *args: Any) -> None:
        parse(self, *args)
        raise _Parsed

    with patch.object(argparse.ArgumentParser, "parse_args", only_parse), patch.object(sys, "argv", [module, *rest]):
        try:
            runpy.run_path(spec.origin, run_name="__main__")
        except _Parsed:
            return
    raise AssertionError(f"{module} parsed nothing")


def _check_pip(arguments: tuple[str, ...]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments[0] in ("install", "uninstall", "show"), arguments
    for target in arguments[1:]:
        assert target not in ("kvoffload",) or arguments[0] == "show", "the package is not on an index"
        if match := re.fullmatch(r"(\.|.*\.whl\)?)\[(.+)\]", target):
            assert {*match[2].split(",")} <= extras.keys(), target
