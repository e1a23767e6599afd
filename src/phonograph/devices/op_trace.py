"""OpTrace: the ops of a forward pass: the line of each, its plain arguments, and the memory that it touches.

Two traces of one shape can be compared. Memory is numbered in order of first use, so that what a pass allocates has
the same number in every run; memory from outside is kept alive as long as the trace, so that its address is not
reused.
"""

from __future__ import annotations

import numbers
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from phonograph.devices.launches import following_launches
from phonograph.devices.trace import OpWatch, is_users, tensors_in, uncompiled
from phonograph.errors import Frame

_OWN_DIR = str(Path(__file__).parent.parent) + os.sep
_LAYER_DIRS = (_OWN_DIR + "devices" + os.sep, _OWN_DIR + "graphs" + os.sep)
_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, complex, str, *_TORCHS, numbers.Number)
_NO_MEMORY = -1
_LOWEST_ADDRESS = 1 << 32


@dataclass(frozen=True, slots=True)
class TensorNote:
    """A tensor among an op's arguments or results."""

    memory: int
    """The number of its memory; -1 where it has none of its own (sparse, a wrapper)."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    form: tuple[Any, ...]
    """Where in its memory it lies: offset and strides."""

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that is neither plain nor a tensor: only its kind can be compared."""

    kind: type

    def __str__(self) -> str:
        return f"<{self.kind.__name__}>"


@dataclass(frozen=True, slots=True)
class Address:
    """A number among a kernel's arguments that is an address in memory which the trace has met."""

    memory: int
    offset: int

    def __str__(self) -> str:
        return f"<memory {self.memory} + {self.offset:,}>"


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One op, or one gap between two graphs."""

    name: str
    code: CodeType | None
    line: int
    arguments: tuple[tuple[str, Any], ...]
    """Name and note of every argument that was given."""
    results: tuple[Any, ...]

    @property
    def frame(self) -> Frame | None:
        """The line that called it: the innermost that is neither torch's nor the graph layer's."""
        return Frame(self.code.co_filename, self.line, self.code.co_name) if self.code is not None else None

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={described(note)}' for name, note in self.arguments)})"


@dataclass(frozen=True, slots=True)
class Outside:
    """Memory that the pass did not allocate."""

    storage: torch.UntypedStorage
    number: complex | None
    """What it holds, where that is one number on the host."""


@dataclass(eq=False)
class OpTrace:
    """The ops of one run, in order."""

    ops: list[TracedOp] = field(default_factory=list)
    outside: dict[int, Outside] = field(default_factory=dict)
    """By number, the memory that was there before."""
    find_names: Callable[[], Mapping[int, str]] | None = None
    """Called at the end of the run, before its effects are undone: by storage, the user's name for it."""
    names: Mapping[int, str] = field(default_factory=dict)
    num_nodes: Callable[[], int] | None = None
    """Counts the nodes of the recording that is made while the trace follows."""
    _places: list[int] = field(default_factory=list)
    """For each op, how many nodes were there before it."""
    _numbers: dict[int, int] = field(default_factory=dict)
    _made: list[StorageWeakRef] = field(default_factory=list)
    """A freed storage's address is not reused while a weak reference to it is held."""
    _inside: int = 0
    """Whether an op runs now, whose launches are noted too."""
    _paused: int = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, every op is noted, and every launch that torch does not dispatch."""
        with following_launches(self.add_launch, around_tuning=self.paused), uncompiled(), OpWatch(self._run):
            yield
        if self.find_names is not None:
            self.names = self.find_names()

    def _run(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Run an op, and note it."""
        if self._paused:
            return func(*args, **kwargs)
        # Before it runs: in place, it may change the form of its argument.
        named = zip(argument_names(func), args, strict=False)
        noted = tuple((name, self.note(value)) for name, value in (*named, *kwargs.items()))
        place = self._place()
        self._inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._inside -= 1
        self.made(result)
        code, line = _calling_line()
        results = tuple(self.note(one) for one in tensors_in(result))
        self._add(TracedOp(op_name(func), code, line, noted, results), place)
        return result

    def _place(self) -> int:
        return self.num_nodes() if self.num_nodes is not None else 0

    def _add(self, op: TracedOp, place: int) -> None:
        self.ops.append(op)
        self._places.append(place)

    def op_before(self, node: int) -> TracedOp | None:
        """The nearest op with a line, of those that began before a node was recorded: mostly the one that did it."""
        began = [(place, at) for at, place in enumerate(self._places) if place <= node and self.ops[at].frame]
        return self.ops[max(began)[1]] if began else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded: a gap, or a measurement of candidates, whose ops are in no graph."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def add_gap(self, name: str, arguments: Mapping[str, object], result: object) -> None:
        """Note a gap that has run: its plain arguments are frozen like an op's; its outputs are not constants."""
        self.made(result)
        code, line = _calling_line()
        results = tuple(self.note(one) for one in tensors_in(result))
        noted = tuple((at, self.note(value)) for at, value in arguments.items())
        self._add(TracedOp(f"gap {name}", code, line, noted, results), self._place())

    def add_launch(self, name: str, grid: Sequence[int], arguments: Mapping[str, object]) -> None:
        """Note a kernel that torch does not dispatch, by a launcher that knows its arguments' names."""
        if not self._paused:
            code, line = _calling_line(4)  # behind the launcher and the hook
            noted = tuple((at, self._placed(self.note(value))) for at, value in arguments.items())
            self._add(TracedOp(f"kernel {name}", code, line, (("grid", tuple(grid)), *noted), ()), self._place())

    def made(self, result: object) -> None:
        """Number memory that is first seen in a result: the pass allocated it."""
        for tensor in tensors_in(result):
            storage = _storage_of(tensor)
            if storage is not None and storage._cdata not in self._numbers:
                self._numbers[storage._cdata] = len(self._numbers)
                self._made.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]

    def note(self, value: object) -> Any:
        """The comparable form of an argument."""
        if isinstance(value, torch.Tensor):
            return self._note_tensor(value)
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, list | tuple):
            return tuple(map(self.note, value))
        if isinstance(value, dict):
            return tuple((key, self.note(one)) for key, one in value.items())
        return Opaque(type(value))

    def _note_tensor(self, tensor: torch.Tensor) -> TensorNote:
        storage = _storage_of(tensor)
        if storage is None:
            return TensorNote(_NO_MEMORY, tuple(tensor.shape), tensor.dtype, ())
        number = self._numbers.get(storage._cdata)
        if number is None and self._inside:
            number = _NO_MEMORY  # what an op makes for itself can't be told from what it reaches
        elif number is None:
            number = self._numbers[storage._cdata] = len(self._numbers)
            self.outside[number] = Outside(storage, _number_in(tensor))
        form = (tensor.storage_offset(), *tensor.stride())
        return TensorNote(number, tuple(tensor.shape), tensor.dtype, form)

    def _placed(self, note: Any) -> Any:
        """A kernel may be passed an address as a number, which is another one in every run."""
        if type(note) is not int or note < _LOWEST_ADDRESS:
            return note
        made = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in reversed(self._made))
        for storage in (*made, *(outside.storage for outside in self.outside.values())):
            if storage is not None and 0 <= note - storage.data_ptr() < storage.nbytes():
                return Address(self._numbers[storage._cdata], note - storage.data_ptr())
        return note


