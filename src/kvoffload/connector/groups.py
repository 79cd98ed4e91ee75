# SPDX-License-Identifier: Apache-2.0
"""KV groups: the arithmetic of tokens, GPU blocks and blocks, and the longest hit that is good for all groups. Pure.

This module uses three units. A *hash-block* contains the tokens that one of the engine's hashes covers, a *GPU block*
is a multiple of it, and a *block* (the offloaded unit) is ``factor`` GPU blocks. Ranges are half open and count from
the request's first token.

A hit of T tokens is *good* when every group has the blocks it needs to continue after T tokens: the whole prefix for
full attention, the last window for sliding windows, the last chunk for local chunks, the last block for single states.
Groups with speculative heads also need the block after T. ``GroupGeometry`` computes these blocks, and ``find_hit``
searches for the greatest T that is good for all groups at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvoffload.base import OffloadKey, make_offload_key
from kvoffload.config import EngineLayout, GroupKind, OffloadingConfig
from kvoffload.connector.engine import NO_BLOCK
from kvoffload.connector.epochs import FIRST, Epoch

# Python looks up a module's name several times faster than a member of an enumeration.
_FULL_ATTENTION = GroupKind.FULL_ATTENTION
_SINGLE_STATE = GroupKind.SINGLE_STATE
_LOCAL_CHUNK = GroupKind.LOCAL_CHUNK


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """The geometry of one group, for planning its lookups, loads and stores."""

    index: int
    kind: GroupKind
    gpu_block_tokens: int
    factor: int
    """GPU blocks per block."""
    block_tokens: int
    """Tokens per block: ``factor * gpu_block_tokens``."""
    hashes_per_block: int
    window_tokens: int | None = None
    lookahead_tokens: int = 0

    def __hash__(self) -> int:
        return self.index  # groups are hashed for each lookup, and all indices of a model differ

    @property
    def hit_align_tokens(self) -> int:
        """The unit in tokens: a hit of this group ends at a multiple of it.

        Full attention may end at any GPU block, also inside a block. Windows store only the part of a block that a hit
        at its *end* needs (``first_gpu_block``), so hits end there. The same holds for states, whose blocks are single
        GPU blocks.
        """
        return self.gpu_block_tokens if self.kind is _FULL_ATTENTION else self.block_tokens

    def first_needed_token(self, num_tokens: int) -> int:
        """Return the first token whose KV is needed to continue after ``num_tokens`` tokens.

        While the request runs, the engine may free GPU blocks that end before this token.
        """
        if self.kind is _FULL_ATTENTION:
            return 0
        if self.kind is _SINGLE_STATE:
            return max(0, num_tokens - 1)
        assert self.window_tokens is not None
        if self.kind is _LOCAL_CHUNK:
            return num_tokens // self.window_tokens * self.window_tokens
        return max(0, num_tokens - self.window_tokens + 1)

    def gpu_blocks_for_hit(self, computed_tokens: int, hit_tokens: int) -> range:
        """Return the GPU blocks to load so that a request with ``computed_tokens`` on the GPU then has
        ``hit_tokens``."""
        if hit_tokens <= computed_tokens:
            return range(0)
        stop = hit_tokens // self.gpu_block_tokens
        if self.kind is _SINGLE_STATE:
            return range(stop - 1, stop)
        start = max(computed_tokens, self.first_needed_token(hit_tokens)) // self.gpu_block_tokens
        return range(min(start, stop), stop)

    def blocks_for_hit(self, computed_tokens: int, hit_tokens: int) -> range:
        """Return the blocks that contain ``gpu_blocks_for_hit``."""
        needed = self.gpu_blocks_for_hit(computed_tokens, hit_tokens)
        if not needed:
            return range(0)
        return range(needed.start // self.factor, -(-needed.stop // self.factor))

    def blocks_to_find(self, computed_tokens: int, hit_tokens: int) -> range:
        """Return the blocks that a hit must find: ``blocks_for_hit``, and the block with the tokens that the last
        tokens looked ahead to.

        The KV of a speculative head at a block's last token depends on the token after the block, which the block's key
        does not identify. The presence of the next block shows that the two were computed in a row.
        """
        if hit_tokens <= computed_tokens:
            return range(0)
        needed = self.gpu_blocks_for_hit(computed_tokens, hit_tokens)
        return range(needed.start // self.factor, -(-(hit_tokens + self.lookahead_tokens) // self.block_tokens))

    def longest_hit(self, num_blocks: int) -> int:
        """Return the largest number of tokens in a hit if exactly ``num_blocks`` blocks of the request can be found."""
        return max(0, num_blocks * self.block_tokens - self.lookahead_tokens)

    def is_reachable(self, block: int, unit_tokens: int) -> bool:
        """Return whether some hit needs ``block``. Hits end at multiples of ``unit_tokens`` (``hit_unit_tokens``).

        A later request may share any part of this prefix and be longer, so every multiple is a possible hit. For a
        window or a state, the first multiple that reaches into the block is the hit that most likely needs the block.
        If it does not, no hit does.
        """
        if self.kind is GroupKind.FULL_ATTENTION:
            return True
        first = max(1, block * self.block_tokens + 1 - self.lookahead_tokens)
        hit_tokens = -(-first // unit_tokens) * unit_tokens
        return block in self.blocks_to_find(0, hit_tokens)

    def first_gpu_block(self, block: int) -> int:
        """Return the first GPU block of ``block`` that any hit can need. Earlier GPU blocks in it are don't-care.

        A hit at or after the end of the block looks back at most one window. The engine may have freed the earlier GPU
        blocks before the block was full.
        """
        first, last = block * self.factor, (block + 1) * self.factor - 1
        if self.kind is GroupKind.FULL_ATTENTION:
            return first
        needed = self.first_needed_token((block + 1) * self.block_tokens) // self.gpu_block_tokens
        return min(max(first, needed), last)

    def source_gpu_blocks(self, block: int, gpu_block_ids: Sequence[int], computed_tokens: int) -> list[int] | None:
        """Return the ``factor`` GPU block ids to copy ``block`` from, or ``None`` if it is not (or no longer) on the
        GPU.

        Not for states, which block tables do not show. ``computed_tokens`` is the number of tokens computed before this
        step; the engine frees blocks by this number. Don't-care positions repeat the last id, so that a transfer always
        moves whole blocks, and a block's bytes depend on its key alone.
        """
        assert self.kind is not _SINGLE_STATE
        first, stop = self.first_gpu_block(block), (block + 1) * self.factor
        if (first + 1) * self.gpu_block_tokens <= self.first_needed_token(computed_tokens):
            return None
        ids = list(gpu_block_ids[first:stop])
        if len(ids) < stop - first or NO_BLOCK in ids:
            return None
        return [ids[-1]] * (self.factor - len(ids)) + ids

    def blocks_to_store(
        self, blocks: range, gpu_block_ids: Sequence[int], computed_tokens: int, unit_tokens: int
    ) -> tuple[Sequence[int], list[int]]:
        """Return the ``blocks`` that some hit can need (``is_reachable``) and that are on the GPU, and a list of the
        ``factor`` GPU block ids of each (``source_gpu_blocks``). Not for states."""
        if self.kind is _FULL_ATTENTION:
            ids = list(gpu_block_ids[blocks.start * self.factor : blocks.stop * self.factor])
            if len(ids) == len(blocks) * self.factor and NO_BLOCK not in ids:
                return blocks, ids
        found: list[int] = []
        ids = []
        for block in blocks:
            if self.is_reachable(block, unit_tokens):
                own = self.source_gpu_blocks(block, gpu_block_ids, computed_tokens)
                if own is not None:
                    found.append(block)
                    ids += own
        return found, ids

    def extend_keys(self, keys: list[OffloadKey], block_hashes: Sequence[bytes], epoch: Epoch = FIRST) -> None:
        """Append the keys of blocks that became full. A block's key is the engine's hash at its end, masked by
        ``epoch``."""
        ends = block_hashes[(len(keys) + 1) * self.hashes_per_block - 1 :: self.hashes_per_block]
        if ends:
            if epoch.seed:
                ends = [epoch.mask(block_hash) for block_hash in ends]
            group = _key_ending(self.index)
            keys += [block_hash + group for block_hash in ends]  # type: ignore[misc]


@functools.cache
def _key_ending(group: int) -> bytes:
    """Return the part of a group's keys that follows the block hash."""
    return make_offload_key(b"", group)


