# SPDX-License-Identifier: Apache-2.0
"""Limit how often a log repeats a message."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class RateLimitedLog:
    """Logs at most once every ``every_s`` seconds, and counts the rest. The records name the caller's file and line."""

    def __init__(
        self, logger: logging.Logger, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._silent_until_s = float("-inf")
        self._unlogged = 0

    def exception(self, what: str) -> None:
        """Log ``what`` and the exception being handled, with its traceback."""
        self._log(logging.ERROR, what, "failures", exc_info=True)

    def warning(self, what: str) -> None:
        self._log(logging.WARNING, what, "warnings", exc_info=None)

    def _log(self, level: int, what: str, kind: str, *, exc_info: bool | None) -> None:
        now_s = self._clock()
        if now_s < self._silent_until_s:
            self._unlogged += 1
            return
        unlogged = f" ({self._unlogged} earlier {kind} were not logged)" if self._unlogged else ""
        self._logger.log(level, "%s%s", what, unlogged, exc_info=exc_info, stacklevel=3)
        self._silent_until_s, self._unlogged = now_s + self._every_s, 0