def described(note: Any) -> str:
    """A note of an argument, in a few characters."""
    if isinstance(note, tuple):
        return f"[{', '.join(map(described, note))}]"
    return str(note) if isinstance(note, TensorNote | Opaque | Address) else repr(note).removeprefix("torch.")


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # a wrapper around tensors that have memory


def _number_in(tensor: torch.Tensor) -> complex | None:
    """The number in a host tensor of one element: ops treat it like a Python number."""
    if tensor.numel() != 1 or tensor.device.type != "cpu" or tensor.dim() > 0:
        return None
    with torch.inference_mode():
        alias = torch.empty(0, dtype=tensor.dtype)
        found: complex = alias.set_(tensor.untyped_storage(), tensor.storage_offset(), (), ()).item()
    return found


_shown_names: dict[Any, str] = {}
_argument_names: dict[Any, tuple[str, ...]] = {}
_skipped_files: dict[str, bool] = {}


def op_name(func: Any) -> str:
    """As messages say it: `aten.mul.Tensor`."""
    found = _shown_names.get(func)
    if found is None:
        found = _shown_names[func] = str(func).removesuffix(".default")
    return found


def argument_names(func: Any) -> tuple[str, ...]:
    """The names of an op's arguments in its schema."""
    found = _argument_names.get(func)
    if found is None:
        found = _argument_names[func] = tuple(one.name for one in func._schema.arguments)
    return found


def calling_frame() -> Frame | None:
    """The line that runs the op that is being watched; None where none is a user's or the engine's."""
    code, line = _calling_line()
    return Frame(code.co_filename, line, code.co_name) if code is not None else None


def _calling_line(depth: int = 2) -> tuple[CodeType | None, int]:
    """The innermost line that is neither torch's, Triton's nor the graph layer's; an engine's bodies have lines too."""
    frame = sys._getframe(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        skipped = _skipped_files.get(file)
        if skipped is None:
            is_engines = file.startswith(_OWN_DIR) and not file.startswith(_LAYER_DIRS)
            is_tritons = frame.f_globals.get("__name__", "").startswith("triton.")
            skipped = _skipped_files[file] = is_tritons or not (is_users(file) or is_engines)
        if not skipped:
            return frame.f_code, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None, 0
