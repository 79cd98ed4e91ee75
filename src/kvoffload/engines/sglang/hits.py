# SPDX-License-Identifier: Apache-2.0
"""Find the pages at which a hit may end, for pools other than the KV pool. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def restorable_pages(present: Sequence[bool], num_pages: int, trailing: int | None) -> set[int]:
    """Return the lengths from 1 to ``num_pages`` that one pool allows for a hit. ``present`` says which pages are
    stored; pages after its end are not.

    ``trailing`` is the number of pages that are needed before the end, for a sliding window or a state. ``None``: all
    pages are needed.
    """
    there = [*present, *[False] * (num_pages - len(present))]
    ends, run = set(), 0
    for end in range(1, num_pages + 1):
        run = run + 1 if there[end - 1] else 0
        if run >= min(end, trailing if trailing is not None else end):
            ends.add(end)
    return ends
