"""Chain: passes that run one after the other as one recording for each bucket and product of axes: one launch.

What a pass returns, the next one takes: it is an intermediate of the recording. What lives to the next step is a
column, and only what the host gives is a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from phonograph.engine.passes.base import Pass
from phonograph.engine.passes.registry import PassDeclaration
from phonograph.errors import DeclarationError


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


def chained(declared: PassDeclaration, *links: Pass) -> Pass:
    """The passes as one. Batches, samples and what trials keep are those of the first; the others read its batches.

    A step is repeated only if every link says that it is steady: one that reads no more than the first does has the
    first one's `is_steady`.
    """
    if not links:
        raise DeclarationError(f"the chain {declared.name!r} has no passes. Give at least one.")
    first, last = links[0], links[-1]
    for place, link in enumerate(links, 1):
        if link.bucketed != first.bucketed:
            raise DeclarationError(
                f"the chain {declared.name!r} records {first.name!r} by {first.bucketed} and {link.name!r} by "
                f"{link.bucketed}. One recording has one bucketed dim."
            )
        if link.tail is not None and place < len(links):
            raise DeclarationError(
                f"the chain {declared.name!r}: the pass {link.name!r} has a tail, which runs after the recording. "
                "Make it part of its body, or the pass the last one."
            )
    return replace(
        first,
        declared=declared,
        tokens_per_row=last.tokens_per_row,
        slots=_together(declared, [link.slots for link in links]),
        dims=_together(declared, [link.dims for link in links]),
        axes=_together(declared, [link.axes for link in links]),
        body=_ChainBody(tuple(link.body for link in links)),
        free=sorted({name for link in links for name in link.free}),
        tail=last.tail,
        is_steady=lambda step: all(link.is_steady(step) for link in links),
        written=None,  # what later passes write, the first does not know
    )


@dataclass(frozen=True)
class _ChainBody:
    bodies: tuple[Callable[..., Any], ...]

    def __call__(self, batch: Any) -> Any:
        handed = self.bodies[0](batch)
        for body in self.bodies[1:]:
            handed = body(batch, handed)
        return handed


def _together(declared: PassDeclaration, of_links: Sequence[Sequence[T]]) -> list[T]:
    """Each once, by name; two of one name must be the same."""
    found: dict[str, T] = {}
    for one in (one for ones in of_links for one in ones):
        if found.setdefault(one.name, one) != one:
            raise DeclarationError(f"the chain {declared.name!r} has two different {one.name!r}. Rename one of them.")
    return list(found.values())
