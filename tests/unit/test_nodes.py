"""Nodes: what nobody sets in a kernel's parameters is no difference, and what a sample froze there is one."""

from __future__ import annotations

import ctypes
import gc
import inspect
import struct
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phonograph import EmulatedDevice, Extent, RunnerOptions, Stage, current, graph_break
from phonograph.devices.base import DeviceGraph
from phonograph.devices.cuda_nodes import _CopyParams, _FillParams, _Reader, words_of
from phonograph.devices.nodes import Node, NodeList, Unsteady, joined, node_difference, nodes_of, steady
from phonograph.graphs.trust import guard as guarding
from phonograph.graphs.trust.guard import guard
from runners import WIDTH, make_runner

OWN = [(0x7F00_0000_0000, 2 << 20), (0x7F10_0000_0000, 20 << 20)]


def told_apart(one: NodeList, other: NodeList) -> str:
    found = node_difference(one, other)
    return found.problem if found is not None else ""


def kernel(*arguments: Any, name: str = "gemm") -> NodeList:
    return NodeList((Node("kernel", name, (8, 1, 1), tuple((f"byte {at}", one) for at, one in enumerate(arguments))),))


def sample(extent: Extent, seed: int) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(extent.used["seqs"], WIDTH, generator=numbers), "scale": 1 / (1 + seed)}


# -- two captures of one sample -----------------------------------------------------------------------------------


def test_what_is_another_in_every_capture_is_no_difference() -> None:
    one, other = steady(kernel(8, 17), kernel(8, 99)), kernel(8, 5)
    assert one.nodes[0].arguments == (("byte 0", 8), ("byte 1", Unsteady.ARGUMENT))
    assert one.unseen == ("numbers that differ from capture to capture in gemm (1×)",)
    assert told_apart(one, other) == told_apart(other, one) == ""


def test_what_each_sample_gives_again_is_a_difference() -> None:
    one, other = steady(kernel(8, 17), kernel(8, 18)), steady(kernel(4, 3), kernel(4, 1))
    assert "byte 0: gets 8 with one sample and 4 with another" in told_apart(one, other)


def test_nodes_that_come_and_go_are_told_and_not_compared() -> None:
    found = steady(kernel(1), kernel(1, name="other"))
    assert not found.is_read
    assert "nodes unseen: two captures of one sample differ: node 0 (kernel gemm) is kernel other" in found.unseen[0]
    assert told_apart(found, kernel(2)) == ""


def test_nodes_that_could_not_be_read_are_not_compared() -> None:
    class Silent:
        def replay(self) -> None: ...

        def release(self) -> None: ...

    unread = joined([kernel(1), nodes_of(Silent())])
    assert not unread.is_read
    assert told_apart(unread, joined([kernel(1)])) == told_apart(kernel(1), unread) == ""
    assert steady(unread, kernel(1)) == steady(kernel(1), unread) == unread


def test_a_node_that_moves_over_a_gap_is_a_difference() -> None:
    one, other = kernel(1), kernel(2)
    assert told_apart(joined([one, other]), joined([one, other])) == ""
    both = NodeList(one.nodes + other.nodes)
    assert told_apart(joined([one, other]), joined([both, NodeList(())]))


