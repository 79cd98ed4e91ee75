# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.tables`` on a page of its own; and every mark in the docs has a kind."""

from __future__ import annotations

import re
from pathlib import Path

from bench.tables import KINDS, rewritten

DOCS = Path(__file__).parents[2] / "docs"
PAGE = """
```yaml
# two.yaml
servers: 2
routers: [round-robin, session]
```

```sh
kvoffload simulate synthetic:chat:1 --fleet two.yaml --max-requests 40 --processes 1
```

<!-- table: fleets -->

| router | hits % |
| --- | --- |
| of long ago | 1 |

A sentence.

```sh
kvoffload simulate synthetic:chat:1 --max-requests 40 --cpu 5%,50% --policy lru --processes 1
```

<!-- table: sweeps -->
"""


def test_tables_are_made_anew_in_place(tmp_path: Path) -> None:
    made = rewritten(PAGE, tmp_path)
    assert "of long ago" not in made
    assert re.search(r"\| round-robin \| [\d.]+ .*\n\| session \| [\d.]+ .*\n\nA sentence\.\n", made)
    assert len(re.findall(r"^\| [\d.]+ [KMG]iB \|", made, re.MULTILINE)) == 2
    head, sentence, swept = made.partition("A sentence.")
    assert head + sentence + rewritten(swept, tmp_path) == made


def test_each_mark_of_the_docs_has_a_kind_and_a_table() -> None:
    found = 0
    for page in DOCS.rglob("*.md"):
        for kind, table in re.findall(r"^<!-- table: (\w+) -->\n\n(.*)$", page.read_text(), re.MULTILINE):
            assert kind in KINDS
            assert table.startswith("| ")
            found += 1
    assert found
