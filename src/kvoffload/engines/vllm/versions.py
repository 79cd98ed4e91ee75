# SPDX-License-Identifier: Apache-2.0
"""The versions of vLLM that kvoffload works with, and what the adapter does differently in some of them.

A difference has a function here and a line in ``tests/engines/vllm/test_interface.py``. Importing this module loads
neither vLLM nor torch.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from kvoffload.engines.vllm.sources import Sources
from kvoffload.errors import ConfigError

OLDEST, NEWEST = (0, 32), (0, 33)
"""Major and minor version. The tests run with all of them. Later versions start if they have all that the adapter
touches (``surface.py``)."""

_0_33 = (0, 33)


def release_of(version: str) -> tuple[int, int]:
    """Major and minor version of ``version``. Raises ``ConfigError`` for one that is older than all that are supported,
    or has no number."""
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release is None or release < OLDEST:
        raise ConfigError(
            f"kvoffload works with {_range()} and newer, and this is vLLM {version}: install one of those versions."
        )
    return release


def _range() -> str:
    return f"vLLM {_text(OLDEST)} to {_text(NEWEST)}"


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def installed_version() -> str:
    """vLLM's own number counts, since its builds have various names."""
    from vllm.version import __version__

    return str(__version__)


@functools.cache
def vllm_release() -> tuple[int, int]:
    """``release_of`` the vLLM in this process. Raises ``ConfigError`` for one that is newer than all that were tried
    and lacks something that the adapter touches."""
    version = installed_version()
    release = release_of(version)
    if release > NEWEST:
        from kvoffload.engines.vllm.surface import missing

        package = importlib.util.find_spec("vllm")
        assert package is not None
        assert package.submodule_search_locations
        lacks = missing(Sources(Path(package.submodule_search_locations[0]).parent), release)
        if lacks:
            more = f" and {len(lacks) - 3} more" if len(lacks) > 3 else ""
            raise ConfigError(
                f"kvoffload works with {_range()}, and vLLM {version} differs in {'; '.join(lacks[:3])}{more}: install "
                "one of those versions, or a newer kvoffload."
            )
    return release


def untried_version() -> str | None:
    """What to tell whoever runs a vLLM that is newer than all that were tried; ``None``: it is one of those."""
    if vllm_release() <= NEWEST:
        return None
    return (
        f"kvoffload was tried with {_range()}, and this is vLLM {installed_version()}: it has all that kvoffload "
        "touches, and its answers were compared with nothing"
    )


def tells_of_sleep() -> bool:
    """Whether a connector hears before its KV cache is unmapped, and when it is mapped again. Not before 0.33."""
    return vllm_release() >= _0_33


def hash_lookahead_tokens(vllm_config: Any) -> int:
    """Tokens after a block that its hash covers too. None before 0.33."""
    return int(vllm_config.num_hash_lookahead_tokens) if vllm_release() >= _0_33 else 0
