# SPDX-License-Identifier: Apache-2.0
"""The lines in ``docs/sglang.md`` are valid, and its table has every key and default."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec

from kvoffload.engines.sglang.options import SGLangOptions, parse_options

PAGE = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text()


def test_the_lines_to_start_are_valid() -> None:
    [text] = re.findall(r"extra-config '(\{.*?\})'$", PAGE, re.MULTILINE | re.DOTALL)
    assert [tier.label for tier in parse_options(json.loads(text)).tiers] == ["disk"]


def test_the_table_has_all_keys_and_defaults() -> None:
    written = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE))
    expected = {
        field.name: "required" if field.required else _shown(field.default)
        for field in msgspec.structs.fields(SGLangOptions)
    }
    assert written == expected


def _shown(default: object) -> str:
    if default is None:
        return "none"
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"
