# SPDX-License-Identifier: Apache-2.0
"""Test output in containers and pipes: no UTF-8, a full disk behind standard output, a closed pipe."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from tests.tiering.stores.blocks import write

from kvoffload.testing.keys import keys
from kvoffload.tiering.options import parse_tier

COMMANDS = ["ls", "check", "help", "plan", "simulate", "doctor", "missing"]
SOME = [pytest.param(name, marks=() if name in ("ls", "help") else pytest.mark.long) for name in COMMANDS]
FOUR = [each for each in SOME if each.values[0] in ("ls", "check", "help", "simulate")]
POSIX, LATIN_1 = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "latin-1"}


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Commands over a directory, a model and a trace whose names ASCII lacks."""
    folder = tmp_path_factory.mktemp("キ")
    tier = {"type": "disk", "path": str(folder / "kv"), "max_bytes": "32MiB"}
    store = parse_tier(tier).open_store(4096, "モデル/ü")
    write(store, keys(1), block_bytes=4096)
    store.close()
    (folder / "c.json").write_text(json.dumps({"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}))
    line = {"timestamp": 0, "input_length": 50, "output_length": 1, "block_tokens": 16, "hash_ids": [1, 2, 3]}
    (folder / "キ.jsonl").write_text("".join(json.dumps(line) + "\n" for _ in range(20)))
    trace = str(folder / "キ.jsonl")
    return {
        "ls": ["store", "ls", str(folder / "kv")],
        "check": ["check-config", str(folder / "c.json")],
        "help": ["-h"],
        "plan": ["plan", trace, "--hit-rate", "10", "--processes", "1"],
        "simulate": ["simulate", trace, "--cpu", "50%", "--processes", "1"],
        "doctor": ["doctor", "-h"],
        "missing": ["store", "ls", str(folder / "没有")],
    }


def run(arguments: list[str], stdout: int, **environ: str) -> tuple[int, bytes, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=kept | environ, check=False)
    return done.returncode, done.stdout or b"", done.stderr.decode(errors="replace")


ONE_AFTER_ANOTHER = """
import sys
from kvoffload.cli import main
words = sys.argv[1:]
while words:
    end = words.index(";")
    try:
        main(words[:end])
        code = 0
    except SystemExit as exc:
        code = exc.code or 0
    print(f"<{code}>", flush=True)
    words = words[end + 1 :]
"""


@pytest.mark.parametrize("environ", [POSIX, LATIN_1], ids=["without UTF-8", "in Latin-1"])
def test_everything_is_printed(environ: dict[str, str], commands: dict[str, list[str]]) -> None:
    words = [word for name in COMMANDS for word in (*commands[name], ";")]
    code, out, err = run(["-c", ONE_AFTER_ANOTHER, *words], subprocess.PIPE, **environ)
    assert code == 0, err
    assert "Traceback" not in err and "UnicodeEncodeError" not in err
    *printed, rest = re.split(rb"<(\d)>\n", out)
    assert rest == b""
    codes = dict(zip(COMMANDS, map(int, printed[1::2]), strict=True))
    assert codes.pop("missing") == 2 and set(codes.values()) <= {0, 1}, err
    assert {name for name, said in zip(COMMANDS, printed[::2], strict=True) if not said} <= {"check", "missing"}, err
    assert "kvoffload: " in err


@pytest.mark.parametrize("name", FOUR)
def test_a_full_disk_behind_standard_output_is_one_sentence(name: str, commands: dict[str, list[str]]) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = run(["-m", "kvoffload", *commands[name]], full.fileno())
    assert code == 2
    assert err.splitlines()[-1] == "kvoffload: No space left on device."
    assert "Traceback" not in err and "Errno" not in err


@pytest.mark.parametrize("name", FOUR)
def test_without_standard_output_nothing_is_raised(name: str, commands: dict[str, list[str]]) -> None:
    command = shlex.join([sys.executable, "-m", "kvoffload", *commands[name]])
    done = subprocess.run(["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_without_standard_input_nobody_is_asked(commands: dict[str, list[str]]) -> None:
    command = shlex.join([sys.executable, "-m", "kvoffload", "store", "clear", commands["ls"][2], "--all"])
    done = subprocess.run(["sh", "-c", f"{command} <&-"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing was deleted" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", SOME)
def test_a_closed_pipe_ends_quietly(name: str, commands: dict[str, list[str]]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        _, _, err = run(["-m", "kvoffload", *commands[name]], writer)
    finally:
        os.close(writer)
    assert "Traceback" not in err and "Exception ignored" not in err and "Errno" not in err
