# SPDX-License-Identifier: Apache-2.0
"""How long a prefix can be had from offloaded blocks: a pure search over several KV groups.

A hit of T tokens is good when every group has the blocks it needs to go on after T tokens: all of the prefix for
full attention, the last window for sliding windows, the last block for single states. The hit is the longest T
that is good for all groups at once. Missing blocks only ever push T down, so trying groups in turn until
none objects ends at the greatest such T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoffload.config import GroupKind
from kvoffload.connector.groups import GroupGeometry, hit_unit_tokens

__all__ = ["AskBlocks", "find_hit"]

AskBlocks = Callable[[int, range], Sequence[bool | None]]
"""``ask(group, blocks)``: lookup answers for consecutive blocks, up to and including the first ``False``."""


class _GroupAnswers:
    """What is known of one group's blocks in this search; no block is asked for twice."""

    __slots__ = ("_ask", "_known", "group")

    def __init__(self, group: GroupGeometry, ask: AskBlocks) -> None:
        self.group = group
        self._ask = ask
        self._known: dict[int, bool | None] = {}

    def first_missing(self, blocks: range) -> int | None:
        """The first block of ``blocks`` that is not and will not be here. Goes on asking past "not yet"."""
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
    """The longest good hit in tokens, ``computed_tokens`` (on the device already) included.

    ``num_keys[g]``: how many full blocks the request has in group g. ``max_tokens``: at most so many tokens.
    ``computed_tokens`` itself is the answer when nothing can be added, ``None`` when a "not yet" stands between now and
    the longest hit: it is worth asking again.
    """
    unit = hit_unit_tokens(groups)
    bound = min(max_tokens, *(keys * group.block_tokens for keys, group in zip(num_keys, groups, strict=True)))
    hit = bound // unit * unit
    answers = [_GroupAnswers(group, ask) for group in groups]

    def shrink(hit: int, of: _GroupAnswers) -> int:
        # A shorter hit needs the missing block as well, as long as it reaches into or beyond it: jump to its start.
        missing = of.first_missing(of.group.blocks_for_hit(computed_tokens, hit))
        return hit if missing is None else missing * of.group.block_tokens // unit * unit

    # A shorter hit needs fewer blocks of full attention and never other ones: one look is enough.
    for full in answers:
        if full.group.kind is GroupKind.FULL_ATTENTION:
            hit = shrink(hit, full)
    windowed = [each for each in answers if each.group.kind is not GroupKind.FULL_ATTENTION]
    before = -1
    while hit > computed_tokens and hit != before:
        before = hit
        for each in windowed:
            hit = shrink(hit, each)
    if hit <= computed_tokens:
        return computed_tokens
    if any(each.any_deferred(each.group.blocks_for_hit(computed_tokens, hit)) for each in answers):
        return None
    return hit
