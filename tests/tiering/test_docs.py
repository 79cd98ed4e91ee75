# SPDX-License-Identifier: Apache-2.0
"""The code on tiers in ``docs/authors.md`` runs, and the metrics of tiers in ``docs/operating.md`` exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.doc_commands import section

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_runs() -> None:
    (code,) = re.findall(
        r"^```python\n(.*?)^```", section(DOCS / "authors.md", "Tiers in code"), re.MULTILINE | re.DOTALL
    )
    exec(compile(code, "docs/authors.md", "exec"), {})


def test_every_metric_it_names_exists() -> None:
    from kvoffload.metrics import METRICS

    named = re.findall(r"^\| `(\w+)(?:\{\w+\})?` \| .*\|$", section(DOCS / "operating.md", "Tiers"), re.MULTILINE)
    assert len(named) >= 7
    assert set(named) <= METRICS.keys()
