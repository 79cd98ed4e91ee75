# SPDX-License-Identifier: Apache-2.0
"""Test ``kvoffload store`` on the root of a ``disk`` tier, as users run it, while stores are open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.files import disk_bytes
from tests.tiering.stores.disk.rig import SMALL, damage, may_grow, payloads, read, right, slab_of, tables, write

from kvoffload.cli import main
from kvoffload.errors import ConfigError
from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk import DiskStore
from kvoffload.tiering.stores.disk.admin import DiskRoot

MODEL = "org/model@[bf16]"
LONG = "long" * 100
KEYS = [*keys_of(*range(9)), b"long key" * 10]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DiskStore]:
    """A store in use, and slabs of a mebibyte each: ten blocks of a model, three without a namespace, two of one
    with a long name."""
    for namespace, count in (("", 3), (LONG, 2)):
        plain = DiskStore(tmp_path, SMALL, namespace, max_bytes=3 << 20)
        write(plain, *KEYS[:count])
        plain.close()
    store = DiskStore(tmp_path, SMALL, MODEL, max_bytes=3 << 20)
    write(store, *KEYS)
    store.refresh()
    yield store
    store.check_invariants()
    store.close()


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["store", *map(str, args)])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def test_ls_tells_namespaces_apart(server, tmp_path: Path, capsys) -> None:
    code, out, _ = run(capsys, "ls", tmp_path)
    assert code == 0
    rows = [line.split() for line in out.splitlines()[1:] if "iB" in line]  # a long name takes more lines
    assert [(row[0][:8], row[2]) for row in rows] == [("(default", "3"), (LONG[:8], "2"), (MODEL[:8], "10")]


def test_verify_finds_and_repairs_what_no_server_writes_to(server, tmp_path: Path, capsys) -> None:
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 0
    assert "15 blocks" in out
    assert ", 0 bad" in out
    for path in payloads(tmp_path):
        block = block_of(KEYS[1], SMALL)
        with path.open("r+b") as file:
            file.seek(path.read_bytes().find(block) + 17)
            file.write(b"????")
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "3 bad" in out
    code, out, _ = run(capsys, "verify", tmp_path, "--repair")
    assert "2 deleted" in out, "not the one in the server's slab"
    assert read(server, KEYS[1]) is None
    assert right(server, *KEYS) == set(KEYS) - {KEYS[1]}
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 0
    assert "12 blocks" in out
    assert run(capsys, "verify", tmp_path, MODEL)[1].startswith("9 blocks")


def test_a_slab_with_a_bad_header_is_one_bad_thing(server, tmp_path: Path, capsys) -> None:
    path = next(path for path in tables(tmp_path) if path.parent.name == "=")
    with path.open("r+b") as file:
        file.write(b"nonsense")
    code, out, _ = run(capsys, "verify", tmp_path)
    assert code == 1
    assert "1 bad" in out
    code, out, _ = run(capsys, "verify", tmp_path, "--repair")
    assert code == 0
    assert not path.exists()
    assert len(tables(tmp_path)) == len(payloads(tmp_path)) == 2


def test_gc_removes_what_no_server_uses_first_and_sweeps(server, tmp_path: Path, capsys) -> None:
    (tmp_path / "=" / "new-12.slab").write_bytes(b"half")
    code, out, _ = run(capsys, "gc", tmp_path)
    assert (code, out.split(",")[:2]) == (0, ["0 blocks deleted", " 1 partial files of killed servers deleted"])
    code, out, _ = run(capsys, "gc", tmp_path, "--max-bytes", "2MiB", "--yes")
    assert (code, out.split(",")[0]) == (0, "3 blocks deleted"), "the oldest"
    assert disk_bytes(tmp_path) <= 2 << 20
    code, out, _ = run(capsys, "gc", tmp_path, "--max-bytes", "1MiB", "--yes")
    assert (code, out.split(",")[0]) == (0, "2 blocks deleted")
    assert right(server, *KEYS) == set(KEYS)


def test_gc_keeps_a_quota_beside_a_server_that_goes_on(server, tmp_path: Path, capsys) -> None:
    keys = keys_of(*range(100, 2900))
    for first in range(0, len(keys), 100):
        write(server, *keys[first : first + 100])
    assert disk_bytes(tmp_path) > 2 << 20
    code, _, _ = run(capsys, "gc", tmp_path, "--max-bytes", "2MiB", "--yes")
    assert (code, disk_bytes(tmp_path) <= 2 << 20) == (0, True)
    server.refresh()
    assert 0 < len(right(server, *keys)) < len(keys)
    assert write(server, KEYS[0]) == [True]
    code, out, _ = run(capsys, "gc", tmp_path, "--max-bytes", "1KiB", "--yes")
    assert (code, "still exceeded" in out, tables(tmp_path)) == (0, False, [])
    server.refresh()
    may_grow(server)
    assert right(server, *keys) == set()
    assert write(server, KEYS[0]) == [True]


@pytest.mark.parametrize(("namespace", "count"), [("(default)", 3), ("", 3), (MODEL, 10), (LONG, 2)])
def test_clear_removes_one_namespace(server, tmp_path: Path, capsys, namespace: str, count: int) -> None:
    code, out, _ = run(capsys, "clear", tmp_path, namespace, "--yes")
    assert (code, out) == (0, f"{count} blocks deleted.\n")
    assert len(tables(tmp_path)) == 2
    server.refresh()
    assert right(server, *KEYS) == (set() if namespace == MODEL else set(KEYS))
    may_grow(server)
    assert write(server, KEYS[0]) == [True]
    assert disk_bytes(tmp_path) <= 3 << 20


def test_mistakes_are_one_sentence(server, tmp_path: Path, capsys) -> None:
    for args, said in [
        (("ls", tmp_path / "nowhere"), "is not a directory"),
        (("clear", tmp_path, "org/modle@[bf16]"), f"Did you mean '{MODEL}'"),
        (("verify", tmp_path, "nope"), "has no namespace 'nope'"),
    ]:
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "")
        assert said in err
        assert err.count("\n") == 1
    with pytest.raises(ConfigError, match="is not a kvoffload store"):
        DiskRoot(tmp_path / "nowhere")


def test_a_block_that_a_server_replaces_meanwhile_is_not_bad(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SMALL, max_bytes=slab_of(8))
    write(store, *keys_of(*range(8)))
    root = DiskRoot(tmp_path)
    blocks = list(root.files())
    write(store, *keys_of(*range(20, 28)))
    assert [root.is_sound(block) for block in blocks] == [None] * 8
    damage(tmp_path, keys_of(20)[0])
    assert [root.is_sound(block) for block in root.files()].count(False) == 1
    store.close()
