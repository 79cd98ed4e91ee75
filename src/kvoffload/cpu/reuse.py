# SPDX-License-Identifier: Apache-2.0
"""The reuse filter, which admits a block for storing once enough requests have asked for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.config import DEFAULTS
from kvoffload.errors import ConfigError

_MIN_REMEMBERED = 64_000


class ReuseFilter:
    """Counts how many requests asked for each key. O(1) per key; not thread-safe.

    The manager that owns a filter calls it first::

        on_new_request(ctx)          announces the request
        looked_up(keys, ctx)         for every lookup, whatever its answers
        offered(keys, ctx)           in prepare_store; only the returned keys are stored
        on_request_finished(ctx)     forgets the request, but keeps its counts

    *An announced request* raises a key's count by one when it first looks the key up or offers it for storing. Its
    later calls for that key do not count, so retries do not inflate the count. A new prefix of any length that fits the
    tracker is stored at the ``threshold``-th request, although its lookups stop at the first miss.

    *A request that reads no cache* (``ReqContext.reads_cache``) does not count. Its offers are stored if enough other
    requests have asked for the keys.

    *A request that was never announced* counts with each of its lookups, and with none of its offers.

    The tracker keeps the ``max_tracker_size`` most recently counted keys. For each announced request the filter
    remembers its counted keys until the request finishes. When a request's set exceeds twice the tracker's size (and
    128,000 keys), the filter drops the keys from it that the tracker no longer has.
    """

    def __init__(self, threshold: int, max_tracker_size: int = DEFAULTS.max_tracker_size) -> None:
        """Create a filter that admits a key at the ``threshold``-th request and tracks ``max_tracker_size`` keys.

        Raises ``ConfigError`` if ``threshold`` is below 2 or ``max_tracker_size`` is below 1.
        """
        if threshold < 2:
            raise ConfigError(
                f"A reuse filter needs a threshold of at least 2, not {threshold}; to store all blocks, use no filter."
            )
        if max_tracker_size < 1:
            raise ConfigError(f"max_tracker_size must be at least 1, not {max_tracker_size}.")
        self.threshold = threshold
        self.max_tracker_size = max_tracker_size
        self._max_remembered = 2 * max(max_tracker_size, _MIN_REMEMBERED)
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()
        self._counted_by: dict[str, set[OffloadKey]] = {}

    @classmethod
    def of(cls, store_threshold: int, max_tracker_size: int) -> ReuseFilter | None:
        """Return the filter for these settings, or ``None`` for a threshold of 0 or 1, with which everything is stored.

        Raises ``ConfigError`` for a negative threshold or a tracker of fewer than one key.
        """
        if store_threshold < 0:
            raise ConfigError(f"store_threshold must be at least 0, not {store_threshold}.")
        if max_tracker_size < 1:
            raise ConfigError(f"max_tracker_size must be at least 1, not {max_tracker_size}.")
        return cls(store_threshold, max_tracker_size) if store_threshold > 1 else None

    def __repr__(self) -> str:
        return f"ReuseFilter(threshold={self.threshold}, {len(self)} of {self.max_tracker_size} keys)"

    def __len__(self) -> int:
        """Return the number of tracked keys."""
        return len(self._counts)

    def count(self, key: OffloadKey) -> int:
        """Return the number of requests that asked for ``key``, or 0 if the tracker does not contain it."""
        return self._counts.get(key, 0)

    def on_new_request(self, req_context: ReqContext) -> None:
        self._counted_by.setdefault(req_context.req_id, set())

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._counted_by.pop(req_context.req_id, None)

    def looked_up(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        counted = self._counted_by.get(req_context.req_id)
        if counted is None:
            for key in keys:
                self._raise_count(key)
        elif not counted.issuperset(keys):  # a request that waits asks again in each step
            for key in keys:
                self._count_once(key, counted)

    def offered(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Collection[OffloadKey]:
        """Count the offer. Returns, in order, the ``keys`` that enough requests have asked for."""
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
        """Count ``key`` for an announced request, unless the request's ``counted`` keys include it."""
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
