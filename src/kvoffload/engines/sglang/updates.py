# SPDX-License-Identifier: Apache-2.0
"""Track the weights that this process serves, because SGLang does not inform storages about updates of weights.

SGLang loads ``watch`` as a plug-in in each of its processes, before it creates a scheduler, and ``watch`` observes the
updates. Importing this module loads neither SGLang nor torch.
"""

from __future__ import annotations

import functools
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.engines.sglang.rejections import UNWATCHED
from kvoffload.engines.weights import Files

logger = logging.getLogger(__name__)

DEFAULT_VERSION = "default"
"""SGLang's ``--weight-version`` if the user gave none. Then the files identify the weights that a process has read."""

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_CONTEXT = "sglang.srt.runtime_context"
_SCHEDULER = "sglang.srt.managers.scheduler"

_REQUIRED = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
    "resume_memory_occupation",
)
_HARMLESS = (
    "init_weights_update_group",
    "destroy_weights_update_group",
    "get_weights_by_name",
    "check_weights",
    "save_remote_model",
    "save_sharded_model",
    "flush_cache_after_weight_update",
    "record_weight_version_after_update",
    "release_memory_occupation",
)
"""The other methods of SGLang's updater. All methods not listed here count as a change of weights."""


@dataclass(slots=True)
class ServedWeights:
    """The state of the weights in this process. Updates, clearing and attaching happen on SGLang's scheduler thread;
    other threads only read it."""

    salt: bytes = b""
    """A part of all keys, which each ``clear`` replaces. It outlives a storage, because SGLang may attach another one
    later."""
    num_changes: int = 0
    is_watched: bool = False
    """Whether ``num_changes`` counts all updates."""
    files: Mapping[str, Files] | None = None
    """The files of weights as they were before SGLang loaded them; ``None`` if they were not recorded."""
    _version_before: str | None = None
    """SGLang's name for the weights before the last change."""
    _num_named: int = 0
    _num_flushed: int = 0
    _is_amid_update: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_named(self) -> bool:
        """Whether a version or a clear has named the weights since they last changed."""
        return self._num_named == self.num_changes

    @property
    def is_flushed(self) -> bool:
        """Whether SGLang has dropped all pages that it computed before the weights last changed."""
        return self._num_flushed == self.num_changes

    def change(self, version: str | None, step: str = "") -> None:
        """Note that the weights are about to change, so that SGLang's pages may belong to different weights."""
        with self._lock:
            self.num_changes += 1
            if not self._is_amid_update:  # a step's own version must not count as an older one
                self._version_before = version
            if step in ("begin_weight_update", "end_weight_update"):
                self._is_amid_update = step == "begin_weight_update"

    def flush(self) -> None:
        """Note that SGLang has dropped all pages that it had computed."""
        self._num_flushed = self.num_changes

    def clear(self) -> None:
        """Hide all earlier pages from this process, and all of its later pages from other processes."""
        with self._lock:
            self.salt = secrets.token_bytes(16)
            self._num_named = self.num_changes

    def why_not_named_by(self, version: str) -> str | None:
        """Use ``version``, which is part of the namespace of a storage that is being attached, as the name of the
        weights. Returns ``None``, or a sentence that explains why it cannot be the name."""
        with self._lock:
            if self.is_named:
                return None
            if version in (DEFAULT_VERSION, self._version_before) or self._version_before is None:
                return (
                    f"SGLang's weights were updated, and the weight_version {version!r} does not name the new ones. "
                    "Nothing is stored or found until the storage is cleared, or attached again after an update with "
                    "another weight_version."
                )
            if not self.is_flushed:
                return (
                    "SGLang may still have pages of the weights before its update. Nothing is stored or found until "
                    "the storage is cleared, or attached again after POST /flush_cache."
                )
            self._num_named = self.num_changes
            return None


SERVED = ServedWeights()


def watch() -> None:
    """Observe the updates in this process. Idempotent.

    SGLang calls it in all servers of an environment with kvoffload, so it must not change anything for servers without
    it. It does nothing without a scheduler, or with a version of SGLang that it cannot observe.
    """
    try:
        _watch()
    except AttributeError as exc:
        logger.debug("kvoffload cannot watch this SGLang's updates of weights: %s", exc)


def _watch() -> None:
    """Replace the methods to observe. Raises ``AttributeError`` and changes nothing if this SGLang lacks one of
    them."""
    updater, controller = sys.modules.get(_UPDATER), sys.modules.get(_CONTROLLER)
    if SERVED.is_watched or updater is None or controller is None:
        return
    manager, cache = updater.SchedulerWeightUpdaterManager, controller.HiCacheController
    reset, steps = cache.reset, {step: getattr(manager, step) for step in _REQUIRED}
    fields = getattr(manager, "__dataclass_fields__", {})
    for name in dir(manager):
        if not name.startswith("_") and name not in {*_HARMLESS, *fields} and callable(getattr(manager, name)):
            steps[name] = getattr(manager, name)
    for name, step in steps.items():
        setattr(manager, name, _announced(name, step))
    cache.reset = _reported(reset)
    if (scheduler := getattr(sys.modules.get(_SCHEDULER), "Scheduler", None)) is not None:
        scheduler.__init__ = _after_a_look(scheduler.__init__)
    SERVED.is_watched = True


def note_files(args: Any) -> None:
    """Record the files of the weights. Call it right before SGLang loads them."""
    from kvoffload.engines.sglang.identity import files_now  # a circular import otherwise

    SERVED.files = files_now(args.resolved_dict())


def watch_from_the_start(is_start: bool) -> None:
    """Start to observe updates. Raises ``ConfigError`` if updates before this call may have been missed."""
    if SERVED.is_watched:
        return
    if not is_start:
        raise UNWATCHED.error()
    try:
        _watch()
    except AttributeError as exc:
        raise UNWATCHED.error(str(exc)) from exc
    if not SERVED.is_watched:
        raise UNWATCHED.error("this SGLang has no such modules")


def _after_a_look(load: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of SGLang's scheduler, which loads the weights, such that it calls ``note_files``
    first."""

    @functools.wraps(load)
    def wrapper(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        try:
            note_files(server_args)
        except Exception as exc:  # noqa: BLE001 - servers with other storages must start
            logger.debug("kvoffload has not seen the files of the weights: %s", exc)
        load(self, server_args, *args, **kwargs)

    return wrapper


def _announced(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of SGLang's updater such that it informs ``SERVED`` before it runs."""

    @functools.wraps(step)
    def wrapper(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        tags = getattr(request, "tags", None)
        if not (name == "resume_memory_occupation" and tags and "weights" not in tags):
            SERVED.change(_version(), name)
        return step(self, request, *args, **kwargs)

    return wrapper


def _reported(reset: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reset of SGLang's cache such that it informs ``SERVED`` afterwards."""

    @functools.wraps(reset)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        answer = reset(*args, **kwargs)
        SERVED.flush()
        return answer

    return wrapper


def _version() -> str | None:
    try:
        version: str = sys.modules[_CONTEXT].get_serving().weight_version
    except Exception:  # noqa: BLE001 - nothing of ours may fail an update
        return None
    return version
