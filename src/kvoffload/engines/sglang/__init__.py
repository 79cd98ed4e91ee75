# SPDX-License-Identifier: Apache-2.0
"""kvoffload below SGLang's HiCache: a storage backend over kvoffload's tiers.

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
        from kvoffload.engines.sglang.versions import sglang_version

        sglang_version()  # before SGLang's own modules, which other versions may have elsewhere
        from kvoffload.engines.sglang.backend import KVOffloadStorage

        return KVOffloadStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
