# SPDX-License-Identifier: Apache-2.0
"""Tests that need SGLang are marked ``sglang`` and run only in an environment that contains it."""

from __future__ import annotations

import importlib.util

import pytest
from tests.engines.models import write_llama


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is not None:
        return
    skip = pytest.mark.skip(reason="needs SGLang: `make test-sglang` runs it")
    for item in items:
        if item.get_closest_marker("sglang") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a small random Llama."""
    return write_llama(tmp_path_factory.mktemp("llama")).path
