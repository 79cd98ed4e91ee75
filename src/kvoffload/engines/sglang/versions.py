# SPDX-License-Identifier: Apache-2.0
"""The versions of SGLang that kvoffload was tried with. Importing this module loads neither SGLang nor torch."""

from __future__ import annotations

import re
from importlib import metadata

TRIED = ("0.5.23",)


def sglang_version() -> str:
    """The SGLang in this environment, whole: builds and post-releases of one release may differ."""
    return metadata.version("sglang")


def untried_version() -> str | None:
    """A clause about a SGLang that was not tried; ``None`` if it is a tried one, or a post-release or build of it. Such
    a version starts if it has everything that kvoffload uses."""
    version = sglang_version()
    found = re.match(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+.*)?$", version)
    if found is not None and found[1] in TRIED:
        return None
    return f"kvoffload was tried with SGLang {', '.join(TRIED)}, and this is SGLang {version}"
