# SPDX-License-Identifier: Apache-2.0
"""kvoffload's series in what a server exposes to Prometheus."""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["series_in"]


def series_in(exposition: str, engines_labels: Collection[str]) -> dict[str, float]:
    """By name and labels of their own, as in ``"tier_blocks|disk"``: without those that the engine gives to all."""
    values = {}
    for name, labels, value in re.findall(r"^kvoffload_(\w+)\{(.*)\} (\S+)$", exposition, flags=re.MULTILINE):
        own = [text for key, text in re.findall(r'(\w+)="([^"]*)"', labels) if key not in engines_labels]
        values["|".join([name.removesuffix("_total"), *own])] = float(value)
    return values
