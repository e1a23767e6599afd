"""Bytecode of a function: which globals, cells, attributes and items each instruction reads.

An instruction takes its operands from the stack: a read has their places there, and the expressions that they come
from, as far as these start at a local, a global or a closure cell and go on by names and keys. Uses of a value as a
whole are noted too: calls, operators, truth, membership, patterns.
"""

from __future__ import annotations

import dis
import functools
import sys
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Literal

from phonograph.graphs.recording.stack_depths import depths_of

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
    "super",
    "match class",
    "match keys",
    "length",
    "value",
]
NULL_COMES_LAST = sys.version_info >= (3, 13)
"""Of the two places of what is called, whether the one for an owner is the upper."""
UNPACKED = "unpacked"
"""The key of a call whose arguments are a sequence, and perhaps a dict."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read: of a name, or of what another read found."""

    kind: Kind
    key: Any
    base: Read | None = None
    parts: tuple[Read, ...] = ()
    """Operands, arguments, or a key that is no constant."""
    offset: int = field(default=-1, compare=False)
    """Where the instruction stands."""
    at: int = field(default=-1, compare=False)
    """Where on the stack the value lies when an instruction takes it, from the bottom; of what is called, the lower of
    two places."""

    def __str__(self) -> str:
        if self.kind in ("value", "super"):
            return "…" if self.kind == "value" else "super()"
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
    depths = depths_of(code)
    prefixes: list[int] = []
    for instruction in dis.get_instructions(code):
        if instruction.is_jump_target or instruction.offset not in depths:
            reading.stack.clear()  # what lies there depends on where one comes from
        if instruction.offset in depths:
            reading.step(instruction, depths[instruction.offset])
        if instruction.opname == "EXTENDED_ARG":
            prefixes.append(instruction.offset)
            continue
        if instruction.offset in reading.reads:  # an instruction with a large argument may be told by its first part
            reading.reads.update(dict.fromkeys(prefixes, reading.reads[instruction.offset]))
        prefixes.clear()
    return dict(sorted(reading.reads.items()))


_UNNAMED = Read("value", None)


