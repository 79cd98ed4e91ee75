# SPDX-License-Identifier: Apache-2.0
"""Children that a script kills."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a forked child must not run on into its parent's code
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return pid