@pytest.mark.parametrize("noise", [lambda number: number, lambda number: number % 2], ids=["any", "in turn"])
def test_a_guard_looks_again_before_it_says_that_nodes_differ(noise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = count()

    def noisy(graph: DeviceGraph) -> NodeList:
        number, found = noise(next(captures)), nodes_of(graph)
        nodes = [Node(n.kind, n.name, n.launch, (*n.arguments, ("byte that nobody sets", number))) for n in found.nodes]
        return NodeList(tuple(nodes), found.unseen)

    monkeypatch.setattr(guarding, "nodes_of", noisy)
    device, unguarded = EmulatedDevice(), RunnerOptions(guard="off")
    right = make_runner(lambda batch: batch["x"] * 2 + 1, device, sample=sample, sizes=(4, 8))
    report = guard(right, nodes=True)
    assert report.ok, str(report)
    assert any("differ from capture to capture in aten.mul" in text for text in report.unseen)
    wrong = make_runner(lambda batch: batch["x"] * batch["scale"], device, sample=sample, sizes=(4,), options=unguarded)
    runs = guarding._Runs(wrong)
    with torch.no_grad(), runs.restored():
        difference, _ = runs.node_difference(wrong.captured[0])
    assert difference is not None
    assert "gets 1.0 with one sample and 0.5 with another" in str(difference)


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_difference_in_nodes_names_the_line_that_recorded_them(backend: str) -> None:
    """Also in the second of two graphs, and where only the other sample has the node."""
    after_gap = graph_break(lambda x: x * 1.0)

    def scaled(batch: dict[str, Any]) -> Any:
        y = after_gap(batch["x"] + 1).relu()
        return y.view(-1, WIDTH) * batch["scale"]  # wrong

    def longer(batch: dict[str, Any]) -> Any:
        y = after_gap(batch["x"] + 1) * 2
        return y if batch["scale"] == 1 else y.relu()  # wrong

    for body in (scaled, longer):
        unguarded = RunnerOptions(guard="off")
        runner = make_runner(body, EmulatedDevice(), sample=sample, sizes=(4,), options=unguarded, backend=backend)
        runs = guarding._Runs(runner)
        with torch.no_grad(), runs.restored():
            difference, _ = runs.node_difference(runner.captured[0])
        source, first = inspect.getsourcelines(body)
        line = first + next(at for at, text in enumerate(source) if "# wrong" in text)
        assert difference is not None
        assert difference.frame is not None, str(difference)
        # Where the nodes of one sample are all of the other's too, the last that both have is as near.
        assert difference.frame.file == __file__
        assert difference.frame.line in (line, line - (body is longer)), str(difference)
        assert f"test_nodes.py:{difference.frame.line}, in {body.__name__}" in str(difference)


def test_a_device_that_does_not_count_leaves_the_line_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "node_counter", lambda device: None)
    unguarded = RunnerOptions(guard="off")
    wrong = make_runner(
        lambda batch: batch["x"] * batch["scale"], EmulatedDevice(), sample=sample, sizes=(4,), options=unguarded
    )
    runs = guarding._Runs(wrong)
    with torch.no_grad(), runs.restored():
        difference, _ = runs.node_difference(wrong.captured[0])
    assert difference is not None
    assert difference.frame is None


def test_where_there_is_no_memory_to_record_again_nodes_are_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    runner = make_runner(lambda batch: batch["x"] * 2, EmulatedDevice(), sample=sample, sizes=(4,))
    monkeypatch.setattr(guarding._Runs, "_recorded", full)
    report = guard(runner, nodes=True)
    assert report.ok
    assert report.unseen == ("the nodes of decode[seqs=4]: there is no memory to record it again",)


def test_what_a_compiler_made_of_the_body_is_listed_as_unseen() -> None:
    device, steps = EmulatedDevice(), list[tuple[str, int, int]]()
    runner = make_runner(lambda batch: batch["x"] * 2, device, sample=sample, sizes=(4,), backend="tc_piecewise")
    report = guard(runner, nodes=True, progress=lambda *step: steps.append(step))
    assert runner.captured
    assert report.ok, str(report)
    assert "what tc_piecewise made of the body" in report.unseen[-1]
    assert steps[-1] == ("guarding decode", 1, 1)


def test_no_garbage_is_collected_while_graphs_are_recorded() -> None:
    seen = Mock()  # what a body notes in its own objects is undone

    def body(batch: dict[str, Any]) -> Any:
        seen(current().stage, gc.isenabled())
        return batch["x"] * 2

    runner = make_runner(body, EmulatedDevice(), sample=sample, sizes=(4,))
    seen.reset_mock()
    assert guard(runner, nodes=True).ok
    assert (Stage.CAPTURING, False) in {call.args for call in seen.call_args_list}
    assert (Stage.CAPTURING, True) not in {call.args for call in seen.call_args_list}
    assert gc.isenabled()


