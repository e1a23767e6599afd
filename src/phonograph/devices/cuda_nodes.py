"""CUDA nodes: the nodes of a kept CUDA graph, read through libcuda.

Of kernels: name, grid, block, shared memory, and every parameter of at most eight bytes: numbers and addresses. Larger
ones are structs and descriptors, in which C++ leaves gaps that nobody sets; they are left out and listed as unseen. An
address in memory of the graph's own pool becomes the offset there, since every capture has a pool of its own. Addresses
of anything else must be the same in every capture: inputs, weights, the generator's seed and offset, workspaces of
libraries.

Of copies and fills: addresses, sizes and the value. Functions of the host, graphs in graphs, and nodes of kinds that
are not known here are listed as unseen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phonograph.devices.nodes import Node, NodeList, Unsteady
from phonograph.errors import DeviceError

_KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty", "wait", "record")
_ORDER_ONLY = ("empty", "wait", "record")
"""Kinds of nodes that compute nothing."""
_OPAQUE = {"host": "functions of the host", "graph": "graphs in graphs"}
_HOST, _ARRAY = 1, 3
"""Of CUmemorytype; the others have a device address, which unified addressing gives to all memory."""
_MAX_PARAMETERS = 256
_WORD, _HALF = 8, 4

Segment = tuple[int, int]
"""Address and bytes of a stretch of memory that the allocator has from the driver."""


Arguments = tuple[tuple[str, Any], ...]


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


def _copy_side(prefix: str) -> tuple[tuple[str, Any], ...]:
    sizes = [(f"{prefix}_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "lod")]
    places = [(f"{prefix}_{name}", ctypes.c_void_p) for name in ("host", "device", "array", "reserved")]
    shape = [(f"{prefix}_{name}", ctypes.c_size_t) for name in ("pitch", "height")]
    return (*sizes, (f"{prefix}_type", ctypes.c_uint), *places, *shape)


class _CopyParams(ctypes.Structure):
    """CUDA_MEMCPY3D_v2."""

    _fields_ = (
        *_copy_side("source"),
        *_copy_side("target"),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


class _FillParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("item_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
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
        if word == "kernel":
            return self._kernel(handle)
        if word == "memcpy":
            return self._read(handle, word, "cuGraphMemcpyNodeGetParams", _CopyParams(), copy_arguments)
        if word == "memset":
            return self._read(handle, word, "cuGraphMemsetNodeGetParams", _FillParams(), fill_arguments)
        if word not in _ORDER_ONLY:
            self._skip(_OPAQUE.get(word, f"nodes of {word}"))
        return Node(word, "")

    def _read(
        self, handle: int, word: str, asked: str, params: Any, arguments: Callable[[Any, Sequence[Segment]], Arguments]
    ) -> Node:
        """A copy or a fill; one whose parameters the driver does not give is unseen, and the other nodes are read."""
        ask = getattr(self._driver, asked, None)
        if ask is None or ask(ctypes.c_void_p(handle), ctypes.byref(params)) != 0:
            self._skip(f"the parameters of a {word}")
            return Node(word, "")
        return Node(word, "", (), arguments(params, self._own))

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


def copy_arguments(params: _CopyParams, own: Sequence[Segment]) -> Arguments:
    """What a copy reads, what it writes, and how much; as many for every copy, empty where that has no meaning."""
    found: list[tuple[str, Any]] = []
    for side in ("source", "target"):
        kind = getattr(params, f"{side}_type")
        held = {_HOST: "host", _ARRAY: "array"}.get(kind, "device")
        address = getattr(params, f"{side}_{held}") or 0
        found.append((side, _place(address, own) or address))
        found += [(f"{side} {name}", getattr(params, f"{side}_{name}")) for name in ("type", "x", "y", "z")]
        found.append((f"{side} pitch", getattr(params, f"{side}_pitch") if params.height > 1 else ""))
        found.append((f"{side} height", getattr(params, f"{side}_height") if params.depth > 1 else ""))
    return (*found, *((name, getattr(params, name)) for name in ("width", "height", "depth")))


def fill_arguments(params: _FillParams, own: Sequence[Segment]) -> Arguments:
    """What a fill writes, and where."""
    address, bits = params.target or 0, 8 * params.item_bytes
    return (
        ("target", _place(address, own) or address),
        ("value", params.value & ((1 << bits) - 1)),
        *((name, getattr(params, name)) for name in ("item_bytes", "width", "height")),
        ("pitch", params.pitch if params.height > 1 else ""),
    )


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


def num_captured(stream: int) -> int:
    """The nodes that a stream's capture has so far; 0 where nothing is captured, or the driver does not tell."""
    driver: Any = ctypes.CDLL("libcuda.so.1")
    ask = getattr(driver, "cuStreamGetCaptureInfo_v2", None)
    status, number, graph, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
    given = (ctypes.byref(one) for one in (status, number, graph))
    if ask is None or ask(ctypes.c_void_p(stream), *given, None, None) != 0 or not graph.value:
        return 0
    return count.value if driver.cuGraphGetNodes(graph, None, ctypes.byref(count)) == 0 else 0
