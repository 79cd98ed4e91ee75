# SPDX-License-Identifier: Apache-2.0
"""The weights of LoRA adapters in the keys of blocks. Scheduler side; importing this module does not load vLLM.

vLLM's block hashes contain the name and path of an adapter, but not its weights, and users replace adapters at their
paths. So the connector gets a ``NamedRequest`` in place of each request with an adapter. Its block hashes also contain
the adapter's seed: a hash of the content of the adapter's files.

vLLM's workers load an adapter when they need it, and may evict it and load it again. So the scheduler side can only
expect that the workers have loaded the files that it hashed, and each worker checks this (``loaded_adapters.py``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvoffload.config import OffloadingConfig
from kvoffload.engines.facts import UnclearError, facts_of
from kvoffload.engines.vllm.arguments import is_alone
from kvoffload.engines.vllm.fields import FIELDS
from kvoffload.engines.vllm.seeded_hashes import SeededHashes
from kvoffload.engines.weights import Files, in_background, outliving_tier

logger = logging.getLogger(__name__)

_RETRY_S = 10.0
"""Time between two attempts to read the files of an adapter that are not there."""


class Loaded(NamedTuple):
    """Files that vLLM's workers load, or should load, under one of its numbers for adapters."""

    number: int
    digest: str
    """``Files.digest``. Empty if a file changed while a worker read it."""


class Mismatch(NamedTuple):
    """A worker's report: a step may have computed blocks with another adapter than expected."""

    expected: Loaded
    digest: str
    """``Files.digest`` of the files that the worker has loaded."""


@dataclass(frozen=True, slots=True)
class AdapterChecks:
    """The message from the scheduler to the workers: which adapters they should have loaded."""

    of_requests: frozenset[Loaded] = frozenset()
    """The adapters of all requests whose blocks are offloaded."""
    of_stores: dict[str, Loaded] = field(default_factory=dict)
    """The adapters of this step's stores, by request id."""
    of_loads: frozenset[Loaded] = frozenset()
    """The adapters of requests that this step computes for the first time on blocks that a load may have brought."""
    needs_proof: bool = False
    """Whether an adapter counts as another one if the worker does not know which files it loaded."""
    known: frozenset[Mismatch] = frozenset()
    """The reports that the scheduler received since the last step."""


class _Content(NamedTuple):
    digest: str
    name: str
    """``Files.name``, or empty if nobody needs it."""


class NamedRequest:
    """A request of vLLM with an adapter, as the connector sees it: other block hashes, and all else of vLLM's."""

    def __init__(self, of_vllm: Any, adapter: Adapter) -> None:
        self.of_vllm = of_vllm
        self.adapter = adapter
        self.seed = adapter.seed
        self.has_cached = False
        """Whether vLLM's prefix cache had some of its blocks when vLLM admitted it."""
        self.is_left_out = self.seed is None or adapter.key != _key_of(of_vllm.lora_request)
        self.loaded = None if self.is_left_out else adapter.loaded
        """The files that the workers should have loaded. ``None``: unknown, or it does not matter."""
        self.is_counted = False
        """Whether ``Adapters`` has the workers check ``loaded`` in each step."""

    def __repr__(self) -> str:
        return f"NamedRequest({self.of_vllm.request_id!r}, {self.adapter})"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_vllm, name)

    @property
    def block_hashes(self) -> Sequence[bytes]:
        hashes: Sequence[bytes] = self.of_vllm.block_hashes
        seed = self.seed
        return SeededHashes(hashes, lambda _: seed) if seed else hashes


