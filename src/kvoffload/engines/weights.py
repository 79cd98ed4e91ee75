# SPDX-License-Identifier: Apache-2.0
"""What tells two sets of weights apart: a fingerprint of their files, the same wherever there is a copy of them.

KV that other weights computed is wrong, and files are replaced at their path. So blocks that outlive a process are kept
apart by it. Loads neither an engine nor torch.

A fingerprint is taken after the engine has loaded the files. ``changed_since`` says whether they are still those.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from kvoffload.config import OffloadingConfig
from kvoffload.errors import ConfigError
from kvoffload.tiering.options import parse_tiers

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
_SAMPLES = 8192
"""Of all large tensors together, evenly. Training changes whole matrices; one that has a thousandth of the bytes is met
by eight samples."""
_SMALL_BYTES = 256 << 10
"""Norms, biases and scales have fewer, and change alone: they are read whole."""
_MOST_SMALL_BYTES = 64 << 20
"""Of all files. With more, what counts as small shrinks."""
_LEAST_PARTS = 16
"""Of a file whose tensors are not known."""
_MOST_HEADER_BYTES = 100_000_000
"""Longer ones no reader of safetensors takes."""

_THREADS = 16
_READS_OF_A_TASK = 64

_UNREAD_S = 0.1
"""A process reads no weights so soon. Its start is known to 10 ms, and who writes weights may start it at once."""
_CLOCK_S = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
"""What the clock said when the host started; another value later means that somebody has set it."""


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
    """Of the files in ``directory`` and its subdirectories whose names fit one of ``patterns``: their names and sizes,
    the headers of safetensors files, small tensors whole, and samples of large ones at fixed places, one at least.

    What it does not see: a change inside a large tensor that meets none of its samples, like a few new rows of an
    embedding, some 2 MB apart in a model of 16 GB. Of other formats it does not know the tensors, and reads both ends
    and samples: a small tensor that changes alone is not seen in a GGUF file, and is in what ``torch.save`` writes,
    which has the checksums of all tensors at its end. JSON and code are read whole.

    Links are followed. Reads up to some 100 MiB, and 4 KiB of each tensor if there are more than 8,192. Raises
    ``OSError`` if there is no file of weights or one cannot be read.
    """
    files = _files(directory, patterns)
    if all(path.suffix == ".json" for path in files):
        raise FileNotFoundError(f"{str(directory)!r} has no file of weights")
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as threads:  # a network's answers are waited for together
        contents = list(threads.map(_contents_of, files))
        for path, content in zip(files, contents, strict=True):
            digest.update(f"{path.relative_to(directory).as_posix()}\0{content.size}\0".encode() + content.header)
        for read in threads.map(_digest_of, _tasks(files, contents)):
            digest.update(read)
    return digest.hexdigest()[:32]


def changed_since(directory: Path, since_s: float, patterns: Sequence[str] = WEIGHT_FILES) -> str | None:
    """A file that ``fingerprint`` reads, a link to it, or its directory, if it was changed or replaced at ``since_s``
    (Unix time) or later. ``None``: who loaded them after that has loaded what is there now.

    It trusts a change's time (``ctime``), which nobody can set back. What the Hub's client has downloaded meanwhile is
    no change: its files are named by their content, and a link to one is newer than the file. What this does not see:
    a directory further up that was replaced by renaming, and changes on a file server whose clock is late by more than
    a load takes to begin.
    """
    files = _files(directory, patterns)
    of_hub = directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--")
    # Directories of a snapshot change when files are added, and only then.
    paths = files if of_hub else [directory, *sorted({path.parent for path in files} - {directory}), *files]
    seen: set[Path] = set()
    for path in paths:
        if of_hub and _is_as_downloaded(path):
            continue
        if path.stat().st_ctime >= since_s or any(link.lstat().st_ctime >= since_s for link in _links(path, seen)):
            return str(path)
    if any(link.lstat().st_ctime >= since_s for link in _links(directory, seen)):
        return str(directory)
    return _moved_ref(directory, since_s) if of_hub else None


def process_start_s() -> float:
    """A tenth of a second after this process started, as Unix time; what it has loaded, it has read later. If somebody
    has set the clock since this module was imported, the earlier one of both answers. Minus infinity if the system does
    not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return float("-inf")
    return since_boot_s + _UNREAD_S + min(_CLOCK_S, time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))


