# SPDX-License-Identifier: Apache-2.0
"""Test the tree of exceptions, and the hints in its messages."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from itertools import islice
from types import ModuleType

import pytest

import kvoffload
from kvoffload.errors import (
    CapacityError,
    ConfigError,
    KVOffloadError,
    LayoutError,
    MissingExtraError,
    UnknownNameError,
    causes,
    suggest,
)

OPTIONAL = {"vllm", "sglang", "torch", "transformers", "typer", "rich"}
"""Distributions that some modules cannot be imported without."""


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(kvoffload.__path__, "kvoffload."):
        try:
            yield importlib.import_module(found.name)
        except ModuleNotFoundError as exc:
            if (exc.name or "").split(".")[0] not in OPTIONAL:
                raise


def test_every_exception_of_the_package_is_a_kvoffload_error() -> None:
    classes = {
        value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__.startswith("kvoffload.")
    }
    assert len(classes) >= 8
    assert {value.__qualname__ for value in classes if not issubclass(value, KVOffloadError)} == set()


@pytest.mark.parametrize("kind", [UnknownNameError, LayoutError, CapacityError])
def test_mistakes_of_the_caller_are_config_errors_and_value_errors(kind: type[Exception]) -> None:
    assert issubclass(kind, ConfigError)
    assert issubclass(kind, ValueError)
    assert issubclass(MissingExtraError, ImportError)


def test_an_error_that_is_its_own_cause_is_named_once() -> None:
    first, last = ValueError(), OSError()
    first.__cause__, last.__cause__ = last, first
    assert [*islice(causes(first), 3)] == [first, last]


def test_suggestions() -> None:
    assert suggest("lur", ["lru", "arc"]) == " Did you mean 'lru'?"
    assert suggest("xyz", ["lru", "arc"]) == " Choices: arc, lru."
    assert suggest("xyz", []) == " Choices: none."
