# SPDX-License-Identifier: Apache-2.0
"""What a request's client may ask for in ``kv_transfer_params``: how much of it is stored and loaded, and from where.
Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.load_tiers import LoadTiers, parse_load_tiers

_MAX_SHOWN = 40
"""Characters of a client's value that a message repeats."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request; ``None`` where there is no limit."""

    max_offload_tokens: int | None = None
    """The tokens that may be offered for store, counted from the request's first. 0: nothing is stored."""
    max_load_tokens: int | None = None
    """The tokens that may come from offloaded blocks, at each admission. 0: none is looked up."""
    load_tiers: LoadTiers | None = None
    """The tiers below host memory that it may load from."""

    @classmethod
    def parse(cls, params: object) -> tuple[RequestLimits, list[str]]:
        """The limits in ``params``, and a sentence for each value that is ignored because it makes no sense.

        Never raises: a client's mistake must not cost its answer. Unknown keys belong to others. The sentences are one
        line each, and repeat only the start of a value.
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
    """The start of a plain value, escaped; of anything else only its type, as its text may be long to make."""
    if isinstance(value, str):
        return ascii(value[:_MAX_SHOWN])[:_MAX_SHOWN]
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 1 << 64):
        return repr(value)
    return f"a value of type {type(value).__name__[:_MAX_SHOWN]}"
