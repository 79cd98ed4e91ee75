# SPDX-License-Identifier: Apache-2.0
"""Parse the limits in a request's ``kv_transfer_params``: how much of it is stored and loaded, and from where. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.load_tiers import LoadTiers, parse_load_tiers

_MAX_SHOWN = 40
"""The number of characters of a client's value that a message repeats."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request. ``None`` means no limit."""

    max_offload_tokens: int | None = None
    """The number of tokens, from the request's first one on, that may be stored. 0: nothing is stored."""
    max_load_tokens: int | None = None
    """The number of tokens that may be loaded from offloaded blocks at each admission. 0: no block is looked up."""
    load_tiers: LoadTiers | None = None
    """The tiers below host memory that the request may load from."""

    @classmethod
    def parse(cls, params: object) -> tuple[RequestLimits, list[str]]:
        """Return the limits in ``params``, and a sentence for each invalid value, which is ignored.

        Never raises, because the request must be answered in spite of such a mistake. Ignores unknown keys, which
        belong to other programs. Each sentence is one line and repeats only the start of a value.
        """
        if params is None:
            return cls(), []
        if not isinstance(params, dict):
            return cls(), [f"kv_transfer_params must be a mapping, not {_shown(params)}; they are ignored."]
        problems: list[str] = []

        def limit(name: str) -> int | None:
            value = params.get(name)
            if value is None or (type(value) is int and value >= 0):
                return value
            problems.append(f"{name} must be a number of tokens, 0 or more, not {_shown(value)}; it is ignored.")
            return None

        load_tiers, makes_sense = parse_load_tiers(params.get("kv_load_tiers"))
        if not makes_sense:
            problems.append(
                'kv_load_tiers must be a list such as [{"medium": "STORAGE"}] or [{"locality": "LOCAL"}]; other '
                "entries are ignored."
            )
        return cls(limit("max_offload_tokens"), limit("max_load_tokens"), load_tiers), problems


def _shown(value: object) -> str:
    """Return the escaped start of a plain value, or only the type of any other value."""
    if isinstance(value, str):
        return ascii(value[:_MAX_SHOWN])[:_MAX_SHOWN]
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return f"a value of type {type(value).__name__[:_MAX_SHOWN]}"
