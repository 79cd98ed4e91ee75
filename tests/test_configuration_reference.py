# SPDX-License-Identifier: Apache-2.0
"""The generated pages match the declarations of options, causes and series."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reference() -> dict[str, object]:
    return runpy.run_path(str(ROOT / "scripts" / "configuration-reference"))


def test_the_pages_are_those_of_the_declarations(reference) -> None:
    made = reference["made"]()
    for path, text in made.items():
        assert path.read_text() == text, f"run scripts/configuration-reference: {path.name} differs"
    assert "`hit_tokens_total` |" in made[reference["SERIES"]]


def test_a_key_without_a_word_on_its_default_is_refused(reference) -> None:
    import msgspec

    class Options(msgspec.Struct):
        size: int | None = None

    (field,) = msgspec.structs.fields(Options)
    with pytest.raises(SystemExit, match="Default"):
        reference["row"](field, "How large.")
    assert (
        reference["row"](field, "How ``large``. Default: the\nsmallest.") == "| `size` | the smallest | How `large`. |"
    )
