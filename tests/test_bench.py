# SPDX-License-Identifier: Apache-2.0
"""Every benchmark runs, in its short form. Its figures mean nothing, and none is judged."""

from __future__ import annotations

import importlib
import math

import pytest
from bench import BENCHES, peers


@pytest.mark.parametrize("name", BENCHES)
def test_each_is_there(name: str) -> None:
    assert callable(importlib.import_module(f"bench.{name}").run)


@pytest.mark.long
@pytest.mark.parametrize("name", BENCHES)
def test_short_form(name: str) -> None:
    rows = importlib.import_module(f"bench.{name}").run(short=True)
    assert rows
    for row in rows:
        assert row.value > 0
        assert math.isfinite(row.value)
        assert row.ratio is None or row.ratio > 0


@pytest.mark.long
def test_peers_kills_each_system_and_changes_its_bytes() -> None:
    """The other systems are in an environment of their own (``scripts/bench-peers``)."""
    found = peers.compare(64 << 10, peers.FLIPPED, 1, ["disk", "fs", "redis"])
    for each in found.values():
        assert each.killed["wrong"] == 0
        assert each.flipped == {"wrong": 0, "changed": peers.FLIPPED}
        assert min(each.speeds["store"] + each.speeds["load"]) > 0
    assert len(list(peers.rows_of(found, 64 << 10, peers.FLIPPED))) == 6
