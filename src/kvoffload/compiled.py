# SPDX-License-Identifier: Apache-2.0
"""Machine code where numba is installed (vLLM brings it); everything works without it, slower."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["compiled"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


def compiled(compile_with: Callable[[Any], T], without_it: str) -> T | None:
    """``compile_with(numba)``, or ``None`` where that is missing or cannot. ``without_it``: what this host loses."""
    try:
        import numba
    except ImportError:
        return None
    try:
        return compile_with(numba)
    except Exception:
        # Releases of numba, llvmlite, numpy and the C library can disagree; the plain way is always right.
        logger.warning("numba is installed but cannot compile: %s.", without_it, exc_info=True)
        return None