class _Reading:
    """Follows the stack of one function. What is below the known part has no names."""

    def __init__(self) -> None:
        self.stack: list[Read] = []
        self.reads: dict[int, Read] = {}
        self._depth = 0

    def step(self, instruction: dis.Instruction, depth: int) -> None:
        name, self._depth = instruction.opname, depth
        if not (self._load(instruction, name) or self._use(instruction, name)):
            if name in _EFFECTS:
                pops, pushes = _EFFECTS[name]
                self._pop_all((instruction.arg or 0) if pops is None else pops)
                self._push_unnamed(pushes)
            else:
                self.stack.clear()

    def _load(self, instruction: dis.Instruction, name: str) -> bool:
        """Instructions that read one value; tells whether it was one."""
        arg, value = instruction.arg or 0, instruction.argval
        if name.startswith("LOAD_FAST"):
            for one in value if isinstance(value, tuple) else (value,):
                self._push(Read("local", one))
        elif name == "STORE_FAST_LOAD_FAST":
            self._pop()
            self._push(Read("local", value[1]))
        elif name in _CONSTANTS:
            self._push(Read("constant", value))
        elif name in _GLOBALS:
            self._pop_all(_GLOBALS[name])
            found = self._note(instruction, Read("global", value))
            self._push_callable(found, with_null=name == "LOAD_GLOBAL" and bool(arg & 1))
        elif name in _CELLS:
            self._pop_all(_CELLS[name])
            self._push(self._note(instruction, Read("cell", value)))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            with_null = name == "LOAD_METHOD" or (_HAS_METHOD_BIT and bool(arg & 1))
            self._attribute(instruction, self._pop(), with_null=with_null)
        elif name in ("IMPORT_NAME", "IMPORT_FROM"):
            self._import(instruction, name)
        elif name == "LOAD_SUPER_ATTR":
            base = Read("super", None, None, tuple(self._pop_all(3)))
            self._attribute(instruction, base, with_null=bool(arg & 1))
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            self._item(instruction)
        elif name in ("COPY", "SWAP") and len(self.stack) >= arg:
            self._shuffle(name, arg)
        else:
            return False
        return True

    def _import(self, instruction: dis.Instruction, name: str) -> None:
        if name == "IMPORT_FROM":
            self._attribute(instruction, self._top(), with_null=False)
            return
        level, wanted = self._pop_all(2)
        if level.kind == wanted.kind == "constant":
            is_from = wanted.key is not None
            self._push(self._note(instruction, Read("import", (instruction.argval, level.key, is_from))))
        else:
            self._push_unnamed(1)

    def _use(self, instruction: dis.Instruction, name: str) -> bool:
        """Instructions that use values as a whole; tells whether it was one."""
        arg = instruction.arg or 0
        if name in _ITERATED:
            self._about(instruction, "items", self._pop())
            self._push_unnamed(_left_by(name, arg))
        elif name in ("CALL", "CALL_KW"):
            self._pop_all(name == "CALL_KW")
            self._call(instruction, self._pop_all(arg))
        elif name == "CALL_FUNCTION_EX":
            self._call(instruction, self._pop_all(1 + (arg & 1)), UNPACKED)
        elif name in _COMPUTED or (name == "FORMAT_VALUE" and not arg & 4):
            self._compute(instruction, name, arg)
        elif name == "CONTAINS_OP":
            key, base = self._pop_all(2)
            self._about(instruction, "contains", base, key)
            self._push_unnamed(1)
        elif name in _PATTERNS:
            self._match(instruction, name)
        elif name == "BUILD_MAP":
            self._pop_all(2 * arg)
            self._push_unnamed(1)
        elif name in _TRUTHS:
            self._about(instruction, "truth", self._pop())
            self._push_unnamed(_TRUTHS[name])
        else:
            return False
        return True

    def _match(self, instruction: dis.Instruction, name: str) -> None:
        """What patterns ask of a value, which all but that of a class leave where it is."""
        if name == "MATCH_CLASS":
            subject, kind, names = self._pop_all(3)
            self._note(instruction, Read("match class", instruction.arg or 0, subject, (kind, names)))
        elif name == "MATCH_KEYS":
            subject, keys = self._top(1), self._top()
            self._note(instruction, Read("match keys", None, subject, (keys,)))
        else:
            self._about(instruction, "length", self._top())
        self._push_unnamed(1)

    def _shuffle(self, name: str, depth: int) -> None:
        if name == "COPY":
            self._push(self.stack[-depth])
        else:
            self.stack[-depth], self.stack[-1] = self.stack[-1], self.stack[-depth]

    def _note(self, instruction: dis.Instruction, read: Read) -> Read:
        found = self.reads[instruction.offset] = replace(read, offset=instruction.offset)
        return found

    def _push(self, found: Read) -> None:
        """From now on its operands are no longer where they were."""
        base = _unplaced(found.base) if found.base is not None else None
        self.stack.append(replace(found, base=base, parts=tuple(map(_unplaced, found.parts))))
        self._depth += 1

    def _push_unnamed(self, count: int) -> None:
        for _ in range(count):
            self._push(_UNNAMED)

    def _push_callable(self, found: Read, *, with_null: bool) -> None:
        if with_null and not NULL_COMES_LAST:
            self._push(_UNNAMED)
        self._push(found)
        if with_null and NULL_COMES_LAST:
            self._push(_UNNAMED)

    def _pop(self) -> Read:
        found = self._top()
        del self.stack[-1:]
        self._depth -= 1
        return found

    def _top(self, below: int = 0) -> Read:
        """What lies on top, or so many places below it."""
        found = self.stack[-1 - below] if len(self.stack) > below else _UNNAMED
        return replace(found, at=self._depth - 1 - below)

    def _pop_all(self, count: int) -> list[Read]:
        return [self._pop() for _ in range(count)][::-1]

    def _attribute(self, instruction: dis.Instruction, base: Read, *, with_null: bool) -> None:
        found = Read("attribute", instruction.argval, base)
        if base.kind != "constant":
            found = self._note(instruction, found)
        self._push_callable(found, with_null=with_null)

    def _item(self, instruction: dis.Instruction) -> None:
        base, key = self._pop_all(2)
        if base.kind == "constant":
            self._push_unnamed(1)
            return
        is_constant = key.kind == "constant" and isinstance(key.key, _KEYS)
        found = Read("item", key.key, base) if is_constant else Read("item", None, base, (key,))
        self._push(self._note(instruction, found))

    def _call(self, instruction: dis.Instruction, arguments: list[Read], key: str | None = None) -> None:
        called = self._pop_all(2)
        callee = next((one for one in called if one.kind != "value"), _UNNAMED)
        found = Read("call", key, replace(callee, at=called[0].at), tuple(arguments))
        self._push(self._note(instruction, found))

    def _compute(self, instruction: dis.Instruction, name: str, arg: int) -> None:
        """What two operands give, a text of parts, a tuple."""
        count = _COMPUTED.get(name, 1)
        parts = tuple(self._pop_all(arg if count is None else count))
        if name in _OPERATORS:
            self._whole(instruction, *parts)
        what = instruction.argrepr if name in ("BINARY_OP", "COMPARE_OP") else name
        if name in ("FORMAT_VALUE", "CONVERT_VALUE"):
            what = ("FORMAT_SIMPLE", "str", "repr", "ascii")[arg & 3]
        self._push(Read("computed", what, None, parts))

    def _about(self, instruction: dis.Instruction, kind: Kind, base: Read, *parts: Read) -> None:
        if base.kind != "constant":
            self._note(instruction, Read(kind, None, base, parts))

    def _whole(self, instruction: dis.Instruction, *parts: Read) -> None:
        """Values that are used as a whole, where they are containers."""
        known = tuple(one for one in parts if one.kind != "constant")
        if known:
            self._note(instruction, Read("whole", None, None, known))


