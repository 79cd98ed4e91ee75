# SPDX-License-Identifier: Apache-2.0
"""Find leaks: ended requests that are still reachable, and open files."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection
from contextlib import suppress
from logging import Logger
from pathlib import Path
from types import FunctionType, ModuleType

_STRANGE = (type, ModuleType, Logger)


def kept(ids: Collection[str], *roots: object) -> dict[str, str]:
    """Return the ``ids`` that objects reachable from ``roots`` refer to, with the last objects on the way. Classes,
    modules and the objects of tests are not searched."""
    found: dict[str, str] = {}
    seen: dict[int, object] = {}
    todo = [(root, "") for root in roots]
    while todo:
        each, way = todo.pop()
        if isinstance(each, str):
            if each in ids:
                found[each] = way
            continue
        if id(each) in seen or isinstance(each, _STRANGE):
            continue
        seen[id(each)] = each  # alive, so that its number is not another one's
        kind = type(each)
        if kind.__module__.startswith(("tests.", "kvoffload.testing")):
            continue
        way = f"{way[-200:]} > {kind.__qualname__}"
        parts = [each.__closure__, each.__defaults__] if isinstance(each, FunctionType) else gc.get_referents(each)
        if isinstance(each, dict):
            parts += each  # where all keys are texts, its referents are the values alone
        todo += [(part, way) for part in parts]
    return found


def open_in(directory: Path) -> set[str]:
    """Return the open files of this process in a directory, including the directory itself and deleted files."""
    found = set[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of this listing itself
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {path for path in found if f"{path}/".startswith(f"{directory}/")}
