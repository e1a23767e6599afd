"""Outputs of every kind: each call gets its own, of its own size, equal to what the function returns."""

from __future__ import annotations

import enum
import functools
import re
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from phonograph import CaptureError, Device, OutputError, RunnerOptions, open_device
from phonograph.graphs.inputs.tree import leaves, map_leaves
from runners import equal, make_runner, rows


class Plain:
    """Wants an argument, computes a property, and forbids setting: none of it is to be run."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden

    @property
    def never(self) -> torch.Tensor:
        raise AssertionError("a property was read")


class Slotted:
    __slots__ = ("__secret", "hidden", "unset")

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden, self.__secret = hidden, hidden + 1

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def secret(self) -> torch.Tensor:
        return self.__secret


class Hostile:
    """Answers nothing that it is asked, and is no leaf."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.__dict__["hidden"] = hidden

    def _no(self, *_: Any) -> Any:
        raise AssertionError("code of the class was run")

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __getitem__ = __setattr__ = __getattr__ = _no


class Shut(OrderedDict[str, Any]):
    """Overrides what it can."""

    def items(self) -> Any:
        raise AssertionError("code of the class was run")

    __copy__ = items


@dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    extra: Any = field(default=None, repr=False)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class WithNote(dict[str, Any]):
    """A dict with an attribute of the same name as its key."""


class Named(list[Any]):
    pass


class Mode(enum.IntEnum):
    FAST = 1


def noted(x: torch.Tensor) -> WithNote:
    made = WithNote(note=x)
    made.note = x * 7  # type: ignore[attr-defined]
    return made


def named(x: torch.Tensor) -> Named:
    made = Named([x, x + 1])
    made.norm = x.norm(dim=1)  # type: ignore[attr-defined]
    return made


def with_extra(x: torch.Tensor) -> Frozen:
    made = Frozen(x)
    object.__setattr__(made, "cached", x * 3)  # as functools.cached_property does
    return made


WEIGHT = torch.nn.Parameter(torch.arange(16.0).view(4, 4))

KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "object": lambda x: Plain(x * 2),
    "object in object": lambda x: Plain(Plain(x * 2)),  # type: ignore[arg-type]
    "slots": lambda x: Slotted(x * 2),
    "hostile": Hostile,
    "dict with overrides": lambda x: Shut(a=x * 2, b=[x]),
    "parameter": lambda x: (WEIGHT, WEIGHT[:2], WEIGHT.detach().T, x),
    "expanded": lambda x: (x[:, :1].expand(-1, 5), x.sum(0).expand(3, 4)),
    "several dtypes": lambda x: (x > 0, x.long(), x.half(), x.to(torch.complex64).conj()),
    "split and sorted": lambda x: {"split": x.split(2, 1), "sorted": x.sort(1), "unbound": x.unbind(1)},
    "namespace": lambda x: SimpleNamespace(a=x * 2, b=SimpleNamespace(c=[x])),
    "frozen dataclass": with_extra,
    "user dict": lambda x: UserDict(a=x * 2, b=None),
    "ordered dict": lambda x: OrderedDict(b=x, a=x * 2),
    "default dict": lambda x: defaultdict(list, {"a": x * 2}),
    "dict with an attribute": noted,
    "list with an attribute": named,
    "what torch.max returns": lambda x: x.max(dim=1),
    "named tuple": lambda x: Pair(x * 2, x),
    "dotted keys": lambda x: {"a.b": x, "a": {"b": x * 2}},
    "keys of two types": lambda x: {1: x, "1": x * 2, (1, "1"): x * 3, None: x * 4},
    "plain values": lambda x: {
        "x": x,
        "mode": Mode.FAST,
        "dtype": x.dtype,
        "tags": {"a", "b"},
        "day": date(1877, 11, 21),
    },
    "empty": lambda x: (x, (), [], {}, None, SimpleNamespace()),
    "one tensor twice": lambda x: (y := x * 2, [y], {"y": y}),
    "views of each other": lambda x: ((y := x * 2), y[:1], y[:, 0], y.T, y.view(-1, 2, 2)),
    "input": Plain,
    "0-d": lambda x: Plain(x.sum()),
    "axes that equal a bucket": lambda x: [x.sum(0), x.T @ x, x.new_zeros(4, 4), x.new_zeros(8) + x.sum(), x],
    "no rows": lambda x: (x[:0], x[:, :0]),
}


