"""Op trace: the aten ops of a forward pass. Refuses those that a graph can't hold, and notes writes.

On the CPU some host reads never reach the dispatcher (`tolist`, `numpy`, `cpu`, printing), so a function
mode runs with the dispatch mode. `torch.frombuffer` and `from_dlpack` reach neither and are not seen.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phonograph.errors import CaptureError, DataDependentShapeError, Frame, HostConstantError, HostReadError

aten = torch.ops.aten

_TORCH_DIR = str(Path(torch.__file__).parent) + os.sep
_OWN_DIR = str(Path(__file__).parent.parent) + os.sep
_LIBRARY_DIRS = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGE_DIRS = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})
"""Installed packages, which may lie in a folder of the library."""
_BREAK = "mark the function @graph_break and use backend='breakable'"
_SLOT_OR_BREAK = f"Put the value in a slot, or {_BREAK}"
_FIXED_SHAPE = f"Use a fixed-size form (torch.where, a mask, nonzero_static), or {_BREAK}"
_BOTH_WAYS = f"Compute both and choose with torch.where, or {_BREAK}"
_MAKE_ONCE = "Make the tensor once outside (a buffer, a parameter), or put the value in a slot"
_DRAW_OUTSIDE = "Leave generator= out, or draw outside and put the numbers in a slot"
# Part of torch's message where a synchronization was made an error.
_WAITED = "called a synchronizing"

# Tensor methods that read from the host without a dispatched op on the CPU.
_HOST_METHODS = {
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.cpu: "Tensor.cpu",
    torch.Tensor.__repr__: "Tensor.__repr__",
}
_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}
_READS = {
    *(aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default),
    aten._linalg_check_errors.default,  # on a real device it waits for the status of a factorization
}
_MASKED_WRITES = {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


def user_frame(start: FrameType | None = None) -> Frame | None:
    """The innermost line of the stack that is a user's."""
    frame = start if start is not None else sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def raising_frame(traceback: TracebackType | None) -> Frame | None:
    """The innermost line of a traceback that is a user's."""
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_users(code.co_filename):
            found = Frame(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return found


def is_users(file: str) -> bool:
    """Whether a source file is neither torch's, nor ours, nor the standard library's."""
    return is_outside(file) and not is_library(file)


def is_outside(file: str) -> bool:
    """Whether a source file is neither torch's nor ours."""
    return not file.startswith((_TORCH_DIR, _OWN_DIR, "<frozen", "<eval_with_key>"))


def is_library(file: str) -> bool:
    """Whether a source file is the standard library's."""
    return file.startswith(_LIBRARY_DIRS) and not file.startswith(_PACKAGE_DIRS)


def is_asked_by_user(frame: FrameType | None) -> bool:
    """Whether this frame's function was called from users' code, directly or through the standard library."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


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
    """The tensors that an op writes: those of its schema, and running statistics, which some schemas leave out."""
    declared, statistics, training = _written_arguments(func)
    for position, name in declared:
        yield from tensors_in(_argument(position, name, args, kwargs))
    if statistics and (training is None or _argument(*training, args, kwargs)):
        for position, name in statistics:
            yield from tensors_in(_argument(position, name, args, kwargs))


def _argument(position: int, name: str, args: Sequence[object], kwargs: dict[str, object]) -> object:
    return args[position] if position < len(args) else kwargs.get(name)


@functools.cache
def _written_arguments(func: Any) -> tuple[list[tuple[int, str]], list[tuple[int, str]], tuple[int, str] | None]:
    """Positions and names: arguments declared as written, other running statistics, the argument that enables these."""
    arguments = list(enumerate(func._schema.arguments))
    declared = [(at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write]
    named = [(at, one.name) for at, one in arguments]
    statistics = [one for one in named if one[1].startswith("running_") and one not in declared]
    training = next((one for one in named if one[1] in ("training", "use_input_stats")), None)
    return declared, [] if func is aten._batch_norm_no_update.default else statistics, training


class Refusals(TorchFunctionMode):
    """Refuses host reads that don't reach the dispatcher, on tensors of one device type; `note` is told of them."""

    def __init__(self, device_type: str, note: Callable[[CaptureError], None]) -> None:
        super().__init__()
        self.device_type = device_type
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        try:
            return self._run(func, args, kwargs)
        except CaptureError as error:
            self._note(error)
            raise

    def _run(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object] | None) -> Any:
        name = _HOST_METHODS.get(func)
        if name and isinstance(args[0], torch.Tensor) and args[0].device.type == self.device_type:
            raise _say(HostReadError, name, "reads the device from the host", _SLOT_OR_BREAK)
        if func in _SPLITS and self.device_type == "cpu" and [*tensors_in((args[1:], kwargs))]:
            raise _say(HostReadError, func.__name__, "reads where to split from the device", _SLOT_OR_BREAK)
        if func is torch.nn.functional.one_hot and self.device_type == "cpu":
            func = _one_hot
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if _WAITED not in str(error):
                raise
            if func in _MAKERS:
                raise _say(HostConstantError, func.__name__, "would freeze a host constant", _MAKE_ONCE) from error
            raise _say(HostReadError, func.__name__, "waits for the device", _SLOT_OR_BREAK) from error


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As on a real device, where torch does not check value ranges on the host."""
    if num_classes < 0:
        return torch.nn.functional.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


def refusal(func: Any, args: Sequence[object], kwargs: dict[str, object], device_type: str) -> CaptureError | None:
    """Why a graph on this device type can't hold the op, or None."""
    if not kwargs and _never_refused(func):
        return None
    if func is aten.lift_fresh.default:
        constant = args[0]
        frozen = isinstance(constant, torch.Tensor) and constant.dim() > 0 and device_type == "cpu"
        return _say(HostConstantError, func, "would freeze a host constant", _MAKE_ONCE) if frozen else None
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator) and generator is not torch.default_generator:
        return _say(CaptureError, func, "draws from a generator that a graph does not advance", _DRAW_OUTSIDE)
    if device_type != "cpu" and func in (aten.copy_.default, aten._to_copy.default):
        return _copy_refusal(func, args, kwargs, device_type)
    on_device = any(tensor.device.type == device_type for tensor in tensors_in((args, kwargs)))
    return _value_refusal(func, args, kwargs) if on_device else None


