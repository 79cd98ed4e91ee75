# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel from its text, one thread after another, over a ``bytearray``: as much of PTX as ours uses.

What is not known here raises. Registers are wide enough, and every 32-bit result is cut to 32 bits.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping

_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([\w.]+)\s*(.*)")
_CALCULATE = {
    "add.u32": operator.add,
    "add.u64": operator.add,
    "mul.wide.u32": operator.mul,
    "shl.b32": operator.lshift,
    "setp.ne.u32": operator.ne,
    "setp.lt.u32": operator.lt,
}


def run(text: str, memory: bytearray, arguments: Mapping[str, bytes], num_groups: int, group_threads: int) -> None:
    """``arguments`` by name, in the kernel's order. Global addresses are places in ``memory``."""
    text = re.sub(r"//[^\n]*", "", text)
    head, _, body = text.partition("{")
    names = re.findall(r"\.param[^,)]*?(\w+)(?:\[\d+\])?\s*[,)]", head + ")")
    assert names == list(arguments)
    lines = [line.strip() for line in re.split(r";|(?<=:)\n", body.rpartition("}")[0]) if line.strip()]
    lines = [line for line in lines if not line.startswith(".reg")]
    for group in range(num_groups):
        for thread in range(group_threads):
            _Thread(lines, memory, arguments, group, thread, group_threads).run()


class _Thread:
    def __init__(
        self,
        lines: list[str],
        memory: bytearray,
        arguments: Mapping[str, bytes],
        group: int,
        thread: int,
        group_threads: int,
    ) -> None:
        self._lines = lines
        self._labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}
        self._memory = memory
        self._arguments = b"".join(arguments.values())
        starts = [sum(len(value) for value in list(arguments.values())[:n]) for n in range(len(arguments))]
        special = {"%ctaid.x": group, "%tid.x": thread, "%ntid.x": group_threads}
        self._values: dict[str, int] = special | dict(zip(arguments, starts, strict=True))

    def run(self) -> None:
        at = 0
        while True:
            line = self._lines[at]
            at += 1
            if line.endswith(":"):
                continue
            found = _INSTRUCTION.fullmatch(line)
            assert found, line
            negated, predicate, name, rest = found.groups()
            if predicate is not None and bool(self._values[predicate]) == bool(negated):
                continue
            if name == "ret":
                return
            if name == "bra":
                at = self._labels[rest]
            else:
                self._do(name, rest)

    def _do(self, name: str, rest: str) -> None:
        if name in ("ld.global.v4.u32", "st.global.v4.u32"):
            self._vector(name.startswith("ld"), rest)
            return
        to, *operands = [operand.strip() for operand in rest.split(",")]
        if name.startswith("ld.param.u"):
            size = int(name[-2:]) // 8
            start = self._address(operands[0])
            assert start % size == 0
            assert start + size <= len(self._arguments)
            self._values[to] = int.from_bytes(self._arguments[start : start + size], "little")
        elif name in ("mov.u32", "mov.u64", "cvt.u64.u32"):
            self._values[to] = self._value(operands[0])
        elif name == "selp.b64":
            first, second, predicate = operands
            self._values[to] = self._value(first if self._values[predicate] else second)
        else:
            result = _CALCULATE[name](*(self._value(operand) for operand in operands))
            self._values[to] = result if "64" in name or "wide" in name else result & 0xFFFFFFFF

    def _vector(self, is_load: bool, rest: str) -> None:
        registers = re.search(r"\{(.*)\}", rest)
        where = re.search(r"(\[.*\])", rest)
        assert registers
        assert where
        names, start = [name.strip() for name in registers[1].split(",")], self._address(where[1])
        assert start % 16 == 0
        assert 0 <= start <= len(self._memory) - 16
        for nth, name in enumerate(names):
            place = slice(start + 4 * nth, start + 4 * nth + 4)
            if is_load:
                self._values[name] = int.from_bytes(self._memory[place], "little")
            else:
                self._memory[place] = self._values[name].to_bytes(4, "little")

    def _address(self, operand: str) -> int:
        name, _, offset = operand.strip("[]").partition("+")
        return self._value(name) + int(offset or 0)

    def _value(self, operand: str) -> int:
        return int(operand) if operand.isdecimal() else self._values[operand]