def test_every_run_has_a_plan_of_its_own() -> None:
    """A plan that its run uses up."""
    plans: list[int] = []

    def host_plan(batch: dict[str, Any], extent: Extent) -> None:
        plans[:] = [extent.used["seqs"]]

    def body(batch: dict[str, Any]) -> Any:
        plans.pop()
        return batch["x"] * 2

    unguarded = RunnerOptions(guard="off")
    runner = make_runner(body, EmulatedDevice(), sample=sample, sizes=(4,), host_plan=host_plan, options=unguarded)
    report = guard(runner, nodes=True)
    assert runner.captured
    assert report.ok, str(report)


# -- a kernel's parameters ----------------------------------------------------------------------------------------


def test_an_address_in_the_graphs_own_memory_is_its_offset_there() -> None:
    one, other = (words_of(struct.pack("<Q", start + 512), [(start, 2 << 20)]) for start in (1 << 40, 3 << 41))
    assert one == other == [(0, "own memory of 2,097,152 bytes + 512"), (4, "")]


def test_a_parameter_has_as_many_words_whatever_is_in_it() -> None:
    """Else nodes whose bytes nobody set would have other arguments in every capture."""
    inside, outside = (words_of(struct.pack("<Q", word), OWN) for word in (OWN[0][0] + 8, 12))
    assert len(inside) == len(outside) == 2
    assert len(words_of(b"\x5c", OWN)) == len(words_of(b"\x01", OWN)) == 1


def test_other_addresses_are_numbers_like_any() -> None:
    one, other = (list(words_of(struct.pack("<Q", address), OWN)) for address in (0x7E00_0000_0200, 0x7E00_0000_0400))
    assert one != other


def test_a_number_beside_bytes_that_nobody_sets_is_seen() -> None:
    clean, garbage, frozen = (struct.pack("<iI", *pair) for pair in ((8, 0), (8, 0x7F6C1234), (5, 0)))
    assert dict(words_of(clean, OWN))[0] == dict(words_of(garbage, OWN))[0] == 8
    assert dict(words_of(frozen, OWN))[0] == 5


def test_an_object_without_members_is_no_number_and_a_bool_is_one() -> None:
    assert words_of(b"\x5c", OWN) == [(0, Unsteady.ARGUMENT)]
    assert list(words_of(b"\x01", OWN)) == [(0, 1)]


@given(st.binary(max_size=8))
def test_every_byte_of_a_parameter_counts(parameter: bytes) -> None:
    """But for the byte of an object without members; memory of the graph's own is below all these numbers."""
    found = list(words_of(parameter, []))
    if len(parameter) == 1 and parameter[0] > 1:
        return
    sizes = [min(4, len(parameter) - at) for at, _ in found]
    assert b"".join(n.to_bytes(size, "little") for (_, n), size in zip(found, sizes, strict=True)) == parameter


# -- copies, fills and what can't be read -------------------------------------------------------------------------


class Driver:
    """A driver whose graph has these nodes: kind, and the fields of its parameters or the status of asking for them."""

    def __init__(self, *nodes: tuple[int, dict[str, int] | int]) -> None:
        self._nodes = nodes

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802 - the driver's name
        kind._obj.value = self._nodes[node.value - 1][0]
        return 0

    def _params(self, node: Any, params: Any) -> int:
        found = self._nodes[node.value - 1][1]
        if isinstance(found, int):
            return found
        for name, value in found.items():
            setattr(params._obj, name, value)
        return 0

    cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = _params  # noqa: N815

    def read(self, own: list[tuple[int, int]] = OWN) -> NodeList:
        reader = _Reader(self, own)
        nodes = tuple(reader.node(at + 1) for at in range(len(self._nodes)))
        return NodeList(nodes, tuple(reader.unseen))


