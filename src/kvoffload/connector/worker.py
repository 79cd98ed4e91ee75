# SPDX-License-Identifier: Apache-2.0
"""The connector's worker side: it starts transfers, waits for them, and reports their ends. One per rank, on its own
thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from kvoffload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingHandler, OffloadingSpec, TransferResult
from kvoffload.connector.messages import ConnectorMeta, LoadOutcome, TransferJob, WorkerReport
from kvoffload.errors import LayoutError
from kvoffload.logs import RateLimitedLog

logger = logging.getLogger(__name__)

_MOST_POLLS = 100
"""Limit on the polls for the end of a load that the host has waited for. A handler should report it at once."""


class OffloadingConnectorWorker:
    """Performs the transfers of ``ConnectorMeta`` on one rank, and reports the end of each exactly once.

    In every step, even without a forward pass, call ``start_step`` before the forward pass (unless its message is
    empty) and ``end_step`` after it was submitted. No method raises into the engine: a transfer that a handler rejects
    is reported as failed. If a handler cannot tell which transfers ended, they count as failed once it has waited for
    them. Until the wait succeeds, they have not ended, because they may still write.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._flushes_on_host = False
        self._is_suspended = False
        self._handlers: dict[tuple[str, str], OffloadingHandler] = {}
        # The handlers of transfers so far, by the types of source and destination, because each type has one medium.
        self._handlers_by_type: dict[tuple[type, type], OffloadingHandler] = {}
        self._log = RateLimitedLog(logger)
        self._waiting_stores: list[TransferJob] = []
        self._open: dict[OffloadingHandler, dict[int, None]] = {}
        """Transfers that each handler has started and not returned yet."""
        self._doubtful: set[int] = set()
        """Transfers whose flush failed, so that their blocks may have been used meanwhile."""
        # The following attributes are for engines whose workers report loads by request.
        self._loads: dict[str, TransferJob] = {}
        """The newest load of each request id, until it ends. An engine may use an id again while a load of the earlier
        request with this id runs. Nobody waits for that load, so its end is not reported."""
        self._results: list[TransferResult] = []
        self._undefined_loads: set[int] = set()
        """Loads within this step that failed."""
        self._loaded_request_ids: set[str] = set()
        self._failed_loads: dict[str, frozenset[int]] = {}

    def __repr__(self) -> str:
        return f"OffloadingConnectorWorker(rank={self._rank}, loads of {sorted(self._loads)})"

    def register_kv_caches(
        self, spec: OffloadingSpec, kv_caches: CanonicalKVCaches, flushes_on_host: bool = False
    ) -> None:
        """Create the handlers for the KV cache. Call it once, after the cache has been allocated. The handlers keep its
        tensors alive until ``shutdown``.

        ``flushes_on_host``: a flush returns when its transfers have ended, instead of letting the GPU's compute wait
        for them. Engines need this if GPU blocks are also written by the host, or by the network card of another
        connector.

        Raises ``LayoutError`` for tensors that do not fit the layout of ``spec``, and for the layout of another rank.
        """
        layout = getattr(spec, "layout", None)
        if layout is not None and layout.rank != self._rank:
            raise LayoutError(
                f"The worker has rank {self._rank}, and the layout of its spec rank {layout.rank}; give both the same, "
                "because otherwise no transfer ends on all ranks."
            )
        self._handlers, self._handlers_by_type = spec.get_handlers(kv_caches), {}
        self._flushes_on_host = flushes_on_host

    def start_step(self, meta: ConnectorMeta) -> None:
        """Start the final stores, flush, then start the loads. Other stores wait until ``end_step``.

        Either the loads within this step end before the compute that is submitted next, or the next report lists them
        as undefined.
        """
        # Start the stores of a step that had no ``end_step``: the compute whose results they read has been submitted
        # since, and the flush below may name them.
        self.end_step()
        # The flush may also name these. The steps that computed their blocks have been submitted.
        for job in meta.final_stores:
            self._start(job)
        if meta.flush_job_ids:
            self._flush(meta.flush_job_ids)
        awaited = [job for job in meta.loads if job.within_step]
        for job in awaited:
            self._start(job)
        for job in meta.loads:
            if not job.within_step:
                self._expect(job)
                self._start(job)
        if awaited:
            self._await({job.job_id for job in awaited})
        self._waiting_stores += meta.stores

    def _await(self, job_ids: set[int]) -> None:
        """Let the compute that is submitted next wait for these transfers, and record failures at once."""
        for handler, open_ids in self._open.items():
            own = open_ids.keys() & job_ids
            if not own:
                continue
            waits_on_device = type(handler).flush is not OffloadingHandler.flush
            if not any(self._guard("flush", flush, own) for flush in (handler.flush, handler.wait)):
                self._undefined_loads |= own
            elif not waits_on_device:
                polls = 0
                while not own.isdisjoint(open_ids) and polls < _MOST_POLLS:
                    self._poll()
                    polls += 1
                self._undefined_loads |= own & open_ids.keys()
        self._poll()
        self._undefined_loads |= {each.job_id for each in self._results if each.job_id in job_ids and not each.success}

    def end_step(self) -> None:
        """Start this step's stores. The forward pass that writes their blocks, if any, has been submitted."""
        stores, self._waiting_stores = self._waiting_stores, []
        for job in stores:
            self._start(job)

    def suspend(self) -> None:
        """Wait until no transfer uses the KV cache, because the engine is about to unmap it. Transfers requested before
        ``resume`` fail. Idempotent. Raises the exception of a handler that fails; the engine must then keep the memory
        mapped."""
        self.end_step()
        for handler, open_ids in self._open.items():
            handler.wait(tuple(open_ids))
        self._is_suspended = True

    def resume(self) -> None:
        """Allow transfers again, because the KV cache is mapped again, with other bytes and perhaps at other addresses.
        Idempotent."""
        handlers = dict.fromkeys(self._handlers.values())
        if self._is_suspended and all(self._guard("take_addresses", handler.take_addresses) for handler in handlers):
            self._is_suspended = False

    def get_report(self) -> WorkerReport:
        """Return the transfers that ended on this rank since the last call."""
        self._poll()
        results, self._results = self._results, []
        undefined, self._undefined_loads = frozenset(self._undefined_loads), set()
        return WorkerReport(tuple((self._rank, result) for result in results), undefined)

    def take_load_outcome(self) -> LoadOutcome:
        """Return the loads that ended on this rank since the last call, for engines whose workers report loads.

        It is independent of ``get_report``, which also returns them.
        """
        self._poll()
        outcome = LoadOutcome(frozenset(self._loaded_request_ids), self._failed_loads)
        self._loaded_request_ids, self._failed_loads = set(), {}
        return outcome

    def shutdown(self) -> None:
        """Wait for running transfers, and release the handlers. Idempotent."""
        self._waiting_stores = []
        handlers, self._handlers, self._handlers_by_type = self._handlers, {}, {}
        self._open.clear()
        for handler in dict.fromkeys(handlers.values()):
            self._guard("shutdown", handler.shutdown)

    def _expect(self, load: TransferJob) -> None:
        self._loads[load.request_id] = load
        self._loaded_request_ids.discard(load.request_id)
        self._failed_loads.pop(load.request_id, None)

    def _start(self, job: TransferJob) -> None:
        if self._is_suspended or job.source is None:
            self._end(TransferResult(job.job_id, success=False))
            return
        types = type(job.source), type(job.destination)
        try:
            if types not in self._handlers_by_type:
                self._handlers_by_type[types] = self._handlers[job.source.medium(), job.destination.medium()]
            handler = self._handlers_by_type[types]
            handler.transfer_async(job.job_id, (job.source, job.destination))
            self._open.setdefault(handler, {})[job.job_id] = None
        except Exception:  # noqa: BLE001 - this is the boundary
            # If a handler is broken, the transfer fails but the engine's step continues.
            ends = f"{job.source.medium()} to {job.destination.medium()}"
            self._log.exception(f"transfer {job.job_id} from {ends} could not be started")
            self._end(TransferResult(job.job_id, success=False))

    def _flush(self, job_ids: Collection[int]) -> None:
        for handler in dict.fromkeys(self._handlers.values()):
            flushes = (handler.wait,) if self._flushes_on_host else (handler.flush, handler.wait)
            if not any(self._guard("flush", flush, job_ids) for flush in flushes):
                self._doubtful.update(self._open.get(handler, {}).keys() & job_ids)

    def _poll(self) -> None:
        for handler, open_ids in self._open.items():
            if not open_ids:
                continue
            results: list[TransferResult] = []
            knows_ends = self._guard("get_finished", _take_finished, handler, results)
            if not knows_ends and self._guard("wait", handler.wait, tuple(open_ids)):
                results += [TransferResult(job_id, success=False) for job_id in open_ids]
            for result in results:
                if result.job_id in open_ids:
                    del open_ids[result.job_id]
                    self._end(result)

    def _guard(self, name: str, call: Callable[..., object], *args: object) -> bool:
        """Call the handler, and return whether ``call`` returned without an exception."""
        try:
            call(*args)
        except Exception:  # noqa: BLE001 - the boundary between a broken handler and the engine's step
            self._log.exception(f"{name} of a transfer handler failed")
            return False
        return True

    def _end(self, result: TransferResult) -> None:
        if result.job_id in self._doubtful:
            self._doubtful.remove(result.job_id)
            result = TransferResult(result.job_id, success=False)
        self._results.append(result)
        load = next((each for each in self._loads.values() if each.job_id == result.job_id), None)
        if load is None:
            return
        del self._loads[load.request_id]
        if result.success:
            self._loaded_request_ids.add(load.request_id)
        else:
            assert isinstance(load.destination, GPULoadStoreSpec)
            self._failed_loads[load.request_id] = frozenset(load.destination.block_ids.tolist())


def _take_finished(handler: OffloadingHandler, results: list[TransferResult]) -> None:
    for result in handler.get_finished():
        if not isinstance(result, TransferResult):
            raise TypeError(f"this is not the end of a transfer: {result!r:.100}")
        results.append(result)
