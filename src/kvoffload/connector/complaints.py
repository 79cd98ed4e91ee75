# SPDX-License-Identifier: Apache-2.0
"""Logging of what may go wrong a thousand times a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["Complaints"]


class Complaints:
    """Logs the exception being handled, with its traceback, at most once every ``every_s`` seconds; counts the rest."""

    def __init__(
        self, logger: logging.Logger, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._silent_until_s = float("-inf")
        self._unlogged = 0

    def log(self, what: str) -> None:
        now_s = self._clock()
        if now_s < self._silent_until_s:
            self._unlogged += 1
            return
        self._logger.exception("%s (%d earlier failures were not logged)", what, self._unlogged)
        self._silent_until_s, self._unlogged = now_s + self._every_s, 0
