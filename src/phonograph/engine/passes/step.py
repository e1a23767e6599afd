"""Step: all that the executor needs to run one forward pass, as plain data that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.engine.state.column import Array
from phonograph.engine.state.updates import TableUpdates


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows that decode together; steps that follow each other may have the same."""

    version: int = 0
    """Another for other rows, or other needs; what is derived from a version can be kept."""
    rows: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    needs: SamplingNeeds = SamplingNeeds()


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens that the host knows, to be computed in one row from position `start` on."""

    row: int
    start: int
    tokens: tuple[int, ...]
    samples: bool
    """Whether the row's next token is sampled."""
    targets: tuple[int, ...] = ()
    """What follows its first tokens in the prompt, where the likelihood of each is wanted."""
    pooled: tuple[int, int] | None = None
    """Which of the tokens are summed, from the first up to the second; None for none."""
    following: int = -1
    """The token that comes after these; -1 where the host does not know it."""
    num_stated: int = 0
    """Of how many of its first tokens hidden states are wanted."""


NO_ROWS = Decodes()


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. Where decodes are, only the device tables know: the host counts what can be at most."""

    number: int
    pass_name: str
    tokens_per_row: int = 1
    """Tokens that it computes for each row that decodes."""
    decodes: Decodes = NO_ROWS
    longest: int = 0
    """Tokens that the longest of these rows has after this step, at most."""
    lengths: Array | None = None
    """The same for each row; None where nothing else is in the step, and the step before had just these rows."""
    prefills: tuple[PromptChunk, ...] = ()
    needs: SamplingNeeds = SamplingNeeds()
    """Of all rows that sample a token: decodes, then the chunks that say so."""
    updates: TableUpdates | None = None
    """To be written to the device tables before the pass runs."""
    serial: int = 0
    """Which of its builder's steps it is: an executor takes each once, in this order (see `StepOrder`)."""
    follows: int = 0
    """The serial of the step before it. Those between the two were abandoned: whether they ran is unknown."""
    catches_up: bool = False
    """Whether the pass that reads what earlier steps left (`Pass.before`) runs first."""
    probes: bool = False
    """Whether that pass drafts although the step is plain, and its drafts are read."""


@dataclass(frozen=True, slots=True)
class Undone:
    """Updates that restore the rows of an abandoned step."""

    updates: TableUpdates
    follows: int
    """The serial of the last step that was not."""