def geometry_of(layout: EngineLayout, config: OffloadingConfig) -> tuple[GroupGeometry, ...]:
    """Return one geometry per group of ``layout``. Raises ``ConfigError`` if ``config.block_size`` does not fit.

    A block of states is one GPU block, whatever ``config.block_size`` is, because the engine decides at which of them
    it ends a step, and a hit can end at any of them.
    """
    common = layout.block_size_factor(config)
    factors = [1 if group.kind is GroupKind.SINGLE_STATE else common for group in layout.groups]
    return tuple(
        GroupGeometry(
            index=index,
            kind=group.kind,
            gpu_block_tokens=group.block_tokens,
            factor=factor,
            block_tokens=factor * group.block_tokens,
            hashes_per_block=factor * group.block_tokens // layout.hash_block_tokens,
            window_tokens=group.sliding_window_tokens,
            lookahead_tokens=group.lookahead_tokens,
        )
        for index, (group, factor) in enumerate(zip(layout.groups, factors, strict=True))
    )


def finest_of(groups: Iterable[GroupGeometry]) -> GroupGeometry:
    """Return the group with the smallest blocks."""
    return min(groups, key=lambda group: group.block_tokens)


def by_position(
    groups: Sequence[GroupGeometry], blocks: Iterable[Sequence[int]], keys: list[OffloadKey]
) -> list[OffloadKey]:
    """Sort the keys of some blocks of a request by the blocks' last tokens. Blocks that end together keep their order.

    ``blocks`` contains the blocks' indices by group, and ``keys`` lists their keys group by group. A hit needs blocks
    of all groups up to its end. So evicting the tail of this order first only shortens a hit, but evicting the tail of
    one group would end it.
    """
    if len(groups) == 1:
        return keys
    ends: list[int] = []
    num_groups = 0
    for group, own in zip(groups, blocks, strict=True):
        if own:
            num_groups += 1
            size = group.block_tokens
            ends += [(block + 1) * size for block in own]
    if num_groups < 2:
        return keys
    return [keys[at] for at in sorted(range(len(keys)), key=ends.__getitem__)]


