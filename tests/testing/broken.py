# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the tests of the shipped contracts: implementations that break a contract must fail."""

from __future__ import annotations


def failures_of(
    contract: type, prefix: str = "test_", raised: type[Exception] | tuple[type[Exception], ...] = Exception
) -> set[str]:
    """Return the failing tests of ``contract`` whose names start with ``prefix``: those that raise one of
    ``raised``."""
    failed = set()
    for name in dir(contract):
        if name.startswith(prefix):
            try:
                getattr(contract(), name)()
            except raised:
                failed.add(name)
    return failed


class EndsOnce:
    """A manager whose second ``shutdown`` raises."""

    has_ended = False

    def shutdown(self) -> None:
        assert not self.has_ended
        self.has_ended = True
