# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvoffload.boundary import Boundary, guarded


class Seam:
    def count(self, words: list[str], start: int = 0, step: int = 1) -> int:
        raise NotImplementedError


class Guarded(Boundary):
    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.faults: list[str] = []

    def failed(self, name: str, exc: BaseException) -> None:
        self.faults.append(f"{name}: {exc}")

    count = guarded(Seam.count, lambda words, *_: -len(words), lambda answer, *_: int(answer))


class Foreign:
    """Foreign code that chooses its own parameter names."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def count(self, w: list[str], s: int = 0, by: int = 1) -> object:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer or len(w) * by + s


def test_answers_come_in_the_shape_that_callers_rely_on() -> None:
    assert Guarded(Foreign("7")).count(["a"]) == 7
    assert Guarded(Foreign(None)).count(["a"], start=2) == 3
    assert Guarded(Foreign(None)).count(words=["a", "b"]) == 2
    assert Guarded(Foreign(None)).count(["a", "b"], step=3) == 6


@pytest.mark.parametrize("answer", ["no number", RuntimeError("broken"), GeneratorExit(), [1]])
def test_what_is_raised_and_what_is_no_answer_become_the_mildest_answer(answer: object) -> None:
    front = Guarded(Foreign(answer))
    assert front.count(["a", "b"]) == -2
    assert len(front.faults) == 1


@pytest.mark.parametrize("answer", [KeyboardInterrupt(), SystemExit()])
def test_what_ends_the_process_passes(answer: BaseException) -> None:
    with pytest.raises(type(answer)):
        Guarded(Foreign(answer)).count([])
