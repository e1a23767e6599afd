"""Watches the aten ops of a forward pass: refuses what a graph can't hold, and notes what is written.

On the CPU some host reads never reach the dispatcher (`tolist`, `numpy`, `cpu`), so a function mode
stands beside the dispatch mode. `torch.frombuffer` and `from_dlpack` reach neither and are not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phonograph.errors import CaptureError, DataDependentShapeError, Frame, HostConstantError, HostReadError

aten = torch.ops.aten

_TORCH_DIR = str(Path(torch.__file__).parent)
_OWN_DIR = str(Path(__file__).parent.parent)
_SLOT_OR_BREAK = "Put the value in a slot, or mark the function @graph_break"
_FIXED_SHAPE = "Use a fixed-size form (torch.where, a mask, nonzero_static), or mark the function @graph_break"
_MAKE_ONCE = "Make the tensor once outside (a buffer, a parameter), or put the value in a slot"

# Tensor methods that read from the host without a dispatched op on the CPU.
_HOST_METHODS = {
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.cpu: "Tensor.cpu",
}
_READS = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default}


def user_frame(start: FrameType | None = None) -> Frame | None:
    """The innermost line of the stack that is neither torch's nor ours."""
    frame = start if start is not None else sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def raising_frame(traceback: TracebackType | None) -> Frame | None:
    """The innermost line of a traceback that is neither torch's nor ours."""
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_users(code.co_filename):
            found = Frame(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found


def _is_users(file: str) -> bool:
    return not file.startswith((_TORCH_DIR, _OWN_DIR, "<frozen")) and "contextlib" not in file


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors among an op's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def written_tensors(func: Any, args: Sequence[object], kwargs: dict[str, object]) -> Iterator[torch.Tensor]:
    """The tensors that an op's schema says it writes."""
    if not func._schema.is_mutable:
        return
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from tensors_in(value)


class Refusals(TorchFunctionMode):
    """Refuses host reads that don't reach the dispatcher, on tensors of one device type."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        name = _HOST_METHODS.get(func)
        if name and isinstance(args[0], torch.Tensor) and args[0].device.type == self.device_type:
            raise HostReadError(f"{name} reads the device from the host", _SLOT_OR_BREAK, op=name, frame=user_frame())
        return func(*args, **(kwargs or {}))


def refusal(func: Any, args: Sequence[object], kwargs: dict[str, object], device_type: str) -> CaptureError | None:
    """Why a graph on this device type can't hold the op, or None."""
    if func is aten.lift_fresh.default:
        constant = args[0]
        frozen = isinstance(constant, torch.Tensor) and constant.dim() > 0 and device_type == "cpu"
        return _say(HostConstantError, func, "would freeze a host constant", _MAKE_ONCE) if frozen else None
    on_device = [t for t in tensors_in((args, kwargs)) if t.device.type == device_type]
    if not on_device:
        return None
    if func in _READS or torch.Tag.data_dependent_output in func.tags:
        return _say(HostReadError, func, "reads the device from the host", _SLOT_OR_BREAK)
    if torch.Tag.dynamic_output_shape in func.tags and not _fixed_after_all(func, args, kwargs):
        return _say(DataDependentShapeError, func, "has a shape that depends on device values", _FIXED_SHAPE)
    return _copy_refusal(func, args, kwargs, device_type) if device_type != "cpu" else None


def _copy_refusal(
    func: Any, args: Sequence[object], kwargs: dict[str, object], device_type: str
) -> CaptureError | None:
    """Copies between host and device that wait: all from the device, and those to it from unpinned memory."""
    if func is aten._to_copy.default:
        source, target = args[0], kwargs.get("device")
        if isinstance(source, torch.Tensor) and target is not None and torch.device(str(target)).type == "cpu":
            return _say(HostReadError, func, "reads the device from the host", _SLOT_OR_BREAK)
    elif func is aten.copy_.default:
        target, source = args[0], args[1]
        if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
            if target.device.type == "cpu" and source.device.type == device_type:
                return _say(HostReadError, func, "reads the device from the host", _SLOT_OR_BREAK)
            if source.device.type == "cpu" and source.dim() > 0 and not source.is_pinned():
                return _say(HostConstantError, func, "would freeze a host constant", _MAKE_ONCE)
    return None


def _say(kind: type[CaptureError], func: Any, problem: str, remedy: str) -> CaptureError:
    op = str(func).removesuffix(".default")
    return kind(f"{op} {problem}", remedy, op=op, frame=user_frame())


def _fixed_after_all(func: Any, args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """Ops tagged as dynamic whose shape is fixed with these arguments."""
    if func is aten.index.Tensor:
        return all(t.dtype not in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is not None
    return False


class OpWatch(TorchDispatchMode):
    """Calls `on_op(func, args, kwargs)` in place of every aten op below autograd, in every grad mode."""

    def __init__(self, on_op: Callable[[Any, tuple[object, ...], dict[str, object]], Any]) -> None:
        super().__init__()
        self.on_op = on_op

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the whole compiler, 1.5 s, at the first op.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled():
            # Here composite ops arrive whole; their parts are what a device runs.
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        return self.on_op(func, args, kwargs or {})


@contextmanager
def refusing(device_type: str) -> Iterator[None]:
    """Runs everything, but what a graph can't hold raises its named error."""

    def run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        error = refusal(func, args, kwargs, device_type)
        if error is not None:
            raise error
        return func(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(Refusals(device_type))
        stack.enter_context(OpWatch(run))
        yield


@contextmanager
def before_writes(on_first: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Calls `on_first` before an op writes to memory that no op under this context made: the state of a pass."""
    # Weak references keep a freed storage's identity from coming back as somebody else's.
    known: dict[int, StorageWeakRef] = {}

    def run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        for tensor in written_tensors(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                known[storage._cdata] = StorageWeakRef(storage)
                on_first(storage)
        result = func(*args, **kwargs)
        before = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                known[storage._cdata] = StorageWeakRef(storage)
        return result

    with OpWatch(run):
        yield
