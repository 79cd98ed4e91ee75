# SPDX-License-Identifier: Apache-2.0
"""The reasons why a block was not found or not loaded: one enum for verdicts, metrics, explanations and docs."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Miss(StrEnum):
    """A cause, as traces and reports write it, with ``advice`` that explains it to an operator.

    ``is_avoidable`` says whether other sizes or speeds could have prevented the miss. If the cause is in a tier below
    host memory, the tier's name may follow it: ``"evicted disk"``. To add a cause, add a row here and return it where
    it arises.
    """

    advice: str
    is_avoidable: bool

    def __new__(cls, cause: str, advice: str, is_avoidable: bool = True) -> Self:
        self = str.__new__(cls, cause)
        self._value_ = cause
        self.advice = advice
        self.is_avoidable = is_avoidable
        return self

    # Never cached.
    NEW = "new", "No earlier request of this process stored these blocks.", False
    TAIL = "tail", "The last token and the last partial block, which are never part of a hit.", False
    NOT_READ = "not read", "The requests asked not to read the cache.", False
    PROMPT_ONLY = "prompt only", "Generated tokens, which offload_prompt_only excludes.", False
    REQUEST_LIMIT = "request limit", "max_offload_tokens of an earlier request excluded them.", False
    LOAD_LIMIT = "load limit", "max_load_tokens of the request excluded them.", False
    # Not stored.
    FILTERED = "filtered", "Fewer requests than store_threshold had asked for them."
    REFUSED = "refused", "No slot of host memory was free when they were computed."
    TOO_LONG = "too long", "The prompt was longer than host memory."
    STORE_FAILED = "store failed", "Copies from the GPU failed; see the log."
    # Stored, and lost.
    EVICTED = "evicted", "There was no room for them; add memory, disk or servers."
    REMOVED = "removed", "Another host or process, or a rule of the store, evicted or deleted them."
    CORRUPT = "corrupt", "Their bytes were wrong; check the disk."
    RESET = "reset", "The cache was reset."
    # Found, and not loaded.
    LOAD_FAILED = "load failed", "Copies to the GPU failed; see the log."
    PROMOTION_FAILED = "promotion failed", "The tier could not read them; check its health."
    OUT_OF_PATIENCE = "out of patience", "The tier took longer than max_wait_s allows."
    TIER_LEFT_OUT = "tier left out", "The request's kv_load_tiers excludes the tier that stores them.", False
    TIER_OFF = "tier off", "The tier's circuit breaker was open."
    NO_ROOM = "no room", "All slots of host memory were in use when the tier was to be read."
    PROMOTION_SHARE = "promotion_share", "Waiting requests had already claimed their share of host memory."
    SLOW_ANSWER = "slow answer", "Their tier answers too slowly for such a short prompt; it is asked for longer ones."
    DECLINED = "declined by cost", "Loading them would have taken longer than computing them."
    UNKNOWN = "unknown", "No loss was recorded."

    @property
    def label(self) -> str:
        """The cause's name in metrics."""
        return self.replace(" ", "_")

    @classmethod
    def of(cls, cause: str) -> Miss | None:
        """Return the row of ``cause``, which may include a tier's name, or ``None`` for a cause of another version."""
        for words in (cause, cause.split(" ")[0]):
            if words in cls._value2member_map_:
                return cls._value2member_map_[words]  # type: ignore[return-value]
        return None


REFUSALS = (Miss.PROMOTION_SHARE, Miss.NO_ROOM)
"""The causes for not starting a read from a tier."""
