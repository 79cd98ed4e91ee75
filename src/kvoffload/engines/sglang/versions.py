# SPDX-License-Identifier: Apache-2.0
"""The versions of SGLang that kvoffload was tried with. Importing this module loads neither SGLang nor torch."""

from __future__ import annotations

import re
from importlib import metadata

from kvoffload.errors import ConfigError

TRIED = ("0.5.23",)


def release_of(version: str) -> str:
    """The release of ``version``, which may be a post-release or a local build of it. Raises ``ConfigError`` for one
    that was not tried."""
    found = re.match(r"(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+.*)?$", version)
    if found is None or found[1] not in TRIED:
        raise ConfigError(
            f"kvoffload was tried with SGLang {', '.join(TRIED)}, and this is SGLang {version}: install that version, "
            "or serve without kvoffload."
        )
    return found[1]


def sglang_version() -> str:
    """The SGLang in this environment, whole: builds and post-releases of one release may differ. Raises as
    ``release_of``."""
    version = metadata.version("sglang")
    release_of(version)
    return version
