# SPDX-License-Identifier: Apache-2.0
"""A stub that `scripts/test-sglang` installs as torchvision, which SGLang and transformers import for images.

No test uses images.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class _Names(type):
    """The metaclass of a class whose attributes are their own names."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Names(name, (), {})
