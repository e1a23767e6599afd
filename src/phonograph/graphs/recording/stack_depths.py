"""Stack depths: how many values lie on the stack of a function before each of its instructions."""

from __future__ import annotations

import dis
import inspect
from types import CodeType
from typing import Any

_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_LEAVES = (
    *("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT"),
    *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"),
)
"""Instructions after which the next one does not run."""
_HAS_PRECALL = "PRECALL" in dis.opmap


def depths_of(code: CodeType) -> dict[int, int]:
    """By offset of an instruction; without those that never run."""
    instructions = list(dis.get_instructions(code))
    index = {one.offset: at for at, one in enumerate(instructions)}
    found: dict[int, int] = {}
    todo = [(0, _at_start(code)), *_at_handlers(code)]
    while todo:
        offset, depth = todo.pop()
        if offset not in index or offset in found:
            continue
        found[offset] = depth
        one = instructions[index[offset]]
        if one.opcode in _JUMPS:
            todo.append((one.argval, depth + _effect(one, jumps=True)))
        if one.opname not in _LEAVES and index[offset] + 1 < len(instructions):
            todo.append((instructions[index[offset] + 1].offset, depth + _effect(one, jumps=False)))
    return found


def _at_start(code: CodeType) -> int:
    """Where a generator goes on for the first time, it is sent a None, unless an instruction puts that there."""
    is_sent = dis.stack_effect(dis.opmap["RETURN_GENERATOR"]) == 0
    return 1 if code.co_flags & _GENERATORS and is_sent else 0


def _at_handlers(code: CodeType) -> list[tuple[int, int]]:
    """Where exceptions are caught: what lay there, perhaps the place of the instruction, and the exception."""
    table: Any = getattr(dis, "_parse_exception_table")(code)  # noqa: B009
    return [(one.target, one.depth + one.lasti + 1) for one in table]


def _effect(one: dis.Instruction, *, jumps: bool) -> int:
    if _HAS_PRECALL and one.opname in ("PRECALL", "CALL"):  # what the first is said to take, the second takes
        return 0 if one.opname == "PRECALL" else -1 - (one.arg or 0)
    return dis.stack_effect(one.opcode, one.arg if one.opcode >= dis.HAVE_ARGUMENT else None, jump=jumps)
