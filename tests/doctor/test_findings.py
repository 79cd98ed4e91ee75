# SPDX-License-Identifier: Apache-2.0
"""Test the verdict for plain values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvoffload.doctor.findings import Severity, findings, verdict
from kvoffload.doctor.report import Checked, Device, Host, PageSpeed, Report, Speed, Versions

GIB = 1 << 30

HOST = Host(
    cores=16,
    memory_bytes=128 * GIB,
    available_bytes=100 * GIB,
    limit_bytes=None,
    shm_bytes=64 * GIB,
    shm_free_bytes=64 * GIB,
    locked_bytes=None,
    huge_pages="madvise",
    numa_nodes=1,
    allowed_nodes="0",
)
DEVICE = Device(
    name="a device",
    driver="570.86.15",
    cuda="12.8",
    has_batch=True,
    pci_bus_id="0000:65:00.0",
    numa_node=0,
    link="PCIe, 32 GT/s x16",
    link_bytes_per_s=63e9,
)


def page(size: int, ratio: float = 0.95, both: float = 0.9, bytes_per_s: float = 50e9) -> PageSpeed:
    return PageSpeed(size, Speed(bytes_per_s, ratio), Speed(bytes_per_s, ratio), Speed(2 * bytes_per_s, both))


GOOD = Report(
    versions=Versions("0.1.0", "3.12.0", "6.8", "2.9.0", "0.33.0", None),
    host=HOST,
    cpu_bytes=32 * GIB,
    device=DEVICE,
    no_device=None,
    checked=Checked(1000, GIB, None),
    pages=(page(4 << 10, ratio=0.6), page(64 << 10), page(4 << 20)),
)


def test_a_machine_with_all_that_is_needed_is_good() -> None:
    assert findings(GOOD) == []
    assert verdict(GOOD) == "Good: copies are right, and as fast as this machine allows."


# The slower way of batched copies by size of page, in GB/s, where one large copy reaches 53: reports of H100 and H200
# servers (vLLM issues 42212 and 48434).
HEALTHY = {4 << 10: 4.5, 8 << 10: 5.0, 16 << 10: 6.0, 32 << 10: 29.0, 64 << 10: 39.0, 256 << 10: 52.0, 4 << 20: 53.0}


def test_a_gpu_that_is_as_fast_as_others_is_called_healthy() -> None:
    pages = tuple(page(size, rate / 53, bytes_per_s=rate * 1e9) for size, rate in HEALTHY.items())
    assert verdict(replace(GOOD, pages=pages)).startswith("Good")


@pytest.mark.parametrize("size", HEALTHY)
def test_a_gpu_that_is_half_as_fast_as_others_is_not(size: int) -> None:
    rate = HEALTHY[size] / 2
    report = replace(GOOD, pages=(page(size, rate / 53, bytes_per_s=rate * 1e9), page(4 << 20)))
    assert verdict(report).startswith("Works, but")


def test_speed_that_was_not_measured_is_not_praised() -> None:
    quick = replace(GOOD, pages=())
    assert findings(quick) == []
    assert verdict(quick) == "Good: copies are right; their speed was not measured."


def test_a_machine_without_a_device_says_why() -> None:
    reason = "NVIDIA's driver cannot be loaded"
    slow = page(64 << 10, ratio=0.2)  # other processes slow down copies within host memory
    for pages in ((), GOOD.pages, (slow,)):
        report = replace(GOOD, device=None, no_device=reason, pages=pages)
        assert all(finding.severity is Severity.NOTE for finding in findings(report))
        assert verdict(report).startswith(f"GPU path not checked: {reason}.")


def test_an_environment_without_an_engine_is_named() -> None:
    (found,) = findings(replace(GOOD, versions=replace(GOOD.versions, vllm=None)))
    assert found.severity is Severity.NOTE and "neither vLLM nor SGLang" in str(found)
    assert findings(replace(GOOD, versions=replace(GOOD.versions, vllm=None, sglang="0.5.23"))) == []


@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        ({"checked": Checked(7, 9, "A copy failed.")}, Severity.FAULT, "A copy failed: serve without kvoffload"),
        (
            {"cpu_bytes": 101 * GIB},
            Severity.FAULT,
            "you want 101 GiB, but only 100 GiB of host memory is available: lower",
        ),
        (
            {"cpu_bytes": 40 * GIB, "host": replace(HOST, available_bytes=30 * GIB, limit_bytes=50 * GIB)},
            Severity.FAULT,
            "30 GiB of host memory is available below a limit of 50 GiB",
        ),
        ({"cpu_bytes": 65 * GIB}, Severity.WARNING, "/dev/shm has only 64 GiB"),
        ({"pages": (page(64 << 10, ratio=0.69),)}, Severity.WARNING, "pages of 64 KiB reach 0.69"),
        ({"pages": (page(256 << 10, ratio=0.89),)}, Severity.WARNING, "pages of 256 KiB reach 0.89"),
        ({"pages": (page(4 << 10, ratio=0.49), page(64 << 10))}, Severity.NOTE, "pages of 4 KiB reach 0.49"),
        ({"pages": (page(4 << 20, both=0.84),)}, Severity.WARNING, "both directions at once reach 0.84"),
        ({"pages": (page(4 << 20, bytes_per_s=20e9),)}, Severity.WARNING, "reaches 21 GB/s, but the GPU's link"),
        (
            {"device": replace(DEVICE, has_batch=False, cuda="12.4")},
            Severity.WARNING,
            "(CUDA 12.4) copies only one page",
        ),
        (
            {"device": replace(DEVICE, numa_node=None), "host": replace(HOST, numa_nodes=2)},
            Severity.NOTE,
            "has 2 NUMA nodes, and the kernel does not say",
        ),
        ({"host": replace(HOST, cores=2)}, Severity.NOTE, "2 cores"),
    ],
)
def test_a_finding_names_its_cause_and_its_remedy(change: dict[str, Any], severity: Severity, words: str) -> None:
    (found,) = findings(replace(GOOD, **change))
    assert found.severity is severity
    assert words in str(found)
    assert len(found.remedy.split()) > 3
    said = verdict(replace(GOOD, **change))
    assert ("Good" in said) == (severity is Severity.NOTE)
    assert "\n" not in said


def test_the_verdict_is_the_worst_finding_and_counts_the_others() -> None:
    report = replace(
        GOOD, checked=Checked(7, 9, "A copy failed."), pages=(page(64 << 10, ratio=0.6), page(4 << 20, both=0.5))
    )
    assert [finding.severity for finding in findings(report)] == [Severity.FAULT, Severity.WARNING, Severity.WARNING]
    assert verdict(report).startswith("Fault: A copy failed: ")
    assert verdict(report).endswith(" 2 more above.")


def test_what_is_unknown_gives_no_finding() -> None:
    host = replace(HOST, available_bytes=None, shm_free_bytes=None, memory_bytes=None, huge_pages=None)
    device = replace(DEVICE, link=None, link_bytes_per_s=None, numa_node=None)
    report = replace(GOOD, host=host, device=device, cpu_bytes=None)
    assert findings(report) == []
