# SPDX-License-Identifier: Apache-2.0
"""What the doctor saw, as plain values. ``None`` means that it could not be seen here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Versions:
    kvoffload: str
    python: str
    kernel: str
    torch: str | None
    vllm: str | None


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, or the container in which the doctor runs."""

    cores: int
    memory_bytes: int | None
    available_bytes: int | None
    """What can be allocated now, a container's limit included."""
    limit_bytes: int | None
    """A container's limit. ``None`` also where there is none."""
    shm_bytes: int | None
    """Of ``/dev/shm``, in all."""
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
    """NVIDIA's number, such as 570.86.15."""
    cuda: str
    """Newest version of CUDA that the driver supports."""
    has_batch: bool
    """Whether the driver copies many pages in one call."""
    pci_bus_id: str
    numa_node: int | None
    link: str | None
    """As the kernel sees it now. An idle device lowers the speed of its link."""
    link_bytes_per_s: float | None
    """Most that the widest and fastest link of this device gives in one direction."""


@dataclass(frozen=True, slots=True)
class Speed:
    bytes_per_s: float
    ratio: float
    """To large copies of the same kind, in the same rounds."""


@dataclass(frozen=True, slots=True)
class PageSpeed:
    """Scattered copies of pages of one size."""

    page_bytes: int
    store: Speed
    load: Speed
    both: Speed
    """Bytes of both directions together, at the same time."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Copies compared byte for byte with what they should be."""

    jobs: int
    num_bytes: int
    wrong: str | None
    """What went wrong first; ``None`` if all was right."""


@dataclass(frozen=True, slots=True)
class Report:
    versions: Versions
    host: Host
    cpu_bytes: int | None
    """Host memory that the user wants to offload to."""
    device: Device | None
    no_device: str | None
    """Why there is no device, in one sentence."""
    checked: Checked
    pages: tuple[PageSpeed, ...]
    """Between the device and host memory, or within host memory where there is no device."""
    job_s: float | None
    """Processor time of the engine's thread for a job of 64 scattered blocks of 64 layers, each a page."""
    side_by_side_job_s: float | None
    """The same where the layers of a block lie side by side: 64 pages."""
    pinned_bytes_per_s: float | None
    matmul_slowdown: float | None
    """How much longer a matrix product takes while blocks are copied both ways: 0.03 is 3 %."""
