# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import ConfigError
from kvoffload.units import format_bytes, parse_bytes, parse_seconds, printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("1.5 KiB", 1536),
        ("2 kb", 2000),
        (" 3TB ", 3 * 10**12),
    ],
)
def test_sizes(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "8 parsecs", "-1", 0, -5, True, 1.5, None])
def test_bad_sizes_say_what_to_write(text: Any) -> None:
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        parse_bytes(text, "cpu_bytes_to_use")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (14_664, "14.3 KiB"),
        (999.6 * 2**20, "1000 MiB"),
        (8 << 30, "8 GiB"),
        (2**40 - 1, "1 TiB"),
        (3 << 50, "3 PiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_sizes_in_words(number: float, text: str) -> None:
    assert format_bytes(number) == text


@given(st.integers(1, 2**62))
def test_what_is_written_can_be_read_and_is_within_a_digit(number: int) -> None:
    assert parse_bytes(format_bytes(number)) == pytest.approx(number, rel=0.006)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(90, 90), (0.5, 0.5), ("90", 90), ("90s", 90), ("1.5 min", 90), ("24h", 86_400), ("7D", 604_800)],
)
def test_spans_of_time(text: float | str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "5 weeks", 0, -1, True, float("nan"), None])
def test_what_is_no_span_of_time_is_one_sentence(text: object) -> None:
    with pytest.raises(ConfigError, match="ttl"):
        parse_seconds(text, "ttl")  # type: ignore[arg-type]


def test_printable_text_has_no_line_breaks_and_no_control_characters() -> None:
    assert (
        printable("ns\x1b[2J\nWARNING: all is well\r\x9b\u202e") == "ns\\x1b[2J\\nWARNING: all is well\\r\\x9b\\u202e"
    )
    assert printable("Gr\xfc\xdfe, 模型 (bf16)") == "Gr\xfc\xdfe, 模型 (bf16)"
