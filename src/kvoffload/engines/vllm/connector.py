# SPDX-License-Identifier: Apache-2.0
"""``KVOffloadConnector``: vLLM's connector interface on one side, ``kvoffload.connector`` on the other.

It translates objects and the order of calls, and decides nothing. vLLM creates one with the scheduler role in the
engine core, and one with the worker role in each worker. In each step, vLLM calls these methods:

* scheduler: ``get_num_new_matched_tokens`` and ``update_state_after_alloc`` while it admits requests, then
  ``build_connector_meta``. With the workers' output: ``update_connector_output``, ``get_kv_connector_stats``,
  ``take_events``.
* worker: ``handle_preemptions`` first, ``bind_connector_metadata`` right before the forward pass, ``wait_for_save``
  after its launch, and then the calls that collect results.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import replace
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.connector import (
    ConnectorMeta,
    GuardedManager,
    OffloadingConnectorScheduler,
    OffloadingConnectorWorker,
    WorkerReport,
)
from kvoffload.cpu.spec import CPUOffloadingSpec
from kvoffload.engines.vllm import loaded_adapters, undone_steps
from kvoffload.engines.vllm.adapters import AdapterChecks, Adapters, Mismatch, adapters_of, note_on_adapters
from kvoffload.engines.vllm.announcements import Place, places_of
from kvoffload.engines.vllm.arguments import config_of
from kvoffload.engines.vllm.events import EventTranslator
from kvoffload.engines.vllm.held_blocks import HeldBlocks, are_written_early
from kvoffload.engines.vllm.kv_caches import LayerCache, canonicalize, canonicalize_heads
from kvoffload.engines.vllm.layout import fails_by_block, layout_of, preferred_layout
from kvoffload.engines.vllm.loaded_adapters import LoadedAdapters
from kvoffload.engines.vllm.log import log_with_vllm
from kvoffload.engines.vllm.media import Media, encodings_are_foreign, media_of, note_on_media
from kvoffload.engines.vllm.other_nodes import EqualWeights, num_other_nodes, weights_on_node
from kvoffload.engines.vllm.rejections import (
    NO_SHARED_MEMORY,
    TWO_CONNECTORS,
    UNKNOWN_TENSORS,
    UNREADABLE_WEIGHTS,
    check_engine,
    check_kv_cache,
    unclear_is_rejected,
)
from kvoffload.engines.vllm.slices import offloaded_groups, offloaded_ids, why_not_rank_free
from kvoffload.engines.vllm.stats import OffloadPromMetrics, OffloadStats, StatsReporter
from kvoffload.engines.vllm.steps import StepTranslator, with_needed_blocks, with_states
from kvoffload.engines.vllm.undone_steps import undo_step
from kvoffload.engines.vllm.updates import Device, unwatch, watch
from kvoffload.engines.vllm.versions import hash_lookahead_tokens, untried_version
from kvoffload.engines.vllm.weights import name_of_weights
from kvoffload.engines.weights import Known, outliving_tier
from kvoffload.errors import ConfigError, LayoutError
from kvoffload.specs import make_spec
from kvoffload.tiering.nodes import Packet
from kvoffload.tiering.options import parse_tiers
from kvoffload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    import torch

    from kvoffload.base import OffloadingSpec
    from kvoffload.config import EngineLayout, OffloadingConfig
    from kvoffload.connector.observer import Watch
    from kvoffload.tiering.options import StoreOptions

logger = init_logger("vllm.kvoffload")  # below vLLM's own logger, whose handlers and level it shares

_NAP_S = 200e-6
"""Pause in a step without a forward pass, which only waits for transfers. If scheduler and worker are one process, such
steps without a pause would keep the interpreter's lock from the copying threads for milliseconds."""

_JOIN_TIMEOUT_S = 30.0
"""Time limit for ranks to join the region in host memory after the scheduler has."""

_STATS_INTERVAL_S = 1.0
"""Time between reports while the server is busy. A report takes about a millisecond: too much for each step."""


