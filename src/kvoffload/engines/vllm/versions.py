# SPDX-License-Identifier: Apache-2.0
"""The versions of vLLM that kvoffload supports, and the differences between them that the adapter handles.

Each difference has a function in this module and a line in ``tests/engines/vllm/test_interface.py``. Importing this
module loads neither vLLM nor torch.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from kvoffload.errors import ConfigError

OLDEST, NEWEST = (0, 32), (0, 33)
"""Major and minor version. The tests run with all of them. Later versions start with a warning, unless ``differences``
finds some."""

_0_33 = (0, 33)


def release_of(version: str) -> tuple[int, int]:
    """Return the major and minor version of ``version``. Raises ``ConfigError`` for a version that is older than all
    supported ones or is not a number."""
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
    """Return the version of vLLM. It uses vLLM's own number, because vLLM's builds have various names."""
    from vllm.version import __version__

    return str(__version__)


@functools.cache
def vllm_release() -> tuple[int, int]:
    """Return ``release_of`` the vLLM in this process."""
    return release_of(installed_version())


def differences(connector: Any) -> list[str]:
    """Return the hooks of ``connector`` that this vLLM calls with other parameters, and the new ones that it requires.
    vLLM would fail at such a call while it serves."""
    found = [f"{name} is new" for name in sorted(connector.__abstractmethods__)]
    for name in vars(connector):
        own, theirs = getattr(connector, name), getattr(super(connector, connector), name, None)
        if name != "__init__" and inspect.isroutine(own) and inspect.isroutine(theirs):
            parameters = list(inspect.signature(theirs).parameters)
            if parameters != list(inspect.signature(own).parameters):
                found.append(f"{name}({', '.join(parameters)})")
    return found


def differs(reason: object) -> ConfigError:
    """Return the error for a vLLM that is newer than all tested versions and does not fit kvoffload."""
    return ConfigError(
        f"kvoffload works with {_range()}, and vLLM {installed_version()} differs: {reason}. Install one of those "
        "versions, or a newer kvoffload."
    )


def untried_version() -> str | None:
    """Return a warning for users of a vLLM that is newer than all tested versions, or ``None`` for a tested version."""
    if vllm_release() <= NEWEST:
        return None
    return (
        f"kvoffload was tried with {_range()}, and this is vLLM {installed_version()}: nobody has compared its "
        "answers, and it may lack something that kvoffload uses"
    )


def tells_of_sleep() -> bool:
    """Return whether vLLM informs a connector before it unmaps the KV cache, and when it maps it again. It does so
    since 0.33."""
    return vllm_release() >= _0_33


def hash_lookahead_tokens(vllm_config: Any) -> int:
    """Return the number of tokens after a block that its hash also covers. It is 0 before 0.33."""
    return int(vllm_config.num_hash_lookahead_tokens) if vllm_release() >= _0_33 else 0