def _value_refusal(func: Any, args: Sequence[object], kwargs: dict[str, object]) -> CaptureError | None:
    """Why an op on device tensors needs their values on the host, or None."""
    if func in _READS or torch.Tag.data_dependent_output in func.tags:
        return _say(HostReadError, func, "reads the device from the host", _SLOT_OR_BREAK)
    if torch.Tag.dynamic_output_shape in func.tags and not _fixed_after_all(func, args, kwargs):
        return _say(DataDependentShapeError, func, "has a shape that depends on device values", _FIXED_SHAPE)
    if func in _MASKED_WRITES and _has_mask(args[1]) and _num_elements(args[2]) > 1:
        return _say(DataDependentShapeError, func, "writes a number of values that depends on its mask", _FIXED_SHAPE)
    return None


@functools.cache
def _never_refused(func: Any) -> bool:
    """Whether a graph can hold an op whatever its arguments; cached, since every op of a warm-up is checked."""
    checked = {aten.lift_fresh.default, aten.copy_.default, aten._to_copy.default, *_READS, *_MASKED_WRITES}
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return func not in checked and not tags & set(func.tags)


def _copy_refusal(
    func: Any, args: Sequence[object], kwargs: dict[str, object], device_type: str
) -> CaptureError | None:
    """Copies between host and device synchronize, except non-blocking ones of pinned memory."""
    if func is aten._to_copy.default:
        source, target, place = args[0], None, kwargs.get("device")
        to = torch.device(str(place)).type if place is not None else ""
        non_blocking = kwargs.get("non_blocking")
    else:
        target, source = args[0], args[1]
        to = target.device.type if isinstance(target, torch.Tensor) else ""
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
    if not isinstance(source, torch.Tensor):
        return None
    if source.device.type == device_type and to == "cpu":
        if isinstance(target, torch.Tensor) and non_blocking and target.is_pinned():
            return None
        return _say(HostReadError, func, "reads the device from the host", _SLOT_OR_BREAK)
    if source.device.type == "cpu" and to == device_type and source.dim() > 0:
        if non_blocking and source.is_pinned():
            return None
        return _say(HostConstantError, func, "would freeze a host constant", _MAKE_ONCE)
    return None


