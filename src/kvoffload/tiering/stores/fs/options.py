# SPDX-License-Identifier: Apache-2.0
"""The configuration keys of an ``fs`` tier."""

from __future__ import annotations

import os

from kvoffload.errors import Problems
from kvoffload.tiering.stores.fs.format import BlockFormat
from kvoffload.tiering.stores.fs.store import FileSystemStore
from kvoffload.tiering.stores.local import DirectoryOptions
from kvoffload.units import parse_bytes

_UNLIMITED = "unlimited"


class FileSystemOptions(DirectoryOptions, frozen=True, kw_only=True):
    """``{"type": "fs", "path": "/mnt/shared/kv", "max_bytes": "20TiB"}``: a directory that many hosts may share, with
    one file per block. On a local disk ``disk`` is faster."""

    _make = FileSystemStore

    path: str
    """The directory: an absolute path, or one that starts with ``~``. kvoffload creates it if it is missing."""
    max_bytes: int | str | None = None
    """Quota on all files below ``path``, kept within a tenth by deleting the oldest blocks. Use the same quota on all
    hosts. A full disk also deletes the oldest blocks; with ``"unlimited"``, only a full disk does. Default:
    required."""

    def check(self, block_bytes: int | None = None) -> None:
        problems = Problems()
        with problems:
            DirectoryOptions.check(self, block_bytes)
        if self.max_bytes is None:
            problems.add(
                f"max_bytes of the {self.type!r} tier is missing: give a quota for all hosts together, for example "
                f"'200GiB', or {_UNLIMITED!r}."
            )
        problems.raise_found()

    @property
    def directories(self) -> tuple[str, ...]:
        return (os.path.expanduser(self.path),)

    @property
    def bound_bytes(self) -> int | None:
        if self.max_bytes is None or self.max_bytes == _UNLIMITED:
            return None
        return parse_bytes(self.max_bytes, f"max_bytes of the {self.type!r} tier", _UNLIMITED)

    def _two_blocks_bytes(self, block_bytes: int) -> int:
        return 2 * BlockFormat("", block_bytes).file_bytes
