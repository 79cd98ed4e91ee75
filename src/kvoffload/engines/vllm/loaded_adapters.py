# SPDX-License-Identifier: Apache-2.0
"""Which files of LoRA adapters vLLM has loaded in this process. Worker side.

vLLM loads an adapter in the step that needs it, may evict it, and then loads it again. On CPUs its weights may even be
a mapping of the file. So this module compares the files before and after vLLM reads them: when it loads an adapter, and
when it copies the weights to the buffers of the device. Importing this module does not load vLLM.
"""

from __future__ import annotations

import functools
import logging
import weakref
from dataclasses import dataclass
from typing import Any

from kvoffload.base import TransferResult
from kvoffload.connector import ConnectorMeta, TransferJob
from kvoffload.engines.vllm.adapters import AdapterChecks, Loaded, Mismatch
from kvoffload.engines.weights import Files

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Read:
    """The files that vLLM has read under one of its numbers for adapters."""

    path: str
    digest: str
    """``Files.digest`` of the files. Empty if one changed while vLLM read it."""
    digests: set[str]
    """The digests of all loads since the last load in place, or since the scheduler knows of a mismatch."""


_loaded: weakref.WeakKeyDictionary[Any, dict[int, Read]] = weakref.WeakKeyDictionary()
"""By vLLM's adapter manager, and by number."""


def watch() -> None:
    """Record from now on which adapters vLLM loads in this process. Idempotent.

    Raises if this vLLM lacks the methods. In this case, no store of an adapter begins if its keys contain its files.
    """
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import WorkerLoRAManager

    load, activate = WorkerLoRAManager._load_adapter, LoRAModelManager.activate_adapter
    if hasattr(load, "tells_kvoffload"):
        return

    @functools.wraps(load)
    def load_and_tell(self: Any, lora_request: Any) -> Any:
        before = _files(lora_request.lora_path)
        loaded = load(self, lora_request)
        after = _files(lora_request.lora_path)
        is_same = after is not None and after.why_not(before) is None
        digest = after.digest if after is not None and is_same else ""
        _note(self._adapter_manager, lora_request, digest)
        return loaded

    @functools.wraps(activate)
    def activate_and_tell(self: Any, lora_id: int) -> Any:
        is_copied = activate(self, lora_id)
        known = _loaded.get(self, {}).get(lora_id)
        if is_copied and known is not None:
            files = _files(known.path)
            if files is None or files.digest != known.digest:
                known.digest = ""
                known.digests.add("")
        return is_copied

    load_and_tell.tells_kvoffload = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter, LoRAModelManager.activate_adapter = load_and_tell, activate_and_tell


def _note(manager: Any, request: Any, digest: str) -> None:
    """vLLM has loaded the adapter of ``request``, a ``LoRARequest``."""
    numbers = _loaded.setdefault(manager, {})
    known = numbers.get(request.lora_int_id)
    before = set() if known is None or request.load_inplace else known.digests
    numbers[request.lora_int_id] = Read(request.lora_path, digest, before | {digest})


def _files(path: str) -> Files | None:
    try:
        return Files.of_adapter(path)
    except Exception as exc:  # noqa: BLE001 - vLLM may find the adapter elsewhere
        logger.debug("kvoffload cannot see the files of the adapter %r: %s", path, exc)
        return None


def digests_of(number: int) -> set[str]:
    """Return ``Read.digests``, of all engines in this process. Empty: nothing was loaded."""
    return {digest for known in _loaded.values() if number in known for digest in known[number].digests}


def _digest_of(number: int) -> str:
    found = {known[number].digest for known in _loaded.values() if number in known}
    return found.pop() if len(found) == 1 else ""


def _forget_earlier(number: int) -> None:
    for known in _loaded.values():
        if number in known:
            known[number].digests = {known[number].digest}


class LoadedAdapters:
    """Checks in each step of a worker that the adapters are the expected ones."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._checks: AdapterChecks | None = None
        """The checks of the step under way."""
        self._stores: tuple[TransferJob, ...] = ()
        """The stores of the step under way, which must wait for ``end_step``."""
        self._reports: set[Mismatch] = set()
        self._unknown: set[Mismatch] = set()
        """Reports that the scheduler may not know yet. Until then it may believe that blocks in vLLM's prefix cache are
        of an expected adapter, so no store of an adapter begins."""
        self._must_undo = False
        self._refused: list[tuple[int, TransferResult]] = []

    def begin_final_stores(
        self, jobs: tuple[TransferJob, ...], checks: AdapterChecks | None
    ) -> tuple[TransferJob, ...]:
        """Return the ``jobs`` that may begin. Earlier steps have computed their blocks."""
        return jobs if checks is None else self._allowed(jobs, checks)

    def begin_step(self, stores: tuple[TransferJob, ...], checks: AdapterChecks | None) -> tuple[TransferJob, ...]:
        """Return the ``stores`` that need no check. ``end_step`` returns the others."""
        if checks is None:
            return stores
        for each in checks.known & self._unknown:
            self._unknown.remove(each)
            _forget_earlier(each.expected.number)
        self._checks = checks
        self._stores = tuple(job for job in stores if job.request_id in checks.of_stores)
        return tuple(job for job in stores if job.request_id not in checks.of_stores)

    def end_step(self) -> ConnectorMeta | None:
        """Check the step, which was computed or at least submitted. Return the stores that may begin, or ``None``."""
        checks, self._checks = self._checks, None
        if checks is None:
            return None
        for expected in checks.of_requests:
            if digests_of(expected.number) - {expected.digest}:
                self._report(expected)
        for expected in checks.of_loads:
            if not self._is_right(expected, checks):
                self._must_undo = True
                self._report(expected)
        stores, self._stores = self._stores, ()
        allowed = self._allowed(stores, checks)
        return ConnectorMeta(stores=allowed) if allowed else None

    def _report(self, expected: Loaded) -> None:
        mismatch = Mismatch(expected, _digest_of(expected.number))
        if mismatch not in self._unknown:
            self._unknown.add(mismatch)
            self._reports.add(mismatch)

    def take(self) -> tuple[tuple[tuple[int, TransferResult], ...], frozenset[Mismatch], bool]:
        """Return the results of stores that did not begin, the mismatches, and whether the step must be undone.

        It must be undone if a load brought blocks of another adapter. Each call returns only news.
        """
        taken = tuple(self._refused), frozenset(self._reports), self._must_undo
        self._refused, self._reports, self._must_undo = [], set(), False
        return taken

    def _allowed(self, jobs: tuple[TransferJob, ...], checks: AdapterChecks) -> tuple[TransferJob, ...]:
        allowed = []
        for job in jobs:
            expected = checks.of_stores.get(job.request_id)
            if expected is None or (not self._unknown and self._is_right(expected, checks)):
                allowed.append(job)
            else:
                self._refused.append((self._rank, TransferResult(job.job_id, success=False)))
        return tuple(allowed)

    def _is_right(self, expected: Loaded, checks: AdapterChecks) -> bool:
        digests = digests_of(expected.number)
        return digests == {expected.digest} or (not digests and not checks.needs_proof)
