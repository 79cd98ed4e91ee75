# SPDX-License-Identifier: Apache-2.0
"""Parse and format sizes, times and counts as people write them."""

from __future__ import annotations

import math
import re
import reprlib

from kvoffload.errors import ConfigError

_FACTORS = {"": 1, "b": 1}
_FACTORS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)}
_FACTORS |= {f"{prefix}i{end}": 1024**power for power, prefix in enumerate("kmgtp", start=1) for end in ("", "b")}
_SECONDS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}
_MOST = 2**63
"""A limit above any real number of bytes or seconds."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(value: int | str, name: str = "size", also: str = "") -> int:
    """Return a size as a number of bytes.

    ``value`` is, for example, ``4096``, ``"4096"``, ``"64 MB"``, ``"1.5GiB"`` or Kubernetes' ``"64Gi"``. Raises
    ``ConfigError``, which calls the value ``name``, for any other value and for values that are not positive. ``also``
    is another value that the caller accepts, for that error.
    """
    number = value
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        factor = match and _FACTORS.get(match[2].lower())
        if not match or not factor:
            raise ConfigError(
                f"{name} must be a size in bytes or with a unit, such as 8589934592 or '8GiB'{_or(also)}, "
                f"not {reprlib.repr(value)}."
            )
        if float(match[1]) * factor >= _MOST:  # the number itself may have thousands of digits
            raise ConfigError(f"{name} is more than any machine has; lower it.")
        number = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if isinstance(number, bool) or not isinstance(number, int):
        raise ConfigError(
            f"{name} must be a whole number of bytes, or a size such as '8GiB'{_or(also)}, not {value!r}."
        )
    if number <= 0:
        raise ConfigError(f"{name} must be positive, not {value!r}.")
    if number >= _MOST:
        raise ConfigError(f"{name} is more than any machine has; lower it.")
    return number


def parse_seconds(value: float | str, name: str = "time", also: str = "") -> float:
    """Return a time such as ``90``, ``"90"``, ``"90s"``, ``"15 min"``, ``"24h"`` or ``"7d"`` in seconds.

    Raises ``ConfigError`` as ``parse_bytes`` does.
    """
    number: float | None = None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match and (factor := _SECONDS.get(match[2].lower())):
            number = float(match[1]) * factor
    elif type(value) in (int, float):  # not isinstance, because a boolean is also an int
        number = float(value) if abs(value) < _MOST else math.inf
    if number is None:
        raise ConfigError(
            f"{name} must be a time in seconds or with a unit, such as 90 or '24h'{_or(also)}, "
            f"not {reprlib.repr(value)}."
        )
    if not 0 < number < _MOST:
        raise ConfigError(f"{name} must be positive and finite, not {reprlib.repr(value)}.")
    return number


def _or(also: str) -> str:
    return f", or {also!r}" if also else ""


def format_bytes(number: float) -> str:
    """Return, for example, ``8 GiB`` for ``8589934592``: three digits in the largest unit that leaves at least 1."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while number >= 1023.5 and len(units) > 1:
        number /= 1024
        del units[0]
    digits = f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
    return f"{digits} {units[0]}"


def format_number(number: float) -> str:
    """Return three digits, or all digits of a large number: ``0.125`` or ``2,051``."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def exact_size(num_bytes: int) -> str:
    """Return a size for a configuration, such as ``8.5GiB``, that is not below ``num_bytes``."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{math.ceil(100 * num_bytes / unit) / 100:.10g}{name}"


def counted(number: int, what: str) -> str:
    """Return the number with its noun, such as ``1 run`` or ``2 runs``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return foreign text for a log, a message or a table, without line breaks and control characters, which could
    forge lines or change the terminal."""
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)
