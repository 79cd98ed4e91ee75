# SPDX-License-Identifier: Apache-2.0
"""The code in docs/authors.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tests.doc_commands import section

PAGE = Path(__file__).parents[3] / "docs" / "authors.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", section(PAGE, "The reference engine"), re.DOTALL)


def test_there_is_code() -> None:
    assert len(SNIPPETS) == 1


@pytest.mark.parametrize("code", SNIPPETS, ids=["serving"])
def test_code_of_the_page_runs(code: str) -> None:
    torch.set_num_threads(1)
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), {"__name__": "page"})
