"""Bytecode of a function: which globals, cells, attributes and items each instruction reads.

A read is known where it starts at a local, a global or a closure cell and goes on by names and keys that are constants,
or computed from what is known. Uses of a value as a whole are noted too: calls, operators, truth, membership.
"""

from __future__ import annotations

import dis
import functools
import sys
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Literal

Kind = Literal[
    "local",
    "global",
    "cell",
    "attribute",
    "item",
    "items",
    "constant",
    "computed",
    "call",
    "whole",
    "truth",
    "contains",
    "import",
]
_NULL_COMES_LAST = sys.version_info >= (3, 13)


@dataclass(frozen=True, slots=True)
class Read:
    """One read: of a name, or of what another read found."""

    kind: Kind
    key: Any
    base: Read | None = None
    parts: tuple[Read | None, ...] = ()
    """Operands, arguments, or a key that is no constant."""
    offset: int = field(default=-1, compare=False)
    """Where the instruction stands."""

    def __str__(self) -> str:
        if self.kind == "attribute":
            return f"{self.base}.{self.key}"
        if self.kind == "item":
            return f"{self.base}[{self.parts[0] if self.parts else repr(self.key)}]"
        if self.kind == "call":
            return f"{self.base}({', '.join(map(str, self.parts))})"
        if self.kind in ("constant", "import"):
            return repr(self.key) if self.kind == "constant" else str(self.key[0])
        return str(self.base) if self.base is not None else str(self.key)


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
        name = instruction.opname
        if not (self._load(instruction, name) or self._use(instruction, name)):
            if name in _EFFECTS:
                pops, pushes = _EFFECTS[name]
                self._pop_all((instruction.arg or 0) if pops is None else pops)
                self.stack += [None] * pushes
            else:
                self.stack.clear()

    def _load(self, instruction: dis.Instruction, name: str) -> bool:
        """Instructions that read one value; tells whether it was one."""
        arg, value = instruction.arg or 0, instruction.argval
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
        elif name == "IMPORT_NAME":
            level, wanted = self._pop_all(2)
            is_from = level is not None and wanted is not None and wanted.key is not None
            self.stack.append(Read("import", (value, level.key)) if level is not None and is_from else None)
        elif name == "IMPORT_FROM" and self.stack:
            self.stack.append(self.stack[-1])
            self._attribute(instruction, with_null=False)
        elif name == "LOAD_SUPER_ATTR":
            called, *arguments = self._pop_all(3)
            self.stack.append(Read("call", None, called, tuple(arguments)) if called is not None else None)
            self._attribute(instruction, with_null=bool(arg & 1))
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            self._item(instruction)
        elif name in ("COPY", "SWAP") and len(self.stack) >= arg:
            self._shuffle(name, arg)
        else:
            return False
        return True

    def _use(self, instruction: dis.Instruction, name: str) -> bool:
        """Instructions that use values as a whole; tells whether it was one."""
        arg = instruction.arg or 0
        if name in _ITERATED:
            self._about(instruction, "items", self._pop())
            self.stack += [None] * (arg if name == "UNPACK_SEQUENCE" else _ITERATED[name])
        elif name in ("CALL", "CALL_KW"):
            self._pop_all(name == "CALL_KW")
            self._call(instruction, arg)
        elif name == "CALL_FUNCTION_EX":
            self._whole(instruction, *self._pop_all(3 + (arg & 1)))
            self.stack.append(None)
        elif name in _COMPUTED or (name == "FORMAT_VALUE" and not arg & 4):
            self._compute(instruction, name, arg)
        elif name == "CONTAINS_OP":
            key, base = self._pop_all(2)
            self._about(instruction, "contains", base, key)
            self.stack.append(None)
        elif name == "BUILD_MAP":
            self._pop_all(2 * arg)
            self.stack.append(None)
        elif name in _TRUTHS:
            self._about(instruction, "truth", self._pop())
            self.stack += [None] * _TRUTHS[name]
        else:
            return False
        return True

    def _shuffle(self, name: str, depth: int) -> None:
        if name == "COPY":
            self.stack.append(self.stack[-depth])
        else:
            self.stack[-depth], self.stack[-1] = self.stack[-1], self.stack[-depth]

    def _note(self, instruction: dis.Instruction, read: Read) -> Read:
        found = self.reads[instruction.offset] = replace(read, offset=instruction.offset)
        return found

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
        if base is not None:
            found = Read("attribute", instruction.argval, base)
            if base.kind != "constant":
                found = self._note(instruction, found)
        self._push_callable(found, with_null=with_null)

    def _item(self, instruction: dis.Instruction) -> None:
        base, key = self._pop_all(2)
        found = None
        if base is not None and base.kind != "constant":
            is_constant = key is not None and key.kind == "constant" and isinstance(key.key, _KEYS)
            found = Read("item", key.key, base) if key is not None and is_constant else Read("item", None, base, (key,))
            found = self._note(instruction, found)
        self.stack.append(found)

    def _call(self, instruction: dis.Instruction, count: int) -> None:
        arguments, called = self._pop_all(count), self._pop_all(2)
        callee = next((one for one in called if one is not None), None)
        found = Read("call", None, callee, tuple(arguments)) if callee is not None else None
        self.stack.append(self._note(instruction, found) if found is not None else None)

    def _compute(self, instruction: dis.Instruction, name: str, arg: int) -> None:
        """What two operands give, a text of parts, a tuple."""
        count = _COMPUTED.get(name, 1)
        parts = tuple(self._pop_all(arg if count is None else count))
        if name in _OPERATORS:
            self._whole(instruction, *parts)
        what = instruction.argrepr if name in ("BINARY_OP", "COMPARE_OP") else name
        if name in ("FORMAT_VALUE", "CONVERT_VALUE"):
            what = ("FORMAT_SIMPLE", "str", "repr", "ascii")[arg & 3]
        self.stack.append(Read("computed", what, None, parts) if None not in parts else None)

    def _about(self, instruction: dis.Instruction, kind: Kind, base: Read | None, *parts: Read | None) -> None:
        if base is not None and base.kind != "constant":
            self._note(instruction, Read(kind, None, base, parts))

    def _whole(self, instruction: dis.Instruction, *parts: Read | None) -> None:
        """Values that are used as a whole, where they are containers."""
        known = tuple(one for one in parts if one is not None and one.kind not in ("constant", "computed"))
        if known:
            self._note(instruction, Read("whole", None, None, known))


