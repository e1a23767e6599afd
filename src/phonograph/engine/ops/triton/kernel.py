"""Kernel: a Triton kernel that the host launches with little work of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import attrgetter, or_
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from phonograph.devices.launches import followers, forwarding
from phonograph.errors import DeclarationError

_ALIGNED = 16
_MOST_FOUND = 4096
_address, _dtype = torch.Tensor.data_ptr, attrgetter("dtype")


class Kernel:
    """A kernel that remembers what was compiled for which arguments: `kernel[grid](tensors…, numbers…, name=constant)`.

    Triton finds the compiled kernel by a look at every argument of every launch, and queries the driver about every
    pointer: several times the work of the launch. Here it is found by all that it can depend on at once: types and
    alignment of the tensors, the numbers, and the constants, which all launches of a kernel name in one order.
    Triton's own launch hooks are not called.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        # The interpreter takes tensors only, and AMD's compiler looks at their sizes too.
        self._is_quick = isinstance(function, JITFunction) and not torch.version.hip
        is_tensor = [name.endswith("_ptr") for name in function.arg_names]
        self._num_tensors = sum(is_tensor)
        if not all(is_tensor[: self._num_tensors]):
            raise DeclarationError(
                f"the kernel {function.__name__} has numbers before tensors. Let its parameters that end in _ptr come "
                "first: launches tell them apart by their places."
            )
        self._found: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        for follow in followers:
            follow(self._function.__name__, grid, self._named(args, constants))
        if not self._is_quick:
            with forwarding():
                self._function[grid](*args, **constants)
            return
        tensors, numbers = args[: self._num_tensors], args[self._num_tensors :]
        addresses, device = tuple(map(_address, tensors)), tensors[0].get_device()
        odd = reduce(or_, addresses) % _ALIGNED and tuple(address % _ALIGNED for address in addresses)
        key = device, odd, numbers, tuple(map(_dtype, tensors)), tuple(constants.values())
        found = self._found.get(key)
        if found is None:
            with forwarding():
                self._remember(key, self._function[grid](*args, **constants), args, constants)
            return
        run, get_stream, function, metadata, named, _ = found
        x, y, z = (*grid, 1, 1)[:3]
        stream = get_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *addresses, *numbers, *named)

    def _named(self, args: tuple[Any, ...], constants: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._function.arg_names, args, strict=False)) | constants

    def _remember(self, key: tuple[Any, ...], compiled: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """What a launch passes on besides its grid, stream, addresses and numbers."""
        if len(self._found) >= _MOST_FOUND:  # an eager pass may come with any number of tokens
            self._found.clear()
        named = tuple(constants[name] for name in self._function.arg_names[len(args) :])
        get_stream = triton.runtime.driver.active.get_current_stream
        # The kernel itself is kept, since without it its function is unloaded.
        self._found[key] = compiled.run, get_stream, compiled.function, compiled.packed_metadata, named, compiled


def kernel(*, unspecialised: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """`triton.jit` for what the host launches; its tensors come first and are named `…_ptr`.

    It is not compiled anew for what is special about the numbers that are named here.
    """
    return lambda function: Kernel(triton.jit(do_not_specialize=list(unspecialised))(function))
