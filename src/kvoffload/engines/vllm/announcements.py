# SPDX-License-Identifier: Apache-2.0
"""Where blocks are in the words that routers know, and what of it was announced.

A router counts a block by its medium, and takes a medium that it does not know for the device. It applies a removal to
whatever it knows under that medium, or not at all. So a block is announced with its first copy in a medium and removed
with its last, in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvoffload.base import OffloadKey
from kvoffload.cpu.common import CPULoadStoreSpec
from kvoffload.tiering.options import StoreOptions

_HOST = CPULoadStoreSpec.medium()


class Place(NamedTuple):
    """A tier in the fields of vLLM's KV events. ``ownership`` is left out: a router takes blocks without one for the
    engine's own, and Dynamo drops those of owners that it does not know."""

    medium: str
    """``CPU`` or ``STORAGE``."""
    locality: str | None = None
    """``LOCAL`` or ``REMOTE``, as the engine sees the tier; ``None``: not known."""


def places_of(tiers: Iterable[StoreOptions]) -> dict[str, Place]:
    """The place of each tier, by its label. The primary tier is called ``CPU``."""
    below = {options.label: Place(options.medium, options.locality) for options in tiers}
    return below | {_HOST: Place(_HOST)}


class Announced(NamedTuple):
    """What routers know of a block in one medium."""

    place: Place
    """That of its first copy."""
    tiers: tuple[str, ...]
    """The labels of all that have a copy now."""
    is_described: bool
    """With tokens. A router may have dropped an announcement without, and one then drops a removal from there on."""


class Announcements:
    """The announced blocks of all tiers, by medium: about 150 bytes each."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        """``places`` by label. A tier that is not in it counts as storage: no router knows its label as a medium."""
        self._places = dict(places)
        self._blocks: dict[str, dict[OffloadKey, Announced]] = {}
        self._known: dict[Announced, Announced] = {}
        """One object for each value, since there are few."""
        self._inner: dict[str, dict[OffloadKey, tuple[OffloadKey, ...]]] = {}
        """By block, the engine's blocks inside it that were announced with it, but for the last, which has its key."""
        self._num_holders: dict[Place, dict[OffloadKey, int]] = {}
        """By engine block inside others, how many blocks that were announced in the same words have it: those that part
        inside share the first. A router may drop one place and not another."""

    def __repr__(self) -> str:
        return f"Announcements({ {medium: len(blocks) for medium, blocks in self._blocks.items()} })"

    def place(self, tier: str) -> Place:
        if tier not in self._places:
            self._places[tier] = Place("STORAGE")
        return self._places[tier]

    def add(self, tier: str, key: OffloadKey) -> bool:
        """A copy appeared in ``tier``. Whether the block is to be announced, which ``describe`` may follow."""
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
        """The block is announced with its tokens. ``inner``: the engine's blocks in it, but for the last. Returns how
        many of these, from the first on, are known in this place by the announcement of another block."""
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
        """A copy left ``tier``. What is to be taken back, if it was the last of the medium; ``take_inner`` follows."""
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
        """The engine's blocks in a removed block, which was announced in ``place``, that no announced block has any
        longer, but for the last."""
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
        """The labels of the tiers below the primary one that have announced blocks."""
        tiers = {tier for blocks in self._blocks.values() for known in blocks.values() for tier in known.tiers}
        return sorted(tiers - {_HOST})

    def keys_in(self, tier: str) -> list[OffloadKey]:
        """The announced blocks of which ``tier`` has a copy."""
        blocks = self._blocks.get(self.place(tier).medium, {})
        return [key for key, known in blocks.items() if tier in known.tiers]

    def _intern(self, value: Announced) -> Announced:
        return self._known.setdefault(value, value)
