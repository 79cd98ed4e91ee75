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
        """The table without these columns. Columns that contain only ``-`` are not
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
        """The table without columns that have nothing but ``-``."""
        empty = [heading for at, heading in enumerate(self.headings) if all(row[at] == "-" for row in self.rows)]
        return self.without(empty)