def plain(tree: Any) -> dict[str, Any]:
    pairs = [(str(path), leaf) for path, leaf in leaves(tree)]
    assert len({path for path, _ in pairs}) == len(pairs), "two leaves have the same path, and one hides the other"
    return dict(pairs)


def same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    one, other = plain(found), plain(wanted)
    assert one.keys() == other.keys()
    for path, leaf in other.items():
        if isinstance(leaf, torch.Tensor):
            assert one[path].shape == leaf.shape, path
            equal(one[path], leaf)
        else:
            assert one[path] == leaf, path


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_call_gets_its_own_outputs_of_its_own_size(device: Device, kind: str) -> None:
    make = KINDS[kind]
    WEIGHT.data = WEIGHT.data.to(device.torch_device)
    runner = make_runner(lambda batch: make(batch["x"]), device)
    kept = []
    for seed, count in enumerate((3, 8, 1, 4, 9, 3, 8)):  # 9 runs eagerly
        x = rows(device, count, seed)
        kept.append((runner.run({"x": x}), make(x)))
    assert runner.stats.replays.total() == 6
    for found, wanted in kept:
        same(found, wanted)
    assert len({id(found) for found, _ in kept}) == len(kept)


def test_what_stands_at_two_places_stands_at_both_again(device: Device) -> None:
    runner = make_runner(lambda batch: (y := batch["x"] * 2, {"y": y}, (holder := Plain(y)), [holder]), device)
    first, named, holder, held = runner.run({"x": rows(device, 3)})
    assert first is named["y"] is holder.hidden
    assert held[0] is holder


class Ring:
    def __init__(self) -> None:
        self.ring = self


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "deque": (lambda x: {"q": deque([x])}, r"\['q'\] is a deque"),
    "iterator": (lambda x: (x, iter([x])), r"\[1\] is a list_iterator"),
    "generator": (lambda x: (row for row in x), "is a generator, which is used up"),
    "set": (lambda x: Plain({x}), "hidden is a set"),  # type: ignore[arg-type]
    "module": (lambda x: [torch.nn.Identity()], r"\[0\] is a Identity"),
    "function": (lambda x: (x, lambda: x), r"\[1\] is a function"),
    "cycle": (lambda x: Ring(), "ring is a Ring, which holds itself"),
    "partial": (lambda x: functools.partial(max, x), "is a partial"),
    "exception": (ValueError, "is a ValueError"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_can_not_be_copied_is_refused_at_capture_and_by_the_eager_path(device: Device, kind: str) -> None:
    make, said = REFUSED[kind]
    runner = make_runner(lambda batch: make(batch["x"]), device)
    assert runner.report is not None
    error = runner.report.failures[0].error
    assert type(error) is CaptureError
    assert error.remedy.startswith("Return tensors in a tuple")
    with pytest.raises(OutputError, match=f"running decode: the output.*{said}"):
        runner.run({"x": rows(device, 3)})


def test_a_numpy_value_is_refused(device: Device) -> None:
    runner = make_runner(lambda batch: {"n": batch["x"].cpu().numpy()}, device, backend="disabled")
    with pytest.raises(OutputError, match=r"the output \['n'\] is a ndarray"):
        runner.run({"x": rows(device, 3)})


class Cache:
    """State that lives longer than a call."""

    def __init__(self, device: Device) -> None:
        self.total = torch.zeros(4, device=device.torch_device)
        self.num_layers = 1
        self.last: torch.Tensor | None = None


@pytest.mark.parametrize("backend", ["full", "disabled"])
def test_an_object_that_the_body_did_not_make_is_handed_back_itself(device: Device, backend: str) -> None:
    cache = Cache(device)

    def body(batch: dict[str, Any]) -> Any:
        cache.total.add_(batch["x"].sum(0))
        return SimpleNamespace(logits=batch["x"] * 2, cache=cache)

    runner = make_runner(body, device, backend=backend)
    x = rows(device, 3)
    found = runner.run({"x": x})
    assert found.cache is cache
    equal(found.logits, x * 2)
    equal(cache.total, x.sum(0))
    assert bool(runner.stats.replays) == (backend == "full")


def test_an_object_that_is_filled_anew_on_every_run_is_refused(device: Device) -> None:
    cache = Cache(device)

    def body(batch: dict[str, Any]) -> Any:
        cache.last = batch["x"] * 2
        return cache

    runner = make_runner(body, device)
    assert runner.report is not None
    assert "changes Cache.last in every run" in str(runner.report.failures[0].error)


def test_an_eager_object_that_holds_an_input_is_copied_and_another_is_not(device: Device) -> None:
    made: list[Plain] = []

    def body(batch: dict[str, Any]) -> Plain:
        made.append(Plain(batch["x"] if len(made) == 0 else batch["x"] * 2))
        return made[-1]

    runner = make_runner(body, device, backend="disabled", options=RunnerOptions(eager_copies=True))
    first, second = runner.run({"x": rows(device, 3, seed=1)}), runner.run({"x": rows(device, 3, seed=2)})
    equal(first.hidden, rows(device, 3, seed=1))
    assert first is not made[0]
    assert second is made[1]


FOLLOWS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "text": (lambda x: (x, f"{len(x)} rows"), r"\[1\] is '8 rows' for {'seqs': 8} and '4 rows' for {'seqs': 4}"),
    "as many outputs as rows": (lambda x: x.unbind(0), r"\[4\] is a tensor .* and not there for {'seqs': 4}"),
    "only for some": (lambda x: (x, x + 1 if len(x) > 4 else None), r"\[1\] is a tensor .* and None for {'seqs': 4}"),
    "dtype": (lambda x: x.half() if len(x) > 4 else x, r"torch.float16 for {'seqs': 8} and a tensor of torch.float32"),
}


