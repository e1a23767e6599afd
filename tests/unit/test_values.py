"""What a slot takes: values of every kind that fit without loss, and a refusal that says why for the others."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from phonograph.devices import EmulatedDevice
from phonograph.errors import LoadError
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.inputs.registry import Registry
from phonograph.graphs.inputs.slot import Pad, Slot

INF = float("inf")


def loaded(
    value: Any, dtype: torch.dtype, *, shape: tuple[int | str, ...] = ("tokens",), host: bool = False
) -> torch.Tensor:
    """The padded view after a load of `value`; the tail is 1."""
    device = EmulatedDevice()
    slot = Slot("x", shape, dtype, pad=Pad.fill(1), place="host" if host else "device")
    made = Registry(device, [slot], {"tokens": Dim("tokens")}, owner="decode")
    pool = BufferPool(device)
    made.declare(pool, "tokens", 4)
    pool.seal()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view: torch.Tensor = made.load({"x": value}, Extent({"tokens": 2}, {"tokens": 4})).batch["x"]
    return view


def read_only(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    array.flags.writeable = False
    return array


# A value of two elements, the slot's dtype, and the elements that must arrive.
TAKEN: dict[str, tuple[Any, torch.dtype, list[Any]]] = {
    "a list": ([5, 6], torch.int64, [5, 6]),
    "a tuple": ((5, 6), torch.int32, [5, 6]),
    "a list of numpy numbers": ([np.int32(5), np.int64(6)], torch.int64, [5, 6]),
    "ints for a float slot": ([5, 6], torch.float32, [5.0, 6.0]),
    "ints for a half slot": ([5, 6], torch.float16, [5.0, 6.0]),
    "ints for a bfloat16 slot": ([5, 6], torch.bfloat16, [5.0, 6.0]),
    "floats": ([0.5, -INF], torch.float32, [0.5, -INF]),
    "floats for bfloat16": ([0.5, -INF], torch.bfloat16, [0.5, -INF]),
    "floats for float8": ([0.5, 2.0], torch.float8_e4m3fn, [0.5, 2.0]),
    "bools": ([True, False], torch.bool, [True, False]),
    "bools for an int slot": ([True, False], torch.int64, [1, 0]),
    "a bool array": (np.array([True, False]), torch.bool, [True, False]),
    "an int64 list narrowed to uint8": ([0, 255], torch.uint8, [0, 255]),
    "an int64 array narrowed to int8": (np.array([-128, 127]), torch.int8, [-128, 127]),
    "an int64 array for an unsigned slot": (np.array([3, 2**31]), torch.uint32, [3, 2**31]),
    "a read-only array": (read_only(np.array([5, 6])), torch.int64, [5, 6]),
    "a reversed array": (np.array([6, 5])[::-1], torch.int64, [5, 6]),
    "a strided array": (np.arange(8)[5:8:2], torch.int64, [5, 7]),
    "a big-endian array": (np.array([5, 6], dtype=">i8"), torch.int64, [5, 6]),
    "a tensor": (torch.tensor([5, 6]), torch.int64, [5, 6]),
    "a strided tensor": (torch.arange(8)[5:8:2], torch.int64, [5, 7]),
    "a tensor narrowed": (torch.tensor([5, 6]), torch.int32, [5, 6]),
    "a bfloat16 tensor for a float slot": (torch.tensor([0.5, 2.0], dtype=torch.bfloat16), torch.float32, [0.5, 2.0]),
    "a float tensor for a bfloat16 slot": (torch.tensor([0.5, 2.0]), torch.bfloat16, [0.5, 2.0]),
    "a tensor that requires grad": (torch.tensor([0.5, 2.0], requires_grad=True), torch.float32, [0.5, 2.0]),
    "a double that requires grad": (
        torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True),
        torch.float32,
        [0.5, 2.0],
    ),
    "a parameter": (torch.nn.Parameter(torch.tensor([0.5, 2.0])), torch.float32, [0.5, 2.0]),
    "a lazily negated tensor": (torch._neg_view(torch.tensor([0.5, 2.0])), torch.float32, [-0.5, -2.0]),
    "a lazily negated double": (torch._neg_view(torch.tensor([0.5, 2.0]).double()), torch.float32, [-0.5, -2.0]),
}


@pytest.mark.parametrize("host", [False, True], ids=["device slot", "host slot"])
@pytest.mark.parametrize("case", TAKEN)
def test_taken(case: str, host: bool) -> None:
    value, dtype, wanted = TAKEN[case]
    view = loaded(value, dtype, host=host)
    assert view.dtype == dtype
    assert view.double().tolist() == [*wanted, 1, 1]


def test_a_wide_slot_takes_host_values_that_torch_has_no_view_of() -> None:
    rows = np.arange(200.0).reshape(2, 100)
    for value in (read_only(rows.copy()), rows[:, ::-1], rows.astype(">f4"), rows.tolist()):
        view = loaded(value, torch.bfloat16, shape=("tokens", 100))
        wanted = torch.tensor(np.asarray(value, dtype=np.float64).tolist()).bfloat16()
        assert torch.equal(view[:2], wanted)
        assert torch.equal(view[2:], torch.ones(2, 100, dtype=torch.bfloat16))


@pytest.mark.parametrize("value", [7, np.int32(7), np.array(7), torch.tensor(7), True])
def test_a_scalar_slot_takes_numbers(value: Any) -> None:
    assert loaded(value, torch.int64, shape=()).item() == int(value)


# A value, the slot's dtype, and words of the refusal: what was found, what was expected.
REFUSED: dict[str, tuple[Any, torch.dtype, list[str]]] = {
    "floats for an int slot": ([0.5, 1.0], torch.int64, ["torch.int64", "float64", "Convert"]),
    "whole floats for an int slot": (np.array([1.0, 2.0]), torch.int32, ["torch.int32", "float64"]),
    "a float tensor for an int slot": (torch.tensor([1.0, 2.0]), torch.int64, ["torch.int64", "torch.float32"]),
    "ints for a bool slot": ([0, 1], torch.bool, ["torch.bool", "int64"]),
    "an int tensor for a bool slot": (torch.tensor([0, 1]), torch.bool, ["torch.bool", "torch.int64"]),
    "complex numbers": ([1j, 2j], torch.float32, ["torch.float32", "complex128"]),
    "complex numbers for bfloat16": ([1j, 2j], torch.bfloat16, ["torch.bfloat16", "complex128"]),
    "words": (["a", "b"], torch.int64, ["torch.int64", "U1"]),
    "None in a list": ([1, None], torch.int64, ["torch.int64", "object"]),
    "fractions": ([Fraction(1, 2), Fraction(1, 3)], torch.float32, ["torch.float32", "object"]),
    "rows of different lengths": ([[1], [2, 3]], torch.int64, ["list", "torch.int64", "tokens"]),
    "too large for int32": ([1, 2**31], torch.int32, ["torch.int32", "1 … 2147483648", "wider"]),
    "too large for int64": (np.array([1, 2**63], dtype=np.uint64), torch.int64, ["torch.int64", str(2**63)]),
    "too large for uint8": ([0, 256], torch.uint8, ["torch.uint8", "0 … 256"]),
    "negative for uint8": (np.array([-1, 2]), torch.uint8, ["torch.uint8", "-1 … 2"]),
    "a tensor too large for uint8": (torch.tensor([1, 300]), torch.uint8, ["torch.uint8", "1 … 300"]),
    "a tensor too large for int32": (torch.tensor([1, 2**40]), torch.int32, ["torch.int32", str(2**40)]),
    "too large for float32": ([1.0, 1e300], torch.float32, ["torch.float32", "1e+300"]),
    "an int too large for float16": ([1, 70_000], torch.float16, ["torch.float16", "70000"]),
    "too large for bfloat16": ([1.0, 1e300], torch.bfloat16, ["torch.bfloat16", "1e+300"]),
    "a dict": ({"a": 1}, torch.int64, ["dict", "expected a tensor"]),
    "text": ("ab", torch.int64, ["str", "expected a tensor"]),
    "an object": (object(), torch.int64, ["object", "expected a tensor"]),
    "a set": ({1, 2}, torch.int64, ["set", "expected a tensor"]),
    "too few": ([5], torch.int64, ["('tokens',)", "(2,)", "(1,)"]),
    "too many axes": (np.ones((2, 1), dtype=np.int64), torch.int64, ["(2,)", "(2, 1)"]),
    "too few axes": (torch.tensor(5), torch.int64, ["(2,)", "()"]),
    "nothing": ([], torch.int64, ["(2,)", "(0,)"]),
    "a tensor elsewhere": (torch.ones(2, dtype=torch.int64, device="meta"), torch.int64, ["meta", "cpu", "Move it"]),
    "None": (None, torch.int64, ["no 'x'", "torch.int64", "tokens", "absent=", "keyed=True"]),
}


@pytest.mark.parametrize("host", [False, True], ids=["device slot", "host slot"])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, host: bool) -> None:
    value, dtype, words = REFUSED[case]
    with pytest.raises(LoadError) as caught:
        loaded(value, dtype, host=host)
    missing = [word for word in ["loading decode", "slot 'x'", *words] if word not in str(caught.value)]
    assert not missing, str(caught.value)
