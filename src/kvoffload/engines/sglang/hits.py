# SPDX-License-Identifier: Apache-2.0
"""At which pages a hit may end, for pools beside that of the KV. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def restorable_pages(present: Sequence[bool], num_pages: int, trailing: int | None) -> set[int]:
    """The lengths from 1 to ``num_pages`` that a hit may have by one pool, of which the pages ``present`` are stored;
    pages after its end are not.

    ``trailing``: only that many pages before the end are needed, as of a sliding window or a state. ``None``: all.
    """
    there = [*present, *[False] * (num_pages - len(present))]
    ends, run = set(), 0
    for end in range(1, num_pages + 1):
        run = run + 1 if there[end - 1] else 0
        if run >= min(end, trailing if trailing is not None else end):
            ends.add(end)
    return ends
