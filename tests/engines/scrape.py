# SPDX-License-Identifier: Apache-2.0
"""Read kvoffload's series from a server's Prometheus metrics."""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["series_in"]


def series_in(exposition: str, engines_labels: Collection[str]) -> dict[str, float]:
    """Return the series by name and their own labels, such as ``"tier_blocks|disk"``, without the engine's common
    labels."""
    values = {}
    for name, labels, value in re.findall(r"^kvoffload_(\w+)\{(.*)\} (\S+)$", exposition, flags=re.MULTILINE):
        own = [text for key, text in re.findall(r'(\w+)="([^"]*)"', labels) if key not in engines_labels]
        values["|".join([name.removesuffix("_total"), *own])] = float(value)
    return values
