# SPDX-License-Identifier: Apache-2.0
"""The two sizes of the suite: quick for ``make test``, thorough for ``make test-all``.

``KVOFFLOAD_TESTS`` chooses. Both sizes run the same tests, except those marked ``long`` and those with Mooncake; a
quick one takes fewer examples, a shorter trace or a part of a matrix.
"""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

SIZE = os.environ.get("KVOFFLOAD_TESTS") or "quick"
if SIZE not in ("quick", "thorough"):
    raise ValueError(f"KVOFFLOAD_TESTS is {SIZE!r}: quick or thorough")

IS_THOROUGH = SIZE == "thorough"


def by_size(quick: T, thorough: T) -> T:
    """Return the value for the size that runs."""
    return thorough if IS_THOROUGH else quick
