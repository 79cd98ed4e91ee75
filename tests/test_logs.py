# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import pytest

from kvoffload.logs import RateLimitedLog


def test_warnings_are_limited_and_have_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = RateLimitedLog(logging.getLogger("kvoffload.test"), every_s=60, clock=lambda: now)
    for _ in range(3):
        log.warning("100% odd")
    now = 61.0
    log.warning("odd again")
    first, second = caplog.records
    assert (first.levelno, first.exc_info) == (logging.WARNING, None)
    assert first.getMessage() == "100% odd"
    assert second.getMessage() == "odd again (2 earlier warnings were not logged)"


def test_records_name_the_caller_and_the_exception_being_handled(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(logging.getLogger("kvoffload.test"))
    try:
        raise ValueError("the reason")
    except ValueError:
        log.exception("it failed")
    (record,) = caplog.records
    assert (record.levelno, record.filename) == (logging.ERROR, "test_logs.py")
    assert "the reason" in caplog.text
