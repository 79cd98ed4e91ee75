# SPDX-License-Identifier: Apache-2.0
"""The reference engine: a scheduler and a worker, each with its side of kvoffload's connector."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from kvoffload.base import OffloadingSpec
from kvoffload.config import OffloadingConfig
from kvoffload.connector import ConnectorMeta, GuardedManager, OffloadingConnectorScheduler, OffloadingConnectorWorker
from kvoffload.engines.facts import Table, facts_of
from kvoffload.engines.reference.kv_cache import KVCache
from kvoffload.engines.reference.layout import engine_layout, fingerprint, kv_shape
from kvoffload.engines.reference.models import use_paged_attention
from kvoffload.engines.reference.request import Request, SamplingParams, State
from kvoffload.engines.reference.runner import ModelRunner
from kvoffload.engines.reference.scheduler import Scheduler, SchedulerCounts, StepPlan
from kvoffload.errors import ConfigError
from kvoffload.metrics import Stats
from kvoffload.specs import make_spec

_PAUSE_S = 0.0002


FIELDS: Table = {
    "EngineOptions": {
        "the layout says how many tokens a block has": "block_tokens",
        "where KV lies, and when it is computed": "num_blocks max_batch_tokens max_requests prefix_caching",
    }
}
"""Options that do not change the bytes of a block. All other options are part of the identity."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Limits of the reference engine, in blocks, tokens and requests. Raises ``ConfigError`` if one is below 1."""

    num_blocks: int = 256
    """Number of GPU blocks of each KV group."""
    block_tokens: int = 16
    """Number of tokens in a block."""
    max_batch_tokens: int = 512
    """The largest number of tokens that a step computes. Longer prompts are prefilled in chunks."""
    max_requests: int = 16
    """The largest number of requests that run at the same time."""
    prefix_caching: bool = True
    """Whether requests find the blocks of earlier ones on the GPU. Offloading needs it."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_tokens", "max_batch_tokens", "max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")


class Engine:
    """Serves a transformers causal LM, step by step, on the caller's thread.

    With ``offloading`` (and prefix caching), the engine copies full blocks to host memory, and loads them from there
    when the GPU no longer has them. ``shutdown`` (or ``with``) releases the memory and threads for this.
    """

    def __init__(
        self, model: Any, options: EngineOptions | None = None, offloading: OffloadingConfig | None = None
    ) -> None:
        self.options = options = options or EngineOptions()
        if offloading is not None and not options.prefix_caching:
            raise ConfigError(
                "Offloading requires prefix_caching, because it finds blocks by their prefix; leave it on."
            )
        use_paged_attention(model)
        shape = kv_shape(model.config)
        weights = [*model.named_parameters(), *model.named_buffers()]
        identity = {
            "model": fingerprint(model.config, weights),
            "code": f"transformers {metadata.version('transformers')}",
        }
        identity |= facts_of(options, FIELDS)
        # Each group has a pool of its own.
        device_tokens = options.num_blocks * options.block_tokens
        self.layout = engine_layout(shape, options.block_tokens, model.dtype, identity, device_tokens)
        self._spec: OffloadingSpec | None = None
        self._connector: OffloadingConnectorScheduler | None = None
        self._worker: OffloadingConnectorWorker | None = None
        if offloading is not None:
            self._spec = make_spec(offloading, self.layout)
        self._runner = ModelRunner(model, shape, options.num_blocks, options.block_tokens)
        if offloading is not None and self._spec is not None:
            self._connector = OffloadingConnectorScheduler(
                GuardedManager(self._spec.get_manager()), self.layout, offloading
            )
            self._worker = OffloadingConnectorWorker()
            self._worker.register_kv_caches(self._spec, self._runner.canonical_kv_caches())
            self._connector.load_within_steps()
        self._kv_cache = KVCache(self.layout.groups, options.num_blocks, options.prefix_caching)
        self._scheduler = Scheduler(self._kv_cache, options.max_batch_tokens, options.max_requests, self._connector)
        self._requests: dict[str, Request] = {}
        self._ids = itertools.count()

    def __repr__(self) -> str:
        return f"Engine({self._scheduler}, offloading={self._connector is not None})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def counts(self) -> SchedulerCounts:
        return self._scheduler.counts

    @property
    def has_requests(self) -> bool:
        return self._scheduler.has_requests

    def get_stats(self) -> Stats:
        """Return kvoffload's metrics; empty without offloading."""
        return self._connector.get_stats() if self._connector is not None else {}

    # --------------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> Request:
        """Queue a request and return it. Each ``step`` may append to its ``Request.output_token_ids``.

        Raises ``ConfigError`` for an empty prompt, an id in use, or a request that can never fit in the KV pool.
        """
        sampling = sampling or SamplingParams()
        request_id = request_id if request_id is not None else f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise ConfigError(f"A request {request_id!r} already exists; choose another id.")
        if not prompt_token_ids:
            raise ConfigError("A prompt needs at least one token.")
        # No token attends to the last one, so it needs no keys and values.
        most = len(prompt_token_ids) + sampling.max_tokens - 1
        room = self.options.num_blocks * self.options.block_tokens
        if most > room:
            raise ConfigError(
                f"A request of {len(prompt_token_ids)} + {sampling.max_tokens} tokens can never fit the {room} of the "
                "KV pool: shorten it or raise num_blocks."
            )
        request = Request(
            request_id, list(prompt_token_ids), sampling, self.options.block_tokens, cache_salt, kv_transfer_params
        )
        self._requests[request_id] = request
        self._scheduler.add(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request at any stage. Ignores requests that have ended, and unknown ids."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, State.ABORTED)

    def _end(self, request: Request, state: State) -> None:
        del self._requests[request.request_id]
        self._scheduler.end(request, state)

    # ------------------------------------------------------------------------------------------------ steps

    def step(self) -> list[Request]:
        """Schedule, compute and collect results once. Return the requests that finished.

        Waits for a transfer only if its GPU blocks are needed again, or if it is a load within the step.
        """
        plan = self._scheduler.schedule()
        if self._connector is not None and self._worker is not None:
            meta: ConnectorMeta = self._connector.build_connector_meta(plan.for_connector)
            self._worker.start_step(meta)
            if any(load.within_step for load in meta.loads):
                plan = self._scheduler.undo(plan, self._connector.update_connector_output(self._worker.get_report()))
            finished = self._compute(plan)
            self._worker.end_step()
            self._finish(finished)
            self._scheduler.take_outcome(self._connector.update_connector_output(self._worker.get_report()))
        else:
            finished = self._compute(plan)
            self._finish(finished)
        if not plan.scheduled:
            time.sleep(_PAUSE_S)  # only transfers run, so leave the processor to them
        return finished

    def _compute(self, plan: StepPlan) -> list[Request]:
        if not plan.scheduled:
            return []
        tokens = iter(self._runner.choose(self._runner.compute(plan.scheduled)))
        finished = []
        for each in plan.scheduled:
            yields_token = each.yields_token  # false once the token is appended
            self._scheduler.advance(each)
            if yields_token:
                token = next(tokens)
                if each.request.append(token.token_id, token.top_logit, token.margin):
                    finished.append(each.request)
        return finished

    def _finish(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._end(request, State.FINISHED)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None) -> list[list[int]]:
        """Serve all prompts together, and return the generated tokens of each."""
        requests = [self.add_request(prompt, sampling) for prompt in prompts]
        while not all(request.is_done for request in requests):
            self.step()
        return [request.output_token_ids for request in requests]

    def drain(self) -> None:
        """Run steps until no request and no transfer is left."""
        while self.has_requests or (self._connector is not None and self._connector.has_pending_work()):
            self.step()

    # --------------------------------------------------------------------------------------- the whole engine

    def reset_cache(self, *, device: bool = True, offloaded: bool = True) -> None:
        """Forget the cached blocks on the GPU, the offloaded blocks, or both. Running requests keep the blocks that
        they use."""
        if device:
            self._kv_cache.forget_all()
        if offloaded and self._connector is not None:
            self._connector.reset_cache()

    def shutdown(self) -> None:
        """Wait for transfers and release everything. Idempotent. The engine cannot be used afterwards."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._connector is not None:
            self._connector.shutdown()
        if self._spec is not None:
            self._spec.shutdown()

    def check_invariants(self) -> None:
        """Check everything that must hold between two steps. For tests."""
        self._scheduler.check_invariants()
        if self._connector is not None:
            self._connector.check_invariants()
