# SPDX-License-Identifier: Apache-2.0
"""Translate the places of blocks into the terms that routers know, and remember the announced blocks.

A router counts a block by its medium, and takes an unknown medium for the GPU. It applies a removal to everything that
it knows under that medium, or not at all. So a block is announced with its first copy in a medium and removed with its
last, in the same terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvoffload.base import OffloadKey
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.tiering.options import StoreOptions

_HOST = CPULoadStoreSpec.medium()


class Place(NamedTuple):
    """A tier in the fields of vLLM's KV events. The field ``ownership`` is left out: a router assumes that blocks
    without an owner belong to the engine, and Dynamo drops blocks of unknown owners."""

    medium: str
    """``CPU`` or ``STORAGE``."""
    locality: str | None = None
    """``LOCAL`` or ``REMOTE``, from the engine's point of view; ``None`` if it is not known."""


def places_of(tiers: Iterable[StoreOptions]) -> dict[str, Place]:
    """Return the place of each tier, by its label. Host memory is called ``CPU``."""
    below = {options.label: Place(options.medium, options.locality) for options in tiers}
    return below | {_HOST: Place(_HOST)}


class Announced(NamedTuple):
    """The announced state of a block in one medium."""

    place: Place
    """The place of its first copy."""
    tiers: tuple[str, ...]
    """The labels of all tiers that have a copy."""
    is_described: bool
    """Whether it was announced with tokens. A router may have dropped an announcement without tokens, and another
    router stops a removal at such a block."""


class Announcements:
    """The announced blocks of all tiers, by medium. Each takes about 150 bytes."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        """Create the record. ``places`` maps labels of tiers to places. A tier that is not in it counts as storage,
        because no router knows its label as a medium."""
        self._places = dict(places)
        self._blocks: dict[str, dict[OffloadKey, Announced]] = {}
        self._known: dict[Announced, Announced] = {}
        """One shared object for each value, because there are few different ones."""
        self._inner: dict[str, dict[OffloadKey, tuple[OffloadKey, ...]]] = {}
        """For each block, the engine's blocks inside it that were announced with it, except the last, which has the
        block's own key."""
        self._num_holders: dict[Place, dict[OffloadKey, int]] = {}
        """For each engine block inside other blocks, the number of blocks with the same announced place that contain
        it, because blocks that diverge inside share their first engine blocks. A router may drop one place and keep
        another."""

    def __repr__(self) -> str:
        return f"Announcements({ {medium: len(blocks) for medium, blocks in self._blocks.items()} })"

    def place(self, tier: str) -> Place:
        if tier not in self._places:
            self._places[tier] = Place("STORAGE")
        return self._places[tier]

    def add(self, tier: str, key: OffloadKey) -> bool:
        """Record a copy in ``tier``, and return whether the block must be announced. ``describe`` may follow."""
        place = self.place(tier)
        blocks = self._blocks.setdefault(place.medium, {})
        known = blocks.get(key)
        if known is None:
            blocks[key] = self._intern(Announced(place, (tier,), is_described=False))
            return True
        if tier not in known.tiers:
            blocks[key] = self._intern(known._replace(tiers=(*known.tiers, tier)))
        return False

    def describe(self, tier: str, key: OffloadKey, inner: Sequence[OffloadKey]) -> int:
        """Record that the block is announced with its tokens. ``inner`` lists the engine's blocks in it, except the
        last. Returns how many of these, from the first on, were already announced in this place with another block."""
        place = self.place(tier)
        blocks = self._blocks[place.medium]
        blocks[key] = self._intern(blocks[key]._replace(is_described=True))
        if not inner:
            return 0
        self._inner.setdefault(place.medium, {})[key] = tuple(inner)
        num_holders = self._num_holders.setdefault(place, {})
        num_known = 0
        for each in inner:
            num_known += each in num_holders
            num_holders[each] = num_holders.get(each, 0) + 1
        return num_known

    def remove(self, tier: str, key: OffloadKey) -> Announced | None:
        """Record that a copy left ``tier``. Returns the announcement to withdraw if it was the last copy in the medium;
        ``take_inner`` follows."""
        blocks = self._blocks.get(self.place(tier).medium, {})
        known = blocks.get(key)
        if known is None or tier not in known.tiers:
            return None
        tiers = tuple(each for each in known.tiers if each != tier)
        if tiers:
            blocks[key] = self._intern(known._replace(tiers=tiers))
            return None
        del blocks[key]
        return known

    def take_inner(self, key: OffloadKey, place: Place) -> list[OffloadKey]:
        """Return the engine's blocks in a removed block, which was announced in ``place``, that no announced block
        contains any longer. It excludes the last one."""
        inner = self._inner.get(place.medium, {}).pop(key, ())
        gone = []
        for each in inner:
            num_holders = self._num_holders[place]
            num_holders[each] -= 1
            if not num_holders[each]:
                del num_holders[each]
                gone.append(each)
        return gone

    def tiers_below(self) -> list[str]:
        """Return the labels of the tiers below host memory that have announced blocks."""
        tiers = {tier for blocks in self._blocks.values() for known in blocks.values() for tier in known.tiers}
        return sorted(tiers - {_HOST})

    def keys_in(self, tier: str) -> list[OffloadKey]:
        """Return the announced blocks with a copy in ``tier``."""
        blocks = self._blocks.get(self.place(tier).medium, {})
        return [key for key, known in blocks.items() if tier in known.tiers]

    def _intern(self, value: Announced) -> Announced:
        return self._known.setdefault(value, value)
