# SPDX-License-Identifier: Apache-2.0
"""Sample faults in ``src/kvoffload``, one at a time, and print those that no test notices: ``make mutants``.

First, a map of the suite records which tests execute a line, and their times. It is kept in ``build/mutants`` until a
file of ``src`` or ``tests`` changes. Then each fault is put into a temporary copy of the tree, and the tests that
execute its line run until one fails, the fastest files first. For lines that run at import, or in a process outside the
map, the test files that mirror the room or import the module run. A failed test is repeated without the fault, and
counts only if it passes then. The exit code is always 0, because a surviving fault may change nothing, or only speed.
Code that only a real engine runs is left to its lane.

None of the tools on the package index samples with a seed, selects tests by line and leaves the working tree alone.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData

ROOT = Path(__file__).parents[1]
SRC, TESTS = ROOT / "src" / "kvoffload", ROOT / "tests"
UNTESTED = (SRC / "cpu" / "copy" / "cuda.py",)
"""Modules whose tests need more than this machine."""
LANES = {SRC / "engines" / engine: f"make test-{engine}" for engine in ("vllm", "sglang")}
"""Rooms with code that only the real engine runs, whose tests need an environment of its own."""

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    path: Path
    statement: int
    """First line of its statement; 0 if it runs at import."""
    line: int
    end: int
    span: tuple[int, int]
    """Bytes of the file that ``text`` replaces."""
    before: str
    text: str

    def __str__(self) -> str:
        first = " ".join(self.before.split())
        shown = first if len(first) <= 90 else first[:87] + "..."
        return f"{self.path.relative_to(ROOT)}:{self.line}: {shown}  ->  {' '.join(self.text.split())[:90]}"


# --------------------------------------------------------------------------------------------------------- the faults


def mutants_of(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
    for candidate, statement in candidates(ast.parse(source)):
        for node, text in replacements(candidate):
            assert node.end_lineno is not None and node.end_col_offset is not None
            span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            lines = node.lineno, node.end_lineno
            yield Mutant(path, statement, *lines, span, source[slice(*span)].decode(), text)


def candidates(node: ast.AST, called: bool = False, statement: int = 0) -> Iterator[tuple[ast.expr | ast.stmt, int]]:
    """Yield nodes whose replacement could matter, with the first line of the statement if a call runs it.

    Excludes nodes of annotations, docstrings, messages, logs and invariants.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "keywords") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or is_beside_the_point(child):
                continue
            runs = called or (name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
            first = child.lineno if runs and isinstance(child, ast.stmt) else statement
            if isinstance(child, (ast.expr, ast.stmt)):
                yield child, first
            yield from candidates(child, runs, first)


def is_beside_the_point(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__" | "check_invariants") | ast.Assert() | ast.JoinedStr():
            return True
        case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Raise(exc=None):
            return True
        case ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "_logger" | "log")))):
            return True
    return False


