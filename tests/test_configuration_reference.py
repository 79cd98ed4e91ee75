# SPDX-License-Identifier: Apache-2.0
"""``docs/configuration.md`` is what the declarations of the options say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reference() -> dict[str, object]:
    return runpy.run_path(str(ROOT / "scripts" / "configuration-reference"))


def test_the_page_is_that_of_the_declarations(reference) -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference["page"](), (
        "run scripts/configuration-reference"
    )


def test_the_tables_of_causes_and_series_are_those_of_the_code(reference) -> None:
    assert (ROOT / "docs" / "operating.md").read_text() == reference["operating"](), (
        "run scripts/configuration-reference"
    )
    assert "`hit_tokens_total` |" in reference["operating"]()


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
