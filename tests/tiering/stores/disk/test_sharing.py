# SPDX-License-Identifier: Apache-2.0
"""Requests for a slab, as files in the control directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffload.tiering.stores.disk.sharing import BULLETIN_NAME, Bulletin, PostedRequest, Request, requests_of_others
from kvoffload.tiering.stores.root import CONTROL_DIR, PRIVATE, Access, check_root

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


def test_it_takes_no_bytes_and_has_the_roots_mode(tmp_path: Path) -> None:
    root = str(tmp_path / "kv")
    check_root(root, "group")
    mine = PostedRequest(root, MINE, Access("group"))
    mine.post(1)
    (path,) = (Path(root) / CONTROL_DIR).glob("want-*")
    assert path.stat().st_size == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    mine.withdraw()


class TestBulletin:
    NAMES = tuple(f"{number:016x}" for number in range(40))

    @pytest.fixture
    def open_bulletin(self, tmp_path: Path):
        opened, dir_fd = [], os.open(tmp_path, os.O_RDONLY)

        def make(access: Access = PRIVATE) -> Bulletin:
            opened.append(Bulletin(access))
            opened[-1].open(dir_fd)
            return opened[-1]

        yield make
        for bulletin in opened:
            bulletin.close()
        os.close(dir_fd)

    def changed(self, is_changed: Callable[[str], bool]) -> set[str]:
        return {name for name in self.NAMES if is_changed(name)}

    def test_what_is_announced_is_seen_once_by_everyone(self, open_bulletin) -> None:
        one, two, three = open_bulletin(), open_bulletin(), open_bulletin()
        for bulletin in (one, two, three):
            assert self.changed(bulletin.take_changed()) == set()
        one.announce(self.NAMES[3:5])
        two.announce(self.NAMES[4:6])
        for bulletin in (one, two, three):
            assert self.changed(bulletin.take_changed()) == set(self.NAMES[3:6])
            assert self.changed(bulletin.take_changed()) == set()

    def test_without_the_file_all_may_have_changed(self, open_bulletin, tmp_path: Path) -> None:
        bulletin = Bulletin(PRIVATE)
        bulletin.announce(self.NAMES)
        assert self.changed(bulletin.take_changed()) == set(self.NAMES)
        bulletin = open_bulletin()
        os.truncate(tmp_path / BULLETIN_NAME, 10)
        assert self.changed(bulletin.take_changed()) == set(self.NAMES)

    def test_a_new_file_is_opened_in_the_place_of_one_that_was_removed(self, open_bulletin, tmp_path: Path) -> None:
        one = open_bulletin()
        (tmp_path / BULLETIN_NAME).unlink()
        dir_fd = os.open(tmp_path, os.O_RDONLY)
        for _ in range(2):
            one.open(dir_fd)
        os.close(dir_fd)
        two = open_bulletin()
        two.announce(self.NAMES[:1])
        assert self.changed(one.take_changed()) == set(self.NAMES[:1])

    @pytest.mark.parametrize("what", ["link", "second name", "pipe", "directory"])
    def test_nothing_else_is_used_in_its_place(self, open_bulletin, tmp_path: Path, what: str) -> None:
        place, precious = tmp_path / BULLETIN_NAME, tmp_path / "precious"
        precious.write_bytes(b"p" * 9000)
        match what:
            case "link":
                place.symlink_to(precious)
            case "second name":
                place.hardlink_to(precious)
            case "pipe":
                os.mkfifo(place)
            case _:
                place.mkdir()
        bulletin = open_bulletin()
        bulletin.announce(self.NAMES)
        assert self.changed(bulletin.take_changed()) == set(self.NAMES)
        assert precious.read_bytes() == b"p" * 9000

    def test_it_has_the_roots_mode(self, open_bulletin, tmp_path: Path) -> None:
        before = os.umask(0o077)
        try:
            open_bulletin(Access("group"))
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / BULLETIN_NAME).stat().st_mode) == 0o660
