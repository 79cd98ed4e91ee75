# SPDX-License-Identifier: Apache-2.0
"""``kvoffload doctor``: does offloading work on this machine, and how fast?"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvoffload.cli.output import Json, Out, check_out, check_unit, print_json, print_table, progress, write_json
from kvoffload.doctor.copies import (
    DevicePlace,
    HostPlace,
    Place,
    check_copies_under_load,
    page_speed,
)
from kvoffload.doctor.findings import Finding, Severity, findings, is_slow, verdict
from kvoffload.doctor.report import PageSpeed, Report
from kvoffload.doctor.system import device_facts, host_facts, versions
from kvoffload.errors import ConfigError, TransferError
from kvoffload.sim.table import Table
from kvoffload.units import counted, format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvoffload.cpu.copy.cuda import CudaDevice

_PAGES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
_LAYERS = 8
_MOST_THREADS = 4
_MORE_TRIES = 2
_MOST_PAGES = 8192
"""Limit on the pages of one job."""


@dataclass(frozen=True, slots=True)
class Effort:
    check_s: float = 10.0
    pages: tuple[int, ...] = _PAGES
    """Sizes to time. With none, nothing is timed."""
    device_bytes: int = 128 << 20
    """By one job."""
    host_bytes: int = 32 << 20
    repeats: int = 7


def doctor(
    cpu_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory that you want for offloaded KV, for example 64GiB.")
    ] = None,
    device: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of the GPU to check, among the GPUs that this process sees.")
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare copies byte by byte, but skip the timing. Takes a few seconds.")
    ] = False,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Check whether offloading works on this machine.

    Copies blocks for about a minute, compares them byte by byte, times them, and explains the results. Without a GPU,
    it checks only host memory.

    Exit codes: 0, no fault was found; 1, offloading does not work here; 2, a mistake in the options.
    """
    wanted = None if cpu_bytes is None else parse_bytes(cpu_bytes, "--cpu-bytes")
    if wanted is not None:
        check_unit("--cpu-bytes", wanted)
    check_out(out)
    report = examine(device, wanted, Effort(check_s=1.0, pages=()) if quick else Effort())
    found = findings(report)
    figures = _as_json(report, found)
    if as_json:
        print_json(figures)
    else:
        _print(report, found)
    write_json(figures, out)
    if any(finding.severity is Severity.FAULT for finding in found):
        raise typer.Exit(1)


def examine(number: int, cpu_bytes: int | None, effort: Effort) -> Report:
    """Measure this machine. Raises ``ConfigError`` if there is no GPU ``number``, unless it is the first."""
    host = host_facts()
    cuda, no_device = cuda_device(number)
    place: Place = HostPlace(max(1, min(_MOST_THREADS, host.cores))) if cuda is None else DevicePlace(cuda)
    job_bytes = effort.host_bytes if cuda is None else effort.device_bytes
    pages = list[PageSpeed]()
    with progress("checks", 1 + len(effort.pages), "steps") as advance:
        checked = check_copies_under_load(place, effort.check_s)
        advance()
        try:
            for page_bytes in effort.pages if checked.wrong is None else ():
                num_bytes = min(job_bytes, _MOST_PAGES * page_bytes)
                pages.append(measured_page(place, page_bytes, num_bytes, effort.repeats))
                advance()
        except TransferError as exc:  # they were right before
            checked = replace(checked, wrong=str(exc))
    return Report(
        versions=versions(),
        host=host,
        cpu_bytes=cpu_bytes,
        device=None if cuda is None else device_facts(cuda.driver, cuda.number),
        no_device=no_device,
        checked=checked,
        pages=tuple(pages),
    )


def measured_page(place: Place, page_bytes: int, num_bytes: int, repeats: int) -> PageSpeed:
    """Time pages of one size. Slow ones on a GPU are timed again, and the best counts: something else may have used the
    machine meanwhile, and the next run should give the same verdict."""
    found = page_speed(place, page_bytes, num_bytes, _LAYERS, repeats)
    for _ in range(_MORE_TRIES if isinstance(place, DevicePlace) else 0):
        if not is_slow(found):
            break
        again = page_speed(place, page_bytes, num_bytes, _LAYERS, repeats)
        store, load, both = (
            max(pair, key=lambda speed: speed.ratio)
            for pair in ((found.store, again.store), (found.load, again.load), (found.both, again.both))
        )
        found = PageSpeed(page_bytes, store, load, both)
    return found


