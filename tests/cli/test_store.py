# SPDX-License-Identifier: Apache-2.0
"""``kvoffload store`` on real roots, run as users run it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.cli import main
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.spec import name_namespace
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import SUFFIX
from kvoffload.tiering.stores.root import CONTROL_DIR

SIZE = 1000
MODEL = "org/model@[bf16]"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileSystemStore]:
    """Yield an open store with ten blocks of a model and three blocks without a namespace."""
    plain = FileSystemStore(tmp_path, SIZE)
    plain.write(keys_of(1, 2, 3), [memoryview(bytes(SIZE))] * 3)
    plain.close()
    store = FileSystemStore(tmp_path, SIZE, MODEL, max_bytes=1 << 20)
    keys = [*keys_of(*range(9)), b"long" * 40]
    store.write(keys, [memoryview(block_of(key, SIZE)) for key in keys])
    yield store
    store.close()


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["store", *map(str, args)])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def block_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*" + SUFFIX))


def test_ls_tells_namespaces_apart(server, tmp_path: Path, capsys) -> None:
    code, out, _ = run(capsys, "ls", tmp_path)
    assert code == 0
    lines = {line.split()[0]: line.split()[2] for line in out.splitlines()[2:]}
    assert lines == {"(default)": "3", MODEL: "10"}
    assert "11 KiB" in out, "ten files of 1128 bytes"


def test_ls_fits_in_80_columns_and_names_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    facts = {"tokens": 16}
    names = [
        name_namespace(["/models/Qwen/Qwen3-8B-Instruct-2507", "bfloat16", "auto"], facts),
        name_namespace(["org/A-model-with-a-very-long-name-indeed-0123456789-abcdefgh"], facts | {"tokens": 32}),
        name_namespace([], facts | {"tokens": 64}),
    ]
    for kind in (DiskStore, FileSystemStore):
        root = tmp_path / kind.__name__
        for name in names:
            store = kind(root, SIZE, name, max_bytes=1 << 30)
            store.write(keys_of(1), [memoryview(block_of(keys_of(1)[0], SIZE))])
            store.close()
        out = run(capsys, "ls", root)[1]
        assert all(len(line) <= 80 for line in out.splitlines())
        assert "Qwen3-8B-Instruct-2507" in out and "unnamed" in out
        assert "s ago" in out
        ids = [name[-32:][:8] for name in names]
        assert all(each in out for each in ids)
        assert run(capsys, "clear", root, ids[0], "--yes")[1] == "1 block deleted.\n"
        assert run(capsys, "clear", root, ids[1], "--dry-run")[1].startswith("1 block ")
        code, _, err = run(capsys, "clear", root, "00000000", "--yes")
        assert (code, "has no namespace" in err) == (2, True)


@pytest.mark.parametrize(("namespace", "left"), [("(default)", 10), ("", 10), (MODEL, 3)])
def test_clear_removes_one_namespace(server, tmp_path: Path, capsys, namespace: str, left: int) -> None:
    code, out, _ = run(capsys, "clear", tmp_path, namespace, "--yes")
    assert code == 0
    assert out == f"{13 - left} blocks deleted.\n"
    assert len(block_files(tmp_path)) == left
    (key,) = keys_of(50)
    assert server.write([key], [memoryview(block_of(key, SIZE))]) == [True]


def test_mistakes_are_one_sentence(server, tmp_path: Path, capsys) -> None:
    for args, said in [
        (("ls", tmp_path / "nowhere"), "is not a directory"),
        (("ls", tmp_path / CONTROL_DIR), "is not a kvoffload store"),
        (("clear", tmp_path, "org/modle@[bf16]"), f"Did you mean '{MODEL}'"),
        (("clear", tmp_path, "nope"), "has no namespace 'nope'"),
        (("clear", tmp_path), "Give one namespace"),
        (("clear", tmp_path, MODEL, "--all"), "Give one namespace"),
        (("clear", tmp_path, MODEL), "add --yes"),
        (("clear", tmp_path, "--all"), "add --yes"),
    ]:
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "")
        assert said in err
        assert err.count("\n") == 1
    assert len(block_files(tmp_path)) == 13


class Terminal(io.StringIO):
    """A standard input that contains a user's answers."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "left"), [("y\n", 3), ("n\n", 13), ("\n", 13)])
def test_clear_asks_at_a_terminal(
    server, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, typed: str, left: int
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    code, out, err = run(capsys, "clear", tmp_path, MODEL)
    assert "Delete 10 blocks (11 KiB) of 1 namespace" in err
    assert (code, "deleted" in out) == ((0, True) if left == 3 else (1, False))
    assert len(block_files(tmp_path)) == left


def test_a_dry_run_says_what_would_be_deleted_and_deletes_nothing(server, tmp_path: Path, capsys) -> None:
    for args, said in [
        (("clear", tmp_path, MODEL), "10 blocks (11 KiB) of 1 namespace would be deleted."),
        (("clear", tmp_path, "--all"), "13 blocks (14.3 KiB) of 2 namespaces would be deleted."),
    ]:
        assert run(capsys, *args, "--dry-run") == (0, said + "\n", "")
    assert len(block_files(tmp_path)) == 13


def test_all_namespaces_are_cleared_at_once(server, tmp_path: Path, capsys) -> None:
    assert run(capsys, "clear", tmp_path, "--all", "--yes") == (0, "13 blocks deleted.\n", "")
    assert not block_files(tmp_path)
    assert run(capsys, "ls", tmp_path)[1] == "No blocks yet.\n"


def test_json_has_the_figures_of_each_command(server, tmp_path: Path, capsys) -> None:
    def figures(*args: str | Path) -> dict:
        return json.loads(run(capsys, *args, "--json")[1])

    (default, model) = figures("ls", tmp_path)["namespaces"]
    assert (default["namespace"], default["blocks"], default["bytes"]) == ("(default)", 3, 3 * 1128)
    assert (model["namespace"], model["blocks"]) == (MODEL, 10)
    assert 0 < model["oldest_use_s"] <= model["last_use_s"]
    left = figures("clear", tmp_path, "--all", "--dry-run")
    assert left["blocks"] == len(block_files(tmp_path)) == 13
    assert figures("clear", tmp_path, "--all", "--yes")["deleted"] == 13
