# SPDX-License-Identifier: Apache-2.0
"""From what the doctor saw to what it means. Pure: a finding is a cause with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from kvoffload.doctor.report import Device, Host, PageSpeed, Report
from kvoffload.units import format_bytes

LEAST_RATIOS = {4 << 10: 0.08, 16 << 10: 0.1, 32 << 10: 0.5, 64 << 10: 0.7, 256 << 10: 0.9}
"""By size of page, what scattered pages reach of one large copy on a healthy H100 or H200 over PCIe 5 (vLLM issues
42212 and 48434). Copy engines fall off a cliff below 28 KiB."""
_LEAST_HOST_RATIOS = {64 << 10: 0.9}
_SMALL_PAGE_BYTES = 64 << 10
_BOTH_RATIO = 0.85
_JOB_S = 1e-3
_SLOWDOWN = 0.03
_LINK_SHARE = 0.6
_LEAST_CORES = 4
_LONG_PINNING_S = 60


class Severity(IntEnum):
    NOTE = 1
    """Worth knowing."""
    WARNING = 2
    """Slower than it could be, or in the way of some configurations."""
    FAULT = 3
    """Offloading does not work here."""


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    cause: str
    """A sentence without its full stop."""
    remedy: str
    """The same."""

    def __str__(self) -> str:
        return f"{self.cause}: {self.remedy}."


def findings(report: Report) -> list[Finding]:
    """The worst first."""
    found = [*_of_correctness(report), *_of_memory(report.host, report.cpu_bytes), *_of_speed(report)]
    if report.device is not None:
        found += _of_device(report.device, report)
    elif report.no_device is not None:
        found.append(Finding(Severity.NOTE, "What needs a GPU was not checked", report.no_device))
    return sorted(found, key=lambda finding: -finding.severity)


def verdict(report: Report) -> str:
    """One line: the worst finding, or that all is well."""
    found = findings(report)
    others = len([finding for finding in found if finding.severity > Severity.NOTE]) - 1
    if found and found[0].severity > Severity.NOTE:
        word = "Fault" if found[0].severity is Severity.FAULT else "Works, but"
        return f"{word}: {found[0]}" + (f" {others} more above." if others else "")
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
        limit = "" if host.limit_bytes is None else f", of a limit of {format_bytes(host.limit_bytes)}"
        yield Finding(
            Severity.FAULT,
            f"{wanted} are wanted and {format_bytes(host.available_bytes)} of host memory are available{limit}",
            "lower cpu_bytes_to_use, or give the machine or container more memory",
        )
    elif host.shm_free_bytes is not None and cpu_bytes > host.shm_free_bytes:
        yield Finding(
            Severity.WARNING,
            f"{wanted} are wanted and /dev/shm has {format_bytes(host.shm_free_bytes)}, which matters where the engine "
            "has several processes, as with tensor parallelism",
            "enlarge it (docker: --shm-size; Kubernetes: an emptyDir of medium Memory)",
        )


def _of_speed(report: Report) -> Iterator[Finding]:
    where = "the device" if report.device is not None else "host memory"
    slow = [page for page in report.pages if _least(page) < least_ratio(page.page_bytes, report.device is not None)]
    if slow:
        page = max(slow, key=lambda page: page.page_bytes)
        yield Finding(
            Severity.WARNING,
            f"pages of {format_bytes(page.page_bytes)} reach {_least(page):.2f} of a large copy to or from {where}, "
            f"below {least_ratio(page.page_bytes, report.device is not None)}",
            "run the doctor again on an idle machine; if it stays so, report this output",
        )
    small = [page for page in report.pages if page.page_bytes < _SMALL_PAGE_BYTES and _least(page) < 0.5]
    if small:
        page = min(small, key=_least)
        yield Finding(
            Severity.NOTE,
            f"pages of {format_bytes(page.page_bytes)} reach {_least(page):.2f} of a large copy",
            'use larger GPU blocks (vLLM: --block-size), or "kv_cache_layout" so that the layers of a block lie side '
            "by side",
        )
    if report.host.cores < _LEAST_CORES:
        yield Finding(
            Severity.NOTE,
            f"this process may use {report.host.cores} core(s), which the engine, copies and tiers share",
            f"give it {_LEAST_CORES} or more",
        )


def least_ratio(page_bytes: int, has_device: bool) -> float:
    """What pages of this size should reach of one large copy."""
    ratios = LEAST_RATIOS if has_device else _LEAST_HOST_RATIOS
    return max((ratio for size, ratio in ratios.items() if size <= page_bytes), default=0.0)


def _least(page: PageSpeed) -> float:
    return min(page.store.ratio, page.load.ratio)


def _of_device(device: Device, report: Report) -> Iterator[Finding]:
    if not device.has_batch:
        yield Finding(
            Severity.WARNING,
            f"the driver (CUDA {device.cuda}) copies one page per call",
            "update it to one for CUDA 12.8 or newer, which copies all pages of a job in one call",
        )
    largest = max(report.pages, key=lambda page: page.page_bytes, default=None)
    if device.link_bytes_per_s is not None and largest is not None:
        reached = max(speed.bytes_per_s / speed.ratio for speed in (largest.store, largest.load))
        if reached < _LINK_SHARE * device.link_bytes_per_s:
            yield Finding(
                Severity.WARNING,
                f"a large copy reaches {reached / 1e9:.0f} GB/s where the device's link could give "
                f"{device.link_bytes_per_s / 1e9:.0f}",
                f"look at its slot and at what else uses it (now: {device.link or 'unknown'}), and run on the cores of "
                f"its socket{'' if device.numa_node is None else f', NUMA node {device.numa_node}'}",
            )
    slow_both = [page for page in report.pages if page.page_bytes >= 256 << 10 and page.both.ratio < _BOTH_RATIO]
    if slow_both:
        page = min(slow_both, key=lambda page: page.both.ratio)
        yield Finding(
            Severity.WARNING,
            f"both directions at once reach {page.both.ratio:.2f} of two large copies at pages of "
            f"{format_bytes(page.page_bytes)}, below {_BOTH_RATIO}",
            "run the doctor again on an idle machine; if it stays so, report this output",
        )
    if report.host.numa_nodes > 1 and device.numa_node is None:
        yield Finding(
            Severity.NOTE,
            f"the machine has {report.host.numa_nodes} NUMA nodes and the kernel does not say which the device is on",
            "bind the engine to one of them (numactl), and compare what the doctor says on each",
        )
    if report.job_s is not None and report.job_s > _JOB_S:
        yield Finding(
            Severity.WARNING,
            f"a job of 64 blocks of 64 layers takes {report.job_s * 1e3:.1f} ms of the engine's thread, above "
            f"{_JOB_S * 1e3:.0f}",
            'set "kv_cache_layout" so that the layers of a block lie side by side, or use a larger "block_size"',
        )
    if report.matmul_slowdown is not None and report.matmul_slowdown > _SLOWDOWN:
        yield Finding(
            Severity.WARNING,
            f"a matrix product takes {report.matmul_slowdown:.0%} longer beside copies, above {_SLOWDOWN:.0%}",
            "run the doctor again on an idle device; if it stays so, report this output",
        )
    if report.pinned_bytes_per_s is not None and report.cpu_bytes is not None:
        seconds = report.cpu_bytes / report.pinned_bytes_per_s
        if seconds > _LONG_PINNING_S:
            yield Finding(
                Severity.NOTE,
                f"each rank takes {seconds:.0f} s to pin {format_bytes(report.cpu_bytes)} at start",
                "allow for it in the start-up probe of the server, or lower cpu_bytes_to_use",
            )
