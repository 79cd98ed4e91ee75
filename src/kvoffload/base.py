# SPDX-License-Identifier: Apache-2.0
"""The shared vocabulary: keys, request contexts, load/store specs, events, and the two interfaces that backends
implement.

The control plane (``OffloadingManager``, scheduler process) decides which blocks to store, keep and evict. The data
plane (``OffloadingHandler``, worker process) moves bytes. They share only the small records of this module, so
importing it loads neither torch nor an engine. The names in it are stable, because engines, tiers and policies depend
on them.
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
"""Identity of one offloaded block: the engine's block hash, followed by the KV group's index in four bytes.

It is plain bytes and not a tuple, so that Python hashes it only once, compares it with memcmp, and hides it from the
garbage collector.
"""

_GROUP_BYTES = 4


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """Return ``block_hash`` followed by ``group_idx`` (unsigned, big endian, 4 bytes). Raises ``OverflowError`` if the
    index does not fit."""
    return OffloadKey(block_hash + group_idx.to_bytes(_GROUP_BYTES, "big", signed=False))


def get_offload_block_hash(key: OffloadKey) -> bytes:
    """Return the engine's block hash in ``key``."""
    return key[:-_GROUP_BYTES]


def get_offload_group_idx(key: OffloadKey) -> int:
    """Return the KV group's index in ``key``."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big", signed=False)


# ----------------------------------------------------------------------------------------------------- requests


class NextUse(IntEnum):
    """A client's hint about when it will use a request's blocks again. It may be wrong."""

    UNKNOWN = 0
    """The client gave no hint."""
    SOON = 1
    """Within a minute."""
    LATER = 2
    """Within ten minutes."""
    NEVER = 3
    """The client does not need them again. Other clients may still use shared blocks."""

    @classmethod
    def named(cls, name: object) -> NextUse | None:
        """Return the member for ``"soon"``, ``"later"`` or ``"never"``, and ``None`` for anything else."""
        return _NEXT_USES.get(name) if isinstance(name, str) else None


_NEXT_USES = {use.name.lower(): use for use in NextUse if use is not NextUse.UNKNOWN}


@dataclass(slots=True)
class ReqContext:
    """The facts about a request that managers can use: its id, the client's parameters for KV transfer, and values that
    the connector derives from them."""

    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    reads_cache: bool = True
    """``False``: the request wants its whole prompt computed. It looks up no blocks, and its offers do not count as
    reuse."""
    load_tiers: LoadTiers | None = None
    """The tiers below host memory that it may load from; ``None``: all."""
    next_use: NextUse = NextUse.UNKNOWN
    """The client's hint about the next use of the request's blocks."""
    tokens_ahead: int | None = None
    """While the request waits for its turn: the number of tokens that the engine computes before it asks for the
    request, in whole steps, from the step that was just decided on. ``None``: its turn has come. The connector sets
    it."""
    tokens_before: int = 0
    """The number of tokens on the device before the blocks that the connector looks up. The connector sets it."""
    tokens_behind: int = 0
    """The number of tokens of the requests behind it in the queue, which overtake it if it misses its turn. Once its
    turn has come, all other requests count. The connector sets it with ``tokens_ahead``."""


class OffloadPolicy(Enum):
    """Which blocks of a request the connector offers for store."""

    BLOCK_LEVEL = "block_level"
    """Only blocks that the request computed, because the blocks of a hit are already stored. The default."""
    REQUEST_LEVEL = "request_level"
    """All blocks of the request, including hits, for tiers that need a request's whole context."""


