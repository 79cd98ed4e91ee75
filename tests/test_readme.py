# SPDX-License-Identifier: Apache-2.0
"""Test that the targets of the README's links exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_its_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(targets) > 5
    assert not [target for target in targets if not (ROOT / target).exists()]
