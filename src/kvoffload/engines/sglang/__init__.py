# SPDX-License-Identifier: Apache-2.0
"""kvoffload below SGLang's HiCache: a storage backend that uses kvoffload's tiers.

SGLang loads it as a dynamic backend, by module ``kvoffload.engines.sglang`` and class ``KVOffloadStorage``
(docs/sglang.md). Importing this package loads neither SGLang nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvoffload.engines.sglang.backend import KVOffloadStorage

__all__ = ["KVOffloadStorage"]


def __getattr__(name: str) -> Any:
    if name == "KVOffloadStorage":
        from kvoffload.engines.sglang.rejections import VERSION
        from kvoffload.engines.sglang.versions import untried_version

        untried = untried_version()
        try:
            from kvoffload.engines.sglang.backend import KVOffloadStorage

            if absent := KVOffloadStorage.__abstractmethods__:
                raise AttributeError(f"kvoffload has no {', '.join(sorted(absent))}")
        except (ImportError, AttributeError) as exc:
            if untried is None:
                raise
            raise VERSION.error(f"{untried}, which differs: {exc}") from exc
        return KVOffloadStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
