# SPDX-License-Identifier: Apache-2.0
"""Read the hints of clients and orchestrators about a request's next use, in all forms that engines provide. Pure.

* ``kv_transfer_params["kvoffload"]["next_use"]``: ``"soon"``, ``"later"`` or ``"never"``. It takes precedence. Beside
  it, ``"prefetch"`` is true for a request that only prepares another one.
* vLLM's ``kv_hints``, and Dynamo's ``kv_transfer_params["kv_hint"]``: envelopes of actions, as objects or mappings. The
  actions ``kv.retain`` and ``vllm.set_priority`` are about the next use; the first of them counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

from kvoffload.base import NextUse
from kvoffload.errors import KVOffloadError
from kvoffload.logs import RateLimitedLog
from kvoffload.metrics import IGNORED_HINTS, NEXT_USES, Stats

logger = logging.getLogger(__name__)

_MAX_SHOWN = 100
"""The number of characters of a request's id that the log shows."""
_SOON_S = 60.0
_MAX_ACTIONS = 16
"""The number of actions that are read of one envelope. Further actions count as one malformed hint."""

_Found = NextUse | Literal["unknown", "malformed"]
"""The meaning of one hint, or why it is ignored: it is not about the next use, or it cannot be read."""


class _Malformed(KVOffloadError):
    """A hint that cannot be read."""


class Hints:
    """Reads and counts the hints of requests. Never raises, because a client's mistake must not cost its answer.
    Malformed hints are logged now and then, with the request's id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = RateLimitedLog(logger, clock=clock)
        self._requests: Counter[str] = Counter()
        self._ignored: Counter[str] = Counter()

    def of_request(self, req_id: str, params: object, kv_hints: object = None) -> tuple[NextUse, bool]:
        """Return the next use, which is ``UNKNOWN`` without a readable hint, and whether the request only prepares
        another one."""
        if params is None and kv_hints is None:
            self._requests["unknown"] += 1
            return NextUse.UNKNOWN, False
        given: dict[str, object] = params if type(params) is dict else {}
        own = given.get("kvoffload")
        found = [*_own(own), *_envelope(kv_hints), *_envelope(given.get("kv_hint"))]
        ignored = [each for each in found if isinstance(each, str)]
        self._ignored.update(ignored)
        if "malformed" in ignored:
            self._log.warning(f"Request {req_id[:_MAX_SHOWN]!a} has hints of the wrong form, which kvoffload ignores.")
        uses = (each for each in found if isinstance(each, NextUse) and each is not NextUse.UNKNOWN)
        use = next(uses, NextUse.UNKNOWN)
        self._requests[use.name.lower()] += 1
        return use, type(own) is dict and own.get("prefetch") is True

    def get_stats(self) -> Stats:
        stats: Stats = {("requests_by_hint", name): self._requests[name] for name in NEXT_USES}
        return stats | {("hints_ignored", reason): self._ignored[reason] for reason in IGNORED_HINTS}


def _own(own: object) -> Iterator[_Found]:
    if own is None:
        return
    if type(own) is not dict:
        yield "malformed"
        return
    if (name := own.get("next_use")) is not None:
        yield NextUse.named(name) or "malformed"
    if not isinstance(own.get("prefetch"), bool | None):
        yield "malformed"


def _envelope(envelope: object) -> Iterator[_Found]:
    if envelope is None:
        return
    actions = _field(envelope, "actions")
    if not isinstance(actions, (list, tuple)):
        yield "malformed"
        return
    for action in actions[:_MAX_ACTIONS]:
        try:
            yield _action(action)
        except _Malformed:
            yield "malformed"
    if len(actions) > _MAX_ACTIONS:
        yield "malformed"


def _action(action: object) -> _Found:
    kind, payload = _field(action, "action_type"), _field(action, "payload")
    if type(kind) is not str:
        raise _Malformed
    if kind not in ("kv.retain", "vllm.set_priority"):
        return "unknown"
    if type(payload) is not dict:
        raise _Malformed
    if kind == "kv.retain":
        return _within(_number(payload, "ttl_seconds"))
    value = _number(payload, "value")
    if value is None or value == 0:  # an earlier priority is withdrawn
        return NextUse.UNKNOWN
    return NextUse.NEVER if value < 0 else _within(_number(payload, "ttl_seconds"))


def _within(ttl_s: float | None) -> NextUse:
    """Return the next use of a block that should be kept for ``ttl_s`` seconds; ``None``: for an unknown time."""
    if ttl_s is None:
        return NextUse.LATER
    if ttl_s < 0:
        raise _Malformed
    return NextUse.NEVER if ttl_s == 0 else NextUse.SOON if ttl_s <= _SOON_S else NextUse.LATER


def _number(payload: dict[str, object], name: str) -> float | None:
    value = payload.get(name)
    if value is None:
        return None
    if type(value) is int:
        return float(max(min(value, 1 << 53), -(1 << 53)))
    if type(value) is float and not math.isnan(value):
        return value
    raise _Malformed


def _field(record: object, name: str) -> object:
    return record.get(name) if type(record) is dict else getattr(record, name, None)