COPY = {"source_type": 2, "source_device": 0x7E00_0000_0000, "target_type": 2, "width": 64, "height": 1, "depth": 1}
MEMCPY, MEMSET, HOST, CHILD, EMPTY, ALLOC = 1, 2, 3, 4, 5, 10


def test_the_parameters_are_laid_out_as_the_driver_has_them() -> None:
    assert ctypes.sizeof(_CopyParams) == 200
    assert ctypes.sizeof(_FillParams) == 40
    offsets = {
        name: getattr(_CopyParams, name).offset for name in ("source_type", "source_device", "target_x", "width")
    }
    assert offsets == {"source_type": 32, "source_device": 48, "target_x": 88, "width": 176}


@pytest.mark.parametrize(
    "changed", [{"source_device": 0x7E00_0000_0100}, {"width": 32}, {"source_x": 8}, {"height": 2}]
)
def test_a_copy_is_compared_by_addresses_and_sizes(changed: dict[str, int]) -> None:
    one, same, other = (Driver((MEMCPY, fields)).read() for fields in (COPY, dict(COPY), COPY | changed))
    assert one.unseen == ()
    assert told_apart(one, same) == ""
    assert "node 0 (memcpy )" in told_apart(one, other)


def test_memory_of_the_graphs_own_is_known_by_its_offset_in_copies_and_fills() -> None:
    """Every capture has it elsewhere."""
    fill = {"value": 1, "item_bytes": 1, "width": 64, "height": 1}
    found = []
    for start in (OWN[0][0], 3 << 41):
        nodes = (MEMCPY, COPY | {"target_device": start + 512}), (MEMSET, fill | {"target": start})
        found.append(Driver(*nodes).read([(start, 2 << 20)]))
    assert told_apart(*found) == ""
    assert dict(found[0].nodes[0].arguments)["target"] == "own memory of 2,097,152 bytes + 512"


def test_what_a_copy_does_not_use_is_no_difference() -> None:
    """Pitches of one row, and addresses of other kinds of memory: nobody sets them."""
    host = COPY | {"source_type": 1, "source_host": 0x5500_0000_0000, "source_device": 7, "source_pitch": 99}
    one, other = (Driver((MEMCPY, fields)).read() for fields in (host, host | {"source_device": 8, "source_pitch": 1}))
    assert told_apart(one, other) == ""
    moved = Driver((MEMCPY, host | {"source_host": 0x5500_0000_1000})).read()
    assert "source: gets" in told_apart(one, moved)


@pytest.mark.parametrize("changed", [{"value": 7}, {"width": 32}, {"target": 0x7E00_0000_0000}])
def test_a_fill_is_compared_by_address_size_and_value(changed: dict[str, int]) -> None:
    fill = {"target": 0x7E00_0000_0100, "value": 1, "item_bytes": 1, "width": 64, "height": 1}
    one, noise, other = (Driver((MEMSET, f)).read() for f in (fill, fill | {"value": 0xFF01}, fill | changed))
    assert told_apart(one, noise) == "", "bytes beyond the size of an item"
    assert "node 0 (memset )" in told_apart(one, other)


def test_nodes_whose_parameters_are_not_known_are_listed_as_unseen() -> None:
    found = Driver((HOST, 0), (CHILD, 0), (ALLOC, 0), (EMPTY, 0), (MEMCPY, 1), (MEMCPY, COPY)).read()
    assert found.unseen == (
        "functions of the host", "graphs in graphs", "nodes of kind 10", "the parameters of a memcpy",
    )  # fmt: skip
    assert [node.kind for node in found.nodes] == ["host", "graph", "kind 10", "empty", "memcpy", "memcpy"]
    assert found.nodes[-1].arguments


def test_a_driver_without_the_question_leaves_the_rest_to_be_read() -> None:
    class Old(Driver):
        cuGraphMemcpyNodeGetParams = None  # type: ignore[assignment]  # noqa: N815

    found = Old((MEMCPY, COPY), (MEMSET, {"item_bytes": 1})).read()
    assert found.unseen == ("the parameters of a memcpy",)
    assert found.nodes[1].arguments
