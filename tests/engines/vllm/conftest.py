# SPDX-License-Identifier: Apache-2.0
"""The vLLM lane: what needs the engine is marked ``vllm`` and runs in the environment that ``make test-vllm`` makes.

Engines are expensive to start, so each one runs in a child process of its own (``harness.run_child``) through several
scenarios, and the tests look at what it wrote down.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.vllm.drafts import Speculation, write_drafts
from tests.engines.vllm.harness import Baseline, run_child
from tests.engines.vllm.models import SmallModel, write_gemma3, write_llama

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_VLLM:
        return
    skip = pytest.mark.skip(reason="needs vLLM, which this environment lacks; `make test-vllm` runs it")
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return write_gemma3(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session")
def llama_baseline(llama: SmallModel) -> Baseline:
    """What vLLM without a connector answers to every prompt of the Llama scenarios."""
    return Baseline(run_child("baseline", model=llama.path, family="llama"))


@pytest.fixture(scope="session")
def gemma_baseline(gemma: SmallModel) -> Baseline:
    return Baseline(run_child("baseline", model=gemma.path, family="gemma"))


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Speculation]:
    return write_drafts(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="session")
def drafts_baseline(drafts: dict[str, Speculation]) -> Baseline:
    """What the target answers without drafts and without a connector."""
    return Baseline(run_child("baseline", model=drafts["eagle"].target, family="llama"))


@pytest.fixture(autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    """Whatever an engine did, no segment of kvoffload's outlives it. Folders of other tests (``tests-of-...``) may."""
    shm = Path("/dev/shm")
    before = {path.name for path in shm.glob("kvoffload-*")}
    yield
    assert {path.name for path in shm.glob("kvoffload-*")} <= before
