"""StepBuilder: the scheduler's plan for sequences as steps of plain data."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import count

import numpy as np

from phonograph.engine.execution.step_order import first_serial
from phonograph.engine.passes.registry import PassDeclaration, StepPasses
from phonograph.engine.passes.step import NO_ROWS, Decodes, PromptChunk, Step, Undone
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Chunk, ScheduledStep
from phonograph.engine.sampling.honoured import HonouredParameters
from phonograph.engine.sampling.needs import needs_of
from phonograph.engine.state.column import Array, Column, TableSizes
from phonograph.engine.state.updates import UpdateBuilder
from phonograph.errors import PhonographError, PlanError

_VERSIONS = count(secrets.randbits(62))
"""Numbers all builders, from a random start, so that those of two processes differ too."""


@dataclass(frozen=True)
class StepTables:
    """The request tables that steps are made for."""

    columns: Many[Column]
    sizes: TableSizes
    prompt_state: Many[str] = ()
    """Columns that hold something of a prompt, which pages don't: no prompt may be shared."""
    passes: Many[PassDeclaration] = ()
    """Those that a step can name."""

    def check(self, named: StepPasses, *, shares_prompts: bool) -> None:
        """Refuse steps that the tables or the passes are not made for."""
        if shares_prompts and self.prompt_state:
            names = ", ".join(self.prompt_state)
            raise PlanError(
                f"prompts are shared by their pages, which don't hold the state by row ({names}). Make the scheduler "
                "with prefix_cache=False."
            )
        fit = {
            "decodes": [one.name for one in self.passes if one.serves],
            "mixed": [one.name for one in self.passes if one.serves and one.is_ragged],
        }
        fit["embeds"] = [one.name for one in self.passes if one.serves and one.pools]
        for kind, name in (("decodes", named.decodes), ("mixed", named.mixed), ("embeds", named.embeds)):
            if name is not None and name not in fit[kind]:
                raise PlanError(
                    f"StepPasses names {name!r} for {kind}: no pass of the executor that can run such a step. "
                    f"Name one of: {', '.join(fit[kind]) or 'none'}."
                )


class StepBuilder:
    """Makes the steps of one executor; while the same sequences decode, little of one is new."""

    def __init__(self, tables: StepTables) -> None:
        self.honoured = HonouredParameters(tables.columns)
        self._updates = UpdateBuilder(tables.columns, tables.sizes)
        self._unknown = [one.name for one in tables.columns if one.is_of_graph and one.restored is None]
        """Columns that can't be restored after a failed step."""
        self._ragged = {one.name for one in tables.passes if one.is_ragged}
        """Passes that take the lengths of rows from the host."""
        self._sequences: tuple[Sequence, ...] = ()
        self._decodes = NO_ROWS
        self._longest = 0
        self._serial = self.last = first_serial()
        """The serials of the step that was built last, and of the last one that was not given up."""

    def build(self, planned: ScheduledStep) -> Step:
        """The step as the executor takes it; to be called when it is launched, since counts are those of now."""
        prefills = planned.prefills
        decodes, longest, lengths = self._decoding(planned) if planned.decodes else (NO_ROWS, 0, None)
        updates, follows = self._updates.build(planned), self.last
        ends = planned.sampling[len(planned.decodes) :]
        self._serial = self.last = serial = self._serial + 1
        return Step(
            planned.number,
            planned.pass_name,
            planned.tokens_per_row,
            decodes,
            longest,
            lengths,
            tuple(_prompt_chunk(one) for one in prefills),
            decodes.needs | needs_of(ends, self.honoured) if ends else decodes.needs,
            updates,
            serial,
            follows,
            planned.catches_up,
            planned.probes,
        )

    def give_up_after(self, last: int) -> None:
        """Continue after this serial: steps built since may or may not have been launched, and are not collected.

        Rows are put back, or their sequences are over.
        """
        self.last = last

    def _decoding(self, planned: ScheduledStep) -> tuple[Decodes, int, Array | None]:
        sequences = planned.decodes
        is_even = planned.tokens_per_row == 1 and planned.pass_name not in self._ragged
        if is_even and sequences is self._sequences and not planned.prefills:
            self._longest += 1
            return self._decodes, self._longest, None
        lengths = np.fromiter((one.num_computed for one in sequences), dtype=np.int64, count=len(sequences))
        if sequences is not self._sequences:
            rows = np.fromiter((one.row for one in sequences), dtype=np.int64, count=len(sequences))
            self._decodes = Decodes(next(_VERSIONS), rows, needs_of(sequences, self.honoured))
            self._sequences = sequences
        self._longest = int(lengths.max())  # where rows have several tokens, a commit may have taken some back
        return self._decodes, self._longest, lengths

    def undone(self, planned: ScheduledStep) -> Undone:
        """What puts the rows of a step that was given up back, from what the host knows of their sequences.

        All steps before it must be committed. Keys and values are written again as they were; what passes
        alone write by row is not known to the host, so that only a sequence that enters can be put back.
        """
        if self._unknown and (planned.decodes or not all(chunk.enters for chunk in planned.prefills)):
            names = ", ".join(self._unknown)
            raise PhonographError(
                f"the step raised, and per-row state ({names}) can't be restored. Send the request again."
            )
        return Undone(self._updates.undone(planned), self.last)


def _prompt_chunk(chunk: Chunk) -> PromptChunk:
    end = chunk.start + chunk.count
    following = next(iter(chunk.sequence.tokens(end, end + 1)), -1)
    asked = (chunk.samples, chunk.targets, chunk.pooled)
    return PromptChunk(chunk.sequence.row, chunk.start, chunk.tokens, *asked, following, chunk.num_stated)
