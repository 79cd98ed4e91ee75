# SPDX-License-Identifier: Apache-2.0
"""Parse ``kv_load_tiers`` of ``kv_transfer_params``: the tiers below host memory that a request may load from. Pure."""

from __future__ import annotations

from typing import NamedTuple

MEDIA = ("CPU", "STORAGE")
LOCALITIES = ("LOCAL", "REMOTE")


class TierMatcher(NamedTuple):
    """The properties that a tier must have. ``None`` matches every tier.

    A tier that does not report a property matches any value of it.
    """

    medium: str | None = None
    locality: str | None = None

    def matches(self, medium: str | None, locality: str | None) -> bool:
        return (self.medium is None or medium is None or self.medium == medium) and (
            self.locality is None or locality is None or self.locality == locality
        )


class LoadTiers(NamedTuple):
    """The allowed tiers: all tiers that at least one matcher matches. Without matchers, no tier is allowed."""

    matchers: tuple[TierMatcher, ...] = ()

    def allows(self, medium: str | None, locality: str | None) -> bool:
        return any(matcher.matches(medium, locality) for matcher in self.matchers)


def parse_load_tiers(value: object) -> tuple[LoadTiers | None, bool]:
    """Return the tiers that a client asked for, as vLLM interprets them, and whether the whole value was valid.

    Invalid entries are left out. The tiers are ``None``, which means all tiers, if ``value`` is ``None``, is not a
    list, or contains only invalid entries.
    """
    if value is None:
        return None, True
    if not isinstance(value, list):
        return None, False
    found = [_matcher_of(entry) for entry in value]
    # Each matcher is kept once, because every matcher is tested for each block and tier.
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
