# SPDX-License-Identifier: Apache-2.0
"""Which tiers below host memory a request may load from: ``kv_load_tiers`` in ``kv_transfer_params``. Pure."""

from __future__ import annotations

from typing import NamedTuple

MEDIA = ("CPU", "STORAGE")
LOCALITIES = ("LOCAL", "REMOTE")


class TierMatcher(NamedTuple):
    """What a tier must be. ``None`` matches everything, and a tier that does not say what it is matches everything."""

    medium: str | None = None
    locality: str | None = None

    def matches(self, medium: str | None, locality: str | None) -> bool:
        return (self.medium is None or medium is None or self.medium == medium) and (
            self.locality is None or locality is None or self.locality == locality
        )


class LoadTiers(NamedTuple):
    """A tier is allowed if one of the matchers matches it. Without any, none is."""

    matchers: tuple[TierMatcher, ...] = ()

    def allows(self, medium: str | None, locality: str | None) -> bool:
        return any(matcher.matches(medium, locality) for matcher in self.matchers)


def parse_load_tiers(value: object) -> tuple[LoadTiers | None, bool]:
    """What a client asked for, as vLLM reads it, and whether all of it made sense.

    ``None``: all tiers, if ``value`` is ``None``, is not a list, or has only entries that make no sense. An entry that
    makes none is left out.
    """
    if value is None:
        return None, True
    if not isinstance(value, list):
        return None, False
    found = [_matcher_of(entry) for entry in value]
    # Each once, so that they are few: they are asked for each block and tier.
    matchers = tuple(dict.fromkeys(matcher for matcher in found if matcher is not None))
    if value and not matchers:
        return None, False
    return LoadTiers(matchers), None not in found


def _matcher_of(entry: object) -> TierMatcher | None:
    if not isinstance(entry, dict):
        return None
    wanted: list[str | None] = []
    for name, known in (("medium", MEDIA), ("locality", LOCALITIES)):
        value = entry.get(name)
        if value is not None:
            value = value.upper() if isinstance(value, str) and len(value) <= max(map(len, known)) else ""
            if value not in known:
                return None
        wanted.append(value)
    return TierMatcher(*wanted)
