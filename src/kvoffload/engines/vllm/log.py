# SPDX-License-Identifier: Apache-2.0
"""Write kvoffload's log records to vLLM's log, with its time, level and process.

vLLM configures only the logger ``vllm``. Without this module, records of ``kvoffload`` would reach Python's handler of
last resort, which prints warnings as bare text without a time.
"""

from __future__ import annotations

import logging


class _ToVLLM(logging.Handler):
    """Passes records to the current handlers of vLLM's logger, because vLLM may replace them after its start."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("vllm").callHandlers(record)


def log_with_vllm() -> None:
    """Let vLLM's handlers write kvoffload's records, from vLLM's level on.

    Changes nothing if the user has configured a handler for ``kvoffload`` or for all loggers, or has told vLLM to
    configure none. Keeps a level that the user has set for ``kvoffload``. Idempotent.
    """
    ours, theirs = logging.getLogger("kvoffload"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers or not theirs.handlers:
        return
    ours.addHandler(_ToVLLM())
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())
