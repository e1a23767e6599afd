"""CUDA nodes: the nodes of a kept CUDA graph, read through libcuda.

Of kernels: name, grid, block, shared memory, and every parameter of at most eight bytes: numbers and addresses. Larger
ones are structs and descriptors, in which C++ leaves gaps that nobody sets; they are left out and listed as unseen. An
address in memory of the graph's own pool becomes the offset there, since every capture has a pool of its own. Addresses
of anything else must be the same in every capture: inputs, weights, the generator's seed and offset, workspaces of
libraries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from phonograph.devices.nodes import Node, NodeList, Unsteady
from phonograph.errors import DeviceError

_KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty", "wait", "record")
_MAX_PARAMETERS = 256
_WORD, _HALF = 8, 4

Segment = tuple[int, int]
"""Address and bytes of a stretch of memory that the allocator has from the driver."""


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
    def __init__(self, driver: Any, own: Sequence[Segment]) -> None:
        self._driver = driver
        self._own = own
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
        if not params.parameters:
            self._skip(f"the parameters of {name}")
            return Node("kernel", name, launch)
        return Node("kernel", name, launch, tuple(self._arguments(params, name)))

    def _name(self, params: _KernelParams) -> str:
        found = ctypes.c_char_p()
        asked = ("cuFuncGetName", params.func) if params.func else ("cuKernelGetName", params.kernel)
        self.call(asked[0], ctypes.byref(found), ctypes.c_void_p(asked[1]))
        return (found.value or b"?").decode(errors="replace")

    def _arguments(self, params: _KernelParams, name: str) -> Iterator[tuple[str, Any]]:
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        asked, whose = ("cuFuncGetParamInfo", params.func) if params.func else ("cuKernelGetParamInfo", params.kernel)
        ask = getattr(self._driver, asked)
        for index in range(_MAX_PARAMETERS):
            if ask(ctypes.c_void_p(whose), ctypes.c_size_t(index), ctypes.byref(offset), ctypes.byref(size)) != 0:
                break  # there are no more
            if size.value > _WORD:
                self._skip(f"structs in the parameters of {name}")
                continue
            for at, value in words_of(ctypes.string_at(params.parameters[index], size.value), self._own):
                yield f"parameter {index}, byte {at}", value

    def _skip(self, what: str) -> None:
        self.unseen[what] = self.unseen.get(what, 0) + 1


def words_of(parameter: bytes, own: Sequence[Segment]) -> list[tuple[int, Any]]:
    """Where in a kernel's parameter something stands, and what: a place in the graph's own memory, or numbers.

    In 4-byte halves, so that a number next to uninitialized padding is still compared; as many for every such size.
    """
    if len(parameter) == 1 and parameter[0] > 1:
        return [(0, Unsteady.ARGUMENT)]  # not a bool: an empty object, whose byte is never initialized
    place = _place(int.from_bytes(parameter, "little"), own) if len(parameter) == _WORD else None
    if place is not None:
        return [(0, place), (_HALF, "")]
    return [(at, int.from_bytes(parameter[at : at + _HALF], "little")) for at in range(0, len(parameter), _HALF)]


def _place(word: int, own: Sequence[Segment]) -> str | None:
    """An address in the graph's own memory, as other captures of the shape have it too."""
    for start, num_bytes in own:
        if start <= word < start + num_bytes:
            return f"own memory of {num_bytes:,} bytes + {word - start:,}"
    return None


def read_nodes(graph: int, own: Sequence[Segment]) -> NodeList:
    """The nodes of a cudaGraph_t, whose pool has these segments; raises where a driver call fails."""
    reader = _Reader(ctypes.CDLL("libcuda.so.1"), own)
    count = ctypes.c_size_t()
    reader.call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    handles = (ctypes.c_void_p * count.value)()
    reader.call("cuGraphGetNodes", ctypes.c_void_p(graph), handles, ctypes.byref(count))
    nodes = tuple(reader.node(handle) for handle in handles if handle is not None)
    return NodeList(nodes, tuple(f"{what} ({times}×)" for what, times in reader.unseen.items()))
