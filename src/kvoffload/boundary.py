# SPDX-License-Identifier: Apache-2.0
"""The boundary to foreign code: whatever it raises, and whatever is no answer, becomes the mildest answer there is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Boundary:
    """Stands in front of ``inner``, which is foreign. The class body is a table of ``guarded`` methods."""

    inner: Any

    def failed(self, name: str, exc: BaseException) -> None:
        """``inner.name`` raised ``exc``, or gave no answer. To be logged or counted."""


def guarded(
    method: Callable[Concatenate[Any, P], R],
    otherwise: Callable[..., R],
    answer: Callable[..., R] | None = None,
) -> Callable[Concatenate[Any, P], R]:
    """``method`` of a ``Boundary``, which calls that of ``inner`` and never raises.

    ``otherwise(*args)`` is the answer to a call that raised. It costs a recomputation and nothing else. (A method that
    has no such answer raises there.) ``answer(answered, *args)``, if it is given, is what was answered in the shape
    that callers rely on, or raises. This includes exceptions that are no ``Exception``, such as a native client's
    panic, but not those that end the process.
    """
    name, parameters = method.__name__, [*inspect.signature(method).parameters.values()][1:]

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given: tuple[object, ...] = args if not kwargs else _by_place(parameters, args, kwargs)
        try:
            answered: R = getattr(self.inner, name)(*given)
            return answered if answer is None else answer(answered, *given)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # noqa: BLE001 - this is the boundary
            self.failed(name, exc)
            return otherwise(*given)

    call.__name__, call.__qualname__, call.__doc__ = name, method.__qualname__, method.__doc__
    return call


def _by_place(
    parameters: Sequence[inspect.Parameter], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...]:
    """Foreign code may call its parameters what it likes."""
    last = max(at for at, each in enumerate(parameters) if each.name in kwargs)
    return args + tuple(kwargs.get(each.name, each.default) for each in parameters[len(args) : last + 1])


def up_to_a_miss(answers: Sequence[object], keys: Sequence[object], *_: object) -> list[bool | None]:
    """There is an answer for each key up to the first ``False``. What is answered after a miss must not make a hit of
    it."""
    if {*map(type, answers)} == {NoneType} and len(answers) >= len(keys):  # most of the long ones
        return [None] * len(keys)
    found = [None if answer is None else bool(answer) for answer in answers]
    if len(found) < len(keys) and not (found and found[-1] is False):
        raise TypeError(f"this is no answer for {len(keys)} blocks: {answers!r:.100}")
    return found[: found.index(False) + 1] if False in found else found[: len(keys)]