@functools.cache
def hit_unit_tokens(groups: tuple[GroupGeometry, ...]) -> int:
    """Return the unit of which every hit's length is a multiple: a boundary of every group."""
    return math.lcm(*(group.hit_align_tokens for group in groups))


# ------------------------------------------------------------------------------------------------------ the longest hit

AskBlocks = Callable[[Sequence[OffloadKey]], Sequence[bool | None]]
"""Returns the answers for the keys of consecutive blocks: one for each, or up to and including the first ``False``."""

_NOT_ASKED = object()
_FIRST_PART = 64
"""The number of blocks in the first call of a search that starts no reads. A prompt that is nowhere costs one such
call."""
_GROWTH = 16
"""Each further call asks for this many times as many blocks as the previous one."""


class _GroupAnswers:
    """The answers for one group's blocks in this search. No block is asked for twice."""

    __slots__ = ("_ask", "_first_part", "_keys", "_known", "group")

    def __init__(self, group: GroupGeometry, keys: Sequence[OffloadKey], ask: AskBlocks, first_part: int) -> None:
        self.group = group
        self._keys = keys
        self._ask = ask
        self._first_part = first_part
        """The number of blocks in the first call; later calls ask for more."""
        self._known: list[object] = [_NOT_ASKED] * len(keys)
        """The answer for each block: ``True``, ``False`` or ``None``."""

    def first_missing(self, blocks: range) -> int | None:
        """Return the first block of ``blocks`` that is a miss. "Not yet" is not a miss, and lookups continue after it,
        so that all blocks that must be read from tiers are asked for in the same step."""
        known, block, most = self._known, blocks.start, self._first_part
        while block < blocks.stop:
            if (answer := known[block]) is not _NOT_ASKED:
                if answer is False:
                    return block
                block += 1
                continue
            stop = min(blocks.stop, block + most)
            most *= _GROWTH
            if known[block:stop].count(_NOT_ASKED) < stop - block:
                stop = next(at for at in range(block, stop) if known[at] is not _NOT_ASKED)
            answers = self._ask(self._keys[block:stop])[: stop - block]
            known[block : block + len(answers)] = answers
            if False in answers:
                return block + answers.index(False)
            block = stop
        return None

    def any_deferred(self, blocks: range) -> bool:
        return None in self._known[blocks.start : blocks.stop]

    def each(self, blocks: Sequence[int]) -> list[object]:
        """Return the answers for ``blocks``. Asks for all new ones in one call."""
        known = self._known
        new = [block for block in blocks if known[block] is _NOT_ASKED]
        for block, answer in zip(new, self._ask([self._keys[block] for block in new]) if new else ()):
            known[block] = answer
        return [known[block] for block in blocks]


def find_hit(
    groups: Sequence[GroupGeometry],
    keys: Sequence[Sequence[OffloadKey]],
    look_up: AskBlocks,
    computed_tokens: int,
    max_tokens: int,
) -> tuple[int, bool]:
    """Return the longest good hit in tokens, including the ``computed_tokens`` that are already on the GPU, and whether
    a block of it is "not yet": ask again in a later step.

    ``keys[g]`` lists the keys of the request's full blocks in group g. The hit is at most ``max_tokens``. It is
    ``computed_tokens`` if no block can be added.
    """
    answers = [_GroupAnswers(group, own, look_up, max(len(own), 1)) for group, own in zip(groups, keys, strict=True)]
    return _longest_hit(answers, keys, computed_tokens, max_tokens, is_pure=False)