@dataclass(slots=True)
class RequestOffloadingContext:
    """A manager's (or tier's) answer to ``on_new_request``."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


# -------------------------------------------------------------------------------------------------------- specs


class LoadStoreSpec(ABC):
    """One end of a transfer: the place of its bytes. The control plane creates it and a handler reads it, so it can be
    pickled."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the medium's name, ``"GPU"`` or ``"CPU"``. The pair (source, destination) determines the handler."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """A spec that identifies its bytes by block ids alone.

    ``block_ids`` is any sequence of non-negative ints. It becomes a one-dimensional int64 array, in transfer order,
    when the worker first reads it; the scheduler's thread only writes specs. An id may occur more than once.
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
        """Return a spec of the same kind with the block ids at these indices, in this order, or ``None`` if the number
        of ids differs from the number of indices."""
        if len(self._ids) != len(order):
            return None
        other = copy.copy(self)
        other._ids = [self._ids[at] for at in order]
        return other

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """GPU blocks of one request, listed group by group.

    ``group_sizes[g]`` GPU blocks belong to KV group ``g`` (``sum(group_sizes) == len(block_ids)``; a size may be 0).
    ``block_indices[g]`` is the position in the request of the group's first GPU block in this spec. So a transfer may
    start inside an offloaded block: with ``block_size_factor`` f, it starts at sub-block ``block_indices[g] % f`` of
    the first host-memory block listed for the group.
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
    """The result of ``prepare_store``: the offered keys to write, the place for each of them (``store_spec``, in the
    same order), and the keys evicted to make room."""

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]


@dataclass(slots=True)
class OffloadingEvent:
    """Blocks that appeared in a medium (``removed=False``) or left it (``removed=True``).

    An event contains no block size, because it may list blocks of KV groups with different sizes, and the engine's own
    events contain the sizes.
    """

    keys: list[OffloadKey]
    medium: str
    removed: bool

    @property
    def clears(self) -> bool:
        """Whether this is a removal without keys. It says that earlier changes of the medium were lost: none of the
        announced blocks counts any longer, and events for the blocks that are still in the medium follow."""
        return self.removed and not self.keys


class StepWork(NamedTuple):
    """The work of an engine in one step. A manager measures the engine's speed with it."""

    tokens: int = 0
    """Number of tokens that the step computes."""
    prompt_tokens: int = 0
    """Number of these tokens that belong to prompts."""
    queued_tokens: int = 0
    """Number of prompt tokens of running requests that later steps will compute."""
    is_continued: bool = False
    """A request of an earlier step also runs in this step, so the engine did not idle between the previous step and
    this one."""
    context_tokens: int = 0
    """The sum of the positions of the step's prompt tokens, because each one attends to all tokens before it."""


# ------------------------------------------------------------------------------------------------ control plane


class Weighed(NamedTuple):
    """Blocks that a waiting request reads from one tier, and the alternatives to reading them there. All times are
    expected times."""

    tier: str
    num_blocks: int
    expected_s: float
    """Seconds until they are in host memory."""
    others_s: Mapping[str, float]
    """The same for each other tier that has all of these blocks."""
    computing_s: float | None
    """Seconds to compute their tokens; ``None``: the engine's speed is not known."""

    def as_json(self) -> dict[str, object]:
        return {
            "tier": self.tier,
            "blocks": self.num_blocks,
            "expected_s": round(self.expected_s, 6),
            "others_s": {name: round(seconds, 6) for name, seconds in self.others_s.items()},
            "computing_s": None if self.computing_s is None else round(self.computing_s, 6),
        }


