# SPDX-License-Identifier: Apache-2.0
"""The vLLM lane. Tests that need the engine are marked ``vllm`` and run in the environment that ``make test-vllm``
makes.

Engines are slow to start, so each one runs in its own child process (``harness.run_child``) through several scenarios,
and the tests check its records.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.greedy import Baseline
from tests.engines.models import SEED, SmallModel, write_falcon_h1, write_gemma3, write_llama
from tests.engines.vllm.drafts import Speculation, write_drafts
from tests.engines.vllm.harness import HAS_VLLM, installed_sources, run_child, states_baseline
from tests.engines.vllm.server import Server
from tests.engines.vllm.sources import Sources


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_VLLM:
        return
    skip = pytest.mark.skip(reason="needs vLLM, which this environment lacks; `make test-vllm` runs it")
    for item in items:
        marker = item.get_closest_marker("vllm")
        if marker is not None and not marker.kwargs.get("elsewhere", False):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def server(llama: SmallModel, tmp_path: Path) -> Iterator[Server]:
    server = Server(llama.path, tmp_path)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return write_gemma3(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="session")
def llama_baseline(llama: SmallModel) -> Baseline:
    """Return the answers of vLLM without a connector to every prompt of the Llama scenarios."""
    return Baseline(run_child("baseline", model=llama.path, family="llama"))


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """Return the Llama with other weights."""
    return write_llama(tmp_path_factory.mktemp("other-llama"), seed=SEED + 1)


@pytest.fixture(scope="session")
def other_llama_baseline(other_llama: SmallModel) -> Baseline:
    return Baseline(run_child("baseline", model=other_llama.path, family="llama"))


@pytest.fixture(scope="session")
def gemma_baseline(gemma: SmallModel) -> Baseline:
    return Baseline(run_child("baseline", model=gemma.path, family="gemma"))


@pytest.fixture(scope="session")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return write_falcon_h1(tmp_path_factory.mktemp("falcon"))


@pytest.fixture(scope="session")
def falcon_baseline(falcon: SmallModel) -> Baseline:
    return states_baseline(falcon.path)


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Speculation]:
    return write_drafts(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="session")
def drafts_baseline(drafts: dict[str, Speculation]) -> Baseline:
    """Return the target's answers without drafts and without a connector."""
    return Baseline(run_child("baseline", model=drafts["eagle"].target, family="llama"))


@pytest.fixture(scope="module")
def sources() -> Sources:
    return installed_sources()


@pytest.fixture(autouse=True)
def no_shared_memory_left() -> Iterator[None]:
    """Whatever an engine did, no segment of kvoffload's outlives it. Folders of other tests (``tests-of-...``) may, and
    so may the segments of engines that others run on this machine."""
    before = abandoned_segments()
    yield
    assert abandoned_segments() <= before


def abandoned_segments() -> set[str]:
    """Return kvoffload's files in shared memory, except for those of living processes, which keep their segments
    locked."""
    shm = Path("/dev/shm")
    names = {path.name for path in shm.glob("kvoffload-*")}
    held = {name for name in names if "." not in name and is_locked(shm / name)}
    return {name for name in names if name.partition(".")[0] not in held}


def is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError, IsADirectoryError):  # in use, unlinked just now, or of another test
        return True
    return False
