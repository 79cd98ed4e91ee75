# SPDX-License-Identifier: Apache-2.0
"""The doctor's measurements, as plain values. ``None`` means that a fact could not be found here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Versions:
    kvoffload: str
    python: str
    kernel: str
    torch: str | None
    vllm: str | None
    sglang: str | None


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, or the container that the doctor runs in."""

    cores: int
    memory_bytes: int | None
    available_bytes: int | None
    """Memory that can be allocated, within the limits of control groups."""
    limit_bytes: int | None
    """The lowest limit of this process's control groups. ``None`` also means that no limit is set."""
    shm_bytes: int | None
    """Size of ``/dev/shm``."""
    shm_free_bytes: int | None
    locked_bytes: int | None
    """Limit on locked memory. ``None`` means unlimited."""
    huge_pages: str | None
    """The kernel's mode of transparent huge pages: always, madvise or never."""
    numa_nodes: int
    allowed_nodes: str | None
    """Nodes whose memory this process may use, as the kernel writes them: ``0-1``."""


@dataclass(frozen=True, slots=True)
class Device:
    """The first GPU that this process sees."""

    name: str
    driver: str | None
    """NVIDIA's version number, such as 570.86.15."""
    cuda: str
    """Newest version of CUDA that the driver supports."""
    has_batch: bool
    """Whether the driver copies many pages in one call."""
    pci_bus_id: str
    numa_node: int | None
    link: str | None
    """Current speed of the link as the kernel reports it. An idle GPU lowers it."""
    link_bytes_per_s: float | None
    """Highest speed in one direction that the link of this GPU supports."""


@dataclass(frozen=True, slots=True)
class Speed:
    bytes_per_s: float
    ratio: float
    """Speed relative to large copies of the same kind, in the same rounds."""


@dataclass(frozen=True, slots=True)
class PageSpeed:
    """Scattered copies of pages of one size."""

    page_bytes: int
    store: Speed
    load: Speed
    both: Speed
    """Speed of both directions together, at the same time."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Copies compared byte by byte with the expected bytes."""

    jobs: int
    num_bytes: int
    wrong: str | None
    """The first mistake; ``None`` if all bytes were right."""


@dataclass(frozen=True, slots=True)
class Report:
    versions: Versions
    host: Host
    cpu_bytes: int | None
    """Host memory that the user wants for offloaded KV."""
    device: Device | None
    no_device: str | None
    """The reason why no GPU was found, in one sentence."""
    checked: Checked
    pages: tuple[PageSpeed, ...]
    """Copies between the GPU and host memory, or within host memory without a GPU."""