def possible_hit(
    groups: Sequence[GroupGeometry],
    keys: Sequence[Sequence[OffloadKey]],
    where: AskBlocks,
    computed_tokens: int,
    max_tokens: int,
) -> tuple[int | None, set[OffloadKey] | None]:
    """Return the longest hit of a hybrid model, counting blocks in any tier, and the blocks after which it could be
    cut off.

    ``where`` (``OffloadingManager.where``) answers for each block alone. The blocks (``ends`` of
    ``OffloadingManager.lookup_prefix``) are ``None`` without states and without a hit.
    """
    answers = [_GroupAnswers(group, own, where, _FIRST_PART) for group, own in zip(groups, keys, strict=True)]
    hit, is_deferred = _longest_hit(answers, keys, computed_tokens, max_tokens, is_pure=True)
    if is_deferred:
        return None, None
    if hit <= computed_tokens or all(group.kind is not _SINGLE_STATE for group in groups):
        return hit, None
    # The last block of full attention of this hit, and of each shorter one whose states are present. Windows count as
    # present.
    unit = hit_unit_tokens(tuple(groups))
    ends: Sequence[int] = range(computed_tokens // unit * unit + unit, hit, unit)
    for each in answers:
        if each.group.kind is _SINGLE_STATE:
            states = each.each([tokens // each.group.block_tokens - 1 for tokens in ends])
            ends = [tokens for tokens, state in zip(ends, states) if state is True]
    found: set[OffloadKey] = set()
    for group, own in zip(groups, keys, strict=True):
        if group.kind is _FULL_ATTENTION:
            # The last of ``blocks_to_find`` of each hit, computed directly, because a long prompt may have one hit for
            # each 16 tokens.
            size, ahead = group.block_tokens, group.lookahead_tokens - 1
            found.update([own[(tokens + ahead) // size] for tokens in (*ends, hit)])
    return hit, found


def _longest_hit(
    answers: Sequence[_GroupAnswers],
    keys: Sequence[Sequence[OffloadKey]],
    computed_tokens: int,
    max_tokens: int,
    *,
    is_pure: bool,
) -> tuple[int, bool]:
    """Return the hit as ``find_hit`` does. ``is_pure``: questions start no reads, so all states are asked for in one
    call."""
    unit = hit_unit_tokens(tuple(each.group for each in answers))
    bound = min(max_tokens, *(each.group.longest_hit(len(own)) for own, each in zip(keys, answers, strict=True)))
    hit = bound // unit * unit

    def shrink(hit: int, of: _GroupAnswers) -> int:
        # Shorter hits need blocks that start no later. So the first missing block rules out every hit that reaches it,
        # and the search may jump to the longest hit that does not reach it.
        missing = of.first_missing(of.group.blocks_to_find(computed_tokens, hit))
        return hit if missing is None else of.group.longest_hit(missing) // unit * unit

    # Invariant: no good hit is longer than ``hit``. So when no group can shorten it further, ``hit`` is good, and it is
    # the longest. "Not yet" counts as present until then.
    #
    # Full attention: a shorter hit needs only a part of the blocks just seen. One walk is enough.
    for full in answers:
        if full.group.kind is _FULL_ATTENTION:
            hit = shrink(hit, full)
    # The other groups need different blocks for a shorter hit, so they are asked until none shortens it.
    windowed = [each for each in answers if each.group.kind is not _FULL_ATTENTION]
    before = -1
    # Until the answers for attention are known, the possible length of a hit is unknown.
    at_once = is_pure and not any(
        full.any_deferred(full.group.blocks_to_find(computed_tokens, hit)) for full in answers
    )
    while hit > computed_tokens and hit != before:
        before = hit
        for each in windowed:
            if at_once and each.group.kind is _SINGLE_STATE:
                hits = range(hit, computed_tokens, -unit)
                states = each.each([tokens // each.group.block_tokens - 1 for tokens in hits])
                hit = next((tokens for tokens, state in zip(hits, states) if state is not False), 0)
            else:
                hit = shrink(hit, each)
    if hit <= computed_tokens:
        return computed_tokens, False
    return hit, any(each.any_deferred(each.group.blocks_to_find(computed_tokens, hit)) for each in answers)
