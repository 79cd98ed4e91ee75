# SPDX-License-Identifier: Apache-2.0
"""The longest prefix that offloaded blocks can supply: a pure search over several KV groups.

A hit of T tokens is *good* when every group has the blocks it needs to continue after T tokens: the whole prefix for
full attention, the last window for sliding windows, the last block for single states. Groups with speculative heads
also need the block behind T (``GroupGeometry.blocks_to_find``). The answer is the greatest T that is good for all
groups at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoffload.config import GroupKind
from kvoffload.connector.groups import GroupGeometry, hit_unit_tokens

__all__ = ["AskBlocks", "find_hit"]

AskBlocks = Callable[[int, range], Sequence[bool | None]]
"""``ask(group, blocks)``: lookup answers for consecutive blocks, up to and including the first ``False``."""


class _GroupAnswers:
    """The lookup answers of one group's blocks in this search. No block is asked for twice."""

    __slots__ = ("_ask", "_known", "group")

    def __init__(self, group: GroupGeometry, ask: AskBlocks) -> None:
        self.group = group
        self._ask = ask
        self._known: dict[int, bool | None] = {}

    def first_missing(self, blocks: range) -> int | None:
        """The first block of ``blocks`` that is a miss. "Not yet" is no miss, and lookups go on past it: so all blocks
        that must be promoted are asked for in the same step."""
        known = self._known
        block = blocks.start
        while block < blocks.stop:
            if block not in known:
                unknown = range(block, next((b for b in range(block, blocks.stop) if b in known), blocks.stop))
                known.update(zip(unknown, self._ask(self.group.index, unknown), strict=False))
            if known[block] is False:
                return block
            block += 1
        return None

    def any_deferred(self, blocks: range) -> bool:
        return any(self._known[block] is None for block in blocks)


def find_hit(
    groups: Sequence[GroupGeometry],
    num_keys: Sequence[int],
    ask: AskBlocks,
    computed_tokens: int,
    max_tokens: int,
) -> int | None:
    """The longest good hit in tokens, including the ``computed_tokens`` that are on the device already.

    ``num_keys[g]`` is the number of full blocks the request has in group g; the hit is at most ``max_tokens``. Returns
    ``computed_tokens`` when there is nothing to add, and ``None`` when a block of the longest hit is "not yet": ask
    again in a later step.
    """
    unit = hit_unit_tokens(tuple(groups))
    bound = min(max_tokens, *(group.longest_hit(keys) for keys, group in zip(num_keys, groups, strict=True)))
    hit = bound // unit * unit
    answers = [_GroupAnswers(group, ask) for group in groups]

    def shrink(hit: int, of: _GroupAnswers) -> int:
        # Shorter hits need blocks that start no later. So the first missing block rules out every hit that reaches it,
        # and the search may jump to the longest that does not.
        missing = of.first_missing(of.group.blocks_to_find(computed_tokens, hit))
        return hit if missing is None else of.group.longest_hit(missing) // unit * unit

    # Invariant: no good hit is longer than ``hit``. So when no group shortens it any more, ``hit`` is good, and it is
    # the longest. "Not yet" counts as present until then.
    #
    # Full attention: a shorter hit needs a part of the blocks just seen, and no others. One walk is enough.
    for full in answers:
        if full.group.kind is GroupKind.FULL_ATTENTION:
            hit = shrink(hit, full)
    # The others need other blocks when the hit becomes shorter, so they are asked until none shortens it.
    windowed = [each for each in answers if each.group.kind is not GroupKind.FULL_ATTENTION]
    before = -1
    while hit > computed_tokens and hit != before:
        before = hit
        for each in windowed:
            hit = shrink(hit, each)
    if hit <= computed_tokens:
        return computed_tokens
    if any(each.any_deferred(each.group.blocks_to_find(computed_tokens, hit)) for each in answers):
        return None
    return hit
