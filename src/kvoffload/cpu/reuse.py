# SPDX-License-Identifier: Apache-2.0
"""The reuse filter: blocks are worth storing once enough requests have asked for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from kvoffload.base import OffloadKey, ReqContext
from kvoffload.errors import ConfigError

__all__ = ["ReuseFilter"]

_MIN_REMEMBERED = 64_000


class ReuseFilter:
    """Counts how many requests asked for each key. O(1) per key; one thread.

    A manager that owns one calls, in front of everything else it does::

        on_new_request(ctx)          announces the request
        looked_up(key, ctx)          for every lookup, whatever its answer
        offered(keys, ctx)           in prepare_store; only the keys it returns go on
        on_request_finished(ctx)     forgets the request, not what it counted

    *An announced request* raises a key's count by one, the first time it looks it up or offers it for store; further
    lookups and offers are no news. So retries do not inflate the count, and a cold prefix of any length that fits the
    tracker is stored at the ``threshold``-th request, although its lookups stop at the first miss.

    *A context that was never announced* has no memory: each of its lookups counts, and its offers do not.

    The tracker forgets the least recently counted of more than ``max_tracker_size`` keys. What an announced request
    has counted is remembered until it finishes; should that grow beyond twice the tracker's size (at least 128,000
    keys), keys that the tracker has forgotten are dropped from the request's memory too.
    """

    def __init__(self, threshold: int, max_tracker_size: int = 64_000) -> None:
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
    def or_none(cls, store_threshold: int, max_tracker_size: int) -> ReuseFilter | None:
        """The filter that these settings ask for: ``None`` with a threshold of 0 or 1, which store everything."""
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
        """Requests known to have asked for ``key``. No side effect."""
        return self._counts.get(key, 0)

    def on_new_request(self, req_context: ReqContext) -> None:
        self._counted_by.setdefault(req_context.req_id, set())

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._counted_by.pop(req_context.req_id, None)

    def looked_up(self, key: OffloadKey, req_context: ReqContext) -> None:
        counted = self._counted_by.get(req_context.req_id)
        if counted is None:
            self._rise(key)
        elif key not in counted:
            self._remember(key, counted)
            self._rise(key)

    def offered(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        """Counts an offer, and returns those of ``keys``, in their order, that enough requests have asked for."""
        counted = self._counted_by.get(req_context.req_id)
        counts, threshold = self._counts, self.threshold
        admitted = []
        for key in keys:
            if counted is not None and key not in counted:
                self._remember(key, counted)
                self._rise(key)
            if counts.get(key, 0) >= threshold:
                admitted.append(key)
        return admitted

    def _rise(self, key: OffloadKey) -> None:
        counts = self._counts
        count = counts.get(key)
        if count is not None:
            counts[key] = count + 1
            counts.move_to_end(key)
            return
        if len(counts) >= self.max_tracker_size:
            counts.popitem(last=False)
        counts[key] = 1

    def _remember(self, key: OffloadKey, counted: set[OffloadKey]) -> None:
        if len(counted) >= self._max_remembered:
            counted.intersection_update(self._counts)
        counted.add(key)

    def check_invariants(self) -> None:
        assert len(self._counts) <= self.max_tracker_size
        assert all(count >= 1 for count in self._counts.values())
        assert all(len(counted) <= self._max_remembered for counted in self._counted_by.values())
