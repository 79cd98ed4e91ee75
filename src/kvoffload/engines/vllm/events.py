# SPDX-License-Identifier: Apache-2.0
"""Translate kvoffload's events into vLLM's KV events, self-describing or plain.

A self-describing event contains token ids, parent hash, block size and the other inputs of the hash, like vLLM's own
events. Only the request has these values, so this module tracks requests from their arrival until the events of their
stores have been sent. A block that no tracked request has gets a plain event: its hash, with block size 0. Routers that
need tokens find them in vLLM's own events of the same hash; some routers drop plain events.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from kvoffload.base import (
    OffloadingEvent,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from kvoffload.config import EngineLayout, GroupKind
from kvoffload.engines.vllm.announcements import Announced, Announcements, Place, places_of

_VLLM_KINDS = {
    GroupKind.FULL_ATTENTION: "full_attention",
    GroupKind.SLIDING_WINDOW: "sliding_window",
    GroupKind.LOCAL_CHUNK: "chunked_local_attention",
    GroupKind.SINGLE_STATE: "mamba",
}
"""The names of the kinds of groups in vLLM's own events."""

_FINISHED_REQUESTS_TRACKED = 512
"""Number of finished requests that are still tracked, because their last stores end after them. Later stores get a
plain event."""

_FINISHED_TOKENS_TRACKED = 1 << 20
"""The same limit in tokens, except for the last request. Each token costs about 64 bytes, including its share of the
hash of 16 tokens."""


@dataclass(slots=True, eq=False)
class _Tracked:
    """A request, or the remaining data of a finished one."""

    request: Any
    own: Any
    """The request as the connector sees it: its block hashes are those of keys. They differ from vLLM's if the request
    has an adapter or media."""
    hashes: list[bytes] = field(default_factory=list)
    """Its block hashes, in the form of keys. ``_holders`` finds the request by them."""
    newest: bytes = b""
    """The last of these hashes, as vLLM has it."""

    def still_has(self, block_hash: bytes, hash_index: int) -> bool:
        """Return whether the block is still the request's: the next input of a session may have replaced a token."""
        hashes = self.own.block_hashes
        return hash_index < len(hashes) and hashes[hash_index] == block_hash


