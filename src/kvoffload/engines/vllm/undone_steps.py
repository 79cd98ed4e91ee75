# SPDX-License-Identifier: Apache-2.0
"""Undo a step of vLLM that computed with blocks of a load that failed within it.

vLLM handles such a failure only for models with one KV group, and not with asynchronous scheduling, because the next
step is already running then. So kvoffload reads the workers' report before vLLM's scheduler does. It then makes vLLM
preempt all running requests and drop the tokens in flight, with the method that resets vLLM's prefix cache. Importing
this module does not load vLLM.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Receives the workers' output of each step before vLLM's scheduler uses it, on the scheduler's thread."""

    @property
    def block_pool(self) -> Any:
        """vLLM's block pool, which distinguishes its scheduler from others in this process."""

    def step_has_ended(self, scheduler: Any, connector_output: Any) -> None: ...


_listeners: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
"""By ``id`` of the block pool, which the listener keeps alive."""


def watch(listener: Listener) -> None:
    """Register ``listener``, which knows its block pool, for each step's output."""
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler.update_from_output, "tells_kvoffload"):
        Scheduler.update_from_output = _told(Scheduler.update_from_output)
    unwatch(listener)
    _listeners[id(listener.block_pool)] = listener


def unwatch(listener: Listener) -> None:
    for pool_id in [pool_id for pool_id, each in _listeners.items() if each is listener]:
        del _listeners[pool_id]


def _told(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        listener = _listeners.get(id(self.kv_cache_manager.block_pool))
        if listener is not None:
            try:
                listener.step_has_ended(self, model_runner_output.kv_connector_output)
            except Exception:
                logger.exception("kvoffload cannot follow the output of a step")
        return call(self, scheduler_output, model_runner_output)

    update_from_output.tells_kvoffload = True  # type: ignore[attr-defined]
    return update_from_output


def undo_step(scheduler: Any) -> None:
    """Preempt all running requests, drop their tokens in flight, and empty vLLM's prefix cache.

    The cache may list blocks that the failed load should have filled, and blocks that were computed from them. Requests
    that wait for a load of their own may have found such blocks there. So they start again when that load has ended, as
    if it had failed.
    """
    from vllm.v1.request import RequestStatus

    for request in scheduler.requests.values():
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
            # Otherwise vLLM counts the blocks that it needs as reserved, even against its own next load. A vLLM without
            # this set reserves nothing, and its steps must be undone all the same.
            getattr(scheduler, "_inflight_prefills", set()).discard(request)
    try:
        if scheduler.reset_prefix_cache(reset_running_requests=True):
            return
    except RuntimeError:
        pass  # requests that wait for loads still have blocks
    pool = scheduler.kv_cache_manager.block_pool
    pool.evict_blocks({*range(len(pool.blocks))})
