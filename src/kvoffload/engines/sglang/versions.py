# SPDX-License-Identifier: Apache-2.0
"""The versions of SGLang with which kvoffload was tested. Importing this module loads neither SGLang nor torch."""

from __future__ import annotations

import re
from importlib import metadata

TRIED = ("0.5.23",)


def sglang_version() -> str:
    """Return the full version of SGLang in this environment, because builds and post-releases of one release may
    differ."""
    return metadata.version("sglang")


def untried_version() -> str | None:
    """Return a clause for a warning about an untested version of SGLang, or ``None`` for a tested version and its
    post-releases and builds. An untested version starts if it provides everything that kvoffload uses."""
    version = sglang_version()
    found = re.match(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+.*)?$", version)
    if found is not None and found[1] in TRIED:
        return None
    return f"kvoffload was tried with SGLang {', '.join(TRIED)}, and this is SGLang {version}"
