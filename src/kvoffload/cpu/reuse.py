# SPDX-License-Identifier: Apache-2.0
"""The reuse filter: a block is stored once enough requests have asked for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.config import DEFAULTS
from kvoffload.errors import ConfigError

_MIN_REMEMBERED = 64_000


class ReuseFilter:
    """Counts how many requests asked for each key. O(1) per key; not thread-safe.

    The manager that owns a filter calls it before it does anything else::

        on_new_request(ctx)          announces the request
        looked_up(keys, ctx)         for every lookup, whatever its answers
        peeked(keys, ctx)            for every peek, whatever its answers
        offered(keys, ctx)           in prepare_store; only the keys it returns are stored
        on_request_finished(ctx)     forgets the request, but not what it counted

    *An announced request* raises a key's count by one when it first looks the key up, peeks at it or offers it for
    store. Whatever it asks of that key later does not count, so retries do not inflate the count. A new prefix of any
    length that fits the tracker is stored at the ``threshold``-th request, although its lookups stop at the first miss.

    *A request that reads no cache* (``ReqContext.reads_cache``) does not count. Its offers are stored where enough
    other requests have asked.

    *A request that was never announced* counts with each of its lookups, and with none of its peeks and offers.

    The tracker keeps the ``max_tracker_size`` most recently counted keys. For each announced request the filter
    remembers which keys it has counted, until the request finishes. When that memory outgrows twice the tracker's size
    (and 128,000 keys), it drops the keys that the tracker no longer has.
    """

    def __init__(self, threshold: int, max_tracker_size: int = DEFAULTS.max_tracker_size) -> None:
        """``threshold`` is the number of requests, at least 2; ``max_tracker_size`` the number of keys, at least 1.

        Raises ``ConfigError`` for smaller ones.
        """
        if threshold < 2:
            raise ConfigError(f"A reuse filter needs a threshold of at least 2, not {threshold}: below, all is stored.")
        if max_tracker_size < 1:
            raise ConfigError(f"max_tracker_size must be at least 1, not {max_tracker_size}.")
        self.threshold = threshold
        self.max_tracker_size = max_tracker_size
        self._max_remembered = 2 * max(max_tracker_size, _MIN_REMEMBERED)
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()
        self._counted_by: dict[str, set[OffloadKey]] = {}

    @classmethod
    def of(cls, store_threshold: int, max_tracker_size: int) -> ReuseFilter | None:
        """The filter for these settings; ``None`` with a threshold of 0 or 1, with which everything is stored.

        Raises ``ConfigError`` for a negative threshold or a tracker of less than one key.
        """
        if store_threshold < 0:
            raise ConfigError(f"store_threshold must be at least 0, not {store_threshold}.")
        if max_tracker_size < 1:
            raise ConfigError(f"max_tracker_size must be at least 1, not {max_tracker_size}.")
        return cls(store_threshold, max_tracker_size) if store_threshold > 1 else None

    def __repr__(self) -> str:
        return f"ReuseFilter(threshold={self.threshold}, {len(self)} of {self.max_tracker_size} keys)"

    def __len__(self) -> int:
        """Keys tracked."""
        return len(self._counts)

    def count(self, key: OffloadKey) -> int:
        """Requests known to have asked for ``key``; 0 for a key that the tracker does not have."""
        return self._counts.get(key, 0)

    def on_new_request(self, req_context: ReqContext) -> None:
        self._counted_by.setdefault(req_context.req_id, set())

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._counted_by.pop(req_context.req_id, None)

    def looked_up(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        if req_context.req_id in self._counted_by:
            self.peeked(keys, req_context)
            return
        for key in keys:
            self._raise_count(key)

    def peeked(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        counted = self._counted_by.get(req_context.req_id)
        if counted is None or counted.issuperset(keys):  # a request that waits asks again in each step
            return
        for key in keys:
            self._count_once(key, counted)

    def offered(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Collection[OffloadKey]:
        """Counts the offer. Returns, in order, those of ``keys`` that enough requests have asked for."""
        counted = self._counted_by.get(req_context.req_id) if req_context.reads_cache else None
        counts, threshold = self._counts, self.threshold
        admitted = []
        for key in keys:
            if counted is not None:
                self._count_once(key, counted)
            if counts.get(key, 0) >= threshold:
                admitted.append(key)
        return admitted

    def _raise_count(self, key: OffloadKey) -> None:
        counts = self._counts
        count = counts.get(key)
        if count is not None:
            counts[key] = count + 1
            counts.move_to_end(key)
            return
        if len(counts) >= self.max_tracker_size:
            counts.popitem(last=False)
        counts[key] = 1

    def _count_once(self, key: OffloadKey, counted: set[OffloadKey]) -> None:
        """For an announced request, which has ``counted`` these keys."""
        if key in counted:
            return
        if len(counted) >= self._max_remembered:
            counted.intersection_update(self._counts)
        counted.add(key)
        self._raise_count(key)

    def check_invariants(self) -> None:
        assert len(self._counts) <= self.max_tracker_size
        assert all(count >= 1 for count in self._counts.values())
        assert all(len(counted) <= self._max_remembered for counted in self._counted_by.values())
