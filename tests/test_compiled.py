# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest

from kvoffload.compiled import compiled


def test_the_compiler_gets_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = ModuleType("numba")
    monkeypatch.setitem(sys.modules, "numba", numba)
    assert compiled(lambda module: (module, "machine code"), "copies are slower") == (numba, "machine code")


def test_without_numba_there_is_nothing_to_say(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compiled(lambda _: "machine code", "copies are slower") is None
    assert not caplog.records


def test_a_numba_that_cannot_compile_is_a_warning_that_names_the_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_with(_: Any) -> str:
        raise RuntimeError("no such intrinsic")

    monkeypatch.setitem(sys.modules, "numba", ModuleType("numba"))
    with caplog.at_level(logging.WARNING):
        assert compiled(compile_with, "copies are slower") is None
    assert "copies are slower" in caplog.text
    assert "no such intrinsic" in caplog.text
