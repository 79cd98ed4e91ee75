# SPDX-License-Identifier: Apache-2.0
"""The table of metrics, and histograms against a count by hand."""

from __future__ import annotations

import re
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.config import GroupKind
from kvoffload.metrics import (
    GROUP_KINDS,
    METRICS,
    Histogram,
    Kind,
    add_stats,
    buckets_of,
    initial_series,
    typical_value,
)

WAITS = METRICS["lookup_wait_seconds"]


def test_names_and_labels_follow_prometheus() -> None:
    for metric in METRICS.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert not metric.name.endswith(("_total", "_bucket", "_count", "_sum"))
        assert metric.help.endswith(".")
        assert not metric.values or len(metric.values) == len(metric.labels)
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_kinds_of_groups_are_those_of_layouts() -> None:
    assert set(GROUP_KINDS) == {kind.value for kind in GroupKind}


def test_all_series_of_known_tiers_are_there_from_the_start() -> None:
    series = {(metric.name, *values) for metric, values in initial_series(["disk", "redis"])}
    assert ("tier_healthy", "redis") in series
    assert ("tier_batch_seconds", "disk", "write") in series
    assert {tier for name, tier in (s for s in series if s[0] == "tier_hit_tokens")} == {"CPU", "disk", "redis"}
    unknown = {name for name in METRICS if name.startswith("tier_disk_")}  # nobody knows the disks before they open
    assert {name for name, *_ in series} == METRICS.keys() - unknown - {"tier_breaker_last_trip_timestamp_seconds"}
    # A tier that nobody has heard of yet is not off, and not full.
    assert METRICS["tier_healthy"].initial == 1
    assert METRICS["tier_free_bytes"].initial == inf


@given(st.lists(st.floats(0, 100, allow_nan=False)), st.lists(st.floats(0, 100, allow_nan=False)))
def test_a_histogram_counts_each_observation_in_its_bucket(first: list[float], second: list[float]) -> None:
    parts = []
    for values in (first, second):
        histogram = Histogram("lookup_wait_seconds")
        for value in values:
            histogram.observe(value)
        parts.append(histogram.stats())
    stats = add_stats(parts)
    everything = first + second
    lower = -inf
    for bound, upper in zip(buckets_of(WAITS), (*WAITS.buckets, inf), strict=True):
        inside = [value for value in everything if lower < value <= upper]
        assert stats.get(("lookup_wait_seconds", "count", bound), 0) == len(inside)
        assert stats.get(("lookup_wait_seconds", "sum", bound), 0) == pytest.approx(sum(inside))
        if inside:
            assert lower < typical_value(WAITS, bound, len(inside), sum(inside)) <= upper
        lower = upper
    assert all(WAITS.fits(sample) for sample in stats)


def test_the_mean_of_equal_values_stays_in_their_bucket() -> None:
    total = sum([0.1] * 10)  # 0.9999999999999999
    for at, bound in enumerate(WAITS.buckets):
        assert typical_value(WAITS, str(bound), 3, 3 * bound * (1 + 1e-16)) <= bound
        assert typical_value(WAITS, buckets_of(WAITS)[at + 1], 3, 3 * bound) > bound
    assert typical_value(WAITS, "0.1", 10, total) <= 0.1


def test_of_parts_that_share_a_tier_the_worst_health_counts_and_the_room_counts_once() -> None:
    def part(*, is_well: bool, used: float) -> dict[tuple[str, ...], float]:
        return {
            ("tier_healthy", "disk"): is_well,
            ("tier_breaker_open", "disk", "read"): not is_well,
            ("tier_quota_bytes", "disk"): 100,
            ("tier_free_bytes", "disk"): 100 - used,
            ("tier_blocks", "disk"): used,
        }

    assert add_stats([part(is_well=True, used=20), part(is_well=False, used=30)]) == {
        ("tier_healthy", "disk"): 0,
        ("tier_breaker_open", "disk", "read"): 1,
        ("tier_quota_bytes", "disk"): 100,
        ("tier_free_bytes", "disk"): 70,
        ("tier_blocks", "disk"): 50,
    }