@pytest.mark.parametrize("kind", list(FOLLOWS))
def test_a_structure_or_value_that_follows_the_size_is_refused(device: Device, kind: str) -> None:
    make, said = FOLLOWS[kind]
    runner = make_runner(lambda batch: make(batch["x"]), device)
    assert runner.report is not None
    assert len(runner.report.failures) == 3
    assert re.search(said, str(runner.report.failures[0].error))
    same(runner.run({"x": rows(device, 3)}), make(rows(device, 3)))
    exact = make_runner(lambda batch: make(batch["x"]), device, exact=True)
    same(exact.run({"x": rows(device, 4)}), make(rows(device, 4)))
    assert exact.stats.replays.total() == 1


def test_a_tensor_of_another_kind_is_refused(device: Device) -> None:
    class Units(torch.Tensor):
        pass

    runner = make_runner(lambda batch: batch["x"].as_subclass(Units), device)
    assert runner.report is not None
    assert "is a torch.strided Units, and a replay gives plain" in str(runner.report.failures[0].error)
    assert type(runner.run({"x": rows(device, 3)})) is Units


@pytest.mark.gpu
def test_an_output_on_the_host_is_refused() -> None:
    device = open_device("cuda")
    host = torch.ones(2)
    runner = make_runner(lambda batch: (batch["x"], host), device)
    assert runner.report is not None
    assert "[1] is on cpu, and a replay's outputs are on cuda" in str(runner.report.failures[0].error)
    assert runner.run({"x": rows(device, 3)})[1].device.type == "cpu"


def test_views_are_the_graphs_own(device: Device) -> None:
    runner = make_runner(lambda batch: Plain(batch["x"] * 2), device, options=RunnerOptions(outputs="view"))
    first = runner.run({"x": rows(device, 3, seed=1)})
    runner.run({"x": rows(device, 3, seed=2)})
    equal(first.hidden, rows(device, 3, seed=2) * 2)


def test_a_hugging_face_output_keeps_its_type_and_its_items(device: Device) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def body(batch: dict[str, Any]) -> Any:
        x = batch["x"]
        return outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x * 2))

    runner = make_runner(body, device)
    x = rows(device, 3)
    found = runner.run({"x": x})
    assert type(found) is outputs.BaseModelOutput
    assert list(found.keys()) == ["last_hidden_state", "hidden_states"]
    assert found["last_hidden_state"] is found.last_hidden_state is found[0]
    equal(found.last_hidden_state, x * 2)
    equal(found.hidden_states[1], x * 2)


def test_paths_are_shown_as_they_are_written() -> None:
    tree = {"a": [Plain(torch.zeros(1))], 1: Pair(torch.zeros(1), torch.zeros(1))}
    assert list(plain(tree)) == ["['a'][0].hidden", "[1].left", "[1].right"]
    assert plain(map_leaves(tree, lambda path, _: str(path))) == {path: path for path in plain(tree)}
