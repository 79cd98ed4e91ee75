# SPDX-License-Identifier: Apache-2.0
"""Test that the faults of ``make mutants`` are real faults, and that it runs the tests of the module."""

from __future__ import annotations

import ast

import pytest
from coverage import CoverageData
from tests.mutants import ROOT, SRC, Copy, Map, Mutant, files_for, mutants_of, sample


def test_each_fault_is_python_and_says_something_else() -> None:
    for mutant in sample(12, 1, SRC / "cpu" / "policies"):
        source = mutant.path.read_bytes()
        text = source[: mutant.span[0]] + mutant.text.encode() + source[mutant.span[1] :]
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(source)), mutant


def test_a_seed_draws_the_same_faults() -> None:
    under = SRC / "events.py"
    drawn = sample(20, 3, under)
    assert drawn == sample(20, 3, under) != sample(20, 4, under)
    assert all(mutant.path.is_relative_to(under) for mutant in drawn)


def test_a_fault_takes_the_tests_that_execute_its_line_those_of_the_quickest_file_first(tmp_path) -> None:
    path = SRC / "cpu" / "manager.py"
    called = next(mutant for mutant in mutants_of(path) if mutant.statement)
    output = [
        "0.30s call     tests/a/test_a.py::test_slow", "0.01s setup    tests/a/test_a.py::test_slow",
        "0.20s call     tests/a/test_a.py::test_quick[x y]", "0.10s call     tests/b/test_b.py::test_other",
        "0.01s call     tests/b/test_b.py::test_elsewhere", "0.01s call     tests/b/test_b.py::test_broken",
        "FAILED tests/b/test_b.py::test_broken - AssertionError: [1] is wrong",
    ]  # fmt: skip
    (tmp_path / "output").write_text("\n".join(output))
    lines = CoverageData(str(tmp_path / "lines"))
    for test in ("a/test_a.py::test_slow|run", "a/test_a.py::test_quick[x y]|run", "b/test_b.py::test_broken|run"):
        lines.set_context(f"tests/{test}")
        lines.add_lines({str(path.relative_to(ROOT)): [called.line]})
    lines.write()
    a = "tests/a/test_a.py::"
    assert Map(tmp_path).tests_for(called) == {a + "test_quick[x y]": 0.2, a + "test_slow": pytest.approx(0.31)}
    lines.set_context("tests/b/test_b.py::test_other|setup")
    lines.add_lines({str(path.relative_to(ROOT)): [called.line]})
    lines.write()
    b = "tests/b/test_b.py::"
    assert list(Map(tmp_path).tests_for(called)) == [
        b + "test_elsewhere", b + "test_other", a + "test_quick[x y]", a + "test_slow",
    ]  # fmt: skip


def test_what_only_a_real_engine_runs_is_its_lanes(tmp_path) -> None:
    ours, theirs, shared = (
        next(mutant for mutant in mutants_of(SRC / path) if mutant.statement)
        for path in ("cpu/manager.py", "engines/vllm/connector.py", "engines/vllm/layout.py")
    )
    (tmp_path / "output").touch()
    lines = CoverageData(str(tmp_path / "lines"))
    lines.set_context("tests/engines/vllm/test_layout.py::test_one|run")
    lines.add_lines({str(shared.path.relative_to(ROOT)): [shared.line]})
    lines.write()
    suite = Map(tmp_path)
    assert [suite.lane_of(mutant) for mutant in (ours, theirs, shared)] == [None, "make test-vllm", None]


def test_a_line_that_runs_at_import_takes_the_files_of_its_room_and_those_that_import_it() -> None:
    assert {m.statement for m in mutants_of(SRC / "units.py")} > {0}
    tests = files_for(SRC / "cpu" / "manager.py")
    assert {"tests/cpu/test_manager.py", "tests/cpu/test_slots.py"} < tests
    assert "tests/test_units.py" in files_for(SRC / "units.py")
    assert "tests/test_registry.py" not in files_for(SRC / "units.py")


@pytest.mark.long
def test_a_fault_is_noticed_and_one_that_changes_nothing_survives(tmp_path) -> None:
    copy = Copy(tmp_path / "copy", timeout_s=60)
    path, tests = SRC / "registry.py", {"tests/test_registry.py": 1.0}
    (found, *_) = (mutant for mutant in mutants_of(path) if mutant.before.startswith("raise "))
    verdict, test = copy.judge(found, tests)
    assert verdict == "noticed"
    assert test.startswith("tests/test_registry.py::")
    nothing = Mutant(path, 1, 1, 1, (0, 0), "", "# nothing changes\n")
    assert copy.judge(nothing, tests) == ("survived", "")
