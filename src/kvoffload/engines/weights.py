# SPDX-License-Identifier: Apache-2.0
"""What tells two sets of weights apart: a fingerprint of their files, the same wherever there is a copy of them.

KV that other weights computed is wrong, and files are replaced at their path. So blocks that outlive a process are kept
apart by it. Loads neither an engine nor torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from kvoffload.config import OffloadingConfig
from kvoffload.errors import ConfigError
from kvoffload.tiering.options import parse_tiers

__all__ = ["WEIGHT_FILES", "fingerprint", "local_directory", "outliving_tier"]

WEIGHT_FILES = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
    "*.index.json",  # which of them are read
    "*quant*.json",  # how they are read
    "*processor_config.json",  # what images and sounds become before they meet them
)
"""Which of them an engine reads depends on the engine, its version and its options. So all count."""

_SAMPLE_BYTES = 4096
_SAMPLES = 4096
"""Of all files together, evenly. Training changes whole matrices; one that has a thousandth of the bytes is met by four
samples."""
_LEAST_SAMPLES = 16
"""Of each file."""

_THREADS = 16
_SAMPLES_OF_A_TASK = 64


def outliving_tier(config: OffloadingConfig) -> str | None:
    """The first of ``secondary_tiers`` whose blocks others, or later processes, read; ``None`` if there is none. One
    that only a spec of the user's own knows counts, too."""
    try:
        return next((tier.label for tier in parse_tiers(config.secondary_tiers) if tier.is_persistent), None)
    except ConfigError:
        return str(config.secondary_tiers[0].get("type"))


def local_directory(model: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Where the files of ``model`` lie on this host: a directory, or a name of the Hub whose snapshot is in the cache.
    Asks no server. Raises ``FileNotFoundError`` if they are not here."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except (OSError, ValueError) as exc:
        raise FileNotFoundError(f"the files of {model!r} are not on this host") from exc


def fingerprint(directory: Path, patterns: Sequence[str] = WEIGHT_FILES) -> str:
    """Of the files in ``directory`` and its subdirectories whose names fit one of ``patterns``: their names, sizes, and
    samples of their bytes at fixed places.

    Links are followed. Reads some 16 MiB. Raises ``OSError`` if there is no file of weights or one cannot be read.
    """
    found = {path for pattern in patterns for depth in ("", "*/") for path in directory.glob(depth + pattern)}
    files = sorted((path.relative_to(directory).as_posix(), path) for path in found if not path.is_dir())
    if all(path.suffix == ".json" for _, path in files):
        raise FileNotFoundError(f"{str(directory)!r} has no file of weights")
    num_samples = max(_LEAST_SAMPLES, _SAMPLES // len(files))
    digest = hashlib.sha256()
    tasks: list[tuple[Path, list[int]]] = []
    for name, path in files:
        size = path.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        places = iter(_places(size, num_samples))
        while batch := list(islice(places, _SAMPLES_OF_A_TASK)):
            tasks.append((path, batch))
    with ThreadPoolExecutor(_THREADS) as threads:  # a network's answers are waited for together
        for samples in threads.map(_digest_of, tasks):
            digest.update(samples)
    return digest.hexdigest()[:32]


def _places(size: int, count: int) -> Iterator[int]:
    """Where to read in a file of ``size`` bytes: all of a small file; otherwise ``count`` places, the first and the
    last bytes among them."""
    if size <= count * _SAMPLE_BYTES:
        yield from range(0, size, _SAMPLE_BYTES)
    else:
        for index in range(count):
            yield index * (size - _SAMPLE_BYTES) // (count - 1)


def _digest_of(task: tuple[Path, list[int]]) -> bytes:
    path, places = task
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for place in places:
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, place))
    return digest.digest()
