# SPDX-License-Identifier: Apache-2.0
"""Test ``kvoffload store`` on the root of a ``disk`` tier, as users run it, while stores are open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.files import disk_bytes
from tests.tiering.stores.disk.rig import SMALL, may_grow, right, tables, write

from kvoffload.cli import main
from kvoffload.errors import ConfigError
from kvoffload.testing.keys import keys as keys_of
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
        (("clear", tmp_path, "nope"), "has no namespace 'nope'"),
    ]:
        code, out, err = run(capsys, *args)
        assert (code, out) == (2, "")
        assert said in err
        assert err.count("\n") == 1
    with pytest.raises(ConfigError, match="is not a kvoffload store"):
        DiskRoot(tmp_path / "nowhere")
