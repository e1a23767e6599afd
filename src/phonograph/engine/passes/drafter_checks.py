"""Drafter checks: a drafter that can't work as it is declared is refused when its engine is made, by what is wrong.

Later nobody could tell: whatever a drafter does in service costs drafts, and no request fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from phonograph.engine.cache.groups import Kept
from phonograph.engine.models.interface import Model
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafter, Drafting, ReadsTarget
from phonograph.errors import DeclarationError
from phonograph.numbers import is_whole

_OF_ALL = ("reads", "writes", "draft", "keep_up")
_OF_READERS = ("taps", "kept", "features", "read")
"""What `Drafter` has, and what `ReadsTarget` has besides."""


def made_drafter(drafting: Drafting, parts: PassParts) -> Drafter:
    """The drafter of one pass of an engine, refused if it or its declaration does not fit."""
    drafter = drafting.make(parts)
    for problem in _problems(drafting, drafter, parts):
        raise DeclarationError(f"the drafter {drafting.name!r} {problem}")
    return drafter


def kept_in_pages(drafting: Drafting) -> Callable[[Model], Sequence[Kept]] | None:
    """What layers of the drafter's own keep, of which there must be some where it declares any."""
    if (keeps := drafting.keeps) is None:
        return None

    def kept(model: Model) -> Sequence[Kept]:
        if not (found := keeps(model)):
            raise DeclarationError(
                f"the drafter {drafting.name!r} declares pages of its own, and `keeps` gives none. Leave `keeps` out."
            )
        return found

    return kept


def _problems(drafting: Drafting, drafter: Drafter | None, parts: PassParts) -> Iterator[str]:
    """What is wrong, the first first: what comes later may count on what came before."""
    room = parts.limits.tokens_per_row - 1
    if drafting.depth != room:
        found = f"drafts {drafting.depth} tokens a round, where rounds of the engine have {room}"
        yield f"{found}. Declare the depth that is asked for."
    if drafter is None:
        yield "is None: `make` returns nothing. Return a drafter of these parts."
    if missing := _missing(drafter, _OF_ALL):
        yield f"has no {missing}. `Drafter` says what each is for."
    assert drafter is not None
    for name in ("reads", "writes"):
        columns = getattr(drafter, name)
        if isinstance(columns, str) or not all(isinstance(column, str) for column in columns):
            yield f"has {name} = {columns!r}, where names of columns are expected. Make it a tuple of texts."
    given = [name for name in _OF_READERS if hasattr(drafter, name)]
    if given and (missing := _missing(drafter, _OF_READERS)):
        yield (
            f"has {_listed(given)}, as one that reads hidden states of the model, but no {missing}. Add what "
            "`ReadsTarget` says, or leave all of it out."
        )
    reader = drafter if isinstance(drafter, ReadsTarget) else None
    if reader is not None:
        yield from _problems_of_reader(reader, parts)
    yield from _problems_of_unread(drafting, reader, parts)


def _problems_of_reader(reader: ReadsTarget, parts: PassParts) -> Iterator[str]:
    count, taps, kept = parts.model.config.num_layers, reader.taps, reader.kept
    if not isinstance(taps, tuple) or not taps or not all(is_whole(tap) and 0 <= tap < count for tap in taps):
        layers = f"the model has layers 0 to {count - 1}"
        yield f"taps the layers {taps!r}, and {layers}. Name at least one of these, in a tuple."
    if not isinstance(kept, tuple) or not kept or not all(isinstance(one, torch.Tensor) for one in kept):
        yield (
            f"has kept = {_shown(kept)}, where a tuple of the tensors that it writes is expected, at least one. Name "
            "those of its pages (`parts.beside`) or of its columns (`parts.tables`)."
        )
    if not kept[0].dtype.is_floating_point:
        yield (
            f"has a first tensor in kept of {kept[0].dtype}, and features are made of its type, which would round "
            "them. Put one of floating-point numbers first."
        )


def _problems_of_unread(drafting: Drafting, reader: ReadsTarget | None, parts: PassParts) -> Iterator[str]:
    unread, room = drafting.unread, parts.limits.unread_places
    places = 0 if unread is None else unread.places
    if places != room:
        yield (
            f"declares {places} places for unread tokens, where the engine has {room}: `Drafting.unread` and "
            "`Chosen.unread_places` say the same number. Make `unread` with that of `Chosen`."
        )
    if unread is None:
        return
    if reader is None:
        yield "declares `unread`, and reads no hidden states. Leave `unread` out."
    assert reader is not None
    left, taken = (unread.num_taps, unread.hidden), (len(reader.taps), parts.model.config.hidden)
    if left != taken:
        yield (
            f"declares `unread` of {left[0]} states of {left[1]} numbers, and taps {taken[0]} of {taken[1]}. Make them "
            "the same."
        )


def check_drafts(drafting: Drafting, drafter: Drafter, parts: PassParts, depths: Collection[int]) -> None:
    """Refuse a drafter whose drafts have another shape than is asked for, by rows of nobody and each of these depths.

    There are more rows than drafts or fewer, so that no transposed result has the right shape by chance. One that
    raises is let pass: it drafts nothing, with a warning.
    """
    for depth in depths:
        num_rows = min(parts.limits.max_seqs, 1 if depth == 2 else 2)
        try:
            found: object = drafter.draft(_of_nobody(drafter, parts, num_rows, drafting.depth + 1), depth)
        except Exception:
            continue
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        if shape != [num_rows, depth]:
            raise DeclarationError(
                f"the drafter {drafting.name!r} returns {shape} where {[num_rows, depth]} is asked for. "
                "Return a tensor of shape [num_rows, depth]."
            )


def _of_nobody(drafter: Drafter, parts: PassParts, num_rows: int, width: int) -> Accepted:
    """Rows of padding, as every recording has some."""
    tables, features = parts.tables, None
    rows = torch.zeros(num_rows, dtype=torch.int64, device=tables.length.device)
    if isinstance(drafter, ReadsTarget):
        features = drafter.kept[0].new_zeros((num_rows * width, parts.model.config.hidden))
    return Accepted(rows, rows.clone(), rows[:, None].repeat(1, width), rows.clone(), tables.pages, features)


def _missing(drafter: object, names: Sequence[str]) -> str:
    return _listed([name for name in names if not hasattr(drafter, name)])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shown(kept: object) -> str:
    """Without the numbers of tensors."""
    return repr(kept) if kept == () else f"a {type(kept).__name__}"
