# SPDX-License-Identifier: Apache-2.0
"""Detect changes of the weights while vLLM serves, because vLLM does not inform connectors.

An engine calls its workers only through one method of its executor, which this module observes once there is a
connector. Some calls are known to leave the weights unchanged, and some to change them. Around all other calls,
checksums of the weights are compared. Importing this module does not load vLLM.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from kvoffload.engines.vllm.checksums import weights_state

logger = logging.getLogger(__name__)

_RESET_ENCODER = "reset_encoder_cache"
_ADD_ADAPTER = "add_lora"
_SLEEP, _DISCARD, _WAKE = "sleep", "discard", "wake_up"

_STEP = frozenset(
    ["execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids", "synchronize_device"]
)
"""Methods that vLLM calls in each step."""

HARMLESS = _STEP | frozenset(
    # Questions after the scheduler was created.
    "get_kv_connector_handshake_metadata get_supported_tasks supports_draft_weight_updates check_health "
    "get_model_inspection compute_weight_checksums get_encoder_timing_stats get_compilation_match_table "
    "get_simple_cpu_offload_num_cpu_blocks profile save_sharded_state save_tensorized_model shutdown "
    # Caches of media, and adapters, which keys distinguish.
    f"reset_mm_cache release_late_interaction_query_cache {_RESET_ENCODER} "
    f"{_ADD_ADAPTER} remove_lora pin_lora list_loras "
    # Memory and processes, which keep the weights; ``_loses_weights`` knows the exceptions.
    f"{_SLEEP} {_DISCARD} {_WAKE} elastic_ep_execute checkpoint_prepare checkpoint_restore".split()
)
"""Methods of vLLM's workers (0.32 and 0.33) that leave the model's weights unchanged. ``test_updates`` lists all others
that vLLM calls by name."""

UPDATES = frozenset(
    [
        "reload_weights",
        "update_weights",
        "start_weight_update",
        "start_draft_weight_update",
        "finish_weight_update",
        "reset_weights",
    ]
)
"""Methods that change weights or begin to change them."""

_KNOWN = HARMLESS | UPDATES


class Listener(Protocol):
    """Receives calls, on the thread that makes them (the scheduler's). ``weights_may_change`` is called before the
    executor's call, or after it if checksums were compared; all other methods are called before."""

    def weights_may_change(self, method: str) -> None: ...

    def device_is_released(self) -> None:
        """vLLM has reset all caches only because it releases GPU memory. The weights do not change."""

    def encoder_cache_is_reset(self) -> None: ...

    def adapter_is_loaded(self, adapter: Any) -> None: ...


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
"""The listeners of all engines in this process, because a call does not show whose workers it concerns. A false alarm
costs only misses."""


def watch(vllm_config: Any, listener: Listener) -> None:
    """Inform ``listener`` about all calls of ``vllm_config``'s engine to its workers."""
    from vllm.v1.executor.abstract import Executor

    executor = Executor.get_class(vllm_config)
    if not hasattr(executor.collective_rpc, "tells_kvoffload"):
        executor.collective_rpc = _told(executor.collective_rpc)
    _listeners.add(listener)


def unwatch(listener: Listener) -> None:
    _listeners.discard(listener)


_without_weights: weakref.WeakSet[Any] = weakref.WeakSet()
"""Executors whose workers have released the memory of the weights without a copy."""


def _told(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, *more: Any, **named: Any
    ) -> Any:
        if isinstance(method, str) and method in _STEP:
            return call(self, method, timeout, args, kwargs, *more, **named)
        before = None
        if _listeners:
            arguments = (*args, *(kwargs or {}).values())
            if not isinstance(method, str) or method not in _KNOWN:
                # If a call does not wait, its answer may come after the next step.
                waits = not more and not named.get("non_block")
                before = _state_of(self, call, timeout) if waits else None
            if before is None:
                _tell(self, method, arguments)
        try:
            return call(self, method, timeout, args, kwargs, *more, **named)
        finally:
            if before is not None and _state_of(self, call, timeout) != before:
                _tell(self, method, ())

    collective_rpc.tells_kvoffload = True  # type: ignore[attr-defined]
    return collective_rpc


def _state_of(executor: Any, call: Callable[..., Any], timeout: Any) -> Any:
    """Return checksums of the weights of all workers, or ``None`` if a worker cannot compute them."""
    if getattr(executor, "is_sleeping", False):  # weights may not be in memory
        return None
    try:
        states = call(executor, weights_state, timeout)
    except Exception as exc:  # noqa: BLE001 - then the call counts as an update
        logger.debug("kvoffload cannot compare vLLM's weights: %r", exc)
        return None
    return None if not states or None in states else states


def _tell(executor: Any, method: Any, arguments: tuple[Any, ...]) -> None:
    for listener in list(_listeners):
        try:
            if not isinstance(method, str):
                listener.weights_may_change("a function")
            elif method not in HARMLESS or _loses_weights(executor, method, arguments):
                listener.weights_may_change(repr(method))
            elif method in (_SLEEP, _DISCARD):
                listener.device_is_released()
            elif method == _RESET_ENCODER:
                listener.encoder_cache_is_reset()
            elif method == _ADD_ADAPTER:
                for adapter in arguments:
                    listener.adapter_is_loaded(adapter)
        except Exception:
            logger.exception("kvoffload cannot follow a call of vLLM's workers")
    if method == _WAKE:
        _without_weights.discard(executor)


def _loses_weights(executor: Any, method: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether a call in ``HARMLESS`` changes the weights after all: sleep above level 1, and the end of such a
    sleep."""
    if method == _SLEEP:
        is_lost = any(isinstance(level, int) and level > 1 for level in arguments)
    elif method == _DISCARD:
        is_lost = any("weights" in tags for tags in arguments)
    else:
        return method == _WAKE and executor in _without_weights
    if is_lost:
        _without_weights.add(executor)
    return is_lost


class Device:
    """Tracks data on the GPU that may depend on weights before their last update: KV in vLLM's block pool, and outputs
    of encoders. Scheduler thread only."""

    def __init__(self, outputs_are_foreign: bool) -> None:
        """Create the record. ``outputs_are_foreign``: outputs of encoders may also come from others, whose weights are
        unknown."""
        self._pool: Any = None
        self._num_held: Callable[[], int] = lambda: 0
        self._outputs_are_foreign = outputs_are_foreign
        self._has_outputs = outputs_are_foreign
        self._has_old_outputs = False

    def bind(self, pool: Any, num_held: Callable[[], int]) -> None:
        """Set vLLM's block pool. ``num_held`` returns the number of blocks that no request uses and that only stores
        hold."""
        self._pool, self._num_held = pool, num_held

    def encoders_run(self) -> None:
        self._has_outputs = True

    def encoder_cache_is_reset(self) -> None:
        if not self._outputs_are_foreign:
            self._has_outputs = self._has_old_outputs = False

    def weights_may_change(self) -> None:
        self._has_old_outputs |= self._has_outputs

    def is_empty(self) -> bool:
        """Return whether neither requests nor vLLM's prefix cache have a block, and vLLM has no old output of an
        encoder."""
        pool = self._pool
        if pool is None or self._has_old_outputs or len(pool.cached_block_hash_to_block):
            return False
        return bool(pool.get_num_free_blocks() + self._num_held() == pool.num_gpu_blocks - 1)  # one is never used
