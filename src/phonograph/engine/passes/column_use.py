"""Column use: what passes say that they read and write, against the columns that there are.

A column without a writer holds its default forever, and one whose writer is not declared is restored wrongly after a
failed step: neither shows in a single step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from phonograph.engine.passes.base import Pass
from phonograph.engine.state.column import Column, Writer
from phonograph.errors import DeclarationError


def check_column_use(passes: Iterable[Pass], columns: Iterable[Column], written: Collection[str]) -> None:
    """Refuse passes that read what nobody writes, or write what is the host's; `written` names what all write."""
    by_name, passes = {column.name: column for column in columns}, tuple(passes)
    writers = {*written, *(name for one in passes for name in one.writes)}
    for one in passes:
        for name in (*one.reads, *one.writes):
            if name not in by_name:
                raise DeclarationError(
                    f"the pass {one.name!r} reads or writes the column {name!r}, which nobody declares. Name it in the "
                    "columns= of a pass of the engine; a chain has those of its own declaration."
                )
        for name in one.writes:
            if Writer.GRAPH not in by_name[name].writer:
                raise DeclarationError(
                    f"the pass {one.name!r} writes the column {name!r}, which only the host writes, as it is declared. "
                    "Add Writer.GRAPH to its writer."
                )
        for name in one.reads:
            if by_name[name].is_of_graph and name not in writers:
                raise DeclarationError(
                    f"the pass {one.name!r} reads the column {name!r}, which forward passes alone write, and none "
                    "does. Name it in the writes= of the pass that writes it, or let the host write it."
                )
