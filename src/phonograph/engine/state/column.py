"""Column: one piece of request state on the device, with a value for every row, declared once.

A declaration says what the state looks like, who writes it and in which form, and how it is read. The tensor, the
host's updates, the values of trial runs, and what trial runs save and put back all follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import Any

import numpy as np
import torch

from phonograph.engine.requests.parameter import SamplingParameter
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import ScheduledStep
from phonograph.errors import DeclarationError
from phonograph.graphs.inputs.values import numpy_dtype
from phonograph.numbers import is_whole
from phonograph.sizes import ceil_div

Array = np.ndarray[Any, np.dtype[Any]]
_LARGEST = {
    torch.float16: 65504.0,
    torch.bfloat16: 2.0**128 - 2.0**120,
    torch.float32: 2.0**128 - 2.0**104,
}


class Width(Enum):
    """Widths that depend on the model and the limits."""

    VOCABULARY = "vocabulary"
    BITS = "bits"
    """A bit for every token of the vocabulary, packed into int32 words, the lowest bit first."""
    PAGES = "pages"
    """As many as the longest sequence has."""
    POSITIONS = "positions"
    """A place for every position that a step may compute."""


class Writer(Flag):
    """Who writes a column."""

    ENTRY = auto()
    """The host, when a sequence takes its row: fresh, or again after a preemption."""
    STEP = auto()
    """The host, before every step that has something for it."""
    GRAPH = auto()
    """The forward pass itself."""


class Form(Flag):
    """In which form the host's values go over."""

    ROW = auto()
    """All of a row."""
    PAIRS = auto()
    """(index, value) for the few places of a row that change; the others stay."""
    RESET = auto()
    """Nothing goes over: a row with a new owner is set to the default, on the device, before anything else."""


class Access(Enum):
    """How a forward pass reads a column."""

    GATHERED = "gathered"
    """The rows of the batch are gathered first."""
    BY_ROW = "by row"
    """Kernels get the whole tensor and the rows, and index it themselves."""


@dataclass(frozen=True, slots=True)
class RowSource:
    """What the values of a row are made from: its sequence, and how far that is computed."""

    sequence: Sequence
    start: int
    """Tokens that are computed already: the length that its row begins with."""

    @property
    def params(self) -> SamplingParams:
        return self.sequence.request.params


@dataclass(frozen=True)
class TrialRows:
    """Rows 1 to `count`, for trial runs, and the random numbers to fill them with."""

    count: int
    vocab: int
    page_size: int
    num_pages: int
    """Of each row's own, after the one that all rows read."""
    last_start: int
    """Where a row's last token may be: what a step writes from there on finds room in the row's pages."""
    numbers: torch.Generator

    def whole(self, low: int, high: int) -> torch.Tensor:
        """A whole number for each row, below `high`."""
        return torch.randint(low, high, (self.count,), generator=self.numbers)

    @property
    def num_positions(self) -> int:
        """Of a row, in all of its pages."""
        return (1 + self.num_pages) * self.page_size


@dataclass(frozen=True)
class TableSizes:
    """What the widths of columns depend on."""

    max_seqs: int
    vocab: int
    max_pages: int
    num_positions: int = 0

    def width(self, width: int | Width) -> int:
        """A width as a number."""
        match width:
            case Width.VOCABULARY:
                return self.vocab
            case Width.BITS:
                return ceil_div(self.vocab, 32)
            case Width.PAGES:
                return self.max_pages
            case Width.POSITIONS:
                return self.num_positions
        return width


@dataclass(frozen=True)
class Group:
    """Columns that come into being together: with the tables, or when somebody needs them.

    Where only some sequences ask for a group, the rows of the others hold the defaults and cost nothing. What a forward
    pass itself writes into those rows does not matter, until a sequence that asks takes one of them.
    """

    name: str
    """What it is, for errors."""
    asked: Callable[[Sequence], bool] | None = None
    """Whether a sequence needs it; None where all do."""
    parameters: tuple[SamplingParameter, ...] = ()
    """Sampling parameters that ask for it, by any of which `asked` goes."""

    @classmethod
    def asked_by(cls, name: str, *parameters: SamplingParameter) -> Group:
        """For requests that set one of these parameters."""

        def asked(sequence: Sequence) -> bool:
            params = sequence.request.params
            return any(one.is_set(params) for one in parameters)

        return cls(name, asked, parameters)


TABLES = Group("request tables")
"""What every sequence has."""