def replacements(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield nodes of ``node`` with their replacements."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPPED:
            yield node, f"({ast.unparse(ast.Compare(left, [SWAPPED[type(op)]()], [right]))})"
        case ast.BoolOp(op=op, values=values):
            yield node, f"({ast.unparse(ast.BoolOp(SWAPPED[type(op)](), values))})"
            yield node, f"({ast.unparse(values[0])})"
            yield node, f"({ast.unparse(values[-1])})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPPED:
            yield node, f"({ast.unparse(ast.BinOp(left, SWAPPED[type(op)](), right))})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, f"{value + 1}"
            yield node, f"{value - 1}" if value > 0 else "2"
        case ast.Constant(value=float(value)):
            yield node, f"{2 * value + 1}"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Expr() | ast.AugAssign() | ast.Delete() | ast.Break() | ast.Continue() | ast.Raise():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, "return None"


# ---------------------------------------------------------------------------------------------------------- the tests


class Map:
    """Which tests execute a line, and the seconds of each test that passes."""

    def __init__(self, directory: Path) -> None:
        """Read the map that ``Copy.make_map`` wrote."""
        self._lines = CoverageData(str(directory / "lines"))
        self._lines.read()
        output = (directory / "output").read_text()
        self._files: defaultdict[str, dict[str, float]] = defaultdict(dict)
        failed = failures(output)
        for seconds, test in re.findall(r"^([\d.]+)s (?:setup|call|teardown) +(tests/.*?)\s*$", output, flags=re.M):
            if test not in failed:
                times = self._files[test.split("::")[0]]
                times[test] = times.get(test, 0.0) + float(seconds)

    def tests_for(self, mutant: Mutant) -> dict[str, float]:
        """Return the node ids and seconds of tests, with the tests of the fastest file first."""
        found = self._contexts(mutant)
        named = {context.rpartition("|")[0] for context in found}
        # A fixture's lines count for its first user only, whoever else depends on it.
        whole = {context.split("::")[0] for context in found if context.endswith("|setup")}
        if not any(named):
            whole = files_for(mutant.path)
        chosen = [
            {test: seconds for test, seconds in tests.items() if file in whole or test in named}
            for file, tests in self._files.items()
        ]
        chosen.sort(key=lambda tests: sum(tests.values()))
        return {test: tests[test] for tests in chosen for test in sorted(tests, key=tests.__getitem__)}

    def lane_of(self, mutant: Mutant) -> str | None:
        """Return the lane that runs the tests of the mutant's line, if no test here does, or ``None``."""
        if not mutant.statement or any(self._contexts(mutant)):
            return None
        return next((lane for room, lane in LANES.items() if mutant.path.is_relative_to(room)), None)

    def _contexts(self, mutant: Mutant) -> set[str]:
        contexts = self._lines.contexts_by_lineno(str(mutant.path.relative_to(ROOT))) if mutant.statement else {}
        return {context for line in range(mutant.statement, mutant.end + 1) for context in contexts.get(line, ())}


def failures(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (tests/[^\s\[]+(?:\[.*?\])?)(?: - .*)?$", output, flags=re.M)


def files_for(module: Path) -> set[str]:
    """Files of tests that mirror the room of ``module``, or name it."""
    inside = module.relative_to(SRC).with_suffix("")
    room, name = inside.parent, f"kvoffload.{'.'.join(inside.parts)}".removesuffix(".__init__")
    mirrors = TESTS.joinpath(room).glob("test_*.py" if room.parts else f"test_{inside.name}.py")
    naming = (test for test in TESTS.rglob("test_*.py") if re.search(rf"\b{name}\b", test.read_text()))
    return {str(test.relative_to(ROOT)) for test in (*mirrors, *naming)}


def listed_files() -> list[str]:
    """Files of the working tree that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


class Copy:
    """A copy of the tree, for one fault at a time."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._root, self._timeout_s = directory, timeout_s
        for name in listed_files():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, directory / name)

    def make_map(self, jobs: int) -> Path:
        """Runs the suite, unless it ran with these files before; returns where the map is."""
        digest = hashlib.sha256()
        for name in listed_files():
            if name.startswith(("src/", "tests/")):
                digest.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
        directory = ROOT / "build" / "mutants" / digest.hexdigest()[:16]
        if not (directory / "output").exists():
            directory.mkdir(parents=True, exist_ok=True)
            split = [f"-n{jobs}", "--dist=loadfile", "--no-loadscope-reorder"]
            options = ["--cov", "--cov-context=test", "--cov-report=", "--durations=0", "--durations-min=0"]
            code, output = self._run([*split, *options], 7200, COVERAGE_FILE=str(directory / "lines"))
            if code not in (0, 1):
                raise SystemExit(f"{output[-2000:]}\nThe suite ended with {code}: there is no map.")
            (directory / "output").write_text(output)
        return directory

    def judge(self, mutant: Mutant, tests: dict[str, float]) -> tuple[str, str]:
        """Return the mutant's fate (``noticed``, ``survived`` and so on), and the deciding one of ``tests``, with their
        seconds."""
        if not tests:
            return "survived", "no test belongs to this line"
        place = self._root / mutant.path.relative_to(ROOT)
        source = place.read_bytes()
        place.write_bytes(source[: mutant.span[0]] + mutant.text.encode() + source[mutant.span[1] :])
        limits = [f"--timeout={self._timeout_s}", "--timeout-method=signal"]
        limit_s = self._timeout_s + 10 * sum(tests.values())
        try:
            code, output = self._run(["-x", *limits, *tests], limit_s)
        finally:
            place.write_bytes(source)
        if code == 0:
            return "survived", ""
        if code in (4, 5):
            return "not judged", f"pytest ended with {code}"
        if not (failed := failures(output)):
            return "noticed", "a run without an end" if code is None else f"pytest ended with {code}"
        if self._run([*limits, failed[0]], limit_s)[0] != 0:
            return "not judged", f"{failed[0]} fails without the fault too"
        return "noticed", failed[0]

    def _run(self, arguments: list[str], limit_s: float, **variables: str) -> tuple[int | None, str]:
        """Exit code (``None``: the time was up) and output."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        # Bytecode of a fault is stale once its source is restored, seconds later.
        environment = os.environ | {"PYTHONPATH": str(self._root / "src"), "PYTHONDONTWRITEBYTECODE": "", **variables}
        with tempfile.TemporaryDirectory() as directory, Path(directory, "output").open("w+") as output:
            os.chmod(directory, 0o755)  # some tests are other users'
            process = subprocess.Popen(
                command,
                cwd=self._root,
                env=environment | {"TMPDIR": directory},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):  # processes that the tests left, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read()


# ------------------------------------------------------------------------------------------------------------ the run


def sample(count: int, seed: int, under: Path) -> list[Mutant]:
    paths = [path for path in sorted(SRC.rglob("*.py")) if path not in UNTESTED and path.is_relative_to(under)]
    everything = [mutant for path in paths for mutant in mutants_of(path)]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--under", type=Path, default=SRC, help="a folder or file of src/kvoffload")
    parser.add_argument(
        "--timeout", type=float, default=120, help="seconds for a test, and for a run beyond ten times the map's"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 30)
    mutants = sample(arguments.count, seed, arguments.under.resolve())
    print(f"seed {seed}: {len(mutants)} faults", flush=True)
    counts: Counter[str] = Counter()
    survivors = []
    with tempfile.TemporaryDirectory(prefix="kvoffload-mutants-") as directory:
        os.chmod(directory, 0o755)  # some tests are other users'
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(arguments.jobs):
            copies.put(Copy(Path(directory, str(number)), arguments.timeout))
        first = copies.get()
        suite = Map(first.make_map(arguments.jobs))
        copies.put(first)

        def judge(mutant: Mutant, tests: dict[str, float]) -> tuple[str, str, float]:
            copy, begin_s = copies.get(), time.monotonic()
            try:
                verdict, test = copy.judge(mutant, tests)
                if verdict == "survived" and (lane := suite.lane_of(mutant)) is not None:
                    verdict, test = "not judged", f"{lane} may notice it"
                return verdict, test, time.monotonic() - begin_s
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(arguments.jobs) as threads:
            verdicts = threads.map(judge, mutants, map(suite.tests_for, mutants))
            for number, (mutant, (verdict, test, seconds)) in enumerate(zip(mutants, verdicts), 1):
                counts[verdict] += 1
                survivors += [mutant] if verdict == "survived" else []
                print(f"{number:4} {verdict:10} {seconds:4.0f} s  {mutant}  {test and f'({test})'}", flush=True)
    print(f"seed {seed}: {', '.join(f'{count} {verdict}' for verdict, count in sorted(counts.items()))}")
    for mutant in survivors:
        print(f"  survived  {mutant}")


if __name__ == "__main__":
    main()
