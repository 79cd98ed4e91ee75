# SPDX-License-Identifier: Apache-2.0
"""A table of text, for terminals and pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Table(NamedTuple):
    """Figures for people. The first column has names."""

    headings: list[str]
    rows: list[list[str]]
    left_out: tuple[str, ...] = ()
    """Headings of dropped columns."""

    def without(self, headings: Iterable[str]) -> Table:
        """Return the table without these columns. Columns that contain only ``-`` are not
        mentioned."""
        dropped = {*headings}
        kept = [at for at, heading in enumerate(self.headings) if heading not in dropped]
        some = [
            heading
            for at, heading in enumerate(self.headings)
            if heading in dropped and any(row[at] != "-" for row in self.rows)
        ]
        rows = [[row[at] for at in kept] for row in self.rows]
        return Table([self.headings[at] for at in kept], rows, (*self.left_out, *some))

    def without_empty(self) -> Table:
        """Return the table without columns that have nothing but ``-``."""
        empty = [heading for at, heading in enumerate(self.headings) if all(row[at] == "-" for row in self.rows)]
        return self.without(empty)

    @property
    def widths(self) -> list[int]:
        return [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]

    def lines(self) -> list[str]:
        """Return the headings and the rows. Sizes and figures are aligned to the right."""
        columns = [
            [cell.rjust(width) if at and _are_figures(cells) else cell.ljust(width) for cell in (heading, *cells)]
            for at, (width, heading, *cells) in enumerate(zip(self.widths, self.headings, *self.rows, strict=True))
        ]
        return ["  ".join(cells).rstrip() for cells in zip(*columns)]


def _are_figures(cells: Iterable[str]) -> bool:
    return all(cell == "none" or cell[:1] in "-+0123456789" for cell in cells)
