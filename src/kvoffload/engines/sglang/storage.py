# SPDX-License-Identifier: Apache-2.0
"""Store the pages of one of SGLang's host pools in tiers, by SGLang's keys. This module uses only attributes of
SGLang's pools and configuration."""

from __future__ import annotations

import enum
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvoffload.base import OffloadKey, make_offload_key
from kvoffload.engines.sglang.facts import POOL_IS_HARMLESS
from kvoffload.engines.sglang.options import SGLangOptions, namespace_of
from kvoffload.engines.sglang.rejections import PAGES
from kvoffload.engines.sglang.tiers import Page, PageTiers
from kvoffload.logs import RateLimitedLog
from kvoffload.metrics import Stats
from kvoffload.units import parse_bytes

_log = RateLimitedLog(logging.getLogger(__name__))

_OF_EVERY_POOL = ("layout", "dtype", "page_size")


def page_facts(host_pool: Any) -> dict[str, Any]:
    """Return the facts that describe the layout of a host pool's page: all of the pool's attributes that are plain
    values, except those that are known to be harmless. Raises ``LookupError`` if an attribute of every pool is
    missing."""
    facts = {
        name: value for name, value in vars(host_pool).items() if name not in POOL_IS_HARMLESS and _is_plain(value)
    }
    if absent := [name for name in _OF_EVERY_POOL if name not in facts]:
        raise LookupError(f"it has no {', '.join(absent)}")
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    # By name, because this module does not import torch.
    return isinstance(value, (bool, int, float, str, enum.Enum, type(None))) or type(value).__name__ == "dtype"


def pages_of(host_pool: Any, host_indices: Any, num_pages: int) -> list[Page]:
    """Return the places of ``num_pages`` pages in a host pool, by the indices of their tokens. Raises ``ValueError`` if
    the number of indices does not match."""
    addresses, sizes = host_pool.get_page_buffer_meta(host_indices)
    per_page, rest = divmod(len(addresses), num_pages)
    if rest or not per_page or len(host_indices) != num_pages * host_pool.page_size:
        raise ValueError(f"{len(host_indices)} tokens in {len(addresses)} pieces are not {num_pages} pages")
    pieces = list(zip(addresses, sizes, strict=True))
    return [pieces[begin : begin + per_page] for begin in range(0, len(pieces), per_page)]


class PoolStorage:
    """Keeps the pages of ``host_pool`` in tiers. Any thread may call it. No call raises or takes longer than
    ``max_wait_s``; every failure is a miss.

    ``first_page`` contains the indices of the pool's first page, which determine the size of pages. ``model`` and
    ``ranks`` are parts of the namespace. A page is found only with the ``salt`` that was valid when it was stored.
    Without a salt, nothing is found or stored. The constructor raises ``ConfigError`` for a pool that cannot be stored,
    and for options that the tiers reject.
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
            raise PAGES.error(f"{name!r}, a {type(host_pool).__name__}: {exc}") from exc
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
        """Return which pages are stored. ``leading``: return only the pages before the first missing one, each as
        ``True``."""
        try:
            found = self._keys(keys)
            if found is not None:
                return self._tiers.present(found, leading=leading)
        except Exception:  # noqa: BLE001 - SGLang's threads do not expect one
            _log.exception("A look-up failed, and counts as misses.")
        return [] if leading else [False] * len(keys)

    def load(self, keys: Sequence[str], pages: Callable[[], Sequence[Page]]) -> list[bool]:
        """Read the content of these keys into ``pages``, which may be anywhere in memory. Pages with the answer
        ``False`` keep theirs."""
        return self._move(self._tiers.load, keys, pages)

    def store(self, keys: Sequence[str], pages: Callable[[], Sequence[Page]]) -> list[bool]:
        """Write ``pages``, and return for each whether some tier has it."""
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
