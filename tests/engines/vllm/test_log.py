# SPDX-License-Identifier: Apache-2.0
"""Test kvoffload's records in vLLM's log, with vLLM's own configuration, each case in its own process."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from tests.engines.vllm.harness import child_environment

from kvoffload.engines.vllm.log import log_with_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

CASES = r"""
import io, json, logging, os
import vllm.logger
from MODULE import log_with_vllm

ours, theirs, root = (logging.getLogger(name) for name in ("kvoffload", "vllm", None))

def configure(level):
    from vllm.config.logging import LoggingConfig
    vllm.logger.configure_logging(LoggingConfig(log_level=level))
    theirs.handlers[0].setStream(out)

def handler(form):
    made = logging.StreamHandler(out)
    made.setFormatter(logging.Formatter(form))
    return made

def plain():
    configure("WARNING")
    yield

def info():
    configure("INFO")
    yield

def replaced_later():
    configure("WARNING")
    yield
    theirs.handlers = [handler("new form: %(message)s")]

def all_loggers():
    root.addHandler(handler("mine: %(message)s"))
    configure("INFO")
    yield

def ours_only():
    ours.addHandler(handler("mine: %(message)s"))
    ours.propagate = False
    configure("INFO")
    yield

def own_level():
    ours.setLevel("ERROR")
    configure("INFO")
    yield

def nothing():
    yield

found = {}
for case in (plain, info, replaced_later, all_loggers, ours_only, own_level, nothing):
    out = io.StringIO()
    for each in (ours, theirs, root):
        each.handlers.clear()
    ours.setLevel(logging.NOTSET)
    ours.propagate = True
    for _ in case():
        log_with_vllm()
        log_with_vllm()
    logging.getLogger("kvoffload.tiering.tier").warning("the disk is gone")
    logging.getLogger("kvoffload.tiering.tier").info("the disk is new")
    found[case.__name__] = out.getvalue().splitlines(), len(ours.handlers)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def logged() -> dict[str, tuple[list[str], int]]:
    """Return each case's output, and the number of handlers of kvoffload's logger after it."""
    environment = child_environment(in_process=True) | {"VLLM_LOGGING_COLOR": "0"}
    result = subprocess.run(
        [sys.executable, "-c", CASES.replace("MODULE", log_with_vllm.__module__)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, tuple[list[str], int]] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_records_have_vllms_form_and_level(logged: dict[str, tuple[list[str], int]]) -> None:
    (line,), num_handlers = logged["plain"]
    assert re.fullmatch(r"\(\w+ pid=\d+\) WARNING \d\d-\d\d \d\d:\d\d:\d\d \[<string>:\d+\] the disk is gone", line)
    assert num_handlers == 1
    assert [line.rpartition("] ")[2] for line in logged["info"][0]] == ["the disk is gone", "the disk is new"]


def test_handlers_that_vllm_replaces_later_are_followed(logged: dict[str, tuple[list[str], int]]) -> None:
    assert logged["replaced_later"][0] == ["new form: the disk is gone"]


def test_what_the_user_configured_stays(logged: dict[str, tuple[list[str], int]]) -> None:
    assert logged["all_loggers"] == [["mine: the disk is gone"], 0]
    assert logged["ours_only"] == [["mine: the disk is gone"], 1]
    assert logged["own_level"][0] == []


def test_where_vllm_configures_nothing_kvoffload_does_not_either(logged: dict[str, tuple[list[str], int]]) -> None:
    assert logged["nothing"] == [[], 0]
