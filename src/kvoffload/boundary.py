# SPDX-License-Identifier: Apache-2.0
"""The boundary to foreign code: its exceptions and invalid answers become the mildest possible answer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Boundary:
    """A wrapper of ``inner``, which is foreign code. The class body is a table of ``guarded`` methods."""

    inner: Any

    def failed(self, name: str, exc: BaseException) -> None:
        """Log or count that ``inner.name`` raised ``exc``, or gave an invalid answer."""


def guarded(
    method: Callable[Concatenate[Any, P], R],
    otherwise: Callable[..., R],
    answer: Callable[..., R] | None = None,
    *,
    kind: type | tuple[type, ...] = object,
) -> Callable[Concatenate[Any, P], R]:
    """Return a method of a ``Boundary`` that calls the same method of ``inner`` and never raises.

    ``otherwise(*args)`` is the answer to a call that raised. It must cost only a recomputation. (A method without such
    an answer raises in ``otherwise``.) An answer that is not of this ``kind`` is invalid. ``answer(answered, *args)``,
    if given, converts an answer into the form that callers rely on, or raises. The boundary also catches exceptions
    that are not an ``Exception``, such as a native client's panic, but not those that end the process.
    """
    name, parameters = method.__name__, [*inspect.signature(method).parameters.values()][1:]

    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        given: tuple[object, ...] = args if not kwargs else _by_place(parameters, args, kwargs)
        try:
            answered: R = getattr(self.inner, name)(*given)
            if not isinstance(answered, kind):
                raise TypeError(f"this is not an answer: {answered!r:.100}")
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
    """Return all arguments by position, because foreign code may use other parameter names."""
    last = max(at for at, each in enumerate(parameters) if each.name in kwargs)
    return args + tuple(kwargs.get(each.name, each.default) for each in parameters[len(args) : last + 1])


def up_to_a_miss(answers: Sequence[object], keys: Sequence[object], *_: object) -> list[bool | None]:
    """Return the answers up to and including the first ``False``.

    Raises ``TypeError`` if there are fewer answers than keys without a ``False`` at the end. Answers after a miss are
    dropped, because they must not turn it into a hit.
    """
    are_whole = type(answers) is list and len(answers) >= len(keys) > 0
    if are_whole and answers.count(first := answers[0]) == len(answers) and first in (None, True):  # most long ones
        return [None if first is None else True] * len(keys)
    found = [None if answer is None else bool(answer) for answer in answers]
    if len(found) < len(keys) and not (found and found[-1] is False):
        raise TypeError(f"this is not an answer for {len(keys)} blocks: {answers!r:.100}")
    return found[: found.index(False) + 1] if False in found else found[: len(keys)]