def _files(directory: Path, patterns: Sequence[str]) -> list[Path]:
    found = {path for pattern in patterns for depth in ("", "*/") for path in directory.glob(depth + pattern)}
    return sorted(path for path in found if not path.is_dir())


@dataclass(frozen=True, slots=True)
class _Contents:
    size: int
    header: bytes
    """A digest of it; empty if the file has none that can be read."""
    bounds: list[int]
    """Between parts, which are tensors if there is a header; the first and the last one of all included."""

    def parts(self) -> Iterator[tuple[int, int]]:
        """Where each one begins, and its bytes."""
        return ((start, end - start) for start, end in pairwise(self.bounds))


def _contents_of(path: Path) -> _Contents:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            start = 8 + header_bytes
            if start <= min(size, _MOST_HEADER_BYTES):
                header = os.pread(file.fileno(), header_bytes, 8)
                if (tensors := _tensors_of(header, size - start)) is not None:
                    return _Contents(size, hashlib.sha256(header).digest(), [start + end for end in tensors])
    step = _SMALL_BYTES
    if path.suffix not in (".json", ".py"):
        step = max(step, (size - 2 * _SMALL_BYTES) // _LEAST_PARTS)
    bounds = {0, size, *range(min(_SMALL_BYTES, size), max(0, size - _SMALL_BYTES), step), max(0, size - _SMALL_BYTES)}
    return _Contents(size, b"", sorted(bounds))


def _tensors_of(header: bytes, data_bytes: int) -> list[int] | None:
    """Where the tensors begin in the data of a safetensors file, and where the last one ends; ``None`` if the header
    does not say so for all of the data."""
    try:
        entries = json.loads(header)
        spans = sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
        bounds = [0, *(end for _, end in spans)]
        is_whole = [start for start, _ in spans] == bounds[:-1] and bounds[-1] == data_bytes
        return bounds if is_whole and bounds == sorted(bounds) and all(type(end) is int for end in bounds) else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _tasks(files: Sequence[Path], contents: Sequence[_Contents]) -> Iterator[tuple[Path, list[tuple[int, int]]]]:
    """What to read: of each file, some places and how many bytes there."""
    small_bytes = _SMALL_BYTES
    sizes = sorted(size for content in contents for _, size in content.parts() if size <= small_bytes)
    while small_bytes > _SAMPLE_BYTES and sum(sizes) > _MOST_SMALL_BYTES:
        small_bytes //= 2
        sizes = [size for size in sizes if size <= small_bytes]
    distance = max(_SAMPLE_BYTES, sum(content.size for content in contents) // _SAMPLES)
    for path, content in zip(files, contents, strict=True):
        reads = (read for part in content.parts() for read in _reads(*part, small_bytes, distance))
        while batch := list(islice(reads, _READS_OF_A_TASK)):
            yield path, batch


def _reads(start: int, size: int, small_bytes: int, distance: int) -> Iterator[tuple[int, int]]:
    if size <= small_bytes:
        yield start, size
    else:
        count = max(1, size // distance)
        for index in range(count):
            yield start + (2 * index + 1) * (size - _SAMPLE_BYTES) // (2 * count), _SAMPLE_BYTES


def _digest_of(task: tuple[Path, list[tuple[int, int]]]) -> bytes:
    path, reads = task
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for place, size in reads:
            digest.update(os.pread(file.fileno(), size, place))
    return digest.digest()


def _links(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Symbolic links on the way to ``path``, and on the way to where they point. Leaves out what is in ``seen``."""
    path = path.absolute()
    for each in (*reversed(path.parents), path):
        if each not in seen:
            seen.add(each)
            if each.is_symlink():
                yield each
                yield from _links(each.parent / os.readlink(each), seen)


def _is_as_downloaded(path: Path) -> bool:
    is_link = path.is_symlink() and Path(os.readlink(path)).parent.name == "blobs"
    return is_link and path.stat().st_ctime <= path.lstat().st_ctime


def _moved_ref(snapshot: Path, since_s: float) -> str | None:
    """A name of the Hub that points to ``snapshot`` since then, and may have pointed to another one before."""
    if len(list(snapshot.parent.iterdir())) == 1:
        return None
    for ref in (snapshot.parent.parent / "refs").rglob("*"):
        if ref.is_file() and ref.stat().st_ctime >= since_s and ref.read_text().strip() == snapshot.name:
            return str(ref)
    return None
