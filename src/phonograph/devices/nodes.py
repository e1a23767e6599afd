"""Nodes: what a recorded graph runs, as the device has it: kernels that no dispatcher sees are among them.

A device that supports this has `keeping_nodes`, and its graphs have `nodes`. Reading them never fails: what can't be
read is listed as unseen, with the reason.

Not every byte of a kernel's parameters is initialized: C++ leaves padding between members, and empty objects, with
whatever is on the stack. So a difference between two samples counts only where capturing either sample again gives the
same bytes (`steady`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from phonograph.devices.base import Device, DeviceGraph


class Unsteady(Enum):
    """Placeholder of an argument that varies between captures of the same sample; equal to any value."""

    ARGUMENT = "unsteady"


@dataclass(frozen=True)
class Node:
    """One node of a graph."""

    kind: str
    """`kernel`, `memcpy`, `memset`, …; `op` where the device is emulated."""
    name: str
    launch: tuple[int, ...] = ()
    """Grid, block and shared memory of a kernel."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Name or place, and value; an address in memory of the graph's own by its offset there."""


@dataclass(frozen=True)
class NodeList:
    """The nodes of a graph in order, and what could not be read of them."""

    nodes: tuple[Node, ...]
    unseen: tuple[str, ...] = ()
    is_read: bool = True
    """Whether the nodes could be read."""


@runtime_checkable
class NodeGraph(Protocol):
    """A graph whose nodes can be read."""

    def nodes(self) -> NodeList: ...


@runtime_checkable
class NodeDevice(Protocol):
    """A device whose graphs' nodes can be read, if they are recorded in `keeping_nodes`."""

    def keeping_nodes(self) -> AbstractContextManager[None]: ...


@runtime_checkable
class NodeCounter(Protocol):
    """A device that tells how many nodes a recording has while it is made."""

    def num_nodes(self) -> int:
        """The nodes of the recording that is made now, as `joined` counts them; 0 where that is not known."""
        ...


def node_counter(device: Device) -> Callable[[], int] | None:
    """Counts the nodes of the recording that is made on a device; None where the device does not tell."""
    return device.num_nodes if isinstance(device, NodeCounter) else None


def keeping_nodes(device: Device) -> AbstractContextManager[None]:
    """Inside, graphs are recorded so that their nodes can be read, where the device can do that."""
    return device.keeping_nodes() if isinstance(device, NodeDevice) else nullcontext()


def nodes_of(graph: DeviceGraph) -> NodeList:
    """The nodes of a graph that was recorded in `keeping_nodes`."""
    if not isinstance(graph, NodeGraph):
        return _unread(f"{type(graph).__name__} has no nodes()")
    try:
        return graph.nodes()
    except Exception as error:  # a driver or a binding of another version: less is seen, and nothing else goes wrong
        return _unread(f"{type(error).__name__}: {error}")


def _unread(reason: str) -> NodeList:
    return NodeList((), (f"nodes unseen: {reason}",), is_read=False)


def joined(graphs: Sequence[NodeList]) -> NodeList:
    """The nodes of several graphs, one after another, with a mark between them."""
    nodes = [node for graph in graphs for node in (*graph.nodes, Node("end of a graph", ""))]
    unseen = tuple(dict.fromkeys(text for graph in graphs for text in graph.unseen))
    return NodeList(tuple(nodes), unseen, all(graph.is_read for graph in graphs))


def steady(one: NodeList, again: NodeList) -> NodeList:
    """What two captures of the same sample agree on; arguments that differ match anything, and are listed as unseen."""
    if not one.is_read or not again.is_read:
        return one if not one.is_read else again
    apart = _structure_difference(one, again)
    if apart is not None:
        return _unread(f"two captures of one sample differ: {apart.problem}")
    unsteady: Counter[str] = Counter()
    nodes = []
    for ours, theirs in zip(one.nodes, again.nodes, strict=True):
        pairs = zip(ours.arguments, theirs.arguments, strict=True)
        kept = tuple((name, value if _same(value, found) else Unsteady.ARGUMENT) for (name, value), (_, found) in pairs)
        unsteady[ours.name] += sum(value is Unsteady.ARGUMENT for _, value in kept)
        nodes.append(Node(ours.kind, ours.name, ours.launch, kept))
    told = (f"numbers that differ from capture to capture in {name} ({n}×)" for name, n in unsteady.items() if n)
    return NodeList(tuple(nodes), (*one.unseen, *told))


@dataclass(frozen=True)
class NodeDifference:
    """The first node in which two captures of one shape differ."""

    index: int
    problem: str


def node_difference(one: NodeList, other: NodeList) -> NodeDifference | None:
    """How two captures of one shape differ; None where they don't, or where that can't be known."""
    if not one.is_read or not other.is_read:
        return None
    return _structure_difference(one, other) or _argument_difference(one, other)


def _structure_difference(one: NodeList, other: NodeList) -> NodeDifference | None:
    for index, (ours, theirs) in enumerate(zip(one.nodes, other.nodes, strict=False)):
        problem = ""
        if (ours.kind, ours.name) != (theirs.kind, theirs.name):
            problem = f"is {theirs.kind} {theirs.name} with another sample"
        elif ours.launch != theirs.launch:
            problem = f"is launched with {ours.launch} for one sample and {theirs.launch} for another"
        elif len(ours.arguments) != len(theirs.arguments):
            problem = f"has {len(ours.arguments)} arguments for one sample, {len(theirs.arguments)} for another"
        if problem:
            return NodeDifference(index, f"node {index} ({ours.kind} {ours.name}) {problem}")
    if len(one.nodes) != len(other.nodes):
        told = f"one sample gives {len(one.nodes)} nodes, another {len(other.nodes)}"
        return NodeDifference(min(len(one.nodes), len(other.nodes)), told)
    return None


def _argument_difference(one: NodeList, other: NodeList) -> NodeDifference | None:
    for index, (ours, theirs) in enumerate(zip(one.nodes, other.nodes, strict=True)):
        for (name, value), (_, found) in zip(ours.arguments, theirs.arguments, strict=True):
            if not _same(value, found):
                where = f"node {index} ({ours.kind} {ours.name}), {name}"
                return NodeDifference(index, f"{where}: gets {value} with one sample and {found} with another")
    return None


def _same(one: Any, other: Any) -> bool:
    both_nan = isinstance(one, float) and isinstance(other, float) and one != one and other != other  # noqa: PLR0124
    return one == other or both_nan or Unsteady.ARGUMENT in (one, other)
