# SPDX-License-Identifier: Apache-2.0
"""Compare benchmarks of this tree with an earlier revision, in turn, on an otherwise idle machine::

    python -m bench.pairs 8828d72 tiering connector --pairs 5

Each pair runs every benchmark in both trees, in the opposite order in every other pair. A row is compared by its ratio
to the reference of the same run, or by its value if there is no reference. The result is the new figure divided by the
old one, inverted if necessary so that a result above 1 is worse: the median of the pairs, and the range. Rows that only
one tree has, and pairs with a failed run, are left out. The exit code is 1 if a median is above ``--most``, or if
nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare benchmarks with an earlier revision, in pairs of runs.")
    parser.add_argument("revision")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--most", type=float, default=1.05, help="Fail if a median is above this ratio.")
    parser.add_argument("--short", action="store_true", help="Only check that everything runs.")
    options = parser.parse_args()
    worse: dict[str, list[float]] = {}
    with _tree_of(options.revision) as before:
        for number in range(options.pairs):
            for name in options.names:
                trees = [ROOT, before] if number % 2 else [before, ROOT]
                try:
                    found = {tree: _rows(tree, name, options.short) for tree in trees}
                except subprocess.CalledProcessError as exc:
                    print(f"pair {number + 1}, {name}: {exc}\n{exc.stderr[-2000:]}", file=sys.stderr, flush=True)
                    continue
                for case in found[ROOT].keys() & found[before].keys():
                    worse.setdefault(case, []).append(_worse(found[ROOT][case], found[before][case]))
            print(f"pair {number + 1} of {options.pairs}", file=sys.stderr, flush=True)
    sys.exit(_print(worse, options.most))


@contextmanager
def _tree_of(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvoffload-pairs-") as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", tree, revision], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=False)


def _rows(tree: Path, name: str, short: bool) -> dict[str, Mapping[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [sys.executable, "-m", "bench", name, "--json", file.name, *(["--short"] if short else [])],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
        return {f"{name}: {row['case']}": row for row in json.loads(Path(file.name).read_text())}


def _worse(now: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    figures = [row["value"] if row["ratio"] is None else row["ratio"] for row in (now, before)]
    if now["target"].startswith(">=") or now["unit"].endswith("/s"):
        figures.reverse()
    return float(figures[0] / figures[1])


def _print(worse: Mapping[str, Sequence[float]], most: float) -> int:
    for case, ratios in sorted(worse.items()):
        median = statistics.median(ratios)
        mark = "WORSE" if median > most else ""
        print(f"{case:90} {median:6.3f}  ({min(ratios):.3f} to {max(ratios):.3f}) {mark}".rstrip())
    return int(not worse or any(statistics.median(ratios) > most for ratios in worse.values()))


if __name__ == "__main__":
    main()
