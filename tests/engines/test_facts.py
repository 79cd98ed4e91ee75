# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import fractions
import functools
import operator
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from kvoffload.engines.facts import Table, UnclearError, facts_of, text_of

TABLE: Table = {"Base": {"a reason": "memory"}}


@dataclasses.dataclass
class Part:
    size: int = 1


@dataclasses.dataclass
class Base:
    dtype: str = "auto"
    memory: int = 1
    part: Any = None


@dataclasses.dataclass
class Newer(Base):
    invented: Any = 1
    made: list[int] = dataclasses.field(default_factory=list)


class Colour(Enum):
    RED = 1


class ModelConfiguration(Base):
    """A configuration as in transformers: a dataclass that may have additional attributes."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def test_a_field_counts_if_it_is_not_at_its_default_and_the_table_lacks_it() -> None:
    assert facts_of(Base(memory=2), TABLE) == {} == facts_of(Newer(), TABLE)
    assert facts_of(Newer(invented=2), TABLE, "cache.") == {"cache.invented": "2"}
    assert facts_of(Newer(made=[1], memory=2), TABLE) == {"made": "[1]"}


def test_parts_within_a_part_are_looked_at_alike() -> None:
    assert facts_of(Base(part=Part(1)), TABLE) == facts_of(Base(part=Part()), TABLE)
    assert facts_of(Base(part=Part(2)), TABLE) != facts_of(Base(part=Part()), TABLE)


def test_a_model_s_configuration_counts_whole() -> None:
    one, other = ModelConfiguration(), ModelConfiguration()
    other.rope_theta = 2.0  # type: ignore[attr-defined]
    assert text_of(one) != text_of(other)
    del other.rope_theta  # type: ignore[attr-defined]
    other.transformers_version = "6"  # type: ignore[attr-defined]
    assert text_of(one) == text_of(other)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        1.5,
        float("inf"),
        "x",
        b"x",
        Colour.RED,
        Path("/x"),
        {1, 2},
        {"b": 1, "a": {3, 2}},
        (1, [2]),
        len,
        Part,
    ],
    ids=repr,
)
def test_a_value_has_one_text(value: Any) -> None:
    assert text_of(value) == text_of(value)
    assert text_of(value) != text_of([value])


def test_values_that_look_alike_are_apart() -> None:
    values: list[Any] = [
        *(1, True, "1", 1.0, "1.0", None, "None", [], {}, set(), [1], ["1"], {1}, {1: 1}, [[1, 1]], {"1": 1}),
        *(Colour.RED, "Colour.RED", ["Colour", "RED"], {"enum": ["Colour", "RED"]}),
        *(b"ab", b"ab".hex(), {"bytes": b"ab".hex()}, Path("/x"), "/x", range(2), "range(0, 2)", [0, 1]),
        *(Part(2), ["Part", ["size", 2]], {"dataclass": ["Part", ["size", 2]]}, Part, f"{__name__}.Part"),
        *(fractions.Fraction(1, 2), "1/2", 0.5, torch.float32, "torch.float32", torch.device("cpu"), "cpu"),
        *(ModelConfiguration(), vars(ModelConfiguration())),
    ]
    assert len({text_of(each) for each in values}) == len(values)


@pytest.mark.parametrize(("default", "value"), [(1, True), (True, 1), (0, False), (1, 1.0), ({1}, [1]), (0, -0.0)])
def test_a_value_that_only_looks_like_the_default_counts(default: Any, value: Any) -> None:
    kind = dataclasses.make_dataclass("Kind", [("invented", Any, dataclasses.field(default_factory=lambda: default))])
    assert facts_of(kind(), TABLE) == {}
    assert set(facts_of(kind(value), TABLE)) == {"invented"}


def test_a_text_is_the_same_in_another_process() -> None:
    code = "from kvoffload.engines.facts import text_of; print(text_of({'b': {'x', 'y', 'z'}, 'a': 1.0}))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 1,
        [object()],
        {"a": object()},
        functools.partial(len),
        operator.itemgetter(1),
        {}.get,
        list[int],
    ],
    ids=["object", "lambda", "in a list", "in a mapping", "partial", "callable object", "method", "alias"],
)
def test_what_other_processes_cannot_tell_apart_is_unclear(value: Any) -> None:
    with pytest.raises(UnclearError):
        text_of(value)
    with pytest.raises(UnclearError, match="invented has a value of type"):
        facts_of(Newer(invented=value), TABLE)
