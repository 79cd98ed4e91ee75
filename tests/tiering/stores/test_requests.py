# SPDX-License-Identifier: Apache-2.0
"""Test that requests of a batch run concurrently, and that impossible ones fail at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.ports import free_port

from kvoffload.errors import StoreError
from kvoffload.testing.keys import keys
from kvoffload.tiering.stores.object import ObjectStore
from kvoffload.tiering.stores.requests import Requests


@pytest.fixture
def only_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that limits how many more threads stores can start, as a limit of processes does."""
    start, left = threading.Thread.start, 0

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if thread.name.startswith("kvoffload-"):
            if not left:
                raise RuntimeError("can't start new thread")
            left -= 1
        start(thread)

    def allow(count: int) -> None:
        nonlocal left
        left = count

    monkeypatch.setattr(threading.Thread, "start", limited)
    return allow


def test_as_many_requests_as_allowed_run_at_once_and_a_failure_is_its_own() -> None:
    requests, together = Requests("test", 4), threading.Barrier(4)

    def call(index: int) -> int:
        together.wait(60)  # passes only if four are at it
        if index == 2:
            raise KeyboardInterrupt("not even this ends a thread")
        return index

    for _ in range(3):
        results = requests.run(call, 8)
        assert [result for result in results if not isinstance(result, BaseException)] == [0, 1, 3, 4, 5, 6, 7]
        assert isinstance(results[2], KeyboardInterrupt)
    assert requests.run(call, 0) == []
    requests.close()
    requests.close()
    with pytest.raises(ValueError, match="closed"):
        requests.run(call, 1)


def test_threads_that_cannot_be_started_fail_the_batch_and_the_next_one_tries_again(
    only_start: Callable[[int], None],
) -> None:
    requests = Requests("test", 4)
    for _ in range(6):
        with pytest.raises(StoreError, match="can't start new thread"):
            requests.run(abs, 3)
    only_start(1)
    assert requests.run(abs, 3) == [0, 1, 2]  # one thread does it all
    only_start(8)
    together = threading.Barrier(4)
    assert len(requests.run(lambda index: together.wait(60), 4)) == 4  # passes only if four are at it
    requests.close()
    with pytest.raises(ValueError, match="closed"):
        requests.run(abs, 1)


def test_a_store_without_threads_fails_in_words_and_closes(only_start: Callable[[int], None]) -> None:
    config = {"endpoint": f"http://127.0.0.1:{free_port()}", "region": "x", "access_key_id": "a"}
    store = ObjectStore("s3://bucket/prefix", 64, config=config | {"secret_access_key": "b"}, requests=2)
    for _ in range(4):
        with pytest.raises(StoreError, match="can't start new thread"):
            store.contains(keys(1))
    only_start(1)
    with pytest.raises(StoreError, match="The object store s3://bucket/prefix fails: "):
        store.contains(keys(1))
    store.close()
