# SPDX-License-Identifier: Apache-2.0
"""Record the requests in a trace, with an explanation of each: the sources of the prompt's tokens, the reasons to wait,
and the reasons why the rest was missing.

An observer exists only while requests are recorded or traced. Scheduler thread only.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple, ParamSpec

from kvoffload.base import OffloadingManager, OffloadKey, StepWork, Weighed
from kvoffload.config import EngineLayout, GroupKind, OffloadingConfig
from kvoffload.connector.engine import EngineRequest
from kvoffload.connector.epochs import Epoch, Epochs
from kvoffload.connector.groups import GroupGeometry, finest_of, hit_unit_tokens
from kvoffload.connector.jobs import JobRecord
from kvoffload.connector.recording import TraceRecorder
from kvoffload.connector.requests import UNLIMITED, Request
from kvoffload.connector.step_times import StepTimes
from kvoffload.errors import ConfigError
from kvoffload.lost_blocks import Loss
from kvoffload.miss import Miss
from kvoffload.units import parse_bytes

logger = logging.getLogger(__name__)
P = ParamSpec("P")

DEVICE = "device"


class Phase(NamedTuple):
    """A period during which a request waited for one thing, by the scheduler side's clock."""

    name: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Explanation:
    """The explanation of one request, from its arrival to its first token."""

    phase: str | None
    """The current reason to wait; ``None`` if there is none."""
    since_s: float
    phases: list[Phase] = field(default_factory=list)
    """The past periods of waiting, in order: ``queue`` (for the engine), ``tiers``, ``another load``, ``own transfers``
    and ``load``."""
    found: dict[str, int] = field(default_factory=dict)
    """Number of prompt tokens by source: the GPU (``device``), host memory (``CPU``), or a tier."""
    missed: dict[str, int] = field(default_factory=dict)
    """Number of computed prompt tokens by cause. Together with ``found``, they add up to the tokens of the prompt."""
    lost_s: dict[str, float] = field(default_factory=dict)
    """For causes with a time, such as evictions: the mean age in seconds over the tokens."""
    promoted_bytes: dict[str, int] = field(default_factory=dict)
    """Number of bytes that each lower tier loaded into host memory while the request waited."""
    weighed: Sequence[Weighed] = ()
    """The reasons for these tiers."""
    loaded_bytes: int = 0
    """Number of bytes that its load copied to the GPU, on all ranks."""

    def enter(self, phase: str | None, now_s: float) -> None:
        """End the current period, and start to wait for ``phase``, or for nothing if it is ``None``."""
        if self.phase is not None and now_s > self.since_s:
            self.phases.append(Phase(self.phase, self.since_s, now_s))
        self.phase, self.since_s = phase, now_s

    @property
    def waited_s(self) -> dict[str, float]:
        """Seconds of waiting by reason."""
        waited_s: dict[str, float] = {}
        for name, begin_s, end_s in self.phases:
            waited_s[name] = waited_s.get(name, 0.0) + end_s - begin_s
        return waited_s

    def as_json(self) -> dict[str, object]:
        return {
            "found": self.found,
            "missed": self.missed,
            "lost_s": {cause: round(seconds, 1) for cause, seconds in self.lost_s.items()},
            "waited_s": {phase: round(seconds, 6) for phase, seconds in self.waited_s.items()},
            "promoted_bytes": self.promoted_bytes,
            "weighed": [each.as_json() for each in self.weighed],
            "loaded_bytes": self.loaded_bytes,
        }


Watch = Callable[[EngineRequest], Callable[[Explanation], None] | None]
"""Called for each arriving request. It returns a function that receives the explanation when the request has ended, or
``None`` if the request needs no explanation. Scheduler thread."""