class OffloadingManager(ABC):
    """Decides which blocks to store, keep and evict. It runs in the scheduler process, and all calls come from the
    scheduler's thread.

    The connector's scheduler side calls these methods for each request, in this order::

        on_new_request                                      once, before anything else
        lookup*                                             per step while the request waits; None = ask again
        touch                                               blocks in use, wherever they were found
        prepare_load -> (transfer) -> complete_load         pins, then unpins, the same keys
        prepare_store -> (transfer) -> complete_store       reserves, then publishes or frees, keys_to_store
        on_request_finished                                 once, after the request's last prepare_*

    and once per step ``note_step``, ``on_schedule_end`` and ``take_events``. ``complete_*`` may follow
    ``on_request_finished``, because a transfer can outlive its request. So these two methods need no request context.

    No method blocks, does I/O, or raises because a tier is broken: a failure is a miss. All methods that take or return
    pins or slots are abstract, so that a subclass cannot forget one. Only optional methods have defaults.
    """

    lost: LostBlocks = NO_LOSSES
    """The record of lost blocks; ``NO_LOSSES`` unless a trace is recorded."""

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return ``True`` if the block is ready to load, ``False`` for a miss, and ``None`` for "not yet": ask again in
        a later step."""

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, ends: Collection[OffloadKey] | None = None
    ) -> list[bool | None]:
        """Return the answers for ``keys`` in order, up to and including the first ``False``. Each has the same meaning
        as in ``lookup``.

        ``lookup`` of a key equals ``lookup_prefix`` of that key alone, including side effects. If a manager decides
        block by block, the result equals a loop of ``lookup``, and an override only saves time. If a manager weighs the
        blocks of a call together, it may answer ``False`` earlier or later than the loop.

        ``ends`` is the set of blocks in this lookup at which a usable hit can end; ``None``: a hit can end at any
        block. In a model with states, a hit ends at a state, so loading blocks after the last state is useless. Testing
        membership in ``ends`` is O(1).
        """
        answers: list[bool | None] = []
        for key in keys:
            answer = self.lookup(key, req_context)
            answers.append(answer)
            if answer is False:
                break
        return answers

    def reads_ahead(self) -> bool:
        """Return whether lookups for requests that wait for their turn (``ReqContext.tokens_ahead``) can start reads: a
        tier can begin to read, and host memory has room for its blocks."""
        return False

    def is_unchanged(self, req_context: ReqContext) -> bool:
        """Return whether another lookup of the request would change nothing: since its last lookup, nothing has
        happened that could change an answer, end its wait or start further reads. Ready blocks stay ready."""
        return False

    def where(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[bool | None]:
        """Return for each of ``keys`` whether a lookup may eventually find it; ``None``: not known (yet).

        Unlike a lookup, the call reads nothing from tiers, makes no request wait and does not count as a use of a
        block. It answers ``False`` only if a lookup would do the same.
        """
        return [None] * len(keys)

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin ``keys``, which ``lookup`` found (``True``) in this step, and return their places in the same order."""

    def release(self, req_context: ReqContext) -> None:
        """Stop keeping blocks for the request, because it will not load any of those that lookups have found."""

    @abstractmethod
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Release the pins of one ``prepare_load`` of these keys, whether or not the transfer succeeded."""

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Mark a request's prefix, given from head to tail, as just used. Unknown keys are ignored."""

    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve slots for the ``keys`` that should be stored and are not stored yet.

        Returns ``None`` if there is no room, and then changes nothing. An empty ``keys_to_store`` means that there is
        nothing to store.
        """

    @abstractmethod
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        """Publish ``keys`` (``keys_to_store`` of an earlier ``prepare_store``), or free their slots if not
        ``success``."""

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Register a new request, and return how the connector should offer its blocks."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Note the end of a request: no ``lookup`` or ``prepare_*`` follows for it, but transfers in flight may still
        complete."""

    def note_step(self, work: StepWork) -> None:
        """Note the work of the step that is being decided. Called just before ``on_schedule_end``. A manager that
        weighs loading against computing measures the engine with it; others ignore it."""

    def on_schedule_end(self) -> None:
        """Submit the work gathered during the step, which has now been decided. Called in every step, including steps
        without a forward pass."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, in the order in which they became true. Folding them gives the
        resident set."""
        return ()

    def has_pending_work(self) -> bool:
        """Return whether the manager needs further steps (``on_schedule_end``) although no request runs."""
        return False

    def reset_cache(self) -> None:
        """Forget every block. Transfers in flight keep their slots until they complete, but publish nothing."""

    def get_stats(self) -> Stats:
        """Return the values of all metrics (``kvoffload.metrics``): counters since the start, and current gauges."""
        return {}

    def sources(self, req_context: ReqContext) -> Mapping[OffloadKey, str]:
        """Return the blocks that were read from tiers while the request waited for them, with the name of the tier.
        Call this before they are loaded to the GPU."""
        return {}

    def weighed(self, req_context: ReqContext) -> Sequence[Weighed]:
        """Return one entry for each read of blocks of the request from a tier, with the alternatives. Call this before
        they are loaded to the GPU."""
        return ()

    def explain(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> list[Loss | None]:
        """Return for each of ``keys`` why the request did not get it; ``None``: the block is in host memory or in a
        tier. Answers are complete only while losses are recorded (``lost``)."""
        return [loss or Loss(Miss.NEW) for loss in self.lost.find(keys)]

    def shutdown(self) -> None:
        """Release threads and files. Idempotent."""


# --------------------------------------------------------------------------------------------------- data plane


class Direction(Enum):
    """The direction of a transfer. The values are the first words of metric names."""

    LOAD = "load"
    """From host memory to the GPU."""
    STORE = "store"
    """From the GPU to host memory."""


class TransferResult(NamedTuple):
    """The result of one transfer on one rank. ``OffloadingHandler.get_finished`` returns each result once."""

    job_id: int
    success: bool
    num_bytes: int = 0
    """Number of bytes moved; 0 after a failure."""
    seconds: float = 0.0
    """Duration of the copy itself, without the time in the queue."""


class OffloadingHandler(ABC):
    """Moves blocks in one direction, for one pair (source medium, destination medium). It runs in a worker.

    The worker's own thread calls all methods. Only ``wait``, ``shutdown`` and the default of ``flush`` block. A
    transfer that fails is a ``TransferResult`` with ``success=False``, never an exception.
    """

    @abstractmethod
    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> None:
        """Start to copy ``spec = (source, destination)``, ordered after the compute submitted so far."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the result of every transfer that ended since the last call, each once."""

    @abstractmethod
    def wait(self, job_ids: Collection[int]) -> None:
        """Return once these transfers have ended. ``get_finished`` still returns them. Unknown ids are ignored."""

    def flush(self, job_ids: Collection[int]) -> None:
        """Order all compute submitted after this call after these transfers. If possible, the GPU waits for them;
        otherwise the host waits in this call. This does not protect GPU blocks that anything other than the GPU's
        compute uses. The next ``get_finished`` must include the transfers that have failed by then."""
        self.wait(job_ids)

    def take_addresses(self) -> None:
        """Read the addresses of the KV tensors again, because the engine unmapped its KV cache and mapped it again. No
        transfer is open. A handler that raises gets no further transfers."""
        raise NotImplementedError(f"{type(self).__name__} does not know where an engine's memory lies after a sleep.")

    @abstractmethod
    def shutdown(self) -> None:
        """Wait for running transfers, drop queued ones, and release threads and GPU resources. Idempotent."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """One block-major view of GPU memory: an int8 or uint8 tensor of shape (num_gpu_blocks, page_size_bytes).

    ``page_size_bytes`` is the contiguous part of each GPU block in this tensor. The distance between rows may be larger
    (padding, or layers interleaved in one allocation).
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class SharedPage:
    """A page of a slot that several ranks fill together, each with the bytes of its own KV heads."""

    start: int
    """Number of bytes of a GPU block before this page, for all ranks together."""
    num_bytes: int
    """Size of the page, for all ranks together."""
    offset: int
    """Distance from the page's start to this rank's bytes."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """A part of a group's GPU block: the first ``page_size_bytes`` of a page in tensor ``tensor_idx``."""

    tensor_idx: int
    page_size_bytes: int
    shared: SharedPage | None = None
    """The place of these bytes in a page of all ranks. ``None``: they are a page of this rank's own slice, after the
    pages of the previous refs."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """A worker's KV cache in a form that does not depend on the engine's layout.

    ``group_data_refs[g]`` lists, in storage order, the pages that make up one GPU block of KV group ``g``. Groups may
    share tensors; their GPU block ids then come from one pool.
    """

    tensors: list[CanonicalKVCacheTensor] = field(default_factory=list)
    group_data_refs: list[list[CanonicalKVCacheRef]] = field(default_factory=list)


class OffloadingSpec(ABC):
    """Creates both planes of one kind of offloading from one validated configuration.

    An engine adapter creates one spec in the scheduler process, where it calls only ``get_manager``, and one in each
    worker process, where it calls only ``get_handlers``. Constructors take ``(config, layout)``: a
    ``kvoffload.config.OffloadingConfig`` and a ``kvoffload.config.EngineLayout``. They raise ``ConfigError`` if these
    cannot work, before they allocate anything.
    """

    @classmethod
    def check_config(cls, config: OffloadingConfig) -> None:
        """Raise ``ConfigError`` if the constructor would reject ``config`` with every layout. An engine calls this
        while it reads its configuration, before it loads a model. It allocates and touches nothing."""

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the manager. The first call creates it, and later calls return the same one."""

    @abstractmethod
    def get_handlers(self, kv_caches: CanonicalKVCaches) -> dict[tuple[str, str], OffloadingHandler]:
        """Return the handlers for ``kv_caches``, by (source medium, destination medium). Called once per worker."""

    def shutdown(self) -> None:
        """Shut down everything that ``get_manager`` and ``get_handlers`` created. Idempotent."""
