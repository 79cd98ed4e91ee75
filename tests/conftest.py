# SPDX-License-Identifier: Apache-2.0
"""Settings of every test: this checkout's sources in subprocesses, and Hypothesis without wall-clock limits."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.sizes import IS_THOROUGH, SIZE

_ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]))

# Shared machines are slow at times: a deadline per example would fail for that alone.
# The quick size draws the same examples each time, so that chance stops no landing. The thorough size explores.
settings.register_profile(
    "quick", max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=500, derandomize=False)
settings.load_profile(SIZE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_THOROUGH:
        skip = pytest.mark.skip(reason="long on purpose: `make test-all` runs it")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)


# Objects in memory are frozen before the first test and after each file. With torch's objects among them, each full
# collection would take half a second, and a few hundred tests ask for one.
gc.disable()


def pytest_collection_finish() -> None:
    _freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    yield
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


def leave_out_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the search for the highest loads that servers carry, which decide nothing else in a plan."""
    monkeypatch.setattr("kvoffload.sim.plan._highest_loads", lambda _trace, _goal, runs, *_: [None] * len(runs))


@pytest.fixture
def no_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_loads(monkeypatch)
