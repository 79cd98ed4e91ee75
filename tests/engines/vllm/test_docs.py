# SPDX-License-Identifier: Apache-2.0
"""The configurations in ``docs/vllm.md`` and the README are valid; the tables have every option and its default."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvoffload.config import OffloadingConfig, parse_config
from kvoffload.tiering.options import STORES, StoreOptions, parse_tiers

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "vllm.md").read_text()
BUILT_IN = [name for name in STORES.names() if STORES.get(name).__module__.startswith("kvoffload.")]


def section(heading: str) -> str:
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/vllm.md needs a section {heading!r} with a table of the options"
    return found[1]


def table(heading: str) -> dict[str, str]:
    """Default by option, as the section's table has them."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .*\|$", section(heading), re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    return {name: default.strip("`") for name, default in rows}


def defaults(kind: type[msgspec.Struct], without: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """Default by option; ``...`` for one that has none."""
    inherited = set(without.__struct_fields__) if without is not None else set()
    return {
        field.name: ... if field.required else field.default
        for field in msgspec.structs.fields(kind)
        if field.name not in inherited
    }


def agree(written: str, default: Any) -> bool:
    """A default that depends on other things (``None``, no entries) is described in words."""
    if default is ...:
        return written == "required"
    if default in (None, (), msgspec.NODEFAULT):
        return not re.fullmatch(r"[\d.]+|true|false|required", written)
    if isinstance(default, str):
        return written == default
    return bool(json.loads(written) == default)


CASES = [
    ("## Keys of `kv_connector_extra_config`", defaults(OffloadingConfig)),
    ("### Every tier", defaults(StoreOptions)),
    *((f"### `{name}`", defaults(STORES.get(name), without=StoreOptions)) for name in BUILT_IN),
]


@pytest.mark.parametrize(("heading", "options"), CASES, ids=[heading for heading, _ in CASES])
def test_a_table_has_every_option_with_its_default(heading: str, options: dict[str, Any]) -> None:
    written = table(heading)
    assert set(written) == set(options)
    wrong = {name: text for name, text in written.items() if not agree(text, options[name])}
    assert not wrong, f"the defaults are {options}"


def test_every_type_of_tier_is_named() -> None:
    assert {"disk", "fs", "memory"} <= set(BUILT_IN)
    row = next(line for line in section("### Every tier").splitlines() if line.startswith("| `type`"))
    assert not [name for name in BUILT_IN if f"`{name}`" not in row]


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md"])
def test_every_transfer_config_is_valid(page: str) -> None:
    configs = re.findall(r"--kv-transfer-config '(\{.*?\})'", (ROOT / page).read_text(), re.DOTALL)
    assert configs
    for text in configs:
        transfer = json.loads(text)
        assert transfer["kv_connector"] == "KVOffloadConnector"
        assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
        extra = transfer["kv_connector_extra_config"]
        if extra.keys() != {"config_file"}:
            config = parse_config(extra)
            parse_tiers(config.secondary_tiers)
            assert config.spec_name is None
