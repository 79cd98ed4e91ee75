# SPDX-License-Identifier: Apache-2.0
"""The configuration keys that all stores in a host's directories share."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal

from kvoffload.errors import ConfigError, Problems
from kvoffload.tiering.options import SealedOptions
from kvoffload.tiering.stores.base import BlockStore
from kvoffload.tiering.stores.in_time import in_time
from kvoffload.tiering.stores.root import RootedStore
from kvoffload.units import format_bytes

_OPEN_S = 30.0
"""Minimum time limit for opening a store, even if ``timeout_s`` is shorter, because startup reads an index while other
programs also start."""


class DirectoryOptions(SealedOptions, frozen=True, kw_only=True):
    """A store in a directory of this host's file systems."""

    locality: ClassVar[str | None] = "LOCAL"
    _make: ClassVar[Callable[..., RootedStore]]
    """The store's class."""

    mode: Literal["private", "group"] = "private"
    """``"group"`` also lets the group that owns ``path`` read and write the blocks."""

    @property
    def directory(self) -> str:
        """The only entry of ``directories``."""
        (directory,) = self.directories
        return directory

    def check(self, block_bytes: int | None = None) -> None:
        problems = Problems()
        with problems:
            SealedOptions.check(self, block_bytes)
        for directory in self.directories:
            if not directory:
                problems.add(f"path of the {self.type!r} tier is empty; name a directory.")
            elif directory.startswith("~"):
                problems.add(f"path of the {self.type!r} tier names the home of an unknown user: {directory}.")
            elif not os.path.isabs(directory):
                problems.add(
                    f"path of the {self.type!r} tier must begin with / or ~, for example '/mnt/kv', not {directory!r}."
                )
        with problems:
            max_bytes = self.bound_bytes
            if max_bytes is not None and block_bytes and max_bytes < self._two_blocks_bytes(block_bytes):
                problems.add(
                    f"max_bytes of the {self.type!r} tier is {format_bytes(max_bytes)}, too little for two blocks "
                    f"of {format_bytes(block_bytes)}; raise it."
                )
        problems.raise_found()

    def open_store(self, block_bytes: int, namespace: str) -> BlockStore:
        (outcome,) = open_each([self], block_bytes, namespace)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _open(self, block_bytes: int, namespace: str, secret: bytes | None) -> BlockStore:
        store = self._make(
            self.directory,
            block_bytes,
            namespace,
            self.bound_bytes,
            mode=self.mode,
            secret=secret,
        )
        if self.encryption_key is not None:
            store.drop_plain()
        return store

    @abstractmethod
    def _two_blocks_bytes(self, block_bytes: int) -> int:
        """Return the bytes on disk of the smallest useful store."""


def open_each(
    each: Sequence[DirectoryOptions], block_bytes: int, namespace: str
) -> Sequence[BlockStore | BaseException]:
    """Open the stores of ``each`` directory at the same time. Returns each store, or the error that prevented opening
    it. That may be a ``TimeoutError``, because a mount may hang forever."""
    limit_s = max(_OPEN_S, *(options.timeout_s for options in each))
    calls = [partial(SealedOptions.open_store, options, block_bytes, namespace) for options in each]
    outcomes = in_time(calls, limit_s, lambda store: store.close())
    for at, (options, outcome) in enumerate(zip(each, outcomes, strict=True)):
        if isinstance(outcome, TimeoutError):
            outcomes[at] = late = ConfigError(
                f"{options.directory} of the {options.label!r} tier did not open within {limit_s:g} s; check its "
                "disk, or choose another directory."
            )
            late.__cause__ = outcome
    return outcomes
