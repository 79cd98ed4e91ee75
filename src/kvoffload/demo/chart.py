# SPDX-License-Identifier: Apache-2.0
"""Draw lines, such as the demo's time to first token by turn, as an SVG that is readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

_WIDTH, _HEIGHT = 760, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 210, 62, 56
_LIGHT = ("#868e96", "#d9730d", "#1f6fb4", "#2f9e44")
_DARK = ("#adb5bd", "#ffa94d", "#74c0fc", "#8ce99a")


def _colors(colors: Sequence[str]) -> str:
    """Return the style rules of the lines. They use no CSS variables, which many programs ignore."""
    return "".join(
        f".w{number} .way,.w{number} .dot{{stroke:{color}}}.w{number} .dot,.w{number} .end{{fill:{color}}}"
        for number, color in enumerate(colors)
    )


_STYLE = f"""
text{{font:14px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#495057}}
.paper{{fill:#ffffff;stroke:#dee2e6}}.title{{font-size:17px;font-weight:600;fill:#212529}}.grid{{stroke:#dee2e6}}
.way{{fill:none;stroke-width:3;stroke-linejoin:round}}.end{{font-weight:600}}
{_colors(_LIGHT)}
@media(prefers-color-scheme:dark){{text{{fill:#ced4da}}.paper{{fill:#1b1f24;stroke:#343a40}}.title{{fill:#f1f3f5}}
.grid{{stroke:#343a40}}{_colors(_DARK)}}}
"""
_GAP = 22.0
"""The least distance between the names of two ways."""


def chart(figures: Mapping[str, Any]) -> str:
    """Return an SVG with a line for each way. ``figures`` is the result of ``Comparison.as_json()``."""
    curves = {
        way["name"]: [1e3 * turn["median_s"] for turn in way["time_to_first_token"]["by_turn"]]
        for way in figures["ways"]
    }
    turns = figures["workload"]["turns"]
    label = f"Time to first token in a chat of {turns} turns: " + "; ".join(
        f"{name}, {curve[-1]:,.0f} ms in the last turn" for name, curve in curves.items()
    )
    return draw_lines(
        "Time to first token, by turn of a chat (median, ms)",
        "turn of each chat",
        [str(turn + 1) for turn in range(turns)],
        {f"{name}: {curve[-1]:,.0f} ms": curve for name, curve in curves.items()},
        label,
    )


def draw_lines(
    title: str, x_title: str, x_labels: Sequence[str], curves: Mapping[str, Sequence[float]], label: str
) -> str:
    """Return an SVG with at most four ``curves`` by name, one value for each of ``x_labels``.

    ``label`` is the text for readers who cannot see the picture.
    """
    count, top = len(x_labels), _round_up(max(max(curve) for curve in curves.values()))

    def x(at: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (at / (count - 1) if count > 1 else 0.5)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"',
        f'height="{_HEIGHT}" role="img" aria-label="{escape(label)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" x=".5" y=".5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="10"/>',
        f'<text class="title" x="{_LEFT - 40}" y="34">{escape(title)}</text>',
    ]
    for step in range(5):
        value = top * step / 4
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 10}" y="{y(value) + 5:.1f}" text-anchor="end">{value:,.4g}</text>')
    parts += [
        f'<text x="{x(at):.1f}" y="{_HEIGHT - _BOTTOM + 22}" text-anchor="middle">{escape(text)}</text>'
        for at, text in enumerate(x_labels)
    ]
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(x_title)}</text>'
    )
    ends = _apart([y(curve[-1]) for curve in curves.values()])
    for number, ((name, curve), end) in enumerate(zip(curves.items(), ends, strict=True)):
        points = [(x(at), y(value)) for at, value in enumerate(curve)]
        line = "L".join(f"{at:.1f} {height:.1f}" for at, height in points)
        dots = "".join(f'<circle class="dot" cx="{at:.1f}" cy="{height:.1f}" r="3.5"/>' for at, height in points)
        parts.append(
            f'<g class="w{number}"><path class="way" d="M{line}"/>{dots}'
            f'<text class="end" x="{_WIDTH - _RIGHT + 14}" y="{end + 5:.1f}">{escape(name)}</text></g>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _round_up(value: float) -> float:
    """Return the least number that is at least ``value`` and is 1, 2, 4, 6 or 8 times a power of ten."""
    power = 1.0
    while power * 10 < value:
        power *= 10
    return power * next(step for step in (1, 2, 4, 6, 8, 10) if value <= step * power)


def _apart(heights: Sequence[float]) -> list[float]:
    """Return ``heights``, moved down where they are closer together than a line of text."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + _GAP)
    return placed
