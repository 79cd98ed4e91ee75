# SPDX-License-Identifier: Apache-2.0
"""One of SGLang's host pools as tiers keep it: its pages by SGLang's keys. Knows SGLang's pools and configuration by
their attributes alone."""

from __future__ import annotations

import enum
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvoffload.base import OffloadKey, make_offload_key
from kvoffload.engines.sglang.facts import POOL_IS_HARMLESS
from kvoffload.engines.sglang.options import SGLangOptions, namespace_of
from kvoffload.engines.sglang.tiers import Page, PageTiers
from kvoffload.errors import LayoutError
from kvoffload.logs import RateLimitedLog
from kvoffload.metrics import Stats
from kvoffload.units import parse_bytes

_log = RateLimitedLog(logging.getLogger(__name__))

_OF_EVERY_POOL = ("layout", "dtype", "page_size")


def page_facts(host_pool: Any) -> dict[str, Any]:
    """What says how a page of a host pool is laid out: all of its attributes that are plain values, but those that are
    known not to matter. Raises ``LookupError`` if one is missing that every pool has."""
    facts = {
        name: value for name, value in vars(host_pool).items() if name not in POOL_IS_HARMLESS and _is_plain(value)
    }
    if absent := [name for name in _OF_EVERY_POOL if name not in facts]:
        raise LookupError(f"it has no {', '.join(absent)}")
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    # torch is not imported here.
    return isinstance(value, (bool, int, float, str, enum.Enum, type(None))) or type(value).__name__ == "dtype"


def pages_of(host_pool: Any, host_indices: Any, num_pages: int) -> list[Page]:
    """Where ``num_pages`` pages lie in a host pool, by the indices of their tokens. Raises ``ValueError`` if these are
    more or fewer."""
    addresses, sizes = host_pool.get_page_buffer_meta(host_indices)
    per_page, rest = divmod(len(addresses), num_pages)
    if rest or not per_page or len(host_indices) != num_pages * host_pool.page_size:
        raise ValueError(f"{len(host_indices)} tokens in {len(addresses)} pieces are not {num_pages} pages")
    pieces = list(zip(addresses, sizes, strict=True))
    return [pieces[begin : begin + per_page] for begin in range(0, len(pieces), per_page)]


class PoolStorage:
    """The pages of ``host_pool``, in tiers. Any thread may call; no call raises, or takes longer than ``max_wait_s``.
    What goes wrong is a miss.

    ``first_page`` has the indices of the pool's first page, which tells the size of pages. ``model`` and ``ranks`` are
    for the namespace. Pages are found by the ``salt`` of the time when they were stored. Without one nothing is found
    or stored. Raises ``ConfigError`` for a pool that cannot be stored, and for what the tiers refuse.
    """

    def __init__(
        self,
        name: str,
        host_pool: Any,
        first_page: Any,
        options: SGLangOptions,
        *,
        model: Mapping[str, Any],
        ranks: Mapping[str, Any],
        salt: Callable[[], bytes | None] = bytes,
    ) -> None:
        try:
            [page] = pages_of(host_pool, first_page, 1)
            facts = page_facts(host_pool)
        except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as exc:
            raise LayoutError(
                f"SGLang's host pool {name!r} ({type(host_pool).__name__}) does not say how its pages lie: {exc}. "
                "Use --hicache-mem-layout page_first, or serve this model without kvoffload."
            ) from exc
        sizes = [num_bytes for _, num_bytes in page]
        facts |= {"pool": type(host_pool).__name__, "pieces": sizes}
        self.name = name
        self.host_pool = host_pool
        self.page_bytes = sum(sizes)
        self.namespace = namespace_of(name, facts, model, ranks)
        self._salt = salt
        self._tiers = PageTiers(
            options.tiers,
            self.page_bytes,
            self.namespace,
            max_wait_s=options.max_wait_s,
            staging_bytes=parse_bytes(options.staging_bytes),
        )

    def __repr__(self) -> str:
        return f"PoolStorage({self.name!r}, pages of {self.page_bytes} bytes, {self._tiers!r})"

    def present(self, keys: Sequence[str], *, leading: bool = True) -> list[bool]:
        """Which pages are stored. ``leading``: only those before the first that is not, each ``True``."""
        try:
            found = self._keys(keys)
            if found is not None:
                return self._tiers.present(found, leading=leading)
        except Exception:  # noqa: BLE001 - SGLang's threads do not expect one
            _log.exception("A look-up failed, and counts as misses.")
        return [] if leading else [False] * len(keys)

    def load(self, keys: Sequence[str], pages: Callable[[], Sequence[Page]]) -> list[bool]:
        """Reads into ``pages``, wherever in memory they lie. Those whose answer is ``False`` keep their content."""
        return self._move(self._tiers.load, keys, pages)

    def store(self, keys: Sequence[str], pages: Callable[[], Sequence[Page]]) -> list[bool]:
        """Writes ``pages``. ``True``: some tier has it."""
        return self._move(self._tiers.store, keys, pages)

    def stats(self) -> Stats:
        return self._tiers.stats()

    def close(self) -> None:
        self._tiers.close()

    def _move(
        self,
        call: Callable[[Sequence[OffloadKey], Sequence[Page]], list[bool]],
        keys: Sequence[str],
        pages: Callable[[], Sequence[Page]],
    ) -> list[bool]:
        try:
            found = pages()
            if len(found) != len(keys) or any(sum(size for _, size in page) != self.page_bytes for page in found):
                raise ValueError(f"{len(keys)} pages of {self.page_bytes} bytes were expected")
            named = self._keys(keys)
            if named is not None:
                return call(named, found)
        except Exception:  # noqa: BLE001 - SGLang's threads do not expect one
            _log.exception(f"Pages of SGLang's pool {self.name!r} were not moved.")
        return [False] * len(keys)

    def _keys(self, keys: Sequence[str]) -> list[OffloadKey] | None:
        if (salt := self._salt()) is None:
            return None
        return [make_offload_key(hashlib.sha256(salt + key.encode()).digest(), 0) for key in keys]
