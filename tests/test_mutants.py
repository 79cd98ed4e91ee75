# SPDX-License-Identifier: Apache-2.0
"""``make mutants``: its faults are faults, and its tests are those of the module."""

from __future__ import annotations

import ast

import pytest
from tests.mutants import SRC, Copy, Mutant, files_for, mutants_of, sample


def test_each_fault_is_python_and_says_something_else() -> None:
    for mutant in sample(40, 1, SRC / "cpu"):
        source = mutant.path.read_bytes()
        text = source[: mutant.span[0]] + mutant.text.encode() + source[mutant.span[1] :]
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(source)), mutant


def test_a_seed_draws_the_same_faults() -> None:
    under = SRC / "connector"
    drawn = sample(20, 3, under)
    assert drawn == sample(20, 3, under) != sample(20, 4, under)
    assert all(mutant.path.is_relative_to(under) for mutant in drawn)


def test_what_mirrors_a_module_comes_first_and_machines_last() -> None:
    tests = files_for(SRC / "cpu" / "manager.py")
    assert tests[0] == "tests/cpu/test_manager.py"
    assert "tests/stateful/test_manager_machine.py" in tests[-3:]
    assert files_for(SRC / "units.py")[0] == "tests/test_units.py"


@pytest.mark.long
def test_a_fault_is_noticed_and_one_that_changes_nothing_survives(tmp_path) -> None:
    copy = Copy(tmp_path / "copy", timeout_s=600)
    path = SRC / "registry.py"
    (found, *_) = (mutant for mutant in mutants_of(path) if mutant.before.startswith("raise "))
    verdict, test = copy.judge(found)
    assert verdict == "noticed"
    assert test.startswith("tests/test_registry.py::")
    assert copy.judge(Mutant(path, 1, (0, 0), "", "# nothing changes\n")) == ("survived", "")
