"""What a compiled program stores, read from its text: how `aot_h100.py` and `aot_kernels.py` find copies."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

BYTES: Final = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8}  # others: 4
IN_PLACE: Final = ("parameter", "get-tuple-element", "while", "bitcast", "conditional", "tuple")
Array = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True)
class Instruction:
    """One array that an instruction of a compiled program stores.

    Attributes:
      name, opcode: of the instruction.
      dtype, shape: of the array.
      operands: the arrays that it was given, but for those in whose place earlier results are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    opcode: str
    operands: tuple[Array, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES.get(self.dtype, 4)

    @property
    def copies(self) -> bool:
        """Whether it is a copy, or a fusion that the compiler made of one."""
        return self.opcode in ("copy", "copy-done") or (self.opcode == "fusion" and "copy" in self.name)

    def makes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether its result is such an array, and none that it was given: then it can't be in place."""
        made = self.opcode not in IN_PLACE and (self.dtype, self.shape) == (dtype, shape)
        return made and (dtype, shape) not in self.operands

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


def stored(text: str) -> Iterator[Instruction]:
    """The arrays of a compiled program, but for those inside fusions: these stay in registers."""
    fused = set(re.findall(r"fusion\(.*?calls=(%[\w.\-]+)", text))
    made: dict[str, Array] = {}
    inside = False
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?(%[\w.\-]+) .*\{$", line):
            inside = header[1] in fused
        found = re.match(r"\s+(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\w+\[\S*) ([\w\-]+)\((.*?)\)", line)
        if found is None or inside:
            continue
        name, results, opcode, operands = found.groups()
        given = [made[each] for each in re.findall(r"%[\w.\-]+", operands) if each in made]
        arrays = [(dtype, _sizes(sizes)) for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", results)]
        if not results.startswith("("):
            made[name] = arrays[0]
        for array in arrays:
            yield Instruction(name, *array, opcode, tuple(given))
            if array in given:
                given.remove(array)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))
