"""Nodes: what a recorded graph runs, as the device has it: kernels that no dispatcher sees are among them.

A device that can be asked has `keeping_nodes`, and its graphs have `nodes`. Reading them never fails: what can't be
read is listed as unseen, with the reason.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from phonograph.devices.base import Device, DeviceGraph


@dataclass(frozen=True)
class Node:
    """One node of a graph."""

    kind: str
    """`kernel`, `memcpy`, `memset`, …; `op` where the device is emulated."""
    name: str
    launch: tuple[int, ...] = ()
    """Grid, block and shared memory of a kernel."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Name or place, and value; for an address the block that it lies in, by first appearance, and the offset there."""


@dataclass(frozen=True)
class NodeList:
    """The nodes of a graph in order, and what could not be read of them."""

    nodes: tuple[Node, ...]
    unseen: tuple[str, ...] = ()


@runtime_checkable
class NodeGraph(Protocol):
    """A graph that can tell its nodes."""

    def nodes(self) -> NodeList: ...


@runtime_checkable
class NodeDevice(Protocol):
    """A device whose graphs can tell their nodes, if they are recorded in here."""

    def keeping_nodes(self) -> AbstractContextManager[None]: ...


def keeping_nodes(device: Device) -> AbstractContextManager[None]:
    """Inside, graphs are recorded so that their nodes can be read, where the device can do that."""
    return device.keeping_nodes() if isinstance(device, NodeDevice) else nullcontext()


def nodes_of(graph: DeviceGraph) -> NodeList:
    """The nodes of a graph that was recorded in `keeping_nodes`."""
    if not isinstance(graph, NodeGraph):
        return NodeList((), (f"nodes unseen: {type(graph).__name__} does not tell them",))
    try:
        return graph.nodes()
    except Exception as error:  # a driver or a binding of another version: less is seen, and nothing else goes wrong
        return NodeList((), (f"nodes unseen: {type(error).__name__}: {error}",))


def node_difference(one: NodeList, other: NodeList) -> str:
    """What tells two captures of one shape apart, in words; empty where nothing does."""
    for index, (ours, theirs) in enumerate(zip(one.nodes, other.nodes, strict=False)):
        where = f"node {index} ({ours.kind} {ours.name})"
        if (ours.kind, ours.name) != (theirs.kind, theirs.name):
            return f"{where} is {theirs.kind} {theirs.name} with another sample"
        if ours.launch != theirs.launch:
            return f"{where} is launched with {ours.launch} for one sample and {theirs.launch} for another"
        if len(ours.arguments) != len(theirs.arguments):
            return f"{where} has {len(ours.arguments)} arguments for one sample, {len(theirs.arguments)} for another"
        for (name, value), (_, found) in zip(ours.arguments, theirs.arguments, strict=True):
            if value != found and not _is_nan(value, found):
                return f"{where}, {name}: gets {value} with one sample and {found} with another"
    if len(one.nodes) != len(other.nodes):
        return f"one sample gives {len(one.nodes)} nodes, another {len(other.nodes)}"
    return ""


def _is_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and isinstance(other, float) and one != one and other != other  # noqa: PLR0124
