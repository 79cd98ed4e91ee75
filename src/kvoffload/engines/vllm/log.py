# SPDX-License-Identifier: Apache-2.0
"""kvoffload's log records in vLLM's log, with its time, level and process.

vLLM configures the logger ``vllm`` alone. Records of ``kvoffload`` would reach Python's last resort: warnings as bare
text, without a time.
"""

from __future__ import annotations

import logging


class _ToVLLM(logging.Handler):
    """Hands records to the handlers that vLLM's logger has at that time: vLLM may replace them after its start."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("vllm").callHandlers(record)


def log_with_vllm() -> None:
    """Lets vLLM's handlers write what kvoffload logs, from vLLM's level on.

    Changes nothing where the user has configured a handler for ``kvoffload`` or for all loggers, or has set vLLM to
    configure none. A level that the user has set for ``kvoffload`` stays. Idempotent.
    """
    ours, theirs = logging.getLogger("kvoffload"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers or not theirs.handlers:
        return
    ours.addHandler(_ToVLLM())
    ours.propagate = False
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.getEffectiveLevel())
