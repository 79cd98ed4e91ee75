# SPDX-License-Identifier: Apache-2.0
"""``kvoffload store`` on real roots, run as users run it."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.files import disk_bytes

from kvoffload.cli import main
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.spec import name_namespace
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.fs import FileSystemStore
from kvoffload.tiering.stores.fs.format import SUFFIX, TEMPORARY_PREFIX
from kvoffload.tiering.stores.root import CONTROL_DIR
from kvoffload.tiering.stores.seal import EncryptionKey

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
        assert run(capsys, "clear", root, ids[0], "--yes")[1] == "1 blocks deleted.\n"
        assert run(capsys, "verify", root, ids[1])[1].startswith("1 blocks")
        code, _, err = run(capsys, "clear", root, "00000000", "--yes")
        assert (code, "has no namespace" in err) == (2, True)


@pytest.mark.parametrize("kind", [DiskStore, FileSystemStore])
def test_a_dry_run_of_gc_says_what_gc_does(kind: type[BlockStore], tmp_path: Path, capsys) -> None:
    store = kind(tmp_path, SIZE, MODEL, max_bytes=1 << 20)  # type: ignore[call-arg]
    for number in range(200):
        store.write(keys_of(number), [memoryview(block_of(keys_of(number)[0], SIZE))])
    store.close()

    def figures(*args: str) -> dict:
        return json.loads(run(capsys, "gc", tmp_path, *args, "--json")[1])

    before = figures()["bytes"]
    planned = figures("--max-bytes", str(before // 2), "--dry-run")
    assert planned["bytes"] == before
    done = figures("--max-bytes", str(before // 2), "--yes")
    assert 0 < planned["would_delete"] == done["deleted"]
    assert planned["would_free_bytes"] == before - done["bytes"]


def test_verify_finds_and_repairs(server, tmp_path: Path, capsys) -> None:
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 0
    assert "13 blocks (14.3 KiB) read, 0 bad" in out
    victims = [path for path in block_files(tmp_path) if "model" in str(path)]
    for victim, position in zip(victims, (5, 70, 127, 128, 1127), strict=False):
        data = bytearray(victim.read_bytes())
        data[position] ^= 4
        victim.write_bytes(data)
    os.truncate(victims[5], 700)
    os.rename(victims[6], victims[7])
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "12 blocks" in out
    assert "7 bad" in out
    assert len(block_files(tmp_path)) == 12
    code, out, _ = run(capsys, "verify", tmp_path, "--repair")
    assert code == 0
    assert "7 deleted" in out
    assert len(block_files(tmp_path)) == 5
    assert run(capsys, "verify", tmp_path, MODEL)[1].startswith("2 blocks")


def test_gc_keeps_a_quota_sweeps_and_the_server_works_on(server, tmp_path: Path, capsys) -> None:
    dead, alive = (block_files(tmp_path)[0].with_name(f"{TEMPORARY_PREFIX}{number}") for number in range(2))
    dead.write_bytes(b"half")
    alive.write_bytes(b"half")
    os.utime(dead, (0, 0))
    code, out, _ = run(capsys, "gc", tmp_path, "--max-bytes", "5KiB", "--yes")
    assert code == 0
    assert "9 blocks deleted, 1 partial files of killed servers deleted" in out
    assert not dead.exists()
    assert alive.exists(), "a server is writing it"
    assert len(block_files(tmp_path)) == 4
    (key,) = keys_of(50)
    assert server.write([key], [memoryview(block_of(key, SIZE))]) == [True]
    assert run(capsys, "gc", tmp_path)[0] == 0


def test_gc_counts_what_servers_are_writing(server, tmp_path: Path, capsys) -> None:
    half = block_files(tmp_path)[0].with_name(f"{TEMPORARY_PREFIX}1")
    half.write_bytes(bytes(5000))
    on_disk = disk_bytes(tmp_path)
    assert run(capsys, "gc", tmp_path, "--max-bytes", str(on_disk - 1), "--yes")[1].startswith("1 blocks deleted")
    code, out, _ = run(capsys, "gc", tmp_path, "--max-bytes", "4KiB", "--yes")
    assert code == 1
    assert "still exceeded" in out
    assert half.exists()


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
        (("verify", tmp_path / CONTROL_DIR), "is not a kvoffload store"),
        (("clear", tmp_path, "org/modle@[bf16]"), f"Did you mean '{MODEL}'"),
        (("verify", tmp_path, "nope"), "has no namespace 'nope'"),
        (("gc", tmp_path, "--max-bytes", "much"), "is not a size"),
        (("clear", tmp_path), "Name one namespace"),
        (("clear", tmp_path, MODEL, "--all"), "Name one namespace"),
        (("clear", tmp_path, MODEL), "use --yes"),
        (("clear", tmp_path, "--all"), "use --yes"),
        (("gc", tmp_path, "--max-bytes", "5KiB"), "use --yes"),
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


def test_gc_asks_before_it_deletes_blocks_and_not_before_it_sweeps(
    server, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert run(capsys, "gc", tmp_path, "--max-bytes", "1MiB")[0] == 0, "nothing to ask about"
    assert run(capsys, "gc", tmp_path, "--max-bytes", "5KiB")[0] == 1
    assert len(block_files(tmp_path)) == 13


def test_a_dry_run_says_what_would_be_deleted_and_deletes_nothing(server, tmp_path: Path, capsys) -> None:
    for args, said in [
        (("clear", tmp_path, MODEL), "10 blocks (11 KiB) of 1 namespace would be deleted."),
        (("clear", tmp_path, "--all"), "13 blocks (14.3 KiB) of 2 namespaces would be deleted."),
        (
            ("gc", tmp_path, "--max-bytes", "5KiB"),
            "14.3 KiB are in use. 9 blocks would be deleted, which would free 9.91 KiB.",
        ),
        (("gc", tmp_path), "14.3 KiB are in use. 0 blocks would be deleted, which would free 0 B."),
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
    victim = block_files(tmp_path)[0]
    os.truncate(victim, 700)
    seen = figures("verify", tmp_path)
    assert (seen["blocks"], len(seen["bad"]), seen["unreadable"], seen["deleted"]) == (13, 1, [], None)
    assert victim == tmp_path / seen["bad"][0]
    assert figures("verify", tmp_path, "--repair")["deleted"] == 1
    planned = figures("gc", tmp_path, "--max-bytes", "5KiB", "--dry-run")
    assert (planned["would_delete"], planned["would_free_bytes"]) == (8, 8 * 1128)
    shrunk = figures("gc", tmp_path, "--max-bytes", "5KiB", "--yes")
    assert (shrunk["deleted"], shrunk["leftovers"], shrunk["is_exceeded"]) == (8, 0, False)
    left = figures("clear", tmp_path, "--all", "--dry-run")
    assert left["blocks"] == len(block_files(tmp_path)) == 4
    assert figures("clear", tmp_path, "--all", "--yes")["deleted"] == 4


@pytest.mark.parametrize("kind", [FileSystemStore, DiskStore])
def test_verify_asks_for_the_key_of_what_one_seals(kind: type[BlockStore], tmp_path: Path, capsys) -> None:
    """Two keys and none in one root: a key that was exchanged."""
    root, known, other = tmp_path / "kv", b"0123456789abcdef", b"fedcba9876543210"
    for secret, numbers in ((None, (1,)), (known, (1, 2)), (other, (1, 2, 3))):
        store = kind(root, SIZE, MODEL, max_bytes=1 << 24, secret=secret)  # type: ignore[call-arg]
        keys = keys_of(*numbers)
        assert all(store.write(keys, [memoryview(block_of(key, SIZE)) for key in keys]))
        store.close()
    (tmp_path / "key").write_bytes(known + b"\n")
    given = ("--seal-key-file", tmp_path / "key")

    listed = json.loads(run(capsys, "ls", root, "--json")[1])["namespaces"]
    names = {each["blocks"]: each["namespace"] for each in listed}
    assert names.keys() == {1, 2, 3}
    of_known, of_other = names[2], names[3]
    code, out, _ = run(capsys, "verify", root, "--repair")
    assert (code, out.split(" (")[0]) == (1, "1 blocks")
    assert ", 0 bad" in out
    assert of_known in out
    assert "--seal-key-file" in out
    code, out, _ = run(capsys, "verify", root, *given, "--repair", "--json")
    assert (code, json.loads(out)["blocks"], json.loads(out)["bad"], json.loads(out)["sealed"]) == (
        1,
        3,
        [],
        [of_other],
    )
    code, out, _ = run(capsys, "verify", root, of_known, *given)
    assert (code, out.split(" (")[0]) == (0, "2 blocks")
    assert run(capsys, "verify", root, MODEL)[0] == 0

    for path in root.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(block_of(keys_of(2)[0], SIZE))) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"????")
    code, out, _ = run(capsys, "verify", root, of_known, *given)
    assert code == 1
    assert "1 bad" in out
    assert run(capsys, "verify", root, of_known, *given, "--repair")[0] == 0
    assert run(capsys, "clear", root, of_other, "--yes")[1] == "3 blocks deleted.\n"
    code, out, err = run(capsys, "verify", root, "--seal-key-file", tmp_path / "none")
    assert code != 0
    assert "--seal-key-file" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", [FileSystemStore, DiskStore])
def test_verify_takes_several_keys_and_those_that_encrypt(kind: type[BlockStore], tmp_path: Path, capsys) -> None:
    root, keys = tmp_path / "kv", [b"0123456789abcdef", b"fedcba9876543210"]
    for number, key in enumerate(keys):
        (tmp_path / f"key{number}").write_bytes(key)
        store = kind(root, SIZE, MODEL, max_bytes=1 << 24, secret=EncryptionKey(key))  # type: ignore[call-arg]
        wanted = keys_of(*range(number + 1))
        assert all(store.write(wanted, [memoryview(block_of(key, SIZE)) for key in wanted]))
        store.close()
    given = [("--encryption-key-file", str(tmp_path / f"key{number}")) for number in range(2)]
    code, out, _ = run(capsys, "verify", root, *given[1], "--json")
    assert (code, json.loads(out)["blocks"], len(json.loads(out)["sealed"])) == (1, 2, 1)
    code, out, _ = run(capsys, "verify", root, "--seal-key-file", given[0][1], "--json")
    assert (code, json.loads(out)["blocks"], len(json.loads(out)["sealed"])) == (1, 0, 2)
    code, out, _ = run(capsys, "verify", root, *given[0], *given[1], "--json")
    assert (code, json.loads(out)["blocks"], json.loads(out)["bad"], json.loads(out)["sealed"]) == (0, 3, [], [])
    for path in root.rglob("*.kvb" if kind is FileSystemStore else "*.slab"):
        with path.open("r+b") as file:
            content = file.read()
            file.seek(next(at for at in range(len(content) - SIZE, -1, -1) if any(content[at : at + 8])))
            file.write(b"????????")
            break
    code, out, _ = run(capsys, "verify", root, *given[0], *given[1], "--repair", "--json")
    assert (code, len(json.loads(out)["bad"]), json.loads(out)["deleted"]) == (0, 1, 1)
