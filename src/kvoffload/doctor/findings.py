# SPDX-License-Identifier: Apache-2.0
"""Findings from the doctor's measurements, each with a cause and its remedy. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from kvoffload.doctor.report import Device, Host, PageSpeed, Report
from kvoffload.units import counted, format_bytes

LEAST_RATIOS = {4 << 10: 0.08, 16 << 10: 0.1, 32 << 10: 0.5, 64 << 10: 0.7, 256 << 10: 0.9}
"""Shares of the speed of one large copy that scattered pages reach on a healthy H100 or H200 over PCIe 5, by page size
(vLLM issues 42212 and 48434). Copy engines become much slower below 28 KiB."""
_SMALL_PAGE_BYTES = 64 << 10
_BOTH_RATIO = 0.85
_LEAST_BOTH_BYTES = 256 << 10
_LINK_SHARE = 0.6
_LEAST_CORES = 4


class Severity(IntEnum):
    NOTE = 1
    """Useful to know."""
    WARNING = 2
    """Slower than possible, or a limit for some configurations."""
    FAULT = 3
    """Offloading does not work here."""


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    cause: str
    """A sentence without its full stop."""
    remedy: str
    """A sentence without its full stop."""

    def __str__(self) -> str:
        return f"{self.cause}: {self.remedy}."


def findings(report: Report) -> list[Finding]:
    """Return all findings, the worst first."""
    found = [*_of_correctness(report), *_of_memory(report.host, report.cpu_bytes), *_of_speed(report)]
    if report.device is not None:
        found += _of_device(report.device, report)
    if report.versions.vllm is None and report.versions.sglang is None:
        found.append(
            Finding(
                Severity.NOTE,
                "neither vLLM nor SGLang is installed in this environment",
                "run the doctor in the environment of your server",
            )
        )
    return sorted(found, key=lambda finding: -finding.severity)


def verdict(report: Report) -> str:
    """Return one line: the worst finding, or that all is well. Without a GPU, the verdict is never "Good"."""
    found = findings(report)
    others = len([finding for finding in found if finding.severity > Severity.NOTE]) - 1
    if found and found[0].severity > Severity.NOTE:
        word = "Fault" if found[0].severity is Severity.FAULT else "Works, but"
        return f"{word}: {found[0]}" + (f" {others} more above." if others else "")
    if report.device is None:
        return f"GPU path not checked: {report.no_device}. Copies within host memory are right."
    speed = ", and as fast as this machine allows" if report.pages else "; their speed was not measured"
    return f"Good: copies are right{speed}."


def _of_correctness(report: Report) -> Iterator[Finding]:
    if report.checked.wrong is not None:
        yield Finding(
            Severity.FAULT,
            report.checked.wrong.rstrip("."),
            "serve without kvoffload on this machine, and report this output",
        )


def _of_memory(host: Host, cpu_bytes: int | None) -> Iterator[Finding]:
    if cpu_bytes is None:
        return
    wanted = format_bytes(cpu_bytes)
    if host.available_bytes is not None and cpu_bytes > host.available_bytes:
        limit = "" if host.limit_bytes is None else f" below a limit of {format_bytes(host.limit_bytes)}"
        yield Finding(
            Severity.FAULT,
            f"you want {wanted}, but only {format_bytes(host.available_bytes)} of host memory is available{limit}",
            "lower cpu_bytes_to_use, or raise the limit of the container or job",
        )
    elif host.shm_free_bytes is not None and cpu_bytes > host.shm_free_bytes:
        yield Finding(
            Severity.WARNING,
            f"you want {wanted}, but /dev/shm has only {format_bytes(host.shm_free_bytes)} free. Engines with several "
            "processes, as with tensor parallelism, keep host memory there",
            "enlarge it (docker: --shm-size; Kubernetes: an emptyDir of medium Memory)",
        )


def _of_speed(report: Report) -> Iterator[Finding]:
    # Copies within host memory are timed for information only: other processes change them from run to run.
    slow = [page for page in report.pages if report.device is not None and _is_below(page)]
    if slow:
        page = max(slow, key=lambda page: page.page_bytes)
        yield Finding(
            Severity.WARNING,
            f"pages of {format_bytes(page.page_bytes)} reach {_least(page):.2f} of the speed of a large copy to or "
            f"from the GPU, below {least_ratio(page.page_bytes)}",
            "run the doctor again on an idle machine; if the result is the same, report this output",
        )
    small = [page for page in report.pages if page.page_bytes < _SMALL_PAGE_BYTES and _least(page) < 0.5]
    if small:
        page = min(small, key=_least)
        yield Finding(
            Severity.NOTE,
            f"pages of {format_bytes(page.page_bytes)} reach {_least(page):.2f} of the speed of a large copy",
            "use larger GPU blocks (vLLM: --block-size), or a kv_cache_layout with the layers of a block side by side",
        )
    if report.host.cores < _LEAST_CORES:
        yield Finding(
            Severity.NOTE,
            f"the engine, copies and tiers share {counted(report.host.cores, 'core')}",
            f"give this process {_LEAST_CORES} or more",
        )


def least_ratio(page_bytes: int) -> float:
    """Return the share of the speed of one large copy that pages of this size should reach on a GPU."""
    return max((ratio for size, ratio in LEAST_RATIOS.items() if size <= page_bytes), default=0.0)


def is_slow(page: PageSpeed) -> bool:
    """Return whether pages are slower than on a healthy GPU. Measure such a page again before you report it."""
    return _is_below(page) or (page.page_bytes >= _LEAST_BOTH_BYTES and page.both.ratio < _BOTH_RATIO)


def _is_below(page: PageSpeed) -> bool:
    return _least(page) < least_ratio(page.page_bytes)


def _least(page: PageSpeed) -> float:
    return min(page.store.ratio, page.load.ratio)


def _of_device(device: Device, report: Report) -> Iterator[Finding]:
    if not device.has_batch:
        yield Finding(
            Severity.WARNING,
            f"the driver (CUDA {device.cuda}) copies only one page per call",
            "update it to CUDA 12.8 or newer, which copies all pages of a job in one call",
        )
    largest = max(report.pages, key=lambda page: page.page_bytes, default=None)
    if device.link_bytes_per_s is not None and largest is not None:
        reached = max(speed.bytes_per_s / speed.ratio for speed in (largest.store, largest.load))
        if reached < _LINK_SHARE * device.link_bytes_per_s:
            yield Finding(
                Severity.WARNING,
                f"a large copy reaches {reached / 1e9:.0f} GB/s, but the GPU's link supports "
                f"{device.link_bytes_per_s / 1e9:.0f} GB/s",
                f"check its slot and other users of its link ({device.link or 'unknown'}), and run on the cores of "
                f"its socket{'' if device.numa_node is None else f', NUMA node {device.numa_node}'}",
            )
    slow_both = [
        page for page in report.pages if page.page_bytes >= _LEAST_BOTH_BYTES and page.both.ratio < _BOTH_RATIO
    ]
    if slow_both:
        page = min(slow_both, key=lambda page: page.both.ratio)
        yield Finding(
            Severity.WARNING,
            f"with pages of {format_bytes(page.page_bytes)}, both directions at once reach {page.both.ratio:.2f} of "
            f"the speed of two large copies, below {_BOTH_RATIO}",
            "run the doctor again on an idle machine; if the result is the same, report this output",
        )
    if report.host.numa_nodes > 1 and device.numa_node is None:
        yield Finding(
            Severity.NOTE,
            f"the machine has {report.host.numa_nodes} NUMA nodes, and the kernel does not say which one the GPU is on",
            "bind the engine to one of them (numactl), and compare the doctor's figures on each",
        )
