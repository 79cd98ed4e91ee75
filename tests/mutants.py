# SPDX-License-Identifier: Apache-2.0
"""Samples faults in ``src/kvoffload``, one at a time, and prints those that no test notices: ``make mutants``.

Each fault is put into a temporary copy of the tree, where the tests that belong to its module run until one fails: the
files that mirror its room, the machines of ``MACHINES``, and every other file that imports it. A test that fails is run
again without the fault: one that fails then too proves nothing. A run that outlasts ``--timeout`` counts as noticed.
The exit code is always 0: a survivor may be a fault that changes nothing, or only speed.

None of the tools on the package index samples with a seed, picks tests by module and leaves the working tree alone.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
SRC, TESTS = ROOT / "src" / "kvoffload", ROOT / "tests"
MACHINES = {
    "cpu": ("test_manager_machine.py",),
    "connector": ("test_connector_machine.py", "test_whole_machine.py"),
    "tiering": ("test_tiering_machine.py", "test_load_policy_machine.py", "test_whole_machine.py"),
    "tiering/stores/disk": ("test_slab_machine.py", "test_disk_machine.py"),
    "tiering/stores/fs": ("test_disk_machine.py",),
}
SLOWER = ("stateful", "integration", "soak", "demo")
UNTESTED = (SRC / "cpu" / "copy" / "cuda.py",)
"""Modules whose tests need more than this machine."""

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    path: Path
    line: int
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
    for candidate in candidates(ast.parse(source)):
        for node, text in replacements(candidate):
            assert node.end_lineno is not None and node.end_col_offset is not None
            span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(path, node.lineno, span, source[slice(*span)].decode(), text)


def candidates(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Nodes whose replacement could matter: not those of annotations, docstrings, messages, logs and invariants."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "keywords") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or is_beside_the_point(child):
                continue
            if isinstance(child, (ast.expr, ast.stmt)):
                yield child
            yield from candidates(child)


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
    """Nodes of ``node`` with what takes their place."""
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


@functools.cache
def imported_by(test: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(test.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return frozenset(found)


def files_for(module: Path, tests: Path = TESTS) -> list[str]:
    """Files of ``tests``, from its parent, those first that will notice most for their time."""
    inside = module.relative_to(SRC).with_suffix("")
    room, name = inside.parent, f"kvoffload.{'.'.join(inside.parts)}".removesuffix(".__init__")
    machines = {f for place, files in MACHINES.items() if inside.is_relative_to(place) for f in files}

    def rank(test: Path) -> tuple[int, Path] | None:
        place = test.relative_to(tests)
        imports = name in imported_by(test)
        if place == room / f"test_{inside.name}.py":
            return 0, place
        if place.parts[0] in SLOWER:
            return (3, place) if imports or place.name in machines else None
        if place.parent == room and room.parts:
            return 1, place
        return (2, place) if imports else None

    ranked = sorted(found for test in tests.rglob("test_*.py") if (found := rank(test)) is not None)
    return [str(Path("tests") / place) for _, place in ranked]


class Copy:
    """A copy of the tree, for one fault at a time."""

    def __init__(self, directory: Path, timeout_s: float) -> None:
        self._root, self._timeout_s = directory, timeout_s
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, directory / name)

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """What became of it (``noticed``, ``survived`` and so on), and by which test."""
        tests = files_for(mutant.path, self._root / "tests")
        if not tests:
            return "survived", "no test file belongs to this module"
        place = self._root / mutant.path.relative_to(ROOT)
        source = place.read_bytes()
        place.write_bytes(source[: mutant.span[0]] + mutant.text.encode() + source[mutant.span[1] :])
        try:
            code, output = self._run(tests)
        finally:
            place.write_bytes(source)
        if code is None:
            return "noticed", "a run without an end"
        if code == 0:
            return "survived", ""
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/[^\s\[]+(?:\[[^\]]*\])?)", output, flags=re.M)
        if code in (4, 5):
            return "not judged", f"pytest ended with {code}"
        if not failed:
            return "noticed", f"pytest ended with {code}"
        if self._run(failed[:1])[0] != 0:
            return "not judged", f"{failed[0]} fails without the fault too"
        return "noticed", failed[0]

    def _run(self, tests: list[str]) -> tuple[int | None, str]:
        """Exit code (``None``: the time was up) and output."""
        command = [sys.executable, "-m", "pytest", "-n0", "-x", "-q", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": str(self._root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
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
                code: int | None = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):  # what the tests left as well
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
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the tests of one fault")
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

        def judge(mutant: Mutant) -> tuple[str, str, float]:
            copy, begin_s = copies.get(), time.monotonic()
            try:
                return *copy.judge(mutant), time.monotonic() - begin_s
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(arguments.jobs) as threads:
            for number, (mutant, (verdict, test, seconds)) in enumerate(zip(mutants, threads.map(judge, mutants)), 1):
                counts[verdict] += 1
                survivors += [mutant] if verdict == "survived" else []
                print(f"{number:4} {verdict:10} {seconds:4.0f} s  {mutant}  {test and f'({test})'}", flush=True)
    print(f"seed {seed}: {', '.join(f'{count} {verdict}' for verdict, count in sorted(counts.items()))}")
    for mutant in survivors:
        print(f"  survived  {mutant}")


if __name__ == "__main__":
    main()
