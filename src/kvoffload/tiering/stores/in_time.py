# SPDX-License-Identifier: Apache-2.0
"""Call functions that may hang on a disk, without hanging as well."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_time(
    calls: Sequence[Callable[[], T]], timeout_s: float, unused: Callable[[T], object] = lambda result: None
) -> list[T | BaseException]:
    """Run ``calls`` concurrently, each in its own thread, and return each one's result or exception.

    The outcome is a ``TimeoutError`` for a call that has not ended after ``timeout_s``. If such a call returns later,
    its result is passed to ``unused`` in the call's thread.
    """
    lock, is_over = threading.Lock(), False
    outcomes: list[T | BaseException] = [TimeoutError(errno.ETIMEDOUT, "no answer in time") for _ in calls]

    def run(at: int) -> None:
        try:
            result = calls[at]()
        except BaseException as exc:  # noqa: BLE001 - the caller raises it
            with lock:
                if not is_over:
                    outcomes[at] = exc
            return
        with lock:
            if not is_over:
                outcomes[at] = result
                return
        unused(result)

    threads = [
        threading.Thread(target=run, args=(at,), name="kvoffload-disk-open", daemon=True) for at in range(len(calls))
    ]
    deadline_s = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
    started = list[threading.Thread]()
    for at, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as exc:  # no thread can be started
            outcomes[at] = exc
        else:
            started.append(thread)
    for thread in started:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    with lock:
        is_over = True
    return outcomes
