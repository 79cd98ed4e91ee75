# SPDX-License-Identifier: Apache-2.0
"""The classes in which ``density`` keeps blocks: what the client said of the next use, and how many uses there were."""

from __future__ import annotations

from itertools import pairwise

from kvoffload.base import NextUse

__all__ = ["CERTAIN", "NUM_CLASSES", "NUM_DRAWS", "NUM_HINTS", "NUM_USES", "OFTEN_USED", "RISEN", "SAME_USES"]

_LEAST_USES = (1, 2, 3, 4, 6, 10, 18, 34)
NUM_USES = len(_LEAST_USES)
"""Classes by number of uses: 1, 2, 3, about 4, about 6, ... , 34 or more."""
OFTEN_USED = _LEAST_USES.index(10)
"""From here on, the classes by number of uses of blocks that are mostly shared: one client's hint says little of the
others'."""
NUM_HINTS = len(NextUse)
NUM_CLASSES = NUM_HINTS * NUM_USES
"""A class is ``next_use * NUM_USES + uses``, where ``uses`` counts the classes by number of uses from 0. A block that
no client said anything about is in one of the first ``NUM_USES``."""
_TOP = NUM_USES - 1
_STEPS = [more - less for less, more in pairwise(_LEAST_USES)]
NUM_DRAWS = max(_STEPS)


def _hinted(uses: list[int]) -> list[tuple[int, ...]]:
    return [tuple(hint * NUM_USES + uses[class_ % NUM_USES] for class_ in range(NUM_CLASSES)) for hint in NextUse]


RISEN = [
    _hinted([uses + (uses < _TOP and draw % _STEPS[uses] == 0) for uses in range(NUM_USES)])
    for draw in range(NUM_DRAWS)
]
"""``RISEN[draw][next_use][class]``: the class after one more use, by a request that said ``next_use``. Beyond 4 uses
only some uses raise the class, at random (R. Morris, "Counting large numbers of events in small registers", 1978), so
blocks need no counters. Where a class rises, all below it rise too: with one draw for all blocks of a path, a head
never counts fewer uses than its tail."""
CERTAIN = 1
"""The draw in which only those classes rise that rise in every draw."""
SAME_USES = _hinted(list(range(NUM_USES)))
"""``SAME_USES[next_use][class]``: the class after a use that does not count, of a request that said ``next_use``."""
