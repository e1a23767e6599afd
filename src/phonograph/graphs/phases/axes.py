"""Axes: features whose values need recordings of their own, and compose.

A product has one value of every axis. Products are named by the values that are not plain, so that a phase without
axes, and the plain product of one that has some, have the same short names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phonograph.errors import DeclarationError

Values = tuple[tuple[str, str], ...]
"""The values of a product that are not plain, by axis, in the order of the axes."""
PLAIN: Values = ()


@dataclass(frozen=True)
class Axis:
    """A feature of batches that needs its own recording for each value: sampling, LoRA, a hidden-state mode."""

    name: str
    values: Sequence[str]
    """In order; the first is the plain one, which the phase's `sample` has."""
    of: Callable[[Any], str]
    """The value that a batch has."""
    apply: Callable[[Any, str], Any]
    """Takes a batch and a value; returns that batch with that value, and the values of other axes as they were."""
    unrecorded: frozenset[str] = field(default_factory=frozenset)
    """Values that get no recordings: their batches run eagerly and are counted, unless another recording stands in."""
    stands_in: bool = False
    """Whether a recording of a value gives batches of the values before it, bit for bit, what their own would give.

    It then serves those of them that have no recording. `verify` checks it.
    """

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values) or not all(map(_is_word, self.values)):
            raise DeclarationError(
                f"axis {self.name!r} has the values {list(self.values)}; expected different words, the plain one "
                "first. Correct them."
            )
        unknown = set(self.unrecorded) - set(self.values)
        if unknown:
            raise DeclarationError(
                f"axis {self.name!r} leaves {sorted(unknown)} unrecorded; its values are {list(self.values)}. "
                "Name some of these."
            )

    @property
    def plain(self) -> str:
        return self.values[0]

    def weaker(self, value: str) -> tuple[str, ...]:
        """The values that a recording of this one may serve: itself, and with `stands_in` those before it."""
        return tuple(reversed(self.values[: self.values.index(value) + 1])) if self.stands_in else (value,)

    def stronger(self, value: str) -> tuple[str, ...]:
        """The values whose recordings may serve this one, itself first."""
        return tuple(self.values[self.values.index(value) :]) if self.stands_in else (value,)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def check_axes(axes: Sequence[Axis], products: Sequence[Mapping[str, str]] | None, phase: str) -> None:
    """Refuse axes of one name, and products of what no axis has."""
    by_name = {axis.name: axis for axis in axes}
    if len(by_name) < len(axes):
        raise DeclarationError(f"phase {phase!r} has two axes of one name: {[axis.name for axis in axes]}. Rename one.")
    if products is not None and not products:
        raise DeclarationError(f"phase {phase!r} records no products at all. Leave products= out to record all.")
    for product in products or ():
        for name, value in product.items():
            if name not in by_name or value not in by_name[name].values:
                raise DeclarationError(
                    f"phase {phase!r} records the product {name}={value}, which its axes don't have: "
                    f"{ {axis.name: list(axis.values) for axis in axes} }. Correct products=."
                )


def named(axes: Sequence[Axis], values: Sequence[str]) -> Values:
    """A product by its values that are not plain."""
    return tuple((axis.name, value) for axis, value in zip(axes, values, strict=True) if value != axis.plain)


def spelled(axes: Sequence[Axis], product: Values) -> tuple[str, ...]:
    """A product by its value of every axis."""
    known = dict(product)
    return tuple(known.get(axis.name, axis.plain) for axis in axes)


def all_products(axes: Sequence[Axis]) -> list[Values]:
    """Every product; those of fewer features come first."""
    products = [named(axes, values) for values in itertools.product(*(axis.values for axis in axes))]
    return sorted(products, key=len)


def recorded_products(axes: Sequence[Axis], declared: Sequence[Mapping[str, str]] | None) -> list[Values]:
    """The products to record, the most important first: the last are the first to be left out."""
    found = []
    for product in all_products(axes):
        values = dict(zip((axis.name for axis in axes), spelled(axes, product), strict=True))
        is_declared = declared is None or any(one.items() <= values.items() for one in declared)
        if is_declared and not any(values[axis.name] in axis.unrecorded for axis in axes):
            found.append(product)
    return found


def weaker_products(axes: Sequence[Axis], product: Values) -> list[Values]:
    """The other products whose batches a recording of this one may serve."""
    choices = (axis.weaker(value) for axis, value in zip(axes, spelled(axes, product), strict=True))
    return [named(axes, values) for values in itertools.product(*choices)][1:]


def stronger_products(axes: Sequence[Axis], product: Values) -> list[Values]:
    """The other products whose recordings may serve batches of this one, the least strong first."""
    choices = (axis.stronger(value) for axis, value in zip(axes, spelled(axes, product), strict=True))

    def strength(values: Sequence[str]) -> int:
        return sum(axis.values.index(value) for axis, value in zip(axes, values, strict=True))

    return [named(axes, values) for values in sorted(itertools.product(*choices), key=strength)][1:]


def described(product: Values) -> str:
    """A product in words."""
    return ", ".join(f"{name}={value}" for name, value in product) or "the plain product"
