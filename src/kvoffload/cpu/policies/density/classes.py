# SPDX-License-Identifier: Apache-2.0
"""Define the classes in which ``density`` keeps blocks, by the client's hint about the next use and the number of
uses."""

from __future__ import annotations

from itertools import pairwise

from kvoffload.base import NextUse

_LEAST_USES = (1, 2, 3, 4, 6, 10, 18, 34)
NUM_USES = len(_LEAST_USES)
"""The number of classes by uses: 1, 2, 3, about 4, about 6, ... , 34 or more."""
OFTEN_USED = _LEAST_USES.index(4)
"""The class of a block with 4 or 5 uses. A path that ends in a block of at least this class is a prompt that several
clients share, because the last block of a session that continues was used once."""
SHARED = len(NextUse)
"""The group of blocks that several clients share, whatever hint the last client gave. A block never leaves it."""
NUM_GROUPS = SHARED + 1
NUM_CLASSES = NUM_GROUPS * NUM_USES
"""The number of all classes. A class is ``group * NUM_USES + uses``. The group is the last request's ``next_use``, or
``SHARED``, and ``uses`` is the index of the class by uses. Blocks without any hint are in the first ``NUM_USES``
classes."""
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
need no counters. If a draw raises a class, it also raises all classes below it. So with one draw for all blocks of a
path, a head never counts fewer uses than its tail."""
CERTAIN = 1
"""The draw that raises a class only if every draw does."""
SAME_USES = _by_group(list(range(NUM_USES)))
"""``SAME_USES[group][class]``: the class after a use that does not count."""