class EventTranslator:
    """Translates events, on the scheduler thread.

    ``describe``: whether stored events are self-describing. ``places``: the places of the tiers, by label
    (``places_of``).
    """

    def __init__(
        self, layout: EngineLayout, factor: int, describe: bool, places: Mapping[str, Place] | None = None
    ) -> None:
        self._describe = describe
        self._announced = Announcements(places_of(()) if places is None else places)
        self._hash_tokens = layout.hash_block_tokens
        # 0: never described. Only groups that keep every block form chains of tokens.
        self._hashes_per_block = [
            factor * group.block_tokens // layout.hash_block_tokens if group.kind is GroupKind.FULL_ATTENTION else 0
            for group in layout.groups
        ]
        self._hashes_per_gpu_block = [group.block_tokens // layout.hash_block_tokens for group in layout.groups]
        self._kinds = [
            (_VLLM_KINDS[group.kind], group.sliding_window_tokens if group.kind is GroupKind.SLIDING_WINDOW else None)
            for group in layout.groups
        ]
        self._holders: dict[bytes, dict[_Tracked, int]] = {}
        """For each hash, the requests that have it, and its index in them. Any of them can describe it."""
        self._has_own = False
        """Whether hashes in keys may differ from vLLM's."""
        self._of_vllm: dict[bytes, tuple[bytes, int]] = {}
        """vLLM's hash of each announced block whose key contains a different hash, and the number of its
        announcements."""
        self._live: dict[str, _Tracked] = {}
        self._finished: deque[_Tracked] = deque()
        self._num_finished_hashes = 0
        self._is_fresh = False
        """Whether ``_holders`` contains all hashes of live requests. They do not grow while events are translated."""

    # ------------------------------------------------------------------------------------------ tracked requests

    def track(self, request: Any, own: Any = None) -> None:
        """Track a request from its arrival on, because a lookup may promote its blocks before vLLM admits it.

        ``own``: see ``_Tracked``; ``None`` if its hashes are vLLM's. If the request is already tracked, this only adds
        its new hashes.
        """
        self._has_own |= own is not None
        if not self._describe and own is None:
            return
        tracked = self._live.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked is not None:  # vLLM uses the id again without having reported an end
                self.finish(tracked.request)
            tracked = self._live[request.request_id] = _Tracked(request, own or request)
        self._add_hashes(tracked)

    def _add_hashes(self, tracked: _Tracked) -> None:
        hashes, own, known = tracked.request.block_hashes, tracked.own.block_hashes, tracked.hashes
        if len(hashes) == len(known) and (not known or hashes[-1] == tracked.newest):
            return  # hashes are chained, so all of them are equal
        # The next input of a session replaces the session's last token, and so changes the hash of the block that this
        # token had filled. Hashes are chained, so all hashes before an equal one are equal.
        while known and (len(known) > len(hashes) or known[-1] != own[len(known) - 1]):
            self._forget_hash(known.pop(), tracked)
        for index in range(len(known), len(hashes)):
            known.append(bytes(own[index]))
            self._holders.setdefault(known[-1], {})[tracked] = index
        tracked.newest = hashes[-1] if known else b""

    def finish(self, request: Any) -> None:
        tracked = self._live.get(request.request_id)
        if tracked is None and not self._describe:
            return
        if tracked is not None and tracked.request is not request:
            return  # another request has the id, and this one was finished earlier
        self.track(request, None if tracked is None or tracked.own is request else tracked.own)
        tracked = self._live.pop(request.request_id)
        if request.prompt_embeds is not None:
            self._hash_prompt_embeds(tracked)
        tracked.request = _without_inputs(request)
        tracked.own = SimpleNamespace(block_hashes=tracked.hashes)
        self._finished.append(tracked)
        self._num_finished_hashes += len(tracked.hashes)
        while self._tracks_too_many():
            self._forget(self._finished.popleft())

    def _hash_prompt_embeds(self, tracked: _Tracked) -> None:
        """Make vLLM cache the hashes of the embeddings in each block, so that it does not need the embeddings again."""
        for per_block in {
            per_gpu_block
            for per_block, per_gpu_block in zip(self._hashes_per_block, self._hashes_per_gpu_block, strict=True)
            if per_block
        }:
            block_tokens = per_block * self._hash_tokens
            num_tokens = len(tracked.hashes) // per_block * block_tokens
            _extra_keys(tracked.request, range(0, num_tokens, block_tokens))

    def _tracks_too_many(self) -> bool:
        num_tokens = self._num_finished_hashes * self._hash_tokens
        return len(self._finished) > _FINISHED_REQUESTS_TRACKED or (
            len(self._finished) > 1 and num_tokens > _FINISHED_TOKENS_TRACKED
        )

    def _forget(self, tracked: _Tracked) -> None:
        self._num_finished_hashes -= len(tracked.hashes)
        for block_hash in tracked.hashes:
            self._forget_hash(block_hash, tracked)

    def _forget_hash(self, block_hash: bytes, tracked: _Tracked) -> None:
        holders = self._holders[block_hash]
        del holders[tracked]
        if not holders:
            del self._holders[block_hash]

    def _holder(self, key: OffloadKey) -> tuple[_Tracked, int] | None:
        """Return a request that has the block, and the index of the block's hash in it, or ``None``."""
        block_hash = get_offload_block_hash(key)
        found = self._known_holder(block_hash)
        if found is None and not self._is_fresh:
            # For a block of generated tokens, add the hashes that requests have gained since.
            for tracked in self._live.values():
                self._add_hashes(tracked)
            self._is_fresh = True
            found = self._known_holder(block_hash)
        return found

    def _known_holder(self, block_hash: bytes) -> tuple[_Tracked, int] | None:
        for tracked, hash_index in self._holders.get(block_hash, {}).items():
            if tracked.still_has(block_hash, hash_index):
                return tracked, hash_index
        return None

    # ---------------------------------------------------------------------------------------------- translation

    def translate(self, events: Iterable[OffloadingEvent]) -> list[Any]:
        """Return vLLM's ``BlockStored`` and ``BlockRemoved``, in order."""
        self._is_fresh = False
        return [
            translated
            for event in events
            for translated in (self._removed(event) if event.removed else self._stored(event))
        ]

    def forget_tiers(self) -> list[Any]:
        """Return removals of all announced blocks below host memory, because the engine no longer finds them."""
        tiers = self._announced.tiers_below()
        return self.translate(OffloadingEvent([], tier, removed=True) for tier in tiers)

    def _removed(self, event: OffloadingEvent) -> Iterator[Any]:
        from vllm.distributed.kv_events import BlockRemoved

        gone: dict[tuple[int, Announced], list[OffloadKey]] = {}
        for key in self._announced.keys_in(event.medium) if event.clears else event.keys:
            known = self._announced.remove(event.medium, key)
            if known is not None:
                keys = gone.setdefault((get_offload_group_idx(key), known), [])
                keys += self._announced.take_inner(key, known.place)
                keys.append(key)
        for (group, known), keys in gone.items():
            yield BlockRemoved(
                block_hashes=[self._external(key, is_removed=True) for key in keys],
                medium=known.place.medium,
                group_idx=group,
                locality=known.place.locality,
            )

    def _stored(self, event: OffloadingEvent) -> Iterator[Any]:
        place = self._announced.place(event.medium)
        for group, keys in self._by_group(event.keys):
            plain: list[OffloadKey] = []
            for key in keys:
                if not self._announced.add(event.medium, key):
                    continue
                is_described = self._describe and self._hashes_per_block[group] > 0
                found = self._holder(key) if is_described or self._has_own else None
                if found is not None and is_described:
                    yield self._described(event.medium, key, group, *found)
                    continue
                plain.append(key)
                if found is not None:
                    self._note(key, *found)
            if plain:
                yield self._event([self._external(key) for key in plain], group, place)

    def _note(self, key: OffloadKey, tracked: _Tracked, hash_index: int) -> None:
        """Remember vLLM's hash of a block of ``tracked`` that is announced, if its key has another hash."""
        own_hash, block_hash = get_offload_block_hash(key), bytes(tracked.request.block_hashes[hash_index])
        if own_hash != block_hash:
            self._of_vllm[own_hash] = block_hash, self._of_vllm.get(own_hash, (block_hash, 0))[1] + 1

    def _external(self, key: OffloadKey, is_removed: bool = False) -> Any:
        """Return the hash by which vLLM's events name a block. ``is_removed``: the event undoes an announcement."""
        own_hash = get_offload_block_hash(key)
        if own_hash not in self._of_vllm:
            return _convert(own_hash)
        block_hash, count = self._of_vllm[own_hash]
        if is_removed:
            self._of_vllm[own_hash] = block_hash, count - 1
            if count == 1:
                del self._of_vllm[own_hash]
        return _convert(block_hash)

    def _by_group(self, keys: Iterable[OffloadKey]) -> Iterable[tuple[int, list[OffloadKey]]]:
        """Return the keys by group, without keys that no block of this engine can have, because a damaged directory may
        list such keys."""
        groups: dict[int, list[OffloadKey]] = {}
        for key in keys:
            group = get_offload_group_idx(key)
            if group < len(self._kinds) and get_offload_block_hash(key):
                groups.setdefault(group, []).append(key)
        return groups.items()

    def _described(self, tier: str, key: OffloadKey, group: int, tracked: _Tracked, hash_index: int) -> Any:
        """Return an event with all of the engine's blocks in the block of ``key``, except those that another block has
        already announced."""
        step, request = self._hashes_per_gpu_block[group], tracked.request
        hashes, lora = request.block_hashes, request.lora_request
        first = hash_index + 1 - self._hashes_per_block[group]
        ends = range(first + step - 1, hash_index + 1, step)
        inner = [make_offload_key(tracked.hashes[end], group) for end in ends[:-1]]
        num_known = self._announced.describe(tier, key, inner)
        first, ends = first + num_known * step, ends[num_known:]
        for each, end in zip([*inner[num_known:], key], ends, strict=True):
            self._note(each, tracked, end)
        size = step * self._hash_tokens
        first_token, stop_token = first * self._hash_tokens, (hash_index + 1) * self._hash_tokens
        return self._event(
            [_convert(bytes(hashes[end])) for end in ends],
            group,
            self._announced.place(tier),
            parent_block_hash=_convert(bytes(hashes[first - 1])) if first > 0 else None,
            token_ids=list(request.all_token_ids[first_token:stop_token]),
            block_size=size,
            lora_id=lora.adapter_id if lora is not None else None,
            lora_name=lora.name if lora is not None else None,
            extra_keys=_extra_keys(request, range(first_token, stop_token, size)),
            session_id=request.session_id,
        )

    def _event(self, hashes: Sequence[Any], group: int, place: Place, **described: Any) -> Any:
        """Return an event. ``described`` contains the fields that a plain event leaves empty."""
        from vllm.distributed.kv_events import BlockStored

        kind, window = self._kinds[group]
        plain: dict[str, Any] = {
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "lora_name": None,
        }
        return BlockStored(
            **plain | described,
            block_hashes=list(hashes),
            medium=place.medium,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=place.locality,
        )


def _without_inputs(request: Any) -> Any:
    """Return a copy that keeps no images or other inputs alive, but only the data for the extra keys of its blocks. For
    prompt embeddings, these are hashes that vLLM has already computed. vLLM uses them only if there are embeddings."""
    lean = copy.copy(request)
    lean.mm_features = [
        SimpleNamespace(identifier=each.identifier, mm_position=each.mm_position) for each in request.mm_features or ()
    ]
    if request.prompt_embeds is not None:
        lean.prompt_embeds = request.prompt_embeds.new_empty((0, *request.prompt_embeds.shape[1:]))
    return lean


def _extra_keys(request: Any, first_tokens: range) -> list[Any] | None:
    """Return the inputs of the blocks' hashes other than tokens (adapter, images, cache salt), in the form of vLLM's
    events. A block begins at each of ``first_tokens``."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    size = first_tokens.step
    hashed = [generate_block_hash_extra_keys(request, first, first + size, 0)[0] for first in first_tokens]
    return cast("list[Any] | None", to_event_extra_keys(hashed))


def _convert(block_hash: bytes) -> Any:
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return maybe_convert_block_hash(block_hash)
