"""Written inputs: those that a body writes in place; refused for recordings, written back on the eager path.

A recording reads and writes its own buffers: what it writes to an input never reaches the caller's tensor, nor another
slot that was given the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from phonograph.devices.refused import Refused, RefusingOps
from phonograph.devices.trace import user_frame, written_tensors
from phonograph.errors import InputWriteError, LoadError

_REMEDY = "Write to a copy (x = x.clone()) and return what the caller needs; keep state in a tensor of the model"


@contextmanager
def refusing_input_writes(inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Raise where an op writes to one of these, and again at the end, for a body that catches it; at the end, where a
    kernel that torch does not dispatch did."""
    refused = Refused()
    spans = {name: span(tensor) for name, tensor in inputs.items() if tensor.numel()}
    before = {name: bits_of(inputs[name]).clone() for name in spans}

    def run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        for tensor in written_tensors(func, args, kwargs):
            name = overlapped(tensor, spans)
            if name is not None:
                op = str(func).removesuffix(".default")
                raise InputWriteError(_problem(name, f"{op} writes"), _REMEDY, op=op, frame=user_frame())
        return func(*args, **kwargs)

    with refused.insisted_on(), RefusingOps(run, refused):
        yield
    changed = next((name for name in spans if not torch.equal(bits_of(inputs[name]), before[name])), None)
    if changed is not None:
        raise InputWriteError(_problem(changed, "a kernel that torch does not see writes"), _REMEDY)


def _problem(name: str, who: str) -> str:
    return f"{who} the input {name!r} in place, and a replay would write its own buffer, not the caller's tensor"


class EagerWrites:
    """The inputs of one eager call that were copied for it: what the body writes to them is the caller's too."""

    def __init__(self, copied: Mapping[str, tuple[torch.Tensor, torch.Tensor]], phase: str) -> None:
        self._copied = copied
        """By slot: the caller's tensor, and the copy that the body gets."""
        self._phase = phase
        self._versions = [copy._version for _, copy in copied.values()]
        self._forms = [(copy.shape, copy.stride()) for _, copy in copied.values()]

    def write_back(self) -> None:
        """Bring what the body wrote to the caller's tensors."""
        self._check_forms()
        pairs = zip(self._copied.values(), self._versions, strict=True)
        written = [(given, copy) for (given, copy), version in pairs if copy._version != version]
        for given, copy in written:
            given.copy_(copy)
        # With copies, two slots that were given one tensor don't see each other's writes.
        for name, (given, copy) in self._copied.items() if written else ():
            if not torch.equal(bits_of(given), bits_of(copy.to(given))):
                raise LoadError(
                    f"running {self._phase}: the body writes an input in place, and what was given for {name!r} is "
                    "the same memory. Give a copy for one of them, or leave eager_copies out."
                )

    def _check_forms(self) -> None:
        """Refuse a changed shape (`unsqueeze_`), and give the copy back the one that it keeps."""
        for (name, (_, copy)), (shape, stride) in zip(self._copied.items(), self._forms, strict=True):
            if copy.shape != shape or copy.stride() != stride:
                copy.as_strided_(shape, stride)
                raise LoadError(
                    f"running {self._phase}: the body changes the shape of its input {name!r} in place. "
                    "Use the form that returns a view (unsqueeze, not unsqueeze_), or leave eager_copies out."
                )


def overlapped(tensor: torch.Tensor, spans: Mapping[str, tuple[int, int]]) -> str | None:
    """The input over whose memory a tensor reaches, or None."""
    if not tensor.numel():
        return None
    try:
        start, end = span(tensor)
    except RuntimeError:
        return None  # a wrapper without memory; what it wraps is written by ops of its own
    return next((name for name, (low, high) in spans.items() if start < high and low < end), None)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor reaches over."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, as bytes one after the other."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
