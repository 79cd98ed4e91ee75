# SPDX-License-Identifier: Apache-2.0
"""The code of ``docs/authors.md`` on bookkeeping and tiers runs; metrics of tiers in ``docs/operating.md`` exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.doc_commands import section

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("part", ["bookkeeping", "tiers"])
def test_the_example_runs(part: str) -> None:
    page = DOCS / "authors.md"
    text = page.read_text().partition("\n## ")[0] if part == "bookkeeping" else section(page, "Tiers in code")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(code, str(page), "exec"), {})


def test_every_metric_it_names_exists() -> None:
    from kvoffload.metrics import METRICS

    rows = re.findall(r"^\| [^|]*\? \| (.*) \|$", section(DOCS / "operating.md", "Metrics"), re.MULTILINE)
    named = re.findall(r"`(\w+_\w+)(?:\{[\w,]+\})?`", "".join(rows))
    assert len(named) >= 20
    assert set(named) - {"no_room", "promotion_share"} <= METRICS.keys()