class Adapter:
    """The weights that vLLM has under one of its numbers for adapters, until it loads others."""

    def __init__(self, request: Any, own_seed: bytes | None, facts: str | None, required: Iterable[str] = ()) -> None:
        """``request``: vLLM's ``LoRARequest``. ``own_seed``: a seed that needs no files. ``facts``: see ``Adapters``.

        ``required``: the digests of the files that workers have loaded, one for each rank, if they are known.
        """
        self.request = request
        self.key = _key_of(request)
        self.required = frozenset(required)
        self._own_seed = own_seed
        self._facts = facts
        self._failed_at_s: float | None = None
        self._content: Callable[[], _Content | None] = lambda: None

    def __repr__(self) -> str:
        return f"Adapter({self.request.lora_int_id}, {self.key})"

    def read(self) -> None:
        """Begin to read the adapter's files, in the background."""
        self._failed_at_s = None
        self._content = in_background(self._read, 0, self._cannot_read)

    def read_again(self) -> None:
        """Call ``read`` if the files could not be read some time ago: vLLM may have downloaded them meanwhile."""
        if self._failed_at_s is not None and time.monotonic() > self._failed_at_s + _RETRY_S:
            self.read()

    def _read(self) -> _Content:
        files = Files.of_adapter(self.request.lora_path)
        return _Content(files.digest, "" if self._facts is None else files.name())

    def _cannot_read(self, error: Exception) -> None:
        if self._facts is not None:
            logger.warning(
                "kvoffload cannot read the files of the LoRA adapter %r (%s), so it does not offload the requests of "
                "this adapter. Put its files on this host, or set adapters_never_change.",
                self.request.lora_path,
                error,
            )
        self._failed_at_s = time.monotonic()

    @property
    def loaded(self) -> Loaded | None:
        """Return the files that the workers should have loaded, or ``None`` if they are unknown. The digest is empty if
        several are possible."""
        content = self._content()
        digests = self.required or (content and {content.digest})
        if not digests:
            return None
        return Loaded(self.request.lora_int_id, next(iter(digests)) if len(digests) == 1 else "")

    @property
    def seed(self) -> bytes | None:
        """The adapter's part of the keys. Empty: vLLM's hashes are enough. ``None``: unknown, so there are no keys."""
        if self._own_seed is not None:
            return self._own_seed
        content = self._content()
        if content is None or not self.required <= {content.digest}:
            return None
        text = f"{content.name} {self._facts} {getattr(self.request, 'is_3d_lora_weight', False)}"
        return hashlib.sha256(text.encode()).digest()


