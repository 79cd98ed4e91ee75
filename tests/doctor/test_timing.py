# SPDX-License-Identifier: Apache-2.0
"""Things that are compared run in turn, and the garbage collector stays out of it."""

from __future__ import annotations

import gc

from kvoffload.doctor.timing import interleaved_medians, thread_medians


def test_they_run_in_turn_without_the_garbage_collector() -> None:
    seen: list[tuple[str, bool]] = []
    times = interleaved_medians(
        lambda: seen.append(("one", gc.isenabled())), lambda: seen.append(("two", gc.isenabled())), repeats=3
    )
    assert seen == [("one", False), ("two", False)] * 3
    assert len(times) == 2
    assert gc.isenabled()


def test_a_failure_leaves_the_garbage_collector_on() -> None:
    try:
        thread_medians(lambda: 1 // 0, repeats=1)
    except ZeroDivisionError:
        assert gc.isenabled()
    else:
        raise AssertionError("the failure was kept")
