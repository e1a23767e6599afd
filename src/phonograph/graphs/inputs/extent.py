"""Extent: by dim, the size that a batch uses and the padded size that a graph was recorded for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phonograph.errors import DeclarationError
from phonograph.numbers import is_whole


@dataclass(frozen=True)
class Dim:
    """A named size in a slot's shape, and what its padded size is.

    The bucketed dim of a phase takes its padded size from the bucket. Every other dim is either
    `limit` large in every graph, or `times` as large as the dim named by `per`.
    """

    name: str
    limit: int | None = None
    per: str | None = None
    times: int = 1
    field: str | None = None
    """The batch field that carries this dim's size, if there is one; may be dotted; the view gets the padded size."""

    def __post_init__(self) -> None:
        if not self.name:
            raise DeclarationError("declaring a dim: its name is empty. Write Dim('tokens').")
        if self.limit is not None and self.per is not None:
            raise DeclarationError(f"dim {self.name!r} has both a limit and per={self.per!r}. Give one of them.")
        if (self.limit is not None and not is_whole(self.limit, 1)) or not is_whole(self.times, 1):
            raise DeclarationError(
                f"dim {self.name!r} has limit={self.limit!r} and times={self.times!r}; "
                "expected positive whole numbers. Correct them, or leave them out."
            )
        if self.times != 1 and self.per is None:
            raise DeclarationError(
                f"dim {self.name!r} has times={self.times} and no per=. Name the dim it is a multiple of: per='…'."
            )
        if self.field is not None and not all(part.isidentifier() for part in self.field.split(".")):
            raise DeclarationError(
                f"dim {self.name!r}: {self.field!r} is not a dotted field name. Write one such as 'inputs.count'."
            )


@dataclass(frozen=True)
class Extent:
    """For each dim, how much is used and how much is padded."""

    used: Mapping[str, int]
    padded: Mapping[str, int]
    for_graph: bool = True
    """Whether a graph reads what is loaded; False where a computed slot's function is asked for the eager path."""

    @property
    def is_padded(self) -> bool:
        return self.used != self.padded

    def __str__(self) -> str:
        return ", ".join(f"{dim}={used}/{self.padded[dim]}" for dim, used in self.used.items())


def padded_sizes(dims: Mapping[str, Dim], bucketed: str, size: int) -> dict[str, int]:
    """The padded size of every dim when the bucketed one has `size`."""
    sizes: dict[str, int] = {}
    for name, dim in dims.items():
        if name == bucketed:
            sizes[name] = size
        elif dim.per is not None:
            sizes[name] = size * dim.times
        elif dim.limit is not None:
            sizes[name] = dim.limit
    return sizes


def check_dims(dims: Mapping[str, Dim], bucketed: str) -> None:
    """Refuse dims whose padded size can't be known."""
    if bucketed not in dims:
        raise DeclarationError(
            f"the bucketed dim {bucketed!r} is in no slot's shape (dims: {', '.join(dims)}). Name one of these."
        )
    for name, dim in dims.items():
        if name == bucketed:
            if dim.limit is not None or dim.per is not None:
                raise DeclarationError(
                    f"dim {name!r} is bucketed: its size comes from the buckets. Remove its limit or per."
                )
        elif dim.per is not None and dim.per != bucketed:
            raise DeclarationError(
                f"dim {name!r} is per {dim.per!r}, but only the bucketed dim {bucketed!r} varies. "
                f"Write per={bucketed!r}, or a limit."
            )
        elif dim.per is None and dim.limit is None:
            raise DeclarationError(
                f"unknown dim {name!r}: its size in a graph is not declared. "
                f"Add dims=[Dim({name!r}, limit=…)] or Dim({name!r}, per={bucketed!r}, times=…)."
            )
