# SPDX-License-Identifier: Apache-2.0
"""A row of an engine's table of rejected setups. The errors and ``docs/compatibility.md`` are made from these rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvoffload.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A setup that kvoffload rejects at startup."""

    setup: str
    """A noun phrase: "kvoffload rejects {setup}"."""
    reason: str
    """A clause: "because {reason}"."""
    remedy: str
    """An imperative: the action for a user with this setup."""
    opened_by: str
    """The change that would let kvoffload accept the setup."""
    peers: str
    """The behaviour of vLLM's own offloading, or of another project, with the setup."""
    applies: Callable[[Any], str | None] | None = None
    """Return the values that make up the setup in this server, maybe ``""``, or ``None`` if the server has another
    setup. If it is ``None`` itself, the code that finds the setup raises ``error``."""

    def sentence(self, found: str = "") -> str:
        """Return the problem, its reason and its remedy for a server with the values ``found``."""
        here = f" ({found})" if found else ""
        return f"kvoffload rejects {self.setup}{here}, because {self.reason}: {self.remedy}."

    def error(self, found: str = "") -> ConfigError:
        return ConfigError(self.sentence(found))


def problems_of(rows: Iterable[Rejection], setup: Any) -> list[str]:
    """Return the sentences of the rows that apply to ``setup``."""
    found = ((row, row.applies(setup)) for row in rows if row.applies is not None)
    return [row.sentence(values) for row, values in found if values is not None]


def check(rows: Iterable[Rejection], setup: Any) -> None:
    """Raise ``ConfigError`` with the sentences of all rows that apply to ``setup``. Do nothing if there are none."""
    if problems := problems_of(rows, setup):
        raise ConfigError(*problems)
