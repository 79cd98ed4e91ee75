# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: keys, request contexts, load/store specs, events, and the two seams every backend fills.

The control plane (``OffloadingManager``, scheduler process) decides what is stored, kept and evicted. The data plane
(``OffloadingHandler``, worker process) moves bytes. They share only the small records of this module, so importing it
loads neither torch nor an engine. The names here are stable: engines, tiers and policies build on them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, NewType, Self

import numpy as np
import numpy.typing as npt

from kvoffload.load_tiers import LoadTiers
from kvoffload.lost_blocks import NO_LOSSES, Loss, LostBlocks
from kvoffload.miss import Miss

if TYPE_CHECKING:
    import torch

    from kvoffload.config import OffloadingConfig
    from kvoffload.metrics import Stats

# --------------------------------------------------------------------------------------------------------- keys

OffloadKey = NewType("OffloadKey", bytes)
"""Identity of one offloaded block: the engine's block hash, then the KV group's index in four bytes.

Plain bytes rather than a tuple: hashed once, compared by memcmp, invisible to the garbage collector.
"""

_GROUP_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """``block_hash`` followed by ``group_idx`` (unsigned, big endian, 4 bytes; ``OverflowError`` outside that)."""
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big", signed=False))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """The engine's block hash inside ``key``."""
    return key[:-_GROUP_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """The KV group index inside ``key``."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big", signed=False)


# ----------------------------------------------------------------------------------------------------- requests


class NextUse(IntEnum):
    """What a client says of a request's blocks: when it will use them again. A hint, which may be wrong."""

    UNKNOWN = 0
    """It said nothing."""
    SOON = 1
    """Within a minute."""
    LATER = 2
    """Within ten minutes."""
    NEVER = 3
    """The client is done with them. Others may still use what they share."""

    @classmethod
    def named(cls, name: object) -> NextUse | None:
        """``"soon"``, ``"later"`` or ``"never"``; ``None`` for anything else."""
        return _NEXT_USES.get(name) if isinstance(name, str) else None


_NEXT_USES = {use.name.lower(): use for use in NextUse if use is not NextUse.UNKNOWN}


@dataclass(slots=True)
class ReqContext:
    """What managers may know of a request: its id, and the parameters its client sent along for KV transfer."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    reads_cache: bool = True
    """``False``: the request wants all of its prompt computed. It looks nothing up, and its offers are no reuse."""
    load_tiers: LoadTiers | None = None
    """The tiers below the primary one that it may load from; ``None``: all."""
    next_use: NextUse = NextUse.UNKNOWN
    """When the client says that it will use the request's blocks again."""
    tokens_ahead: int | None = None
    """While the request waits for its turn: the tokens that the engine computes before it, including the step that was
    just decided, but not the rest of running prompts. ``None``: its turn has come. The connector sets it."""


class OffloadPolicy(Enum):
    """How much of a request is offered for offloading."""

    BLOCK_LEVEL = "block_level"
    """Only blocks the request computed; what came from a hit is stored already. The default."""
    REQUEST_LEVEL = "request_level"
    """All blocks of the request, hits included: for tiers that need a request's whole context."""


@dataclass(slots=True)
class RequestOffloadingContext:
    """A manager's (or tier's) answer to ``on_new_request``."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


# -------------------------------------------------------------------------------------------------------- specs


class LoadStoreSpec(ABC):
    """One end of a transfer: where its bytes lie. Picklable; built by the control plane, read by a handler."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """The medium's name, ``"GPU"`` or ``"CPU"``: handlers are chosen by the pair (source, destination)."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """A spec that names its bytes by block ids alone.

    ``block_ids`` is any sequence of non-negative ints. It becomes a one-dimensional int64 array in transfer order when
    it is read first, which is in the worker: the scheduler's thread only writes specs. An id may occur more than once.
    """

    __slots__ = ("_ids",)

    def __init__(self, block_ids: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self._ids: list[int] | npt.NDArray[np.int64]
        self._ids = block_ids if isinstance(block_ids, np.ndarray) else list(block_ids)

    @property
    def block_ids(self) -> npt.NDArray[np.int64]:
        self._ids = ids = np.asarray(self._ids, dtype=np.int64)
        return ids

    def in_order(self, order: Sequence[int]) -> Self | None:
        """Return a spec of the same kind with the block ids at these indices, in this order. ``None`` if there are more
        or fewer ids than indices."""
        if len(self._ids) != len(order):
            return None
        other = copy.copy(self)
        other._ids = [self._ids[at] for at in order]
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """GPU blocks of one request, group after group.

    ``group_sizes[g]`` GPU blocks belong to KV group ``g`` (``sum(group_sizes) == len(block_ids)``; a group may
    have none). ``block_indices[g]`` is the position in the request of the group's first GPU block here, so that
    a transfer may start inside an offloaded block: with ``block_size_factor`` f it starts at sub-block
    ``block_indices[g] % f`` of the first CPU block listed for the group.
    """

    __slots__ = ("block_indices", "group_sizes")

    def __init__(
        self,
        block_ids: Sequence[int] | npt.NDArray[np.int64],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
    ) -> None:
        super().__init__(block_ids)
        if sum(group_sizes) != len(self._ids):
            raise ValueError(
                f"group_sizes must add up to the number of block_ids: {list(group_sizes)} for {len(self._ids)}."
            )
        if len(block_indices) != len(group_sizes):
            raise ValueError(
                f"block_indices needs one entry per group: {len(block_indices)} for {len(group_sizes)} groups."
            )
        self.group_sizes: tuple[int, ...] = tuple(group_sizes)
        self.block_indices: tuple[int, ...] = tuple(block_indices)

    def __repr__(self) -> str:
        return (
            f"GPULoadStoreSpec({self.block_ids.tolist()}, group_sizes={list(self.group_sizes)}, "
            f"block_indices={list(self.block_indices)})"
        )

    @staticmethod
    def medium() -> str:
        return "GPU"


@dataclass(slots=True)
class PrepareStoreOutput:
    """The result of ``prepare_store``: the offered keys that are to be written, where to write each (``store_spec``, in
    the same order), and the keys evicted to make room."""

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]


@dataclass(slots=True)
class OffloadingEvent:
    """Blocks that appeared in (``removed=False``) or left (``removed=True``) a medium.

    There is no block size: one event may group blocks of KV groups whose sizes differ, and the engine's own
    events carry them already.
    """

    keys: list[OffloadKey]
    medium: str
    removed: bool

    @property
    def clears(self) -> bool:
        """A removal without keys: changes of the medium were lost before this event. None of its announced blocks
        counts any longer, and events of those that it has follow."""
        return self.removed and not self.keys


class StepWork(NamedTuple):
    """What an engine does in one step, from which a manager learns how fast it computes."""

    tokens: int = 0
    """All tokens that the step computes."""
    prompt_tokens: int = 0
    """Those of them that belong to prompts."""
    queued_tokens: int = 0
    """Prompt tokens of running requests that are left for later steps."""
    is_continued: bool = False
    """A request of an earlier step runs in this one, so the engine did not idle between the step before and this."""


# ------------------------------------------------------------------------------------------------ control plane


class Weighed(NamedTuple):
    """Blocks of one tier for a request that waits, and what they were weighed against. Times are what was expected."""

    tier: str
    num_blocks: int
    expected_s: float
    """Until they are in host memory."""
    others_s: Mapping[str, float]
    """The same from each other tier that has all of them."""
    computing_s: float | None
    """Of their tokens; ``None``: the engine's speed is not known."""

    def as_json(self) -> dict[str, object]:
        return {
            "tier": self.tier,
            "blocks": self.num_blocks,
            "expected_s": round(self.expected_s, 6),
            "others_s": {name: round(seconds, 6) for name, seconds in self.others_s.items()},
            "computing_s": None if self.computing_s is None else round(self.computing_s, 6),
        }


class OffloadingManager(ABC):
    """Decides what is stored, kept and evicted. Lives in the scheduler process; every call is on its thread.

    Called by the connector's scheduler side, per request, in this order::

        on_new_request                                      once, before anything else
        lookup*                                             per step while the request waits; None = ask again
        touch                                               blocks in use, wherever they were found
        prepare_load -> (transfer) -> complete_load         pins, then unpins, the same keys
        prepare_store -> (transfer) -> complete_store       reserves, then publishes or frees, keys_to_store
        on_request_finished                                 once, after the request's last prepare_*

    and once per step ``note_step``, ``on_schedule_end`` and ``take_events``. ``complete_*`` may arrive after
    ``on_request_finished``: a transfer outlives its request, which is why those two need no request context.

    No method blocks, does I/O or raises because a tier is broken: a failure is a miss. Methods that take pins or slots
    and methods that give them back are all abstract, so that a subclass forgets neither. Only options have defaults.
    """

    lost: LostBlocks = NO_LOSSES
    """Where lost blocks are recorded, if a trace is."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """``True``: ready to load. ``False``: not here. ``None``: not yet; ask again in a later step."""

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, ends: Collection[OffloadKey] | None = None
    ) -> list[bool | None]:
        """Answers for ``keys`` in order, up to and including the first ``False``, each with the meaning it has in
        ``lookup``.

        ``lookup`` of a key equals ``lookup_prefix`` of that key alone, side effects included. A manager that decides
        block by block equals the loop of ``lookup``, and overrides this only to be faster. One that weighs the blocks
        of a call together may answer ``False`` earlier or later than the loop.

        ``ends``: of the blocks that the request looks up now, the last ones of hits that it could use. ``None``: each
        may be the last. Where a model has states, a hit ends at one of them, and whoever loads a part of a hit would
        load what comes after the last of them for nothing. ``in`` is O(1).
        """
        answers: list[bool | None] = []
        for key in keys:
            answer = self.lookup(key, req_context)
            answers.append(answer)
            if answer is False:
                break
        return answers

    def reads_ahead(self) -> bool:
        """Whether lookups for requests that wait for their turn (``ReqContext.tokens_ahead``) are of use now: a tier
        can begin to read, and there is room for its blocks."""
        return False

    def is_waiting(self, req_context: ReqContext) -> bool:
        """Whether the request waits, for its turn perhaps, and nothing has happened to the blocks that it waits for, so
        that its last lookups would get the same answers again."""
        return False

    def peek(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Whether lookups may find ``keys`` in the end, in order, up to the first ``False``; ``None``: not known (yet).
        Unlike a lookup it promotes nothing, makes no request wait and does not use a block. ``False`` only if a lookup
        would say so too."""
        return [None] * len(keys)

    def peek_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """``peek`` at each of ``keys`` alone: the answers go on after a ``False``."""
        return [self.peek([key], req_context)[0] for key in keys]

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pins ``keys``, each of which ``lookup`` found (``True``) in this step. Returns where they lie, in order."""

    @abstractmethod
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Gives back the pins of one ``prepare_load`` of these keys, whether or not the transfer succeeded."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Marks a request's prefix, given head to tail, as just used; keys that are not here are ignored."""

    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserves slots for those of ``keys`` that should be stored and are not here yet.

        ``None``: there is no room now, and nothing was changed. An empty ``keys_to_store`` means nothing to do.
        """

    @abstractmethod
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        """Publishes ``keys`` (``keys_to_store`` of an earlier ``prepare_store``), or frees them if not ``success``."""

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request arrives. Returns how its blocks are to be offered. Abstract, so that no manager forgets it."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No more ``lookup`` or ``prepare_*`` for this request; transfers in flight may still complete."""

    def note_step(self, work: StepWork) -> None:
        """What the step that is being decided computes. Called just before ``on_schedule_end``. A manager that weighs
        loading against computing learns from it; for others there is nothing to do."""

    def on_schedule_end(self) -> None:
        """The step is decided: submit what was gathered. Called on every step, also those without a forward pass."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events since the last call, in the order things became true. Folding them gives the resident set."""
        return ()

    def has_pending_work(self) -> bool:
        """Whether steps are needed (``on_schedule_end``) although no request runs."""
        return False

    def reset_cache(self) -> None:
        """Forgets every block. Transfers in flight keep their slots until they complete; they publish nothing."""

    def get_stats(self) -> Stats:
        """Current metric values (``kvoffload.metrics``): counters since start, gauges now."""
        return {}

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Which blocks are here or below, as far as that is known. Unlike a lookup it promotes nothing."""
        return [False] * len(keys)

    def sources(self, req_context: ReqContext) -> Mapping[OffloadKey, str]:
        """The blocks that were promoted while the request waits for them, with the tier that they came from. To be read
        before they are loaded."""
        return {}

    def weighed(self, req_context: ReqContext) -> Sequence[Weighed]:
        """Why its blocks come from these tiers, one entry for each. To be read before they are loaded."""
        return ()

    def explain(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[Loss | None]:
        """Why the request did not get each of ``keys``; ``None``: the block is here or below. Only known in full while
        losses are recorded (``lost``)."""
        held = self.holds(keys)  # first: tiers record what they lost meanwhile
        losses = self.lost.find(keys)
        return [None if is_held else loss or Loss(Miss.NEW) for is_held, loss in zip(held, losses, strict=True)]

    def shutdown(self) -> None:
        """Releases threads and files. Idempotent."""


# --------------------------------------------------------------------------------------------------- data plane


class Direction(Enum):
    """Which way a transfer moves blocks. The values are the first words of metric names."""

    LOAD = "load"
    """From the primary tier to the device."""
    STORE = "store"
    """From the device to the primary tier."""


class TransferResult(NamedTuple):
    """The end of one transfer on one rank. ``OffloadingHandler.get_finished`` returns each once."""

    job_id: int
    success: bool
    num_bytes: int = 0
    """Bytes moved, 0 on failure."""
    seconds: float = 0.0
    """Duration of the copy itself, without the time in the queue."""


class OffloadingHandler(ABC):
    """Moves blocks in one direction, for one pair (source medium, destination medium). Lives in a worker.

    The worker's own thread calls all methods. Only ``wait``, ``shutdown`` and the default of ``flush`` block. A
    transfer that fails is a ``TransferResult`` with ``success=False``, never an exception.
    """

    @abstractmethod
    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        """Starts copying ``spec = (source, destination)``, ordered after the compute submitted so far."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Every transfer that ended since the last call, each once."""

    @abstractmethod
    def wait(self, job_ids: Collection[int]) -> None:
        """Returns once these transfers have ended. ``get_finished`` still returns them. Unknown ids are ignored."""

    def flush(self, job_ids: Collection[int]) -> None:
        """Compute submitted from now on finds these transfers ended: it waits for them on the device where that is
        possible, else the host waits for them here. Not enough where something else than the device's compute uses
        their GPU blocks. Those that have failed by then must be in the next ``get_finished``."""
        self.wait(job_ids)

    def take_addresses(self) -> None:
        """The engine had its KV cache unmapped, and has mapped it again: reads anew where its tensors lie. No transfer
        is open. A handler that cannot do that is given no transfer any more."""
        raise NotImplementedError(f"{type(self).__name__} does not know where an engine's memory lies after a sleep.")

    @abstractmethod
    def shutdown(self) -> None:
        """Waits for what runs, drops what is queued, releases threads and device resources. Idempotent."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """One block-major view of device memory: an int8 or uint8 tensor of shape (num_gpu_blocks, page_size_bytes).

    ``page_size_bytes`` is the contiguous part of each GPU block in this tensor; rows may lie further apart
    (padding, or layers interleaved in one allocation).
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class SharedPage:
    """A page of a slot that several ranks fill, each with the bytes of its own KV heads."""

    start: int
    """Bytes of a GPU block before this page, all ranks together."""
    num_bytes: int
    """Of the page, all ranks together."""
    offset: int
    """From the page's start to this rank's bytes."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """A part of a group's GPU block: the first ``page_size_bytes`` of a page in tensor ``tensor_idx``."""

    tensor_idx: int
    page_size_bytes: int
    shared: SharedPage | None = None
    """Where these bytes lie in a page of all ranks. ``None``: they are a page of this rank's slice alone, after those
    of the refs before."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """A worker's KV cache, whatever the engine's layout was.

    ``group_data_refs[g]`` lists, in storage order, the pages that make up one GPU block of KV group ``g``.
    Groups may share tensors: their GPU block ids then come from one pool.
    """

    tensors: list[CanonicalKVCacheTensor] = field(default_factory=list)
    group_data_refs: list[list[CanonicalKVCacheRef]] = field(default_factory=list)


class OffloadingSpec(ABC):
    """Builds both planes of one way of offloading from one validated configuration.

    An engine adapter makes one in the scheduler process, where only ``get_manager`` is called, and one in each
    worker process, where only ``get_handlers`` is. Constructors take ``(config, layout)``:
    ``kvoffload.config.OffloadingConfig`` and ``kvoffload.config.EngineLayout``, and refuse what cannot work
    (``ConfigError``) before anything is allocated.
    """

    @classmethod
    def check_config(cls, config: OffloadingConfig) -> None:
        """Raises ``ConfigError`` for what the constructor would refuse whatever the layout. An engine asks while it
        reads its configuration, before it loads a model. Allocates and touches nothing."""

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """The manager, made on first call and the same one afterwards."""

    @abstractmethod
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
        """The handlers for ``kv_caches``, by (source medium, destination medium); called once per worker."""

    def shutdown(self) -> None:
        """Releases what ``get_manager`` and ``get_handlers`` made. Idempotent."""
