# SPDX-License-Identifier: Apache-2.0
"""The name of the weights of a model or an adapter: a hash of the content of their files, equal for all copies.

KV of other weights is wrong, and users replace files at their paths. So the keys of persistent blocks include this
name. This module loads neither an engine nor torch.

The content that an engine loads may differ from the content that kvoffload hashes later. So an engine's adapter calls
``Files.of`` before the engine loads its files, and compares afterwards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvoffload.config import OffloadingConfig
from kvoffload.errors import ConfigError
from kvoffload.tiering.options import parse_tiers

logger = logging.getLogger(__name__)

WEIGHT_FILES = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.index.json",  # names the files that are read
    "*quant*.json",  # says how they are read
    "*processor_config.json",  # says how images and sounds are prepared
)
"""An engine reads some of these files, depending on its version and options. So all of them count."""

ADAPTER_FILES = ("adapter_*", "new_embeddings.*")
"""The files of a LoRA adapter. Engines read them from its directory, not from subdirectories."""

Answer = TypeVar("Answer")

Known = Callable[[], str | None]
"""The name of the weights; ``None`` while it is not known, and forever if it cannot be known. Returns at once."""

STARTUP_S = 0.5
"""How long a start waits for a name. Small models are hashed by then."""

_MODELSCOPE = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
"""Variables that make an engine download what is not on this host from ModelScope instead of the Hub."""
_UNSET = ("", "0", "false")

_THREADS = 2
_READ_BYTES = 1 << 20

_Stat = tuple[int, int, int, int, int]
"""Device, inode, size, and the times in ns of the last change of the content and of the inode."""


def outliving_tier(config: OffloadingConfig) -> str | None:
    """Return the label of the first persistent tier, or ``None``.

    A type of tier that only the user's own spec knows counts as persistent.
    """
    try:
        return next((tier.label for tier in parse_tiers(config.secondary_tiers) if tier.is_persistent), None)
    except ConfigError:
        return str(config.secondary_tiers[0].get("type"))


def local_directory(model: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Return the directory with the files of ``model``: ``model`` itself, or a snapshot in the Hub's cache.

    Asks no server. Raises ``FileNotFoundError`` if the files are not on this host, or not in the Hub's cache.
    """
    if os.path.isdir(model):
        return Path(model)
    if (why := why_not_of_hub(model)) is not None:
        raise FileNotFoundError(f"the files of {model!r} are not known: {why}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (OSError, ValueError) as exc:
        raise FileNotFoundError(f"the files of {model!r} are not on this host") from exc


def why_not_of_hub(model: str) -> str | None:
    """Return why an engine may load the files of ``model`` from elsewhere than the Hub's cache, or ``None``."""
    if os.path.exists(model):
        return None
    found = next((name for name in _MODELSCOPE if os.environ.get(name, "").strip().lower() not in _UNSET), None)
    return None if found is None else f"{found} has them loaded from elsewhere than the Hub's cache"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a model or an adapter, as they were at one moment."""

    directory: Path
    stats: Mapping[str, _Stat]
    """By path in the directory."""

    @classmethod
    def of(cls, directory: Path, patterns: Sequence[str] = WEIGHT_FILES, depths: Sequence[str] = ("", "*/")) -> Files:
        """Return the files in ``directory`` whose names match one of ``patterns``, including those in subdirectories.

        Follows links, and reads no content. Raises ``OSError`` if no file contains weights, or a file cannot be read.
        """
        found = {path for pattern in patterns for depth in depths for path in directory.glob(depth + pattern)}
        paths = sorted(path for path in found if not path.is_dir())
        if all(path.suffix == ".json" for path in paths):
            raise FileNotFoundError(f"{str(directory)!r} has no file of weights")
        return cls(directory, {path.relative_to(directory).as_posix(): _stat_of(path.stat()) for path in paths})

    @classmethod
    def of_adapter(cls, path: str) -> Files:
        """Return the files of the LoRA adapter at ``path``, a directory or a name of the Hub. Raises ``OSError``."""
        return cls.of(local_directory(os.path.expanduser(path)), ADAPTER_FILES, depths=("",))

    @property
    def digest(self) -> str:
        """A short text that differs if a file was replaced or changed on this host. Reads no content."""
        return hashlib.sha256(json.dumps(dict(self.stats), sort_keys=True).encode()).hexdigest()[:32]

    @property
    def is_of_hub(self) -> bool:
        """Whether the directory is a snapshot in the Hub's cache.

        The Hub's client only adds files to a snapshot, because the name of the directory identifies their content.
        """
        snapshots = self.directory.parent
        return snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")

    def why_not(self, before: Files | None) -> str | None:
        """Return the path of a file that may differ from the one that an engine loaded after ``before``, or ``None``.

        ``before`` is ``None`` if the files were missing at that time: the Hub's client may have downloaded them.
        """
        if before is None:
            return None if self.is_of_hub else str(self.directory)
        if before.directory != self.directory:
            return str(self.directory)
        for name in sorted(before.stats.keys() | self.stats.keys()):
            is_download = self.is_of_hub and name not in before.stats
            if before.stats.get(name) != self.stats.get(name) and not is_download:
                return str(self.directory / name)
        return None

    def name(self) -> str:
        """Return a hash of the files' paths and content.

        Reads all files, except for blobs of the Hub. Raises ``OSError`` if a file cannot be read, or has changed.
        """
        with ThreadPoolExecutor(_THREADS) as threads:
            hashes = list(threads.map(self._hash_of, self.stats))
        digest = hashlib.sha256()
        for name, content in zip(self.stats, hashes, strict=True):
            digest.update(f"{name}\0{content}\0".encode())
        return digest.hexdigest()[:32]

    def _hash_of(self, name: str) -> str:
        """Return the SHA-256 of a file's content."""
        path, stat = self.directory / name, self.stats[name]
        if self.is_of_hub and path.is_symlink():
            blob = Path(os.readlink(path))
            if blob.parent.name == "blobs" and _is_hash(blob.name):
                return blob.name
        return _read(path, stat)


def fingerprint(directory: Path, patterns: Sequence[str] = WEIGHT_FILES) -> str:
    """Return ``Files.name`` of the current files."""
    return Files.of(directory, patterns).name()


def _log_unnamed(error: Exception) -> None:
    """Log that the files of the weights could not be hashed."""
    logger.warning(
        "kvoffload cannot hash the files of the weights (%s), so this engine shares no blocks with other engines, and "
        "later engines will not find its blocks.",
        error,
    )


def in_background(
    compute: Callable[[], Answer],
    wait_s: float = STARTUP_S,
    on_error: Callable[[Exception], None] = _log_unnamed,
) -> Callable[[], Answer | None]:
    """Call ``compute`` in a thread, wait for at most ``wait_s``, and return a function that returns the answer.

    The function returns ``None`` until the answer is known, and forever if ``compute`` raised. In this case, the thread
    calls ``on_error`` with the exception.
    """
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(compute())
        except Exception as exc:  # noqa: BLE001 - then the answer stays unknown
            on_error(exc)
            answer.cancel()

    threading.Thread(target=run, name="kvoffload-weights", daemon=True).start()
    if wait_s:
        wait([answer], wait_s)
    return lambda: answer.result() if answer.done() and not answer.cancelled() else None


def _stat_of(found: os.stat_result) -> _Stat:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _is_hash(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def _read(path: Path, stat: _Stat) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(buffer):
            digest.update(memoryview(buffer)[:num_read])
        if _stat_of(os.fstat(file.fileno())) != stat:
            raise OSError(f"{path} has changed")
    return digest.hexdigest()
