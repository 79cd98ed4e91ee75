# SPDX-License-Identifier: Apache-2.0
"""The knowledge of routers about one engine, by the rules that Dynamo and llm-d apply to vLLM's KV events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

Hash = bytes
_MEDIA = {"GPU": "device", "CPU": "host", "STORAGE": "disk"}
"""Dynamo's tier of a medium."""


def _is_removal(event: Any) -> bool:
    return type(event).__name__ == "BlockRemoved"


class LlmD:
    """llm-d's index. The medium is the tier, whatever the locality and the owner.

    A hash is known by its tokens, which come with an event. An event without tokens counts only for hashes that are
    known by another event. An event whose parent is not known is dropped. Stores of a hash are counted, and only the
    removal that makes them even is applied.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, set[Hash]] = {}
        self._known: set[Hash] = set()
        self._stores: Counter[tuple[str, Hash]] = Counter()

    def computed(self, hashes: Iterable[Hash]) -> None:
        """vLLM's own events announced these blocks on the device."""
        self._known.update(hashes)

    def restarted(self) -> None:
        self.blocks.clear()
        self._stores.clear()

    def apply(self, events: Sequence[Any]) -> None:
        for event in events:
            tier = event.medium.lower()
            if _is_removal(event):
                self._remove(tier, event.block_hashes)
            elif event.kv_cache_spec_kind == "full_attention":
                self._store(tier, event)

    def _store(self, tier: str, event: Any) -> None:
        hashes = event.block_hashes
        if event.token_ids:
            assert len(event.token_ids) == event.block_size * len(hashes), "a span with gaps is skipped"
            if event.parent_block_hash is not None and event.parent_block_hash not in self._known:
                return
            self._known.update(hashes)
        else:
            hashes = [each for each in hashes if each in self._known]
        self.blocks.setdefault(tier, set()).update(hashes)
        self._stores.update((tier, each) for each in hashes)

    def _remove(self, tier: str, hashes: Iterable[Hash]) -> None:
        for each in hashes:
            count = self._stores[tier, each]
            if count <= 1:
                self.blocks.get(tier, set()).discard(each)
                del self._stores[tier, each]
            else:
                self._stores[tier, each] = count - 1


class Dynamo:
    """Dynamo's index below the device: blocks of the engine's own size, with their tokens and their engine.

    It drops events of unknown owners and places, and ignores blocks that do not have ``block_tokens`` tokens. It stops
    processing a removal at the first unknown hash.
    """

    def __init__(self, block_tokens: int) -> None:
        self.blocks: dict[str, set[Hash]] = {}
        self._block_tokens = block_tokens

    def restarted(self) -> None:
        self.blocks.clear()

    def apply(self, events: Sequence[Any]) -> None:
        for event in events:
            tier = _MEDIA.get(event.medium)
            # A block with an owner is not a block of the engine.
            if tier is None or getattr(event, "ownership", None) is not None or event.locality == "REMOTE":
                continue
            blocks = self.blocks.setdefault(tier, set())
            if _is_removal(event):
                for each in event.block_hashes:
                    if each not in blocks:
                        break
                    blocks.remove(each)
            elif event.kv_cache_spec_kind == "full_attention" and event.block_size == self._block_tokens:
                assert len(set(event.block_hashes)) == len(event.block_hashes)
                blocks.update(event.block_hashes[: len(event.token_ids) // self._block_tokens])