class _SharedSpec:
    """A spec that the scheduler's and the worker's connector share if both are in one process. The first connector
    creates it, and the last one frees it."""

    _known: ClassVar[weakref.WeakValueDictionary[str, _SharedSpec]] = weakref.WeakValueDictionary()

    def __init__(self, spec: OffloadingSpec) -> None:
        self.spec = spec

    @classmethod
    def of(cls, config: OffloadingConfig, layout: EngineLayout) -> _SharedSpec:
        if layout.num_processes > 1:
            return cls(make_spec(config, layout))
        known = cls._known.get(layout.instance_id)
        if known is None:
            known = cls._known[layout.instance_id] = cls(make_spec(config, layout))
        return known


@dataclass
class StepMeta(KVConnectorMetadata):  # type: ignore[misc]
    """The message from the scheduler to the workers."""

    meta: ConnectorMeta = field(default_factory=ConnectorMeta)
    has_forward_pass: bool = True
    packets: tuple[Packet, ...] = ()
    """Messages to the agents of tiers that span nodes."""
    adapters: AdapterChecks | None = None


@dataclass
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The message from the workers to the scheduler. vLLM merges the messages of all ranks."""

    report: WorkerReport
    packets: tuple[Packet, ...] = ()
    """Messages from the agents of tiers that span nodes."""
    other_adapters: frozenset[Mismatch] = frozenset()
    """Adapters that workers have loaded from other files than expected."""
    must_undo: bool = False
    """The step computed with blocks of another adapter."""
    weights: tuple[str, ...] = ()
    """Names of the weights on other nodes than the scheduler's, which each sends once."""
    is_taken: bool = False
    """Whether the scheduler side has read this report."""

    def aggregate(self, other: StepReport) -> StepReport:
        return StepReport(
            WorkerReport.merge((self.report, other.report)),
            self.packets + other.packets,
            self.other_adapters | other.other_adapters,
            self.must_undo or other.must_undo,
            self.weights + other.weights,
        )


class KVOffloadConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Offloads vLLM's KV cache through kvoffload. See ``docs/vllm.md``."""

    _cache_hit_source = CacheHitSource.HOST
    _open: ClassVar[weakref.WeakValueDictionary[Any, KVOffloadConnector]] = weakref.WeakValueDictionary()
    """The connectors of this process, by role, rank and the engine's ``instance_id``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_with_vllm()
        config = check_engine(vllm_config)
        is_worker = role is KVConnectorRole.WORKER
        rank = vllm_config.parallel_config.rank if is_worker else 0
        check_kv_cache(vllm_config, kv_cache_config, rank)
        layout = layout_of(vllm_config, kv_cache_config, config, rank, is_worker)
        self._name = is_worker, rank, layout.instance_id
        if self._name in self._open:
            raise TWO_CONNECTORS.error()
        self._shared_spec = _SharedSpec.of(config, layout)
        spec = self._shared_spec.spec
        self.scheduler: _SchedulerSide
        """Exists only in the engine core. ``worker`` exists only in workers."""
        self.worker: _WorkerSide
        if role is KVConnectorRole.SCHEDULER:
            logger.info("kvoffload offloads %d KV group(s) to %r", len(layout.groups), spec)
            if untried := untried_version():
                logger.warning("%s", untried)
            if config.secondary_tiers and not layout.rank_free:
                reason = why_not_rank_free(vllm_config, kv_cache_config)
                logger.info("kvoffload's tiers serve only engines with the same number of ranks: %s", reason)
            if outliving_tier(config) is not None:
                _log_who_finds_blocks(vllm_config, config)
            with unclear_is_rejected(config, UNREADABLE_WEIGHTS):
                own_weights = name_of_weights(vllm_config, config)
            self.scheduler = _SchedulerSide(
                spec,
                layout,
                config,
                leaves_out=_left_out(vllm_config.model_config, config),
                blocks_are_written_early=are_written_early(vllm_config, kv_cache_config),
                can_describe=not hash_lookahead_tokens(vllm_config),
                group_ids=offloaded_ids(kv_cache_config),
                encodings_are_foreign=encodings_are_foreign(vllm_config),
                weights_name=EqualWeights(own_weights, num_other_nodes(vllm_config, config)),
                adapters=adapters_of(vllm_config, config),
                media=media_of(vllm_config, config, layout.hash_block_tokens, hash_lookahead_tokens(vllm_config)),
            )
            _check_region(spec)
            watch(vllm_config, self.scheduler)
        else:
            self.worker = _WorkerSide(spec, layout, kv_cache_config, weights_on_node(vllm_config, config, rank))
            if vllm_config.lora_config is not None:
                self.worker.watch_adapters()
        self._open[self._name] = self

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return ``False``. Raise ``ConfigError`` for mistakes in the user's keys: vLLM calls this while it reads its
        configuration, if it will capture CUDA graphs."""
        config_of(extra_config)
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the preferred layout of the KV cache, or ``None``. Raise ``ConfigError`` for rejected setups.

        ``register`` makes vLLM call this before an engine starts. vLLM calls it again after it has loaded the model.
        """
        return preferred_layout(vllm_config, check_engine(vllm_config))

    def shutdown(self) -> None:
        self._open.pop(self._name, None)
        if self.role is KVConnectorRole.SCHEDULER:
            unwatch(self.scheduler)
            undone_steps.unwatch(self.scheduler)
            self.scheduler.core.shutdown()
        else:
            self.worker.core.shutdown()
        self._shared_spec.spec.shutdown()

    @property
    def requires_kv_delivery(self) -> bool:
        """Return ``False``, because a block that is not stored only causes a later miss."""
        return False

    # ------------------------------------------------------------------------------------------------ scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.scheduler.bind_block_pool(gpu_block_pool)
        undone_steps.watch(self.scheduler)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return the external tokens by source, for vLLM's own metrics."""
        return self.scheduler.hit_sources(request) if num_external_tokens else {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        return self.scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return that vLLM may free the GPU blocks at once. Stores that still read them are flushed before their next
        use."""
        self.scheduler.request_finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        return self.scheduler.take_events()

    def has_pending_block_frees(self) -> bool:
        """Return whether stores hold blocks. vLLM calls this if it has no block for a running request, and then waits a
        step for held blocks instead of preempting another request."""
        return self.scheduler.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self.scheduler.core.has_pending_work()

    def reset_cache(self) -> bool:
        self.scheduler.reset_cache()
        return True

    # --------------------------------------------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # Another connector in this engine may write GPU blocks without the compute of this device.
        is_alone = not has_kv_transfer_group() or get_kv_transfer_group() is self
        self.worker.register(kv_caches, flushes_on_host=not is_alone)

    def unregister_kv_caches(self) -> None:
        """Suspend transfers, because vLLM will unmap the KV cache (0.33 and later), perhaps before compute ends."""
        self.worker.core.suspend()

    def restore_kv_caches(self) -> None:
        self.worker.core.resume()

    def handle_preemptions(self, kv_connector_metadata: StepMeta) -> None:
        # vLLM calls this before the step uses the device. Transfers of GPU blocks that were allocated again must end
        # first. Final stores also read such blocks, so they start here.
        self.worker.receive(kv_connector_metadata.packets)
        self.worker.begin_final_stores(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: StepMeta) -> None:
        # Both of vLLM's runners call this last before the forward pass. One of them zeroes and copies blocks after
        # ``handle_preemptions``, and loads must wait for that.
        super().bind_connector_metadata(connector_metadata)
        self.worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing. Loads have already started, because vLLM may call this after it has launched the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing. Compute waits for the loads within its step, and other requests wait for their own loads."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing, because whole blocks are stored after the forward pass."""

    def wait_for_save(self) -> None:
        self.worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.take_results(may_nap=not self._get_connector_metadata().has_forward_pass)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_invalid_block_ids()

    def build_connector_worker_meta(self) -> StepReport | None:
        return self.worker.take_report()

    # -------------------------------------------------------------------------------------------------- metrics

    def get_kv_connector_stats(self) -> OffloadStats | None:
        return self.scheduler.get_stats() if self.role is KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadStats:
        return OffloadStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> OffloadPromMetrics:
        config = config_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        tiers = [options.label for options in _tiers_of(config)]
        series = OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        series.begin(tiers)
        return series


def _check_region(spec: OffloadingSpec) -> None:
    """Raise ``ConfigError`` unless all processes of this node's ranks share their host memory with the scheduler.

    vLLM creates the scheduler after the workers have registered their KV caches. So all ranks have joined by then.
    """
    if isinstance(spec, CPUOffloadingSpec) and (num_joined := spec.wait_for_ranks(_JOIN_TIMEOUT_S)) is not None:
        raise NO_SHARED_MEMORY.error(f"only {num_joined} of {spec.layout.num_processes} processes share it")


def _log_who_finds_blocks(vllm_config: Any, config: OffloadingConfig) -> None:
    logger.info("kvoffload's tiers serve engines with the same options and weights")
    for note in (note_on_adapters(vllm_config, config), note_on_media(vllm_config, config)):
        if note is not None:
            logger.info("%s", note)


def _left_out(model_config: Any, config: OffloadingConfig) -> Callable[[Any], bool] | None:
    """Return a function that tells whether the keys of a request identify its blocks too poorly for persistent tiers,
    or ``None`` if all keys are good."""
    if outliving_tier(config) is None or not model_config.enable_prompt_embeds:
        return None
    return lambda request: _has_unclear_embeddings(request, model_config.dtype)


def _has_unclear_embeddings(request: Any, dtype: torch.dtype) -> bool:
    """Return whether the keys of a request leave open what its embeddings are. vLLM hashes the bytes of embeddings, but
    neither their dtype nor the tokens that they replace."""
    embeddings = request.prompt_embeds
    return embeddings is not None and (embeddings.dtype != dtype or request.prompt_is_token_ids is not None)


def hit_source(place: Place) -> CacheHitSource:
    """Return the name of hits from a tier in vLLM's metrics."""
    if place.medium == "CPU":
        return CacheHitSource.HOST
    return CacheHitSource.DISK if place.locality == "LOCAL" else CacheHitSource.EXTERNAL_UNSPECIFIED


def _tiers_of(config: OffloadingConfig) -> tuple[StoreOptions, ...]:
    """Return the tiers below host memory. Empty if the user's own spec defines them: their first report shows them."""
    try:
        return parse_tiers(config.secondary_tiers)
    except ConfigError:
        return ()


class _SchedulerSide:
    """``OffloadingConnectorScheduler`` and its translators. Used in the engine core, on the scheduler's thread."""

    def __init__(
        self,
        spec: OffloadingSpec,
        layout: EngineLayout,
        config: OffloadingConfig,
        leaves_out: Callable[[Any], bool] | None = None,
        blocks_are_written_early: bool = False,
        can_describe: bool = True,
        group_ids: Sequence[int] | None = None,
        encodings_are_foreign: bool = False,
        weights_name: EqualWeights | None = None,
        adapters: Adapters | None = None,
        media: Media | None = None,
    ) -> None:
        """``leaves_out`` tells whether the keys of a request identify its blocks too poorly. ``adapters`` and ``media``
        are ``None`` if vLLM's keys identify the blocks of all requests with adapters or media.

        ``can_describe``: a block's hash covers all tokens up to its end, so that events can name them. ``group_ids``:
        vLLM's numbers of the offloaded groups, or ``None`` for all. ``encodings_are_foreign``: see ``Device``.
        ``weights_name`` returns the name of the weights that vLLM has loaded on all nodes.
        """
        manager = GuardedManager(spec.get_manager())
        self._nodes = spec.nodes if isinstance(spec, TieringOffloadingSpec) else None
        self._adapters, self._media = adapters, media
        reasons = [] if leaves_out is None else [leaves_out]
        if adapters is not None:
            reasons.append(adapters.leaves_out)
        if media is not None:
            reasons.append(media.leaves_out)
        self._device = Device(encodings_are_foreign)
        self.core = OffloadingConnectorScheduler(
            manager,
            layout,
            config,
            leaves_out=(lambda request: any(each(request) for each in reasons)) if reasons else None,
            watch=_spans() if layout.traces_enabled else None,
            weights_name=weights_name or str,
        )
        self._weights_name = weights_name
        self._group_ids = group_ids
        self._steps = StepTranslator(group_ids)
        self._has_states = layout.has_states
        self._places = places_of(_tiers_of(config))
        self._publishes_events = layout.events_enabled
        self._events = EventTranslator(
            layout,
            layout.block_size_factor(config),
            describe=config.self_describing_kv_events and layout.events_enabled and can_describe,
            places=self._places,
        )
        self._updates: set[str] = set()
        """Calls of workers that the log has already reported as updates of weights."""
        self._ended_events: list[Any] = []
        """Events of earlier epochs that vLLM has not taken yet."""
        self._reporter = StatsReporter()
        self._stats_due_s = 0.0
        self._is_reported = True
        """Nothing has happened since the last report of statistics."""
        self._holds_blocks = blocks_are_written_early
        self._held: HeldBlocks | None = None
        self.block_pool: Any = None
        # In the step that vLLM is scheduling:
        self._refused_running = False
        """vLLM found no blocks for a running request."""
        self._refused_waiting = False
        """vLLM got an answer for a waiting request, and has not allocated blocks for it since."""

    def bind_block_pool(self, pool: Any) -> None:
        self.block_pool = pool
        self._steps = StepTranslator(self._group_ids, pool.null_block.block_id)
        if self._holds_blocks:
            self._held = HeldBlocks(pool)
            self.core.hold_sources(self._held)
        self._device.bind(pool, lambda: len(self._held.blocks_without_request()) if self._held is not None else 0)

    def on_new_request(self, request: Any) -> None:
        self.core.on_new_request(self._track(request))

    def _track(self, request: Any) -> Any:
        """Return ``request`` as the connector sees it. From now on events can describe its blocks."""
        own = self._own(request)
        if self._publishes_events:
            self._events.track(request, own if own.block_hashes is not request.block_hashes else None)
        return own

    def _own(self, request: Any) -> Any:
        """Return ``request`` as the connector sees it."""
        if self._media is not None:
            request = self._media.of(request)
        return request if self._adapters is None else self._adapters.of(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.core.is_closed and self._device.is_empty():
            self.core.open_epoch()
        if self._adapters is not None and self._adapters.waits_for_empty_device and self._device.is_empty():
            self._adapters.device_is_empty()
        own = self._track(request)  # before the lookup promotes blocks, whose events are sent at the end of this step
        if self._adapters is not None:
            self._adapters.admit(own, num_computed_tokens)
        answer = self.core.get_num_new_matched_tokens(own, num_computed_tokens)
        self._refused_waiting |= answer[0] is not None
        return answer

    def has_pending_block_frees(self) -> bool:
        self._refused_running = True
        return self._held is not None and bool(self._held.blocks_without_request())

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None:
        self._refused_waiting = False
        own = self._own(request)
        if num_external_tokens and self._adapters is not None:
            self._adapters.has_loaded_blocks(own)
        self.core.update_state_after_alloc(own, self._steps.block_ids(block_ids), num_external_tokens)

    def hit_sources(self, request: Any) -> dict[Any, int]:
        sources: dict[Any, int] = {}
        for tier, tokens in self.core.hit_tokens_by_tier(self._own(request)).items():
            place = self._places.get(tier, Place("STORAGE"))
            source = hit_source(place)
            sources[source] = sources.get(source, 0) + tokens
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        if scheduler_output.scheduled_encoder_inputs:
            self._device.encoders_run()
        step = self._steps.step(scheduler_output)
        if self._has_states:
            step = with_states(step, scheduler_output, self._group_ids)
        if self._held is not None and (self._refused_running or self._refused_waiting or not step.scheduled):
            # Release the blocks for vLLM's next step. A step without a forward pass has time.
            step = with_needed_blocks(step, self._held.blocks_without_request())
        self._refused_running = self._refused_waiting = False
        meta = self.core.build_connector_meta(step)
        packets = self._nodes.take_packets() if self._nodes is not None else ()
        tokens, checks = scheduler_output.num_scheduled_tokens, None
        if self._adapters is not None:
            checks = self._adapters.checks(tokens, (job.request_id for job in (*meta.stores, *meta.final_stores)))
        return StepMeta(meta, bool(tokens), packets, checks)

    def step_has_ended(self, scheduler: Any, connector_output: Any) -> None:
        """vLLM's ``scheduler`` will now read the output of a step. Loads within steps depend on this call."""
        self.core.load_within_steps()
        if connector_output is None:
            return
        whole = connector_output.kv_connector_worker_meta
        for each in getattr(whole, "metadata", (whole,)):  # of each connector of a ``MultiConnector``
            if isinstance(each, StepReport):
                try:
                    self._take_output(connector_output.invalid_block_ids, each)
                finally:
                    if each.report.undefined_loads or each.must_undo:
                        undo_step(scheduler)

    def update_connector_output(self, connector_output: Any) -> None:
        self._take_output(connector_output.invalid_block_ids, connector_output.kv_connector_worker_meta)

    def _take_output(self, invalid_block_ids: Collection[int] | None, worker_meta: StepReport | None) -> None:
        if worker_meta is not None and worker_meta.is_taken:
            return
        if invalid_block_ids:  # maybe of another connector beside this one
            self.core.blocks_are_undefined(invalid_block_ids)
        if worker_meta is not None:
            worker_meta.is_taken = True
            if self._nodes is not None:
                self._nodes.receive(worker_meta.packets)
            self.core.update_connector_output(worker_meta.report)
            if self._adapters is not None:
                self._adapters.others_are_loaded(worker_meta.other_adapters)
            if self._weights_name is not None:
                self._weights_name.add(worker_meta.weights)
            self._is_reported = False

    def request_finished(self, request: Any) -> None:
        if self._publishes_events:
            self._events.finish(request)
        own = self._own(request)
        self.core.request_finished(own)
        if self._adapters is not None:
            self._adapters.finish(own)
        if self._media is not None:
            self._media.finish(request)
        self._is_reported = False

    def take_events(self) -> list[Any]:
        if not self._publishes_events:
            return []
        ended, self._ended_events = self._ended_events, []
        events, group_ids = ended + self._translate(), self._group_ids
        if group_ids is None:
            return events
        return [replace(event, group_idx=group_ids[event.group_idx]) for event in events]

    def _translate(self) -> list[Any]:
        return self._events.translate(self.core.take_events())

    def reset_cache(self) -> None:
        self._begin_epoch(self.core.reset_cache)

    def weights_may_change(self, method: str) -> None:
        if method not in self._updates:
            self._updates.add(method)
            logger.warning(
                "kvoffload treats %s as an update of vLLM's weights. It no longer finds earlier blocks, and stores "
                "nothing while vLLM's prefix cache contains some. Reset this cache together with the connector.",
                method,
            )
        self._device.weights_may_change()
        self._begin_epoch(self.core.change_weights)

    def device_is_released(self) -> None:
        self.core.undo_reset()

    def encoder_cache_is_reset(self) -> None:
        self._device.encoder_cache_is_reset()

    def adapter_is_loaded(self, adapter: Any) -> None:
        if self._adapters is not None:
            self._adapters.load(adapter)

    def _begin_epoch(self, begin: Callable[[bool], bool]) -> None:
        device_is_empty = self._device.is_empty()
        if device_is_empty and self._adapters is not None:
            self._adapters.device_is_empty()
        tiers_are_kept = begin(device_is_empty)
        if not self._publishes_events:
            return
        self._ended_events += self._translate()
        if not tiers_are_kept:
            self._ended_events += self._events.forget_tiers()

    def get_stats(self) -> OffloadStats | None:
        now_s, is_idle = time.monotonic(), self.core.is_idle()
        self._is_reported = self._is_reported and is_idle
        # When vLLM is idle, its gauges keep the values of the last step.
        if now_s < self._stats_due_s and (self._is_reported or not is_idle):
            return None
        self._is_reported = True
        self._stats_due_s = now_s + _STATS_INTERVAL_S
        if not self._publishes_events:
            self.core.take_events()  # which tiers of others may record all the same
        return self._reporter.report(self.core.get_stats())


def _spans() -> Watch:
    from kvoffload.engines.vllm.spans import Spans  # loads OpenTelemetry

    return Spans()


class _WorkerSide:
    """``OffloadingConnectorWorker``, and the results of loads in vLLM's form. Used in a worker, on its thread."""

    def __init__(
        self,
        spec: OffloadingSpec,
        layout: EngineLayout,
        kv_cache_config: Any,
        weights_on_node: Known = lambda: None,
    ) -> None:
        self.core = OffloadingConnectorWorker(layout.rank)
        self._spec = spec
        self._layout = layout
        self._kv_cache_config = kv_cache_config
        self._fails_by_block = fails_by_block(kv_cache_config)
        self._agent = spec.make_agent() if isinstance(spec, TieringOffloadingSpec) else None
        self._invalid_block_ids: set[int] = set()
        self._adapters: LoadedAdapters | None = None
        self._weights_on_node = weights_on_node
        """The name that this worker must still send."""

    def watch_adapters(self) -> None:
        """vLLM serves adapters: record which files it loads."""
        self._adapters = LoadedAdapters(self._layout.rank)
        try:
            loaded_adapters.watch()
        except Exception as exc:  # noqa: BLE001 - then nothing is stored under the names of an adapter's files
            logger.warning(
                "kvoffload cannot see which LoRA adapters vLLM loads (%s), so persistent tiers do not serve requests "
                "with an adapter. Set adapters_never_change if you never replace one.",
                exc,
            )

    def begin_final_stores(self, step: StepMeta) -> None:
        self.end_step()  # of a step for which vLLM did not call it
        stores, flush_job_ids = step.meta.final_stores, step.meta.flush_job_ids
        if self._adapters is not None:
            stores = self._adapters.begin_final_stores(stores, step.adapters)
        if stores or flush_job_ids:
            self.core.start_step(ConnectorMeta(final_stores=stores, flush_job_ids=flush_job_ids))

    def begin_step(self, step: StepMeta) -> None:
        loads, stores = step.meta.loads, step.meta.stores
        if self._adapters is not None:
            stores = self._adapters.begin_step(stores, step.adapters)
        if loads or stores:
            self.core.start_step(ConnectorMeta(loads=loads, stores=stores))

    def end_step(self) -> None:
        if self._adapters is not None and (checked := self._adapters.end_step()) is not None:
            self.core.start_step(checked)
        self.core.end_step()

    def take_report(self) -> StepReport | None:
        report, packets = self.core.get_report(), self.take_packets()
        others, must_undo = frozenset[Mismatch](), False
        if self._adapters is not None:
            refused, others, must_undo = self._adapters.take()
            if refused:
                report = WorkerReport.merge((report, WorkerReport(refused)))
        weights: tuple[str, ...] = ()
        if (name := self._weights_on_node()) is not None:
            weights, self._weights_on_node = (name,), lambda: None
        has_news = report.results or report.undefined_loads or packets or others or must_undo or weights
        return StepReport(report, packets, others, must_undo, weights) if has_news else None

    def register(self, kv_caches: dict[str, torch.Tensor], flushes_on_host: bool) -> None:
        """Register ``kv_caches``, by layer name. Layers that only reuse the cache of another layer are ignored."""
        config = self._kv_cache_config
        layers = [
            [LayerCache(name, _tensors(kv_caches[name])) for name in group.layer_names]
            for group in offloaded_groups(config)
        ]
        part = self._layout.slice
        try:
            if self._layout.rank_free:
                layout = config.kv_cache_layout
                caches = canonicalize_heads(layers, config.num_blocks, layout, part.index, part.num_slices)
            else:
                caches = canonicalize(layers, config.num_blocks)
        except LayoutError as exc:
            raise UNKNOWN_TENSORS.error(str(exc).rstrip(".")) from exc
        for index, (refs, group) in enumerate(zip(caches.group_data_refs, self._layout.groups, strict=True)):
            num_bytes = sum(ref.page_size_bytes for ref in refs)
            if num_bytes > group.page_bytes:
                raise UNKNOWN_TENSORS.error(
                    f"a GPU block of KV group {index} has {num_bytes} bytes, and the scheduler side expects "
                    f"{group.page_bytes}"
                )
        self.core.register_kv_caches(self._spec, caches, flushes_on_host)

    def receive(self, packets: tuple[Packet, ...]) -> None:
        if self._agent is not None:
            self._agent.receive(packets)

    def take_packets(self) -> tuple[Packet, ...]:
        return self._agent.take_packets() if self._agent is not None else ()

    def take_results(self, may_nap: bool) -> KVConnectorTransferResults:
        """Return the requests whose load ended on this rank. If loads fail by block, ``take_invalid_block_ids`` returns
        the failed blocks."""
        outcome = self.core.take_load_outcome()
        if may_nap and not outcome.ended_request_ids:
            time.sleep(_NAP_S)
            outcome = self.core.take_load_outcome()
        ended = set(outcome.ended_request_ids)
        if not self._fails_by_block:
            return KVConnectorTransferResults(finished_recving=ended, failed_recving=set(outcome.failed_loads))
        self._invalid_block_ids |= outcome.invalid_block_ids
        return KVConnectorTransferResults(finished_recving=ended)

    def take_invalid_block_ids(self) -> set[int]:
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid


def _tensors(cache: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(cache) if isinstance(cache, (list, tuple)) else (cache,)
