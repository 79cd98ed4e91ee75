# SPDX-License-Identifier: Apache-2.0
"""Test that the figures on the pages are the recorded ones."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "figures"))


def test_the_pages_are_those_that_the_script_makes(figures: dict[str, Any]) -> None:
    for path, text in figures["made"]().items():
        assert path.read_text() == text, f"run scripts/figures: {path.relative_to(ROOT)} is not what it makes"


def test_every_run_names_its_command_its_day_and_its_machine(figures: dict[str, Any]) -> None:
    runs = dict(figures["kept"]())
    assert {path.stem for path in figures["FOLDER"].glob("*.json")} == runs.keys(), "a file that RUNS does not name"
    for run in runs.values():
        assert all(run[key] for key in ("command", "date", "machine", "revision"))


PAGE = """
```yaml
# two.yaml
servers: 2
routers: [round-robin, session]
```

```sh
kvoffload simulate synthetic:chat:1 --fleet two.yaml --max-requests 20 --processes 1
```

<!-- table of fleets -->

| router | hits % |
| --- | --- |
| of long ago | 1 |

A sentence.
"""


def test_tables_of_fleets_are_made_anew_in_place(figures: dict[str, Any], tmp_path: Path) -> None:
    made = figures["with_fleets"](PAGE, tmp_path)
    head, mark, rest = made.partition(figures["MARK"])
    assert head + mark == PAGE.partition("\n| router")[0]
    assert re.fullmatch(
        r"\n\| router \| hits % \|.*\n\| --- .*\n\| round-robin .*\n\| session .*\n\nA sentence\.\n", rest
    )


def test_the_page_of_benchmarks_has_its_tables(figures: dict[str, Any]) -> None:
    _, *parts = (ROOT / "docs" / "contributing" / "benchmarks.md").read_text().split(figures["MARK"])
    assert parts and all(part.startswith("\n| ") for part in parts)