_KEYS = (str, int, type(None), bool)
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL", "RETURN_CONST")
_HAS_METHOD_BIT = sys.version_info >= (3, 12)
_ITERATED = {"GET_ITER": 1, "LIST_EXTEND": 0, "SET_UPDATE": 0, "DICT_UPDATE": 0, "DICT_MERGE": 0, "UNPACK_SEQUENCE": 0}
"""What goes over all items of a value, and how many values it leaves in its place."""
_TRUTHS = {
    "UNARY_NOT": 1,
    "TO_BOOL": 1,
    "JUMP_IF_FALSE_OR_POP": 0,
    "JUMP_IF_TRUE_OR_POP": 0,
    "POP_JUMP_FORWARD_IF_FALSE": 0,
    "POP_JUMP_FORWARD_IF_TRUE": 0,
    "POP_JUMP_IF_FALSE": 0,
    "POP_JUMP_IF_TRUE": 0,
}
"""What asks whether a value is true, and how many values it leaves in its place."""
_OPERATORS = ("BINARY_OP", "COMPARE_OP", "BINARY_SLICE")
_COMPUTED: dict[str, int | None] = {
    "BINARY_OP": 2,
    "COMPARE_OP": 2,
    "BINARY_SLICE": 3,
    "FORMAT_SIMPLE": 1,
    "CONVERT_VALUE": 1,
    "BUILD_STRING": None,
    "BUILD_TUPLE": None,
}
"""What makes a value of others: how many; None: as many as its argument says."""
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
    "LIST_APPEND": (1, 0),
    "SET_ADD": (1, 0),
    "LIST_TO_TUPLE": (1, 1),
    "CALL_INTRINSIC_1": (1, 1),
    "UNARY_INVERT": (1, 1),
    "FOR_ITER": (0, 1),
    "DELETE_FAST": (0, 0),
    "LOAD_ASSERTION_ERROR": (0, 1),
    "FORMAT_WITH_SPEC": (2, 1),
    "BUILD_SET": (None, 1),
    "STORE_FAST": (1, 0),
    "STORE_FAST_STORE_FAST": (2, 0),
    "STORE_GLOBAL": (1, 0),
    "STORE_DEREF": (1, 0),
    "STORE_ATTR": (2, 0),
    "STORE_SUBSCR": (3, 0),
    "RETURN_VALUE": (1, 0),
    "UNARY_NEGATIVE": (1, 1),
    "IS_OP": (2, 1),
    "BUILD_LIST": (None, 1),
    "BUILD_SLICE": (None, 1),
    "POP_JUMP_FORWARD_IF_NONE": (1, 0),
    "POP_JUMP_FORWARD_IF_NOT_NONE": (1, 0),
    "POP_JUMP_IF_NONE": (1, 0),
    "POP_JUMP_IF_NOT_NONE": (1, 0),
}
"""What an instruction takes from the stack and puts there; None: as many as its argument says."""
