# SPDX-License-Identifier: Apache-2.0
"""Parse the user's options, and compute the namespace of the pages, because SGLang's keys identify neither model nor
rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvoffload.config import parse_struct
from kvoffload.config_file import with_config_file
from kvoffload.errors import ConfigError, Problems
from kvoffload.tiering.options import StoreOptions, parse_tiers
from kvoffload.tiering.spec import name_namespace
from kvoffload.units import parse_bytes

_WHAT = "'kvoffload' of SGLang's storage options"

_FORMAT = 2
"""Raise it whenever the meaning of a block's bytes changes for the same facts."""

_RANK_BOUND = ("mamba", "draft")
"""Pools, by the first word of their name, that differ from rank to rank even if the KV of all ranks is the same."""

_LATENT = ("MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool")
"""Host pools of drafters whose KV is the same on all ranks. SGLang writes them on one rank."""


class SGLangOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of ``kvoffload`` in ``--hicache-storage-backend-extra-config``."""

    secondary_tiers: list[dict[str, Any]]
    """The tiers, as in vLLM's configuration. All are written; pages are read from the first that has them."""
    max_wait_s: float = 5.0
    """Time limit of each call from SGLang, for each pool. Pages that were not found, read or written by then are
    misses."""
    staging_bytes: int | str = "256MiB"
    """Memory for pages of one pool in transfer, half of it for reads. It must have room for at least four pages."""
    media_never_change: bool = False
    """A promise that no client names an image, video or sound by a hash (``mm_hashes``) of another one. Without it,
    kvoffload rejects a model that accepts media if there is a persistent tier."""
    metrics_port: int | None = None
    """Port of 127.0.0.1 that serves kvoffload's metrics. Each further rank of a host uses the next port. Default:
    none."""

    @property
    def tiers(self) -> tuple[StoreOptions, ...]:
        return parse_tiers(self.secondary_tiers)


def parse_options(extra_config: Mapping[str, Any]) -> SGLangOptions:
    """Return the options in SGLang's ``extra_config``. Raises ``ConfigError`` with all mistakes. Touches nothing."""
    given = extra_config.get("kvoffload", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_WHAT} must be a mapping, such as {{'secondary_tiers': [...]}}, not {given!r}.")
    options: SGLangOptions = parse_struct(SGLangOptions, with_config_file(given), _WHAT)
    problems = Problems()
    if not options.secondary_tiers:
        problems.add(f"secondary_tiers of {_WHAT} is empty: name a tier, such as {{'type': 'disk', 'path': ...}}.")
    if not options.max_wait_s > 0:
        problems.add(f"max_wait_s of {_WHAT} must be positive, not {options.max_wait_s}.")
    if options.metrics_port is not None and not 0 <= options.metrics_port < 1 << 16:
        problems.add(f"metrics_port of {_WHAT} must be from 0 to 65535, not {options.metrics_port}.")
    with problems:
        parse_bytes(options.staging_bytes, f"staging_bytes of {_WHAT}")
    with problems:
        for tier in options.tiers:
            if tier.cascade == "on_evict":
                problems.add(
                    f"cascade of the {tier.label!r} tier: SGLang says when pages are written. Leave it out, and use "
                    "--hicache-write-policy."
                )
    problems.raise_found()
    return options


def namespace_of(pool_name: str, page: Mapping[str, Any], model: Mapping[str, Any], ranks: Mapping[str, Any]) -> str:
    """Return the namespace of a pool's pages, which two engines share only if each can use the other's pages.

    ``page`` contains the facts of one page (layout, dtype, sizes), ``model`` the facts of the model (its ``name``
    first), and ``ranks`` the numbers and counts of ranks, including ``tp_rank`` and ``is_mla_model``. If
    ``is_mla_model`` is true, the KV is the same on all ranks of tensor parallelism, and SGLang writes it on one of
    them.
    """
    own, kind = dict(ranks), pool_name.split("_")[0]
    is_latent = kind not in _RANK_BOUND or (kind == "draft" and page.get("pool") in _LATENT)
    if own.pop("is_mla_model") and is_latent:
        del own["tp_rank"]
    facts = {
        "engine": "sglang",
        "format": _FORMAT,
        "pool": pool_name,
        "page": _as_text(page),
        "model": _as_text(model),
        "ranks": _as_text(own),
    }
    words = ["sglang", str(model.get("name") or "model"), str(page.get("dtype", "")).removeprefix("torch.")]
    return name_namespace([*words, *([] if pool_name == "kv" else [pool_name])], facts)


def _as_text(facts: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in facts.items()}