class Adapters:
    """Which adapters have which weights, and the requests with adapters. Scheduler thread only."""

    def __init__(self, facts: str | None = None, reads_files: bool = True, adapts_media: bool = False) -> None:
        """``facts``: other settings that change the KV of adapters, if keys must contain the adapter's content.

        ``None``: vLLM's keys are enough until an adapter is replaced. ``reads_files``: the files on this host are
        the files that the workers load. ``adapts_media``: adapters change the encodings of media.
        """
        self._facts = facts
        self._reads_files = reads_files
        self._adapts_media = adapts_media
        self._current: dict[int, Adapter] = {}
        """By vLLM's number."""
        self._seen: set[tuple[str, str]] = set()
        """``Adapter.key`` of all adapters so far."""
        self._requests: dict[str, NamedRequest] = {}
        self._expected: Counter[Loaded] = Counter()
        """The files that the workers should have loaded, with the number of requests that rely on them."""
        self._of_requests: frozenset[Loaded] | None = None
        """The keys of ``_expected``. ``None`` after a change."""
        self._ended: dict[str, Loaded] = {}
        """By id, requests that ended since the last step. The next step has their last stores."""
        self._loading: set[str] = set()
        """Ids of requests that no step has computed since they got blocks that a load may have brought."""
        self._on_device: dict[tuple[str, str], Adapter] = {}
        """By ``Adapter.key``, the first adapter that may have blocks in vLLM's prefix cache."""
        self._mixed: set[tuple[str, str]] = set()
        """Keys under which vLLM's prefix cache may have blocks of several adapters."""
        self._unchecked: set[Adapter] = set()
        """Adapters that may have blocks on the device from the time before kvoffload knew the adapter's files.

        Workers have not compared these blocks with another number of vLLM."""
        self._known: set[Mismatch] = set()
        """Reports since the last step."""

    # ----------------------------------------------------------------------------------------------------- requests

    def of(self, request: Any) -> Any:
        """Return ``request``, or its ``NamedRequest`` if it has an adapter."""
        if request.lora_request is None:
            return request
        named = self._requests.get(request.request_id)
        if named is not None and named.of_vllm is request:
            return named
        if named is not None:  # vLLM uses the id again
            self.finish(named)
        named = self._requests[request.request_id] = NamedRequest(request, self._of_request(request.lora_request))
        if named.loaded is not None:
            named.is_counted = True
            self._expected[named.loaded] += 1
            self._of_requests = None
        return named

    def finish(self, request: Any) -> None:
        """Forget a request that has ended. ``request`` is a result of ``of``."""
        if isinstance(request, NamedRequest) and self._requests.pop(request.request_id, None) is not None:
            self._loading.discard(request.request_id)
            if request.loaded is not None and not self.leaves_out(request):
                self._ended[request.request_id] = request.loaded
            self._expect_no_more(request)

    def _expect_no_more(self, named: NamedRequest) -> None:
        if named.is_counted and named.loaded is not None:
            named.is_counted = False
            self._expected[named.loaded] -= 1
            if not self._expected[named.loaded]:
                del self._expected[named.loaded]
                self._of_requests = None

    def leaves_out(self, request: Any) -> bool:
        """Return whether the keys of ``request``, a result of ``of``, do not identify the weights of its adapter."""
        if not isinstance(request, NamedRequest):
            return False
        return (
            request.is_left_out
            or self._current[request.lora_request.lora_int_id] is not request.adapter
            or (self._adapts_media and request.seed != b"" and bool(request.mm_features))
        )

    def admit(self, request: Any, num_computed_tokens: int) -> None:
        """vLLM asks about ``request``, a result of ``of``. Its prefix cache has ``num_computed_tokens`` of the request.

        This cache only knows names and paths. So if an adapter was replaced, its blocks may belong to other weights.
        """
        if isinstance(request, NamedRequest):
            adapter, key = request.adapter, _key_of(request.lora_request)
            first = self._on_device.setdefault(key, adapter)
            is_known = self._current[request.lora_request.lora_int_id] is adapter and adapter.key == key
            if not is_known or (
                first is not adapter and (first in self._unchecked or first.seed is None or first.seed != adapter.seed)
            ):
                self._mixed.add(key)
            if request.loaded is None:
                self._unchecked.add(adapter)
            request.has_cached = num_computed_tokens > 0
            if request.has_cached:
                self.has_loaded_blocks(request)  # maybe those that a load brought for a request that never ran
            request.is_left_out |= request.has_cached and key in self._mixed

    @property
    def waits_for_empty_device(self) -> bool:
        """Whether ``device_is_empty`` would let more requests be offloaded."""
        return bool(self._mixed)

    def device_is_empty(self) -> None:
        """Neither vLLM's prefix cache nor a request has a block on the device."""
        self._on_device.clear()
        self._mixed.clear()
        self._unchecked.clear()

    # ------------------------------------------------------------------------------------------------------- steps

    def has_loaded_blocks(self, request: Any) -> None:
        """Note that a load may have brought blocks of ``request``, a result of ``of``."""
        if isinstance(request, NamedRequest) and request.loaded is not None:
            self._loading.add(request.request_id)

    def checks(self, scheduled: Collection[str], stores: Iterable[str]) -> AdapterChecks | None:
        """Return the checks of a step that computes ``scheduled`` and begins ``stores`` (both are request ids).

        ``None``: there is nothing to check.
        """
        ended, self._ended = self._ended, {}
        if self._of_requests is None:
            self._of_requests = frozenset(self._expected)
        known, self._known = self._known, set()
        begun = self._loading.intersection(scheduled) if self._loading else ()
        self._loading.difference_update(begun)
        if not (self._of_requests or ended or known or begun):
            return None
        of_stores = {}
        for request_id in stores:
            named = self._requests.get(request_id)
            loaded = ended.get(request_id) if named is None else named.loaded
            if loaded is not None:
                of_stores[request_id] = loaded
        of_loads = frozenset(loaded for each in begun if (loaded := self._requests[each].loaded) is not None)
        return AdapterChecks(self._of_requests, of_stores, of_loads, self._facts is not None, frozenset(known))

    def others_are_loaded(self, reports: Collection[Mismatch]) -> None:
        """Workers report that the last steps may have computed blocks with other adapters than expected."""
        found: dict[int, set[str]] = {}
        for each in reports:
            number = each.expected.number
            adapter = self._current.get(number)
            if adapter is not None:
                self._mix(adapter.key)
                if adapter.loaded == each.expected:  # otherwise the worker checks the newer expectation
                    found.setdefault(number, set()).add(each.digest)
        self._known.update(reports)
        for number, digests in found.items():
            adapter = self._current[number]
            logger.warning(
                "vLLM has not loaded the files of the LoRA adapter %r that kvoffload has read, because they were "
                "replaced. kvoffload reads them again.",
                adapter.request.lora_path,
            )
            self._renew(adapter.request, digests)

    def _mix(self, key: tuple[str, str]) -> None:
        """Note that the device may have blocks of several adapters under ``key``."""
        if key in self._on_device:
            self._mixed.add(key)
        for named in self._requests.values():
            named.is_left_out |= named.has_cached and named.adapter.key == key

    # ---------------------------------------------------------------------------------------------------- adapters

    def load(self, request: Any) -> None:
        """vLLM loads the adapter of ``request``, a ``LoRARequest``, unless it already has that number."""
        if request.load_inplace:
            self._mix(_key_of(request))
            self._renew(request)
        else:
            self._of_request(request)

    def _of_request(self, request: Any) -> Adapter:
        adapter = self._current.get(request.lora_int_id)
        if adapter is None:
            return self._renew(request)
        adapter.read_again()
        return adapter

    def _renew(self, request: Any, required: Iterable[str] = ()) -> Adapter:
        seed = None
        if self._facts is None:
            is_new = _key_of(request) not in self._seen and not required
            seed = b"" if is_new else secrets.token_bytes(32)
        before = self._current.get(request.lora_int_id)
        for named in self._requests.values():
            if named.adapter is before:
                self._expect_no_more(named)
        adapter = self._current[request.lora_int_id] = Adapter(request, seed, self._facts, required)
        self._seen.add(adapter.key)
        if self._reads_files:
            adapter.read()
        return adapter


