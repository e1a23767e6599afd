"""EmulatedTape: the ops of a recording on the emulated device, the memory that they made, and the pool of all of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from phonograph.devices.nodes import Node
from phonograph.devices.op_trace import OpTrace, argument_names, op_name
from phonograph.devices.trace import refusal, tensors_in, user_frame, written_tensors
from phonograph.errors import CaptureError

aten = torch.ops.aten

# Their result is undefined memory: a replay leaves it as it is.
_UNDEFINED = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

_NO_DERIVATIVES = "Compute derivatives outside, or mark the function @graph_break and use backend='breakable'"


@dataclass(frozen=True)
class _Op:
    func: Any
    args: tuple[object, ...]
    kwargs: dict[str, object]
    fresh: tuple[tuple[int, torch.Tensor], ...]
    """Position among the op's results, and the memory that keeps that result's address."""
    number: complex | None = None
    """The value that it writes, where that is a host constant."""

    def run(self) -> None:
        results = list(tensors_in(self.func(*self.args, **self.kwargs)))
        for position, kept in self.fresh:
            kept.copy_(results[position])

    def node(self, trace: OpTrace, pool: EmulatedPool) -> Node:
        """As a node; `trace` numbers memory across all ops of a graph, since addresses in the pool don't matter."""
        given = [*zip(argument_names(self.func), self.args, strict=False), *self.kwargs.items()]
        noted = [(name, trace.note(value)) for name, value in given if self.number is None or name == "self"]
        addresses = [
            (f"address of {name}", value.data_ptr())
            for name, value in given
            if isinstance(value, torch.Tensor) and value.layout is torch.strided and not pool.owns(value)
        ]
        if self.number is not None:
            addresses = []
        trace.made([kept for _, kept in self.fresh])
        return Node("op", op_name(self.func), arguments=(*noted, *addresses, ("number", self.number)))


@dataclass(eq=False)
class EmulatedTape:
    """The ops between one `begin` and its `end`, and the memory that they made."""

    recording: object
    ops: list[_Op] = field(default_factory=list)
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(default_factory=dict)

    def on_op(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        error = refusal(func, args, kwargs, "cpu")
        if error is not None:
            raise error
        for tensor in written_tensors(func, args, kwargs):
            self._save(tensor)
        result = func(*args, **kwargs)
        if func is aten.lift_fresh.default:
            return self._constant(result)
        before = {_storage_id(t) for t in tensors_in((args, kwargs))}
        fresh = [(i, t) for i, t in enumerate(tensors_in(result)) if _storage_id(t) not in before]
        if any(tensor._is_zerotensor() for _, tensor in fresh):
            problem = "makes zeros without memory (a tangent of torch.func.jvp, a gradient)"
            raise CaptureError(f"{func} {problem}", _NO_DERIVATIVES, op=str(func), frame=user_frame())
        for _, tensor in fresh:
            self.made.setdefault(_storage_id(tensor), tensor)
        # A view of memory that keeps its address needs no replay; a write or a fresh result does.
        if (fresh or func._schema.is_mutable) and not _is_undefined_or_view(func):
            kept = tuple((i, t.detach()) for i, t in fresh)
            self.ops.append(_Op(func, _aliases(args), _aliases(kwargs), kept))
        return result

    def _constant(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor made from a Python number: memory of its own, set to that number at every replay."""
        made, kept = value.clone(), value.clone()
        self.made.setdefault(_storage_id(made), made)
        number = kept.item() if kept.numel() == 1 else None
        self.ops.append(_Op(aten.copy_.default, (made.detach(), kept), {}, (), number))
        return made

    def _save(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.made and storage._cdata not in self.saved:
            self.saved[storage._cdata] = (storage, storage.clone())  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.made.values())

    def undo(self) -> None:
        """Restore memory from outside that recording wrote to."""
        for storage, content in self.saved.values():
            storage.copy_(content)
        self.saved.clear()


def _is_undefined_or_view(func: Any) -> bool:
    return func in _UNDEFINED or torch.Tag.inplace_view in func.tags


def _aliases(value: Any) -> Any:
    """The arguments with tensors of their own: an in-place view op (`squeeze_`) changes the shape of the user's."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, list | tuple):
        return type(value)(_aliases(item) for item in value)
    if isinstance(value, dict):
        return {key: _aliases(item) for key, item in value.items()}
    return value


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class EmulatedPool:
    """The tapes whose memory a real device would overlay."""

    def __init__(self, *, poison: bool) -> None:
        self.poisons = poison
        self.tapes: list[EmulatedTape] = []
        self._poisoned: dict[object, int] = {}
        """By recording: the pattern that all its memory has. Only its own replay writes there."""

    def owns(self, tensor: torch.Tensor) -> bool:
        return any(_storage_id(tensor) in tape.made for tape in self.tapes)

    def wrote(self, recording: object) -> None:
        """One of its tapes runs, or was made."""
        self._poisoned.pop(recording, None)

    def poison(self, pattern: int) -> None:
        self.poison_all_but(None, pattern)

    def poison_all_but(self, recording: object, pattern: int = 0) -> None:
        others = {tape.recording for tape in self.tapes} - {recording}
        fresh = {one for one in others if self._poisoned.get(one) != pattern}
        for tape in self.tapes:
            if tape.recording in fresh:
                for tensor in tape.made.values():
                    fill_with(tensor, pattern)
        self._poisoned = dict.fromkeys(others, pattern)


def fill_with(tensor: torch.Tensor, pattern: int) -> None:
    """Fill a tensor's whole storage with a finite value that is unlikely to be right."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    if tensor.dtype == torch.bool:
        flat.fill_(bool(pattern))
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        flat.fill_((-191.0, 223.0)[pattern])
    else:
        flat.fill_((0, 1)[pattern])