@dataclass(frozen=True)
class Column:
    """The declaration of a column."""

    name: str
    dtype: torch.dtype
    default: float = 0
    """What rows hold that were never written, and what a reset leaves."""
    width: int | Width = 1
    """1 makes a tensor of [rows], everything else one of [rows, width]."""
    writer: Writer = Writer.ENTRY
    form: Form = Form.ROW
    value: Callable[[RowSource], Any] | None = None
    """What the host writes for a sequence: a number; a row, which the default fills where it is short (of `Width.BITS`,
    zeros); or of pairs a tuple of all indices and all values, no index with two values. A value that the type can't
    hold, and a row that is too long, fail the request."""
    changes: Callable[[ScheduledStep], Many[tuple[int, int, Any]]] | None = None
    """Pairs that the step lists itself, as (row, index, value), instead of `value`; names no place twice."""
    restored: Callable[[RowSource], Any] | None = None
    """Of a column that the forward pass alone writes, what the host knows of a row: for a step that is undone."""
    from_prompt: bool = True
    """Of a column that the forward pass alone writes: whether the tokens of a prompt go into it. Pages don't hold it,
    so that no prompt can be shared then."""
    access: Access = Access.GATHERED
    trial: Callable[[TrialRows], torch.Tensor] | None = None
    """Values for trial runs, for the first places of each row; None leaves what is there."""
    group: Group = TABLES
    parameter: SamplingParameter | None = None
    """The sampling parameter that it carries: requests may set it then."""
    is_public: bool = False
    """Whether files may have it: it tells nothing of which tokens a request has."""

    @property
    def is_of_graph(self) -> bool:
        """Whether the forward pass alone writes it, so that the host does not know what it holds."""
        return self.writer == Writer.GRAPH

    @property
    def is_sent(self) -> bool:
        """Whether the host ever writes it, if only to undo a step."""
        return self.value is not None or self.changes is not None or self.restored is not None

    def __post_init__(self) -> None:
        problem = next((problem for wrong, problem in self._problems() if wrong), None)
        if problem is not None:
            raise DeclarationError(f"column {self.name!r} {problem}")

    def _problems(self) -> Iterable[tuple[bool, str]]:
        by_host, sent = bool(self.writer & (Writer.ENTRY | Writer.STEP)), bool(self.form & (Form.ROW | Form.PAIRS))
        given = (self.value is not None) + (self.changes is not None)
        is_width = isinstance(self.width, Width) or is_whole(self.width)
        yield not self.name.isidentifier(), "has no name that a field can have. Rename it."
        yield (
            self.is_sent and numpy_dtype(self.dtype) is None,
            f"is {self.dtype}, which numpy can't write. Take another.",
        )
        yield not is_width, f"is {self.width!r} wide. Give it a whole number, or a Width."
        yield (
            not isinstance(self.width, Width) and self.width < 1,
            f"is {self.width} wide. Give it a width of at least 1.",
        )
        yield not _holds(self.dtype, self.default), f"has the default {self.default!r}, which {self.dtype} can't hold."
        yield not self.writer, "has no writer. Take ENTRY, STEP or GRAPH."
        yield self.width is Width.BITS and self.dtype != torch.int32, "holds bits, packed into int32. Make it int32."
        yield Form.ROW | Form.PAIRS in self.form, "goes over in two forms. Take ROW or PAIRS."
        yield Writer.ENTRY | Writer.STEP in self.writer, "is written at entry and in every step. Take one."
        yield Form.PAIRS in self.form and self.width == 1, "is one value wide and has no places for pairs. Take ROW."
        yield (
            given > int(by_host and sent),
            "has a source that nobody writes from. Give the host a form to write it in.",
        )
        yield given < int(by_host and sent), "is written by the host: say from what, by value= or changes=."
        yield (
            self.changes is not None and (Writer.STEP not in self.writer or Form.PAIRS not in self.form),
            "lists changes: they are pairs, written by STEP.",
        )
        yield (
            Form.PAIRS in self.form and Form.RESET not in self.form,
            "goes over in pairs, and a new owner of a row would find those of the last one. Take PAIRS | RESET.",
        )
        yield (
            self.is_of_graph and Form.RESET not in self.form and self.restored is None,
            "is written by the forward pass alone, and a new owner of a row would find what the last one left. "
            "Take form=Form.RESET.",
        )
        yield (
            self.parameter is not None and self.group.asked is not None and self.parameter not in self.group.parameters,
            f"carries a parameter that does not ask for its group, {self.group.name!r}, and would not be written. Name "
            "it in Group.asked_by.",
        )
        yield (
            self.restored is not None and (by_host or self.width != 1),
            "is restored from what the host writes, or wide: `restored` is for one value that the graph alone writes.",
        )


def _holds(dtype: torch.dtype, default: object) -> bool:
    """Whether a type holds a default, but for its precision."""
    if not isinstance(default, bool | int | float):
        return False
    if dtype.is_floating_point:
        return not math.isfinite(default) or abs(default) <= _LARGEST.get(dtype, math.inf)
    if dtype == torch.bool:
        return default in (0, 1)
    return float(default).is_integer() and torch.iinfo(dtype).min <= default <= torch.iinfo(dtype).max
