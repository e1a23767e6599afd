"""Drafter writes: before the first request a drafter runs once on a few rows, and must write nothing but its own.

What it writes besides is read again by the rounds, eagerly and in replays alike, so that no comparison of the two shows
it: a wrong length or table is a wrong token, or a row that never ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from phonograph.devices.refused import Refused, RefusingOps
from phonograph.devices.trace import is_users, tensors_in, uncompiled, written_tensors
from phonograph.engine.ops.queries import Queries
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafter_samples import DrafterSamples
from phonograph.engine.passes.drafting import Accepted, Drafter, Drafting, ReadsTarget
from phonograph.engine.passes.registry import TARGET_VERIFY
from phonograph.engine.passes.unread import UnreadSize
from phonograph.engine.requests.limits import half_width
from phonograph.errors import CaptureError, DeclarationError, Frame
from phonograph.graphs.recording.written_inputs import bits_of, overlapped, span

_ENGINE_DIR = str(Path(__file__).parent.parent)
_DRAFT = "draft"
"""The column of drafts, which the rounds write after the drafter."""
_NOT_NAMED = "which its `writes` does not name", "Name it there"
_OF_THE_ENGINE = "which is the engine's", "Keep what it notes in columns that its Drafting declares"
_LENT = "which is lent to it, and read again after it", "Write to a copy (x = x.clone())"
_UNKNOWN = "which it neither makes nor declares", "Make it in the call, or let its Drafting declare a column for it"


@dataclass(frozen=True)
class _Foreign:
    """Memory that a drafter may read, and must not write."""

    name: str
    tensor: torch.Tensor
    why: tuple[str, str]
    """What it is to the drafter, and what to do."""
    part: torch.Tensor
    """What is compared before and after a call, for kernels that torch does not dispatch: where the samples are."""


def check_writes(drafting: Drafting, drafter: Drafter, parts: PassParts) -> None:
    """Refuse a drafter that says or shows that it writes what is not its own."""
    own = {column.name for column in drafting.columns()}
    for name in drafter.writes:
        if name not in {*own, _DRAFT} and any(column.name == name for column in parts.tables.columns):
            raise DeclarationError(
                f"the drafter {drafting.name!r} names the column {name!r} in its `writes`, which is the engine's. "
                "Leave it out, and have the drafter write columns that its Drafting declares."
            )
    samples = DrafterSamples(parts)
    check = _Check(drafting, drafter, samples, parts)
    with samples.running():
        for call, function, arguments in _calls(drafter, samples, drafting.unread):
            check.run(call, function, arguments)


def _calls(
    drafter: Drafter, samples: DrafterSamples, unread: UnreadSize | None
) -> Iterator[tuple[str, Callable[..., Any], Mapping[str, Any]]]:
    """What an engine calls of a drafter: names, methods and arguments."""
    states: torch.dtype | None = None
    if isinstance(drafter, ReadsTarget) and drafter.kept:
        states = drafter.kept[0].dtype
        yield "features", drafter.features, {"taps": samples.taps(len(drafter.taps))}
        yield "read", drafter.read, samples.prompt(states)
    # Rounds bring as many places as are computed; before a step there is what plain ones left.
    width, half, late = samples.width, half_width(samples.width), 1 if unread is None else unread.places
    for places, depth in dict.fromkeys(((width, width - 1), (half, half - 1), (late, width - 1))):
        accepted = samples.accepted(places, states)
        if depth:
            yield "draft", drafter.draft, {"accepted": accepted, "depth": depth}
        yield "keep_up", drafter.keep_up, {"accepted": accepted}


class _Check:
    """Runs calls of a drafter, and refuses what they write besides its own."""

    def __init__(self, drafting: Drafting, drafter: Drafter, samples: DrafterSamples, parts: PassParts) -> None:
        self._name, self._parts, self._trials = drafting.name, parts, samples.trials
        self._columns = {column.name for column in drafting.columns()}
        self._writes = {*(name for name in drafter.writes if name in self._columns), _DRAFT}
        self._group = None if drafting.keeps is None else parts.beside.get(TARGET_VERIFY.name)
        kept = drafter.kept if isinstance(drafter, ReadsTarget) else ()
        pages = () if self._group is None else self._group.tensors
        own = (*kept, *pages, *(parts.tables[name] for name in self._writes))
        self._own = {str(at): span(one) for at, one in enumerate(own) if one.numel()}
        self._made: dict[int, StorageWeakRef] = {}

    def run(self, call: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """One call. What it raises of its own is told in service, where it drafts nothing."""
        lent = [_Foreign(name, one, _LENT, one) for name, one in _tensors(arguments) if one.numel()]
        foreign = {one.name: one for one in (*lent, *self._of_the_engine())}
        spans = {name: span(one.tensor) for name, one in foreign.items()}
        before = {name: bits_of(one.part).clone() for name, one in foreign.items()}
        refused = Refused()

        def run(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
            for tensor in written_tensors(func, args, kwargs):
                name = overlapped(tensor, spans)
                self._refuse(func, tensor, None if name is None else foreign[name])
            result = func(*args, **kwargs)
            self._note_made((args, kwargs), result)
            return result

        with suppress(Exception), uncompiled(), RefusingOps(run, refused):
            function(*arguments.values())
        if refused.errors:
            raise DeclarationError(f"the drafter {self._name!r}, in `{call}`: {refused.errors[0]}.")
        for name, one in foreign.items():
            if not torch.equal(bits_of(one.part), before[name]):
                problem, remedy = one.why
                raise DeclarationError(
                    f"the drafter {self._name!r}, in `{call}`: a kernel that torch does not see writes {name}, "
                    f"{problem}. {remedy}."
                )

    def _refuse(self, func: Any, tensor: torch.Tensor, foreign: _Foreign | None) -> None:
        """Raise where an op writes memory of somebody else's, or of nobody's."""
        what, why = "" if foreign is None else foreign.name, _UNKNOWN if foreign is None else foreign.why
        if _is_interpreted():
            return
        if foreign is None:
            is_made = tensor.untyped_storage()._cdata in self._made
            # Ops of libraries have memory of their own, to work in.
            if is_made or overlapped(tensor, self._own) or not tensor.numel() or func.namespace != "aten":
                return
            what = f"a tensor {list(tensor.shape)} of {tensor.dtype}"
        op = str(func).removesuffix(".default")
        raise CaptureError(f"{op} writes {what}, {why[0]}", why[1], op=op, frame=_line())

    def _note_made(self, given: object, result: object) -> None:
        known = {one.untyped_storage()._cdata for one in tensors_in(given)}
        for one in tensors_in(result):
            storage = one.untyped_storage()
            if storage._cdata not in known:
                self._made[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _of_the_engine(self) -> Iterator[_Foreign]:
        """The memory of requests that is not the drafter's."""
        tables, trials = self._parts.tables, self._trials
        for column in tables.columns:
            if column.name not in self._writes and tables.is_made(column.group):
                tensor, why = tables[column.name], _NOT_NAMED if column.name in self._columns else _OF_THE_ENGINE
                yield _Foreign(f"the column {column.name!r}", tensor, why, tensor[: trials.num_rows + 1])
        groups = {"the model": self._parts.cache}
        groups |= {f"the pass {name!r}": one for name, one in self._parts.beside.items() if one is not self._group}
        for owner, group in groups.items():
            for at, tensor in enumerate(group.tensors):
                name = f"the KV cache of {owner} ({at})"
                yield _Foreign(name, tensor, _OF_THE_ENGINE, tensor[:, : trials.num_pages])


def _is_interpreted() -> bool:
    """Whether Triton's interpreter runs the op: it copies all arguments of a kernel back, written or not."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _Check.run.__code__:
        if frame.f_globals.get("__name__") == "triton.runtime.interpreter":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _line() -> Frame | None:
    """The innermost line of a user's in the call; in a drafter of the package, its innermost line."""
    nearest, frame = None, sys._getframe(1)
    while frame is not None and frame.f_code is not _Check.run.__code__:
        file = frame.f_code.co_filename
        found = Frame(file, frame.f_lineno, frame.f_code.co_name)
        if is_users(file):
            return found
        if nearest is None and file.startswith(_ENGINE_DIR) and file != __file__:
            nearest = found
        frame = frame.f_back  # type: ignore[assignment]
    return nearest


def _tensors(arguments: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of a call, by name."""
    for name, value in arguments.items():
        if isinstance(value, Accepted | Queries):
            held = {field.name: getattr(value, field.name) for field in fields(value)}
            yield from ((f"{name}.{part}", one) for part, one in held.items() if isinstance(one, torch.Tensor))
        elif isinstance(value, tuple):
            yield from ((f"{name}[{at}]", one) for at, one in enumerate(value))
        elif isinstance(value, torch.Tensor):
            yield name, value
