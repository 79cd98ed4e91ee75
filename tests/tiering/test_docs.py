# SPDX-License-Identifier: Apache-2.0
"""The code in ``docs/tiering.md`` runs, and its configuration is valid."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvoffload.config import OffloadingConfig, parse_config

PAGE = (Path(__file__).parents[2] / "docs" / "tiering.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_runs() -> None:
    (code,) = blocks("python")
    exec(compile(code, "docs/tiering.md", "exec"), {})


def test_the_configuration_is_valid_and_its_defaults_are_the_stated_ones() -> None:
    texts = blocks("json")
    assert len(texts) >= 2
    for text in texts:
        parse_config(json.loads(text))
    for name, default in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PAGE, re.MULTILINE):
        assert float(default) == getattr(OffloadingConfig(cpu_bytes_to_use=1), name)


def test_every_metric_it_names_exists() -> None:
    from kvoffload.metrics import METRICS

    named = re.findall(r"^\| `(\w+)(?:\{\w+\})?` \| .*\|$", PAGE.split("## Operating it")[1], re.MULTILINE)
    assert len(named) >= 7
    assert set(named) <= METRICS.keys()
