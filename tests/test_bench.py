# SPDX-License-Identifier: Apache-2.0
"""Every benchmark runs, in its short form. Its figures mean nothing, and none is judged."""

from __future__ import annotations

import importlib
import math

import pytest
from bench import BENCHES

LONG = ("connector", "control_plane", "remote_store")
"""A third of the time of the quick size, if they were in it."""


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.long] * (each in LONG)) for each in BENCHES])
def test_short_form(name: str) -> None:
    rows = importlib.import_module(f"bench.{name}").run(short=True)
    assert rows
    for row in rows:
        assert row.bench == name
        assert row.value > 0
        assert math.isfinite(row.value)
        assert row.ratio is None or row.ratio > 0
