# SPDX-License-Identifier: Apache-2.0
"""Test that the functions that look for leaks find them."""

from __future__ import annotations

import os
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.leaks import kept, open_in

from kvoffload.base import ReqContext


@pytest.mark.parametrize(
    "root",
    [
        {"r1": 0}, {0: "r1"}, {"r1"}, deque(["r1"]), [(0, ["r1"])], SimpleNamespace(name="r1"), ReqContext("r1"),
        partial(print, "r1"), (lambda request: lambda: request)("r1"), (each for each in ["r1"]),
    ],
    ids=lambda root: type(root).__name__,
)  # fmt: skip
def test_an_id_is_found_wherever_it_is_kept(root: object) -> None:
    assert {*kept({"r1", "r2"}, {"part": root})} == {"r1"}
    assert not kept({"r2"}, {"part": root})


def test_an_open_file_is_found_though_its_name_is_gone(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_CREAT)
    assert len(open_in(tmp_path)) == 1
    (tmp_path / "file").unlink()
    assert len(open_in(tmp_path)) == 1
    os.close(descriptor)
    assert not open_in(tmp_path)