def _ends_recording(method: Callable[Concatenate[Observer, P], None]) -> Callable[Concatenate[Observer, P], None]:
    """Return ``method`` such that an exception ends the recording for good, and does not disturb the step."""

    @functools.wraps(method)
    def call(self: Observer, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_closed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception:
            logger.exception("Recording or tracing requests failed. kvoffload ends both, and continues to serve.")
            self.close()

    return call


class Observer:
    """Records and traces requests with their explanations, and records lost blocks, which explain the misses of later
    requests.

    The scheduler side reports the events of each request. The manager explains why the request did not get a block
    (``OffloadingManager.explain``). If a block is present but was not used, an earlier block was missing, and the
    present block gets the same cause.

    The explanations are written to the trace in the file ``config.record_trace``, unless it is ``None``, and passed to
    ``watch``. The path may contain ``{pid}``, for engines that run several schedulers. The trace lists the blocks of
    the group with the smallest blocks. The file is created at once, so that a path that cannot be written raises
    ``ConfigError`` before any request is served. Later failures end the recording with one line in the log.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        geometry: tuple[GroupGeometry, ...],
        layout: EngineLayout,
        config: OffloadingConfig,
        epochs: Epochs,
        clock: Callable[[], float],
        watch: Watch | None = None,
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._finest = finest_of(geometry)
        self._num_slots = layout.num_slots(config)
        self._block_bytes = layout.block_bytes(layout.block_size_factor(config))
        self._epochs = epochs
        self._clock = clock
        self._lost = manager.lost
        self._recorder: TraceRecorder | None = None
        if config.record_trace:
            path = config.record_trace.replace("{pid}", str(os.getpid()))
            size = self._finest.block_tokens
            self._recorder = TraceRecorder(path, size, _machine(geometry, size, layout, config))
        self._step_times = StepTimes(clock)
        self._watch = watch
        self._watched: dict[Request, Callable[[Explanation], None]] = {}
        self.is_closed = False
        self._unfinished: dict[Request, Explanation] = {}
        """The explanations of recorded or watched requests that have not ended."""
        self._before: Epoch | None = None
        """The epoch that the last reset ended."""
        self._reset_s = 0.0

    def __repr__(self) -> str:
        return f"Observer({self._recorder}, {len(self._unfinished)} requests)"

    def close(self) -> None:
        """Write the remaining requests, even if they have not finished, and close the trace. Idempotent, and never
        raises."""
        if not self.is_closed:
            self.is_closed = True
            self._watched.clear()
            self._unfinished.clear()
            try:
                if self._recorder is not None:
                    self._recorder.close()
            except Exception:
                logger.exception("The trace could not be closed.")

    # ------------------------------------------------------------------------------------- events of a request

    @_ends_recording
    def arrived(self, request: Request) -> None:
        tell = self._watch(request.of_engine) if self._watch is not None else None
        if tell is not None:
            self._watched[request] = tell
        elif self._recorder is None:
            return
        request.extend_keys()
        now_s = self._clock()
        self._unfinished[request] = Explanation("queue", now_s)
        if self._recorder is not None:
            context, prompt_tokens = request.context, request.of_engine.num_prompt_tokens
            keys = request.groups[self._finest.index].keys[: prompt_tokens // self._finest.block_tokens]
            self._recorder.arrived(context.req_id, now_s, keys, prompt_tokens, next_use=context.next_use)

    @_ends_recording
    def step(self, work: StepWork) -> None:
        """Note a step, which has just been decided."""
        if self._recorder is not None:
            self._step_times.begin(work)

    @_ends_recording
    def deferred(self, request: Request, phase: str) -> None:
        """Note that a lookup had no answer, because of ``phase``."""
        explanation = self._unfinished.get(request)
        if explanation is not None and not explanation.found:
            explanation.enter(phase, self._clock())

    @_ends_recording
    def answered(self, request: Request) -> None:
        """Note that the lookup has an answer, so that the engine can admit the request."""
        explanation = self._unfinished.get(request)
        if explanation is not None and not explanation.found and explanation.phase != "queue":
            explanation.enter("queue", self._clock())
            explanation.weighed = self._manager.weighed(request.context)
            blocks = Counter(request.prefix.sources.values())
            explanation.promoted_bytes = {tier: number * self._block_bytes for tier, number in blocks.items()}

    @_ends_recording
    def admitted(self, request: Request) -> None:
        """Note that the request has GPU blocks. Later admissions change nothing."""
        explanation, hits = self._unfinished.get(request), request.prefix.tokens_by_tier or {}
        if explanation is None or explanation.found:
            return
        explanation.enter("load" if hits else None, self._clock())
        prompt_tokens = request.of_engine.num_prompt_tokens
        on_device = min(request.prefix.computed_tokens, prompt_tokens)
        explanation.found = {DEVICE: on_device, **hits}
        begin = min(on_device + sum(hits.values()), prompt_tokens)
        self._explain(request, explanation, begin, prompt_tokens)

    @_ends_recording
    def load_ended(self, job: JobRecord) -> None:
        """Note the end of a load. If its request has already ended, the explanation does not include the load."""
        explanation = self._unfinished.get(job.request)
        if explanation is None or explanation.phase != "load":
            return
        explanation.enter(None, self._clock())
        explanation.loaded_bytes = job.num_bytes
        if not job.success:
            lost = sum(explanation.found.values()) - explanation.found[DEVICE]
            explanation.found = {DEVICE: explanation.found[DEVICE]}
            explanation.missed[Miss.LOAD_FAILED] = explanation.missed.get(Miss.LOAD_FAILED, 0) + lost

    @_ends_recording
    def store_failed(self, job: JobRecord) -> None:
        self._lost.record(job.keys, Miss.STORE_FAILED)

    @_ends_recording
    def finished(self, request: Request, most_tokens: int, has_no_room: bool) -> None:
        """Note the end of a request, and write its explanation. Its blocks that were not accepted for store are lost,
        because of a lack of room if ``has_no_room``. Blocks from ``most_tokens`` on were excluded from storing. If the
        request was never admitted, it has no explanation in the trace."""
        self._record_losses(request, most_tokens, has_no_room)
        explanation = self._unfinished.pop(request, None)
        if explanation is None:
            return
        explanation.enter(None, self._clock())
        if (tell := self._watched.pop(request, None)) is not None:
            tell(explanation)
        if self._recorder is not None:
            output_tokens = max(request.of_engine.num_tokens - request.of_engine.num_prompt_tokens, 0)
            line = explanation.as_json() if explanation.found else None
            self._recorder.finished(request.context.req_id, output_tokens, line, self._step_times.take())

    @_ends_recording
    def reset(self, ended: Epoch) -> None:
        """Note a reset of the cache, which ended the epoch ``ended``."""
        self._before, self._reset_s = ended, self._clock()

    # ---------------------------------------------------------------------------------------------- why it was missing

    def _losses(self, keys: Sequence[OffloadKey], request: Request) -> list[Loss | None]:
        """Return for each of ``keys`` why the request did not get it; ``None``: the block is in host memory or a tier.
        Blocks that tiers still hold from the epoch before the last reset count as lost by that reset."""
        losses = self._manager.explain(keys, request.context)
        if self._before is None or self._before.seed == request.epoch.seed:
            return losses
        old = self._before.engine_keys(request.epoch.engine_keys(keys))
        by_reset = Loss(Miss.RESET, seconds_ago=self._clock() - self._reset_s)
        before = [loss or by_reset for loss in self._manager.explain(old, request.context)]
        return [
            old_loss if loss is not None and loss.miss is Miss.NEW else loss
            for loss, old_loss in zip(losses, before, strict=True)
        ]

    def _record_losses(self, request: Request, most_tokens: int, has_no_room: bool) -> None:
        limit = request.limits().max_offload_tokens
        beyond = Miss.REQUEST_LIMIT if limit is not None and limit <= most_tokens else Miss.PROMPT_ONLY
        if self._epochs.is_over(request.epoch):
            beyond = Miss.RESET
        short = None
        if has_no_room or not request.max_blocks:
            # Its own stores occupied all slots, or the stores of other requests did.
            short = Miss.TOO_LONG if self._surely_stored(request) > self._num_slots else Miss.REFUSED
        ready_tokens = request.ready_tokens
        for own in request.groups:
            ready = min(ready_tokens // own.group.block_tokens, len(own.keys))
            first_beyond = min(max(most_tokens // own.group.block_tokens, own.next_block), ready)
            if short is not None and own.next_block < first_beyond:
                self._lost.record(own.keys[own.next_block : first_beyond], short)
            if first_beyond < ready:
                self._lost.record(own.keys[first_beyond:ready], beyond)

    def _surely_stored(self, request: Request) -> int:
        """Return the least number of blocks that the whole request stores. Most states are never kept, and blocks
        behind a window may leave the GPU before they are offered."""
        blocks = dict.fromkeys(GroupKind, 0)
        for own in request.groups:
            blocks[own.group.kind] += len(own.keys)
        return blocks[GroupKind.FULL_ATTENTION] or blocks[GroupKind.SLIDING_WINDOW] or blocks[GroupKind.LOCAL_CHUNK]

    def _explain(self, request: Request, explanation: Explanation, begin: int, prompt_tokens: int) -> None:
        """Add the reasons why the prompt's tokens from ``begin`` on were missing."""
        unit, size = hit_unit_tokens(self._geometry), self._finest.block_tokens
        keys = request.groups[self._finest.index].keys
        # The farthest possible end of a hit. Hits end between GPU blocks, which may be smaller than offloaded ones.
        longest = [own.group.longest_hit(len(own.keys)) for own in request.groups]
        end = max(min(prompt_tokens - 1, *longest) // unit * unit, begin)
        if tail := prompt_tokens - end:
            explanation.missed[Miss.TAIL] = tail
        if end == begin:
            return
        if not request.context.reads_cache:
            explanation.missed[Miss.NOT_READ] = end - begin
            return
        blocks = range(begin // size, min(-(-end // size), len(keys)))
        losses = self._losses(keys[blocks.start : blocks.stop], request)
        loadable = UNLIMITED
        if (most := request.limits().max_load_tokens) is not None:
            loadable = (request.prefix.computed_tokens + most) // unit * unit
        loss = Loss(Miss.NEW)
        is_first = True
        for block, own in zip(blocks, losses, strict=True):
            if max(begin, block * size) >= loadable:
                loss = Loss(Miss.LOAD_LIMIT)
            elif own is not None:
                loss = own
            elif is_first:
                loss = self._why_no_longer_hit(request, (begin // unit + 1) * unit)
            is_first = False
            tokens = min(end, (block + 1) * size) - max(begin, block * size)
            before = explanation.missed.get(loss.cause, 0)
            explanation.missed[loss.cause] = before + tokens
            if loss.seconds_ago is not None:
                mean_s = explanation.lost_s.get(loss.cause, 0.0)
                explanation.lost_s[loss.cause] = (mean_s * before + loss.seconds_ago * tokens) / (before + tokens)

    def _why_no_longer_hit(self, request: Request, hit_tokens: int) -> Loss:
        """Return why there was no hit of ``hit_tokens``, the next longer hit, although the group with the smallest
        blocks has its next block. The reason is a block that another group lacks, or a block for looking ahead. After a
        failed load, there is no second load."""
        if request.prefix.load_failed:
            return Loss(Miss.LOAD_FAILED)
        for own in request.groups:
            blocks = own.group.blocks_to_find(request.prefix.computed_tokens, hit_tokens)
            for loss in self._losses(own.keys[blocks.start : blocks.stop], request):
                if loss is not None:
                    return loss
        return Loss(Miss.UNKNOWN)


def _machine(
    geometry: Sequence[GroupGeometry], finest: int, layout: EngineLayout, config: OffloadingConfig
) -> dict[str, object]:
    """Return the part of the configuration that ``kvoffload explain`` needs, without paths and addresses. ``finest`` is
    the number of tokens of the smallest block."""
    slots = sum(finest / group.block_tokens for group in geometry)
    return {
        "block_bytes": round(layout.block_bytes(layout.block_size_factor(config)) * slots),
        "cpu_bytes": config.cpu_bytes,
        "policy": config.eviction_policy,
        "store_threshold": config.store_threshold,
        "load_policy": config.load_policy,
        "device_blocks": None if layout.device_tokens is None else layout.device_tokens // finest,
        "tiers": [
            {
                "type": tier.get("type"),
                "max_bytes": _quota_of(tier.get("max_bytes")),
                "cascade": tier.get("cascade", "on_store" if tier.get("offload_policy") == "request_level" else None),
            }
            for tier in config.secondary_tiers
        ],
    }


def _quota_of(max_bytes: Any) -> int | None:
    """Return the number of bytes that a tier may use, for several disks together; ``None`` if it has no such limit."""
    try:
        return sum(map(parse_bytes, max_bytes if isinstance(max_bytes, list) else [max_bytes]))
    except ConfigError:
        return None
