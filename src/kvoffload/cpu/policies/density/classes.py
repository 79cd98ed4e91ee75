# SPDX-License-Identifier: Apache-2.0
"""The classes in which ``density`` keeps blocks: what the client said of the next use, and how many uses there were."""

from __future__ import annotations

from itertools import pairwise

from kvoffload.base import NextUse

_LEAST_USES = (1, 2, 3, 4, 6, 10, 18, 34)
NUM_USES = len(_LEAST_USES)
"""Classes by number of uses: 1, 2, 3, about 4, about 6, ... , 34 or more."""
OFTEN_USED = _LEAST_USES.index(4)
"""A path that ends at such a block is a prompt that several clients share: the last block of a session that goes on
was used once."""
SHARED = len(NextUse)
"""The group of blocks that several clients share, whatever the last one said. A block stays in it."""
NUM_GROUPS = SHARED + 1
NUM_CLASSES = NUM_GROUPS * NUM_USES
"""A class is ``group * NUM_USES + uses``: the group is the ``next_use`` that the last request said, or ``SHARED``, and
``uses`` counts the classes by number of uses from 0. A block that no client said anything about is in one of the first
``NUM_USES``."""
_TOP = NUM_USES - 1
_STEPS = [more - less for less, more in pairwise(_LEAST_USES)]
NUM_DRAWS = max(_STEPS)


def _by_group(uses: list[int]) -> list[tuple[int, ...]]:
    return [
        (*(group * NUM_USES + risen for risen in uses * SHARED), *(SHARED * NUM_USES + risen for risen in uses))
        for group in range(NUM_GROUPS)
    ]


RISEN = [
    _by_group([uses + (uses < _TOP and draw % _STEPS[uses] == 0) for uses in range(NUM_USES)])
    for draw in range(NUM_DRAWS)
]
"""``RISEN[draw][group][class]``: the class after one more use, which puts the block into ``group``. Beyond 4 uses only
some uses raise the class, at random (R. Morris, "Counting large numbers of events in small registers", 1978), so blocks
need no counters. Where a class rises, all below it rise too: with one draw for all blocks of a path, a head never
counts fewer uses than its tail."""
CERTAIN = 1
"""The draw in which only those classes rise that rise in every draw."""
SAME_USES = _by_group(list(range(NUM_USES)))
"""``SAME_USES[group][class]``: the class after a use that does not count."""
