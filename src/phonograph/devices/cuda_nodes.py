"""CUDA nodes: the nodes of a kept CUDA graph, read through libcuda.

Of kernels: name, grid, block, shared memory, and the bytes of every parameter. Words that lie in memory of torch's
allocator become (block, offset). Words that look like addresses of anything else (descriptors, workspaces of libraries)
are left out, and counted as unseen.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Sequence
from typing import Any

from phonograph.devices.nodes import Node, NodeList
from phonograph.errors import DeviceError

_KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty", "wait", "record")
_MAX_PARAMETERS = 256
_LOWEST_ADDRESS = 1 << 32
"""Numbers from here on are taken for addresses; sizes and strides of one tensor stay below."""

Block = tuple[int, int]
"""Address and bytes of one block of the allocator."""


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.POINTER(ctypes.c_void_p)),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Reader:
    def __init__(self, driver: Any, blocks: Sequence[Block]) -> None:
        self._driver = driver
        self._blocks = sorted(blocks)
        self._starts = [start for start, _ in self._blocks]
        self._numbers: dict[int, int] = {}
        self.unseen: dict[str, int] = {}

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise DeviceError(f"{name} gives status {status}")

    def node(self, handle: int) -> Node:
        kind = ctypes.c_int()
        self.call("cuGraphNodeGetType", ctypes.c_void_p(handle), ctypes.byref(kind))
        word = _KINDS[kind.value] if kind.value < len(_KINDS) else f"kind {kind.value}"
        return self._kernel(handle) if word == "kernel" else Node(word, "")

    def _kernel(self, handle: int) -> Node:
        params = _KernelParams()
        self.call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(handle), ctypes.byref(params))
        launch = (*params.grid, *params.block, params.shared)
        name = self._name(params)
        if not params.func or not params.parameters:
            self._skip(f"the parameters of {name}")
            return Node("kernel", name, launch)
        return Node("kernel", name, launch, tuple(self._arguments(params, name)))

    def _name(self, params: _KernelParams) -> str:
        found = ctypes.c_char_p()
        asked = ("cuFuncGetName", params.func) if params.func else ("cuKernelGetName", params.kernel)
        self.call(asked[0], ctypes.byref(found), ctypes.c_void_p(asked[1]))
        return (found.value or b"?").decode(errors="replace")

    def _arguments(self, params: _KernelParams, name: str) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        for index in range(_MAX_PARAMETERS):
            asked = (ctypes.c_void_p(params.func), ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size))
            if self._driver.cuFuncGetParamInfo(*asked) != 0:
                break  # there are no more
            data = ctypes.string_at(params.parameters[index], size.value)
            for start in range(0, len(data), 8):
                word = data[start : start + 8]
                value = self._value(int.from_bytes(word, "little"), is_whole=len(word) == 8, whose=name)
                found.append((f"parameter {index}, byte {start}", value))
        return found

    def _value(self, word: int, *, is_whole: bool, whose: str) -> Any:
        at = bisect.bisect_right(self._starts, word) - 1
        if at >= 0 and word < self._blocks[at][0] + self._blocks[at][1]:
            number = self._numbers.setdefault(self._starts[at], len(self._numbers))
            return f"block {number} + {word - self._starts[at]}"
        if is_whole and word >= _LOWEST_ADDRESS:
            self._skip(f"addresses outside of torch's memory in {whose}")
            return "unseen"
        return word

    def _skip(self, what: str) -> None:
        self.unseen[what] = self.unseen.get(what, 0) + 1


def read_nodes(graph: int, blocks: Sequence[Block]) -> NodeList:
    """The nodes of a cudaGraph_t; raises where the driver does not answer."""
    reader = _Reader(ctypes.CDLL("libcuda.so.1"), blocks)
    count = ctypes.c_size_t()
    reader.call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    handles = (ctypes.c_void_p * count.value)()
    reader.call("cuGraphGetNodes", ctypes.c_void_p(graph), handles, ctypes.byref(count))
    nodes = tuple(reader.node(handle) for handle in handles if handle is not None)
    return NodeList(nodes, tuple(f"{what} ({times}×)" for what, times in reader.unseen.items()))
