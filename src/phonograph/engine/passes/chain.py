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
from phonograph.engine.state.column import Column
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
        _check_state(declared, link)
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
        reads=sorted({name for link in links for name in link.reads}),
        writes=sorted({name for link in links for name in link.writes}),
        free=sorted({name for link in links for name in link.free}),
        tail=last.tail,
        is_steady=lambda step: all(link.is_steady(step) for link in links),
        written=None,  # what later passes write, the first does not know
    )


def _check_state(declared: PassDeclaration, link: Pass) -> None:
    """Refuse a link with columns or pages that the chain does not have: an engine makes those of the chain alone."""
    ours = {column.name: _looks(column) for column in declared.columns()}
    for column in link.declared.columns():
        if column.name not in ours:
            raise DeclarationError(
                f"the chain {declared.name!r} has no column {column.name!r}, which its pass {link.name!r} declares. "
                "Name it in the columns= of the chain."
            )
        if ours[column.name] != _looks(column):
            raise DeclarationError(
                f"the chain {declared.name!r} and its pass {link.name!r} declare the column {column.name!r} "
                "differently. Declare it once."
            )
    if link.declared.keeps not in (None, declared.keeps):
        raise DeclarationError(
            f"the pass {link.name!r} of the chain {declared.name!r} keeps something else in pages than the chain, and "
            "all links share its one cache group. Give both the same keeps=, or let the link be a pass of its own."
        )


def _looks(column: Column) -> tuple[Any, ...]:
    """All that two declarations of one column must agree in; their functions may be made anew."""
    return (
        *(column.dtype, column.default, column.width, column.writer, column.form),
        *(column.from_prompt, column.access, column.group),
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