def cuda_device(number: int) -> tuple[CudaDevice | None, str | None]:
    """Return the GPU with an idle compute stream, or why there is none."""
    try:
        from kvoffload.cpu.copy.driver import load_driver

        driver = load_driver()
        if number >= driver.num_devices():
            raise ConfigError(
                f"--device {number} does not exist: this process sees {counted(driver.num_devices(), 'GPU')}."
            )
        from kvoffload.cpu.copy.cuda import CudaDevice
    except ConfigError as exc:
        if number:
            raise
        return None, str(exc).rstrip(".")
    except ImportError as exc:
        return None, f"the GPU path needs torch ({exc})"
    driver.use_device(number)
    idle = driver.create_stream()
    return CudaDevice(driver, number, lambda: idle), None


def _as_json(report: Report, found: list[Finding]) -> dict[str, Any]:
    named = [{**asdict(finding), "severity": finding.severity.name.lower()} for finding in found]
    return {"verdict": verdict(report), "findings": named, **asdict(report)}


# ----------------------------------------------------------------------------------------------------------- output


def _print(report: Report, found: list[Finding]) -> None:
    width = shutil.get_terminal_size().columns
    for name, value in _facts(report):
        print(fill(value, width, initial_indent=f"{name:15}", subsequent_indent=15 * " "))
    if report.pages:
        where = "between the GPU and host memory" if report.device is not None else "within host memory"
        print_table(_page_table(report), f"\nCopies of pages {where} (x: relative to one large copy)")
    print()
    for finding in found:
        print(f"{finding.severity.name.lower()}: {finding}")
    print(verdict(report))


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    versions, host, device = report.versions, report.host, report.device
    installed = [("torch", versions.torch), ("vLLM", versions.vllm), ("SGLang", versions.sglang)]
    packages = ", ".join(f"{name} {number}" if number else f"no {name}" for name, number in installed)
    yield (
        "versions",
        f"kvoffload {versions.kvoffload}, Python {versions.python}, {packages}, Linux {versions.kernel}",
    )
    if device is None:
        yield "GPU", f"none: {report.no_device}"
    else:
        numa = "unknown NUMA node" if device.numa_node is None else f"NUMA node {device.numa_node}"
        number = f"NVIDIA {device.driver}, " if device.driver else ""
        copies = "all pages of a job in one call" if device.has_batch else "one call for each page"
        yield "GPU", f"{device.name}, {device.pci_bus_id}, {numa}"
        yield "driver", f"{number}CUDA {device.cuda}: {copies}"
        if device.link is not None:
            most = (
                f"; supports {device.link_bytes_per_s / 1e9:.1f} GB/s in each direction"
                if device.link_bytes_per_s
                else ""
            )
            yield "link", f"{device.link}{most}"
    limit = "no limit" if host.limit_bytes is None else f"a limit of {format_bytes(host.limit_bytes)}"
    yield "memory", f"{_size(host.memory_bytes)}, {_size(host.available_bytes)} available, {limit} on this process"
    yield "/dev/shm", f"{_size(host.shm_bytes)}, {_size(host.shm_free_bytes)} free"
    yield "locked memory", "unlimited" if host.locked_bytes is None else f"at most {format_bytes(host.locked_bytes)}"
    yield "huge pages", f"{host.huge_pages or 'unknown'} (transparent)"
    nodes = f", memory of node {host.allowed_nodes} allowed" if host.allowed_nodes else ""
    numa = "an unknown number of NUMA nodes" if not host.numa_nodes else counted(host.numa_nodes, "NUMA node")
    yield "CPU", f"{counted(host.cores, 'core')}, {numa}{nodes}"
    if report.cpu_bytes is not None:
        yield "wanted", format_bytes(report.cpu_bytes)
    checked = report.checked
    seen = f"{counted(checked.jobs, 'random job')}, {format_bytes(checked.num_bytes)}, and conflicts during compute"
    yield "copies", f"{seen}: {checked.wrong or 'all bytes match'}"


def _size(number: int | None) -> str:
    return "unknown" if number is None else format_bytes(number)


def _page_table(report: Report) -> Table:
    rows = []
    for page in report.pages:
        row = [format_bytes(page.page_bytes)]
        for speed in (page.store, page.load, page.both):
            row += [f"{speed.bytes_per_s / 1e9:.1f}", f"{speed.ratio:.2f}"]
        rows.append(row)
    return Table(["page", "store GB/s", "store x", "load GB/s", "load x", "both GB/s", "both x"], rows)
