# SPDX-License-Identifier: Apache-2.0
"""Every benchmark runs, in its short form. Its figures mean nothing, and none is judged."""

from __future__ import annotations

import importlib
import math

import pytest
from bench import BENCHES


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
