# SPDX-License-Identifier: Apache-2.0
"""Read vLLM's sources without importing them: names, methods with their parameters, attributes of classes."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Method:
    """A method or a function."""

    parameters: tuple[str, ...]
    """The parameters without ``self`` or ``cls``, followed by keyword-only ones, and then "*" and "**" if it accepts
    any."""
    required: frozenset[str]
    """The parameters without a default."""
    is_abstract: bool


class Sources:
    """A tree of vLLM's Python files, which are read on demand. ``root`` is the directory that contains the package
    ``vllm``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._trees: dict[str, ast.Module] = {}

    def module(self, dotted: str) -> ast.Module:
        """Return the parsed module, or an empty one if the module does not exist."""
        if dotted not in self._trees:
            path = self.root / dotted.replace(".", "/")
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._trees[dotted] = ast.parse(path.read_text() if path.exists() else "")
        return self._trees[dotted]

    def top_level_names(self, dotted: str) -> set[str]:
        names: set[str] = set()
        body = self.module(dotted).body
        # A module declares the names that it creates on demand only for type checkers.
        attempts = [each for node in body if isinstance(node, (ast.Try, ast.If)) for each in node.body]
        for node in (*body, *attempts):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
        return names

    def class_of(self, dotted: str, name: str) -> ast.ClassDef:
        for node in ast.walk(self.module(dotted)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        raise LookupError(f"{dotted} has no class {name}")

    def methods(self, dotted: str, name: str) -> dict[str, Method]:
        return methods_of(self.class_of(dotted, name))

    def functions(self, dotted: str) -> dict[str, Method]:
        return methods_of(self.module(dotted))

    def attributes(self, dotted: str, name: str) -> set[str]:
        """Return the fields, properties and methods of a class, and the attributes that its ``__init__`` assigns.
        Includes bases in the same module. Raises ``LookupError`` if there is no such class."""
        cls = self.class_of(dotted, name)
        found: set[str] = set()
        for base in self._bases(dotted, cls):
            found |= self.attributes(dotted, base)
        for node in cls.body:
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
                found |= {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                }
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return found

    def required_fields(self, dotted: str, name: str) -> set[str]:
        """Return the required fields of a dataclass or a struct. Includes bases in the same module."""
        cls = self.class_of(dotted, name)
        found: set[str] = set()
        for base in self._bases(dotted, cls):
            found |= self.required_fields(dotted, base)
        for node in cls.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                is_field = not ast.unparse(node.annotation).startswith("ClassVar")
                (found.add if node.value is None and is_field else found.discard)(node.target.id)
        return found

    def _bases(self, dotted: str, cls: ast.ClassDef) -> list[str]:
        """Return the bases that the module itself defines."""
        classes = {node.name for node in self.module(dotted).body if isinstance(node, ast.ClassDef)}
        return [base.id for base in cls.bases if isinstance(base, ast.Name) and base.id in classes]


def imports_of_vllm(path: Path) -> set[tuple[str, str]]:
    """Return (module, name) of every ``from vllm… import …`` in a file."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }


def methods_of(node: ast.Module | ast.ClassDef) -> dict[str, Method]:
    return {each.name: method_of(each) for each in node.body if isinstance(each, ast.FunctionDef)}


def method_of(node: ast.FunctionDef) -> Method:
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    required = names[: len(names) - len(arguments.defaults)]
    required += [
        each.arg for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is None
    ]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    names += [each.arg for each in arguments.kwonlyargs]
    names += ["*"] * (arguments.vararg is not None) + ["**"] * (arguments.kwarg is not None)
    is_abstract = any("abstractmethod" in ast.dump(each) for each in node.decorator_list)
    return Method(tuple(names), frozenset(required).intersection(names), is_abstract)
