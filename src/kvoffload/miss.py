# SPDX-License-Identifier: Apache-2.0
"""Why a block was not found or not loaded: one enum, for verdicts, metrics, explanations and docs."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Miss(StrEnum):
    """A cause, as traces and reports write it, with its ``advice``: what it means for an operator.

    ``is_avoidable``: other sizes or speeds could have changed it. Of a tier below host memory the cause may be followed
    by the tier's name: ``"evicted disk"``. To add a cause, add a row here and return it where it arises.
    """

    advice: str
    is_avoidable: bool

    def __new__(cls, cause: str, advice: str, is_avoidable: bool = True) -> Self:
        self = str.__new__(cls, cause)
        self._value_ = cause
        self.advice = advice
        self.is_avoidable = is_avoidable
        return self

    # Never to be found.
    NEW = "new", "No request of this process had stored these before.", False
    TAIL = "tail", "The last token and the last partial block: never part of a hit.", False
    NOT_READ = "not read", "The requests asked not to read the cache.", False
    PROMPT_ONLY = "prompt only", "Generated tokens: offload_prompt_only leaves them out.", False
    REQUEST_LIMIT = "request limit", "max_offload_tokens of an earlier request.", False
    LOAD_LIMIT = "load limit", "max_load_tokens of the request.", False
    # Not stored.
    FILTERED = "filtered", "store_threshold: too few requests had asked before."
    REFUSED = "refused", "No slot of host memory was free when they were computed."
    TOO_LONG = "too long", "The prompt was longer than host memory."
    STORE_FAILED = "store failed", "Copies from the device failed; see the log."
    # Stored, and gone.
    EVICTED = "evicted", "There was no room for them: more memory, disk or servers."
    REMOVED = "removed", "Another host or process, or a rule of the store, evicted or deleted them."
    CORRUPT = "corrupt", "Their bytes were wrong; look at the disk."
    RESET = "reset", "The cache was reset."
    # Found, and not loaded.
    LOAD_FAILED = "load failed", "Copies to the device failed; see the log."
    PROMOTION_FAILED = "promotion failed", "The tier could not read them; see its health."
    OUT_OF_PATIENCE = "out of patience", "The tier was too slow for max_wait_s."
    TIER_LEFT_OUT = "tier left out", "kv_load_tiers of the request leaves out the tier that has them.", False
    TIER_OFF = "tier off", "The tier's circuit breaker was open."
    NO_ROOM = "no room", "All slots were in use when they were to be promoted."
    PROMOTION_SHARE = "promotion_share", "Waiting requests may claim no more of host memory."
    SLOW_ANSWER = "slow answer", "Their tier answers later than such a prompt can wait: it is asked for longer ones."
    DECLINED = "declined by cost", "Loading them would have taken longer than computing."
    UNKNOWN = "unknown", "No loss was recorded."

    @property
    def label(self) -> str:
        """As metrics name it."""
        return self.replace(" ", "_")

    @classmethod
    def of(cls, cause: str) -> Miss | None:
        """The row of ``cause``, which may name a tier; ``None``: a cause of another version."""
        for words in (cause, cause.split(" ")[0]):
            if words in cls._value2member_map_:
                return cls._value2member_map_[words]  # type: ignore[return-value]
        return None


REFUSALS = (Miss.PROMOTION_SHARE, Miss.NO_ROOM)
"""Why a promotion was not begun."""
