# SPDX-License-Identifier: Apache-2.0
"""Run the requests of a batch concurrently. Each is a call that waits for a server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvoffload.errors import StoreError

T = TypeVar("T")


class _Batch(Generic[T]):
    """The calls of one ``run``. Threads take them in order, and the thread that finishes the last one wakes the
    caller."""

    def __init__(self, call: Callable[[int], T], count: int) -> None:
        self.call = call
        self.results: list[T | BaseException | None] = [None] * count
        self._lock = threading.Lock()
        self._num_open = count
        self.has_ended = threading.Event()

    def do(self, index: int) -> None:
        try:
            self.results[index] = self.call(index)
        except BaseException as exc:  # noqa: BLE001 - a native client's panic is not an Exception, and must not end the thread
            self.results[index] = exc
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                self.has_ended.set()


class Requests:
    """Up to ``count`` daemon threads for requests, which start when they are needed. Any thread may call ``run``;
    batches share the threads in order of arrival."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[_Batch[object], int] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_open = 0
        self._is_closed = False

    def run(self, call: Callable[[int], T], count: int) -> list[T | BaseException]:
        """Return the results or exceptions of ``call(0)`` to ``call(count - 1)``, once all of them have ended. Raises
        ``StoreError``, without any call, if no thread can be started; the next batch tries again."""
        if not count:
            return []
        batch: _Batch[T] = _Batch(call, count)
        with self._lock:
            if self._is_closed:
                raise ValueError("the store is closed")
            self._start_threads(min(self._count, self._num_open + count))
            self._num_open += count
            for index in range(count):
                self._queue.put((batch, index))  # type: ignore[arg-type]
        batch.has_ended.wait()
        with self._lock:
            self._num_open -= count
        results: Sequence[T | BaseException | None] = batch.results
        return results  # type: ignore[return-value]

    def close(self) -> None:
        """End the threads after their current requests. Idempotent."""
        with self._lock:
            threads, self._threads = self._threads, []
            self._is_closed = True
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            thread.join()

    def _start_threads(self, wanted: int) -> None:
        while len(self._threads) < wanted:
            name = f"kvoffload-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as exc:
                if self._threads:
                    return  # the running threads do all the work, only more slowly
                raise StoreError(f"A store's requests need a thread, which cannot be started: {exc}.") from exc
            self._threads.append(thread)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            batch, index = job
            batch.do(index)
            del job, batch  # a waiting thread must not keep a batch's memory alive
