# SPDX-License-Identifier: Apache-2.0
"""Rewrites tables of the docs in place: ``python -m bench.tables [PAGE...]``, by default all pages that have some.

A table to be made follows a line ``<!-- table: KIND -->``. It comes from the commands of the last ``sh`` fence above:
each runs once more with ``--json``, beside the traces of ``KVOFFLOAD_BENCH_TRACES`` and the page's own YAML files,
whose first line is a comment with their name. ``KINDS`` makes the rows of it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvoffload.sim.report import format_seconds
from kvoffload.units import format_bytes

ROOT = Path(__file__).parents[1]
TRACES = Path(os.environ.get("KVOFFLOAD_BENCH_TRACES", ROOT / "../shared/traces"))
_MARK = re.compile(r"^<!-- table: (\w+) -->$")
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Rows = Iterator[list[str]]


def fleets(told: list[Any]) -> Rows:
    """The headings, then a row for each fleet of each command."""
    yield ["servers", "router", "memory", "shared tier", "hits %", "from it", "p50", "p90", "busiest %", "cost/M"]
    for report in (report for command in told for report in command):
        for fleet in report["fleets"]:
            config, shared = fleet["config"], fleet["config"]["shared"]
            server = config["server"]
            busiest_s = max(each["busy_s"] for each in fleet["servers"])
            yield [
                str(config["servers"]),
                config["router"],
                format_bytes(server["cpu_blocks"] * server["block_bytes"]),
                f"{shared['server_bytes_per_s'] * 8 / 1e9:g} Gbit/s" if shared else "-",
                f"{100 * fleet['hit_rate']:.2f}",
                f"{100 * fleet['hit_blocks'].get('shared', 0) / fleet['accesses']:.2f}" if shared else "-",
                format_seconds(fleet["ttft_s"]["p50"]),
                format_seconds(fleet["ttft_s"]["p90"]),
                f"{min(100 * busiest_s / fleet['duration_s'], 100):.0f}",
                f"{fleet['cost_per_million_tokens']:.3f}",
            ]


def sweeps(told: list[Any]) -> Rows:
    """The headings, then a row for each run of each trace."""
    yield ["trace", "policy", "memory", "hits %", "optimum %", "loaded", "stored", "saved prefill", "p50", "p99"]
    for report in (report for command in told for report in command):
        for run in report["runs"]:
            yield [
                report["trace"],
                run["policy"],
                format_bytes(run["cpu_blocks"] * report["block_bytes"]),
                f"{100 * run['hit_rate']:.2f}",
                f"{100 * run['optimum_hit_rate']:.2f}",
                format_bytes(run["loaded_bytes"]),
                format_bytes(run["stored_bytes"]),
                format_seconds(run["saved_prefill_s"]),
                format_seconds(run["ttft_s"]["p50"]),
                format_seconds(run["ttft_s"]["p99"]),
            ]


KINDS: dict[str, Callable[[list[Any]], Rows]] = {"fleets": fleets, "sweeps": sweeps}


def rewritten(text: str, traces: Path) -> str:
    """``text`` with its tables made anew."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for trace in traces.glob("*.jsonl*"):
            (place / trace.name).symlink_to(trace.resolve())
        for language, body in _FENCE.findall(text):
            if language == "yaml" and (named := re.match(r"# ([\w.-]+\.yaml)\n", body)):
                (place / named[1]).write_text(body)
        lines: list[str] = []
        source = iter(text.splitlines(keepends=True))
        for line in source:
            lines.append(line)
            if mark := _MARK.match(line):
                lines.append("\n")
                lines += _table(KINDS[mark[1]], _commands("".join(lines)), place)
                for old in source:  # the table that was there
                    if old.strip() and not old.startswith("|"):
                        lines += ["\n", old]
                        break
    return "".join(lines)


def _commands(before: str) -> list[list[str]]:
    *_, fence = (body for language, body in _FENCE.findall(before) if language == "sh")
    return [shlex.split(line) for line in fence.replace("\\\n", " ").splitlines() if line.startswith("kvoffload ")]


def _table(rows_of: Callable[[list[Any]], Rows], commands: list[list[str]], place: Path) -> Iterator[str]:
    told = []
    for _, *words in commands:
        print(shlex.join(["kvoffload", *words]), file=sys.stderr)
        command = [sys.executable, "-m", "kvoffload", *words, "--json"]
        told.append(json.loads(subprocess.run(command, cwd=place, check=True, stdout=subprocess.PIPE).stdout))
    headings, *rows = rows_of(told)
    figures = headings.index("hits %")  # what comes before says what a row is of
    some = [at for at in range(len(headings)) if any(row[at] != "-" for row in rows)]
    varied = [at for at in some if at >= figures or len({row[at] for row in rows}) > 1]
    yield f"| {' | '.join(headings[at] for at in varied)} |\n"
    yield f"| {' | '.join('---' for _ in varied)} |\n"
    for row in rows:
        yield f"| {' | '.join(row[at] for at in varied)} |\n"


def main(pages: list[Path]) -> None:
    for page in pages:
        text = page.read_text()
        if re.search(_MARK.pattern, text, re.MULTILINE):
            page.write_text(rewritten(text, TRACES))


if __name__ == "__main__":
    main([*map(Path, sys.argv[1:])] or sorted((ROOT / "docs").rglob("*.md")))
