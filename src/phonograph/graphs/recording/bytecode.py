"""Bytecode of a function: which globals, cells, attributes and items each instruction reads.

A read is known where it starts at a local, a global or a closure cell and goes on by constant names and keys. What a
call returns is not known.
"""

from __future__ import annotations

import dis
import functools
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

Kind = Literal["local", "global", "cell", "attribute", "item", "items", "constant"]
_NULL_COMES_LAST = sys.version_info >= (3, 13)


@dataclass(frozen=True, slots=True)
class Read:
    """One read: of a name, or of what another read found."""

    kind: Kind
    key: Any
    base: Read | None = None

    def __str__(self) -> str:
        if self.kind == "attribute":
            return f"{self.base}.{self.key}"
        if self.kind == "item":
            return f"{self.base}[{self.key!r}]"
        return str(self.base) if self.kind == "items" else str(self.key)


@functools.lru_cache(maxsize=4096)
def reads_of(code: CodeType) -> dict[int, Read]:
    """By offset, what the instruction there reads besides locals."""
    reading = _Reading()
    for instruction in dis.get_instructions(code):
        if instruction.is_jump_target:
            reading.stack.clear()  # what lies there depends on where one comes from
        reading.step(instruction)
    return reading.reads


class _Reading:
    """Follows the stack of one function. What is below the known part is unknown, and so is a None in it."""

    def __init__(self) -> None:
        self.stack: list[Read | None] = []
        self.reads: dict[int, Read] = {}

    def step(self, instruction: dis.Instruction) -> None:
        name, arg, value = instruction.opname, instruction.arg or 0, instruction.argval
        if name.startswith("LOAD_FAST"):
            names = value if isinstance(value, tuple) else (value,)
            self.stack += [Read("local", one) for one in names]
        elif name == "STORE_FAST_LOAD_FAST":
            self._pop()
            self.stack.append(Read("local", value[1]))
        elif name in _CONSTANTS:
            self.stack.append(Read("constant", value))
        elif name == "LOAD_GLOBAL":
            found = self._note(instruction, Read("global", value))
            self._push_callable(found, with_null=bool(arg & 1))
        elif name == "LOAD_DEREF":
            self.stack.append(self._note(instruction, Read("cell", value)))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._attribute(instruction, with_null=name == "LOAD_METHOD" or (_HAS_METHOD_BIT and bool(arg & 1)))
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            self._item(instruction)
        elif name == "GET_ITER":
            base = self._pop()
            if base is not None and base.kind != "constant":
                self._note(instruction, Read("items", None, base))
            self.stack.append(None)
        elif name in ("CALL", "CALL_FUNCTION"):
            self._call(instruction, arg)
        elif name in _EFFECTS:
            pops, pushes = _EFFECTS[name]
            self._pop_all(arg if pops is None else pops)
            self.stack += [None] * pushes
        else:
            self.stack.clear()

    def _note(self, instruction: dis.Instruction, read: Read) -> Read:
        self.reads[instruction.offset] = read
        return read

    def _push_callable(self, found: Read | None, *, with_null: bool) -> None:
        if not with_null:
            self.stack.append(found)
        else:
            self.stack += [found, None] if _NULL_COMES_LAST else [None, found]

    def _pop(self) -> Read | None:
        return self.stack.pop() if self.stack else None

    def _pop_all(self, count: int) -> list[Read | None]:
        return [self._pop() for _ in range(count)][::-1]

    def _attribute(self, instruction: dis.Instruction, *, with_null: bool) -> None:
        base = self._pop()
        found = None
        if base is not None and base.kind != "constant":
            found = self._note(instruction, Read("attribute", instruction.argval, base))
        self._push_callable(found, with_null=with_null)

    def _item(self, instruction: dis.Instruction) -> None:
        base, key = self._pop_all(2)
        found = None
        if base is not None and key is not None and key.kind == "constant" and isinstance(key.key, _KEYS):
            found = self._note(instruction, Read("item", key.key, base))
        self.stack.append(found)

    def _call(self, instruction: dis.Instruction, count: int) -> None:
        """`getattr(x, "name")` and `hasattr(x, "name")` read as `x.name` does."""
        arguments, called = self._pop_all(count), self._pop_all(2)
        found = None
        if 2 <= count <= 3 and any(one in _ATTRIBUTE_FUNCTIONS for one in called if one is not None):
            base, name = arguments[:2]
            if base is not None and name is not None and name.kind == "constant" and isinstance(name.key, str):
                found = self._note(instruction, Read("attribute", name.key, base))
        # A default may have come out.
        self.stack.append(found if count == 2 and Read("global", "getattr") in called else None)


_KEYS = (str, int, type(None), bool)
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL", "RETURN_CONST")
_HAS_METHOD_BIT = sys.version_info >= (3, 12)
_ATTRIBUTE_FUNCTIONS = (Read("global", "getattr"), Read("global", "hasattr"))
_EFFECTS: dict[str, tuple[int | None, int]] = {
    "NOP": (0, 0),
    "RESUME": (0, 0),
    "CACHE": (0, 0),
    "PRECALL": (0, 0),
    "KW_NAMES": (0, 0),
    "EXTENDED_ARG": (0, 0),
    "COPY_FREE_VARS": (0, 0),
    "MAKE_CELL": (0, 0),
    "NOT_TAKEN": (0, 0),
    "PUSH_NULL": (0, 1),
    "LOAD_CLOSURE": (0, 1),
    "POP_TOP": (1, 0),
    "STORE_FAST": (1, 0),
    "STORE_FAST_STORE_FAST": (2, 0),
    "STORE_GLOBAL": (1, 0),
    "STORE_DEREF": (1, 0),
    "STORE_ATTR": (2, 0),
    "STORE_SUBSCR": (3, 0),
    "RETURN_VALUE": (1, 0),
    "UNARY_NOT": (1, 1),
    "UNARY_NEGATIVE": (1, 1),
    "TO_BOOL": (1, 1),
    "BINARY_OP": (2, 1),
    "COMPARE_OP": (2, 1),
    "IS_OP": (2, 1),
    "CONTAINS_OP": (2, 1),
    "BINARY_SLICE": (3, 1),
    "BUILD_TUPLE": (None, 1),
    "BUILD_LIST": (None, 1),
    "BUILD_SLICE": (None, 1),
    "BUILD_STRING": (None, 1),
    "POP_JUMP_FORWARD_IF_FALSE": (1, 0),
    "POP_JUMP_FORWARD_IF_TRUE": (1, 0),
    "POP_JUMP_FORWARD_IF_NONE": (1, 0),
    "POP_JUMP_FORWARD_IF_NOT_NONE": (1, 0),
    "POP_JUMP_IF_FALSE": (1, 0),
    "POP_JUMP_IF_TRUE": (1, 0),
    "POP_JUMP_IF_NONE": (1, 0),
    "POP_JUMP_IF_NOT_NONE": (1, 0),
}
"""What an instruction takes from the stack and puts there; None: as many as its argument says."""
