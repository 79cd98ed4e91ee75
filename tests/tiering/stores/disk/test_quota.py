# SPDX-License-Identifier: Apache-2.0
"""Requests for a slab, as files in the control directory."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from kvoffload.testing.keys import keys as keys_of
from kvoffload.testing.store_contract import block_of
from kvoffload.tiering.stores.disk import DiskStore, quota
from kvoffload.tiering.stores.disk.admin import DiskRoot
from kvoffload.tiering.stores.disk.quota import PostedRequest, Request, requests_of_others
from kvoffload.tiering.stores.root import CONTROL_DIR, PRIVATE, Access, check_root, make_file

MINE, THEIRS = "a" * 16, "b" * 16


@pytest.fixture
def root(tmp_path: Path) -> str:
    check_root(str(tmp_path / "kv"), "private")
    return str(tmp_path / "kv")


def others(root: str, own: PostedRequest) -> list[tuple[int, str]]:
    return [(request.num_slabs, request.identity) for request in requests_of_others(root, PRIVATE, own.process)]


def test_a_request_is_seen_by_others_until_it_is_withdrawn(root: str) -> None:
    mine, theirs = PostedRequest(root, MINE, PRIVATE), PostedRequest(root, THEIRS, PRIVATE)
    mine.withdraw()
    mine.post(3)
    mine.post(3)
    assert others(root, theirs) == [(3, MINE)]
    assert others(root, mine) == []
    mine.post(4)
    theirs.post(0)
    assert others(root, theirs) == [(4, MINE)]
    assert others(root, mine) == [(0, THEIRS)]
    mine.withdraw()
    assert others(root, theirs) == []
    mine.post(1)
    assert others(root, theirs) == [(1, MINE)]
    mine.withdraw()
    theirs.withdraw()
    assert list((Path(root) / CONTROL_DIR).glob("want-*")) == []


def test_a_dead_process_s_request_is_removed_and_nothing_else(root: str, tmp_path: Path) -> None:
    control = Path(root) / CONTROL_DIR
    dead = control / Request(2, THEIRS, "c" * 16).name
    dead.touch(0o600)
    (control / "want-what").touch()
    (control / Request(2, THEIRS, "d" * 16).name).symlink_to(tmp_path / "victim")
    mine = PostedRequest(root, MINE, PRIVATE)
    assert others(root, mine) == []
    assert not dead.exists()
    assert len(list(control.glob("want-*"))) == 2


def test_a_request_that_was_taken_for_a_dead_ones_is_posted_anew(root: str) -> None:
    mine, theirs = PostedRequest(root, MINE, PRIVATE), PostedRequest(root, THEIRS, PRIVATE)
    mine.post(1)
    next((Path(root) / CONTROL_DIR).glob("want-*")).unlink()
    mine.post(2)
    mine.post(2)
    assert others(root, theirs) == [(2, MINE)]
    mine.withdraw()


def test_a_request_that_a_neighbour_sees_before_it_is_locked_is_posted_anew(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = PostedRequest(root, MINE, PRIVATE), PostedRequest(root, THEIRS, PRIVATE)

    def seen_at_once(*arguments: Any) -> int:
        fd = make_file(*arguments)
        assert others(root, theirs) == []  # and taken for a dead one's
        return fd

    with monkeypatch.context() as slow:
        slow.setattr(quota, "make_file", seen_at_once)
        mine.post(0)
    mine.post(0)
    assert others(root, theirs) == [(0, MINE)]
    mine.withdraw()


def test_it_takes_no_bytes_and_has_the_roots_mode(tmp_path: Path) -> None:
    root = str(tmp_path / "kv")
    check_root(root, "group")
    mine = PostedRequest(root, MINE, Access("group"))
    mine.post(1)
    (path,) = (Path(root) / CONTROL_DIR).glob("want-*")
    assert path.stat().st_size == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    mine.withdraw()


def test_files_of_others_under_the_root_are_not_slabs(tmp_path: Path) -> None:
    """Files of other programs do not count and are never removed, whatever their names and places."""
    root, names = tmp_path / "kv", ("prices.table", "holiday.slab", "new-year.slab", "f" * 17 + ".table")
    theirs = [root / folder / name for folder in ("photos", "=") for name in names]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1 << 20))
    store = DiskStore(root, 4096, max_bytes=1 << 20)
    keys = keys_of(*range(600))
    for key in keys:
        assert store.write([key], [memoryview(block_of(key, 4096))]) == [True]
    store.close()
    found = DiskRoot(root)
    assert found.directories() == ["="]
    found.clear("=")
    assert all(path.exists() for path in theirs)
