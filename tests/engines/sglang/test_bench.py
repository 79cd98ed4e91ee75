# SPDX-License-Identifier: Apache-2.0
"""``bench.sglang_storage`` runs, in its short form. Its figures mean nothing, and none is judged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]


def test_short_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.sglang_storage import run

    monkeypatch.setenv("KVOFFLOAD_BENCH_DIR", str(tmp_path))
    for row in run(short=True):
        assert row.value > 0
        assert row.ratio is not None and math.isfinite(row.ratio)