def _unplaced(read: Read) -> Read:
    if read.kind == "super":
        return replace(read, parts=tuple(replace(part, at=-1) for part in read.parts))
    return read if read.at < 0 else replace(read, at=-1)


def _left_by(name: str, arg: int) -> int:
    """How many values are there after something was iterated."""
    if name == "UNPACK_EX":
        return (arg & 0xFF) + (arg >> 8) + 1
    return arg if name == "UNPACK_SEQUENCE" else _ITERATED[name]


_KEYS = (str, int, type(None), bool)
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL", "RETURN_CONST")
_HAS_METHOD_BIT = sys.version_info >= (3, 12)
_GLOBALS = {"LOAD_GLOBAL": 0, "LOAD_NAME": 0, "LOAD_FROM_DICT_OR_GLOBALS": 1}
_CELLS = {"LOAD_DEREF": 0, "LOAD_CLASSDEREF": 0, "LOAD_FROM_DICT_OR_DEREF": 1}
"""What reads a name, and how many values it takes for that."""
_PATTERNS = ("MATCH_CLASS", "MATCH_KEYS", "GET_LEN")
_ITERATED = {
    "GET_ITER": 1,
    "GET_YIELD_FROM_ITER": 1,
    "LIST_EXTEND": 0,
    "SET_UPDATE": 0,
    "DICT_UPDATE": 0,
    "DICT_MERGE": 0,
    "UNPACK_SEQUENCE": 0,
    "UNPACK_EX": 0,
}
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
    "MATCH_MAPPING": (0, 1),
    "MATCH_SEQUENCE": (0, 1),
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