def adapters_of(vllm_config: Any, config: OffloadingConfig) -> Adapters | None:
    """Return an ``Adapters`` for this engine, or ``None`` if it serves no adapters. In persistent tiers keys contain
    the content of adapters, unless the user promises that no adapter is ever replaced."""
    lora = vllm_config.lora_config
    if lora is None:
        return None
    if not _are_in_question(vllm_config, config):
        return Adapters(reads_files=_is_one_node(vllm_config), adapts_media=_adapts_media(lora))
    is_read = why_unread(vllm_config) is None
    return Adapters(_facts(lora) if is_read else "", reads_files=is_read, adapts_media=_adapts_media(lora))


def note_on_adapters(vllm_config: Any, config: OffloadingConfig) -> str | None:
    """Return a sentence about adapters for the log and for ``check-config``, or ``None`` if there is nothing to say."""
    if not _are_in_question(vllm_config, config):
        return None
    if (why := why_unread(vllm_config)) is not None:
        return (
            f"kvoffload neither stores nor loads for requests with a LoRA adapter, because {why}: set "
            "adapters_never_change if you never replace an adapter at its path, or leave out persistent tiers"
        )
    return "kvoffload's tiers serve requests with a LoRA adapter once it has hashed the adapter's files"


def why_unread(vllm_config: Any) -> str | None:
    """Return why the files of an adapter do not identify its KV, as a clause, or ``None`` if they do."""
    if not _is_one_node(vllm_config):
        return "its ranks run on several nodes, where the files of an adapter may differ"
    if not is_alone(vllm_config):
        return "another connector may bring KV that was computed with other files of an adapter"
    try:
        _facts(vllm_config.lora_config)
    except UnclearError as exc:
        return f"vLLM's {exc}"
    return None


def _are_in_question(vllm_config: Any, config: OffloadingConfig) -> bool:
    has_adapters = vllm_config.lora_config is not None
    return has_adapters and not config.adapters_never_change and outliving_tier(config) is not None


def _is_one_node(vllm_config: Any) -> bool:
    return bool(vllm_config.parallel_config.nnodes_within_dp == 1)


def _facts(lora: Any) -> str:
    return json.dumps(facts_of(lora, FIELDS), sort_keys=True)


def _adapts_media(lora: Any) -> bool:
    return bool(getattr(lora, "enable_tower_connector_lora", False))


def _key_of(request: Any) -> tuple[str, str]:
    """Return the part of an adapter that vLLM's block hashes contain."""
    return request.lora_name, request.lora_path