def _say(kind: type[CaptureError], func: Any, problem: str, remedy: str) -> CaptureError:
    op = str(func).removesuffix(".default")
    return kind(f"{op} {problem}", remedy, op=op, frame=user_frame())


def _fixed_after_all(func: Any, args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """Ops tagged as dynamic whose shape is fixed with these arguments."""
    if func is aten.index.Tensor:
        return not _has_mask(args[1])
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is not None
    return False


def _has_mask(indices: object) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(indices))


def _num_elements(value: object) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@functools.cache
def _composite(func: Any) -> Callable[..., Any] | None:
    """The composite kernel that decomposes an op, or None; cached, since it is looked up for every op.

    torch's Python decompositions run other ops than a device does, and import sympy, which takes 2 s.
    """
    has_parts = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
    return functools.partial(func._op_dk, _COMPOSITE) if has_parts else None


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `on_op(func, args, kwargs)` in place of every aten op below autograd, in every grad mode.

    Ops that take functions (flex_attention, cond) are run by the ops that they are made of.
    """

    supports_higher_order_operators = True

    def __init__(self, on_op: Callable[[Any, tuple[object, ...], dict[str, object]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_op = on_op

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the whole compiler, 1.5 s, at the first op.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_parts(func, args, kwargs)
        if torch.is_inference_mode_enabled():
            # In inference mode composite ops arrive undecomposed; a device runs their parts.
            composite = _composite(func)
            if composite is not None:
                with self:
                    return composite(*args, **kwargs)
        return self.on_op(func, args, kwargs)

    def _run_parts(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = f"torch.ops.higher_order.{func.__name__}"
        own = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        parts = _cond if func is torch.ops.higher_order.cond else own
        if parts is None:
            raise _say(CaptureError, name, "is not made of ops that can be recorded", f"Keep it outside, or {_BREAK}")
        try:
            with self:
                return parts(*args, **kwargs)
        except HostReadError as error:
            problem = "branches on a device value, and a recording holds one branch only"
            raise _say(HostReadError, name, problem, _BOTH_WAYS) from error


def _cond(
    is_true: torch.Tensor, then: Callable[..., Any], otherwise: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    """torch.cond, whose kernel must run outside of the mode."""
    return then(*operands) if is_true else otherwise(*operands)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled functions run as they were written.

    torch compiles ops that take functions (flex_attention) when they are called, and can't do so under a mode.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
            return
        compile_now = torch.compile

        def compile_later(*args: Any, **kwargs: Any) -> Any:
            # Only once the compiler is imported, 1.5 s, can its stance be set.
            if torch.compile is compile_later:
                torch.compile = compile_now
                importlib.import_module("torch._dynamo")
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            return compile_now(*args, **kwargs)

        torch.compile = compile_later
        try:
            yield
        finally:
            torch.compile = compile_now


def forget_modes() -> None:
    """Make torch check again whether a mode is active, when a body may have left inference mode after its modes.

    Inference mode restores the dispatch keys that it found, also the key of a mode that has ended since.
    """
    with OpWatch(lambda func, args, kwargs: func(*args, **kwargs)):
        pass


@contextmanager
def watching_ops(
    before: Callable[[Any, tuple[object, ...], dict[str, object]], None],
    after: Callable[[Any, tuple[object, ...], dict[str, object], object], None],
) -> Iterator[None]:
    """Run everything, and report every op: `before(func, args, kwargs)` and `after(func, args, kwargs, result)`."""

    def run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        before(func, args, kwargs)
        result = func(*args, **kwargs)
        after(func, args, kwargs, result)
        return result

    with uncompiled(), OpWatch(run):
        yield
