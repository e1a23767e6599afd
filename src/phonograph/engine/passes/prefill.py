"""prefill: chunks of prompts and, among them, rows that decode."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from phonograph.engine.ops.attention.apart import ApartAttention
from phonograph.engine.ops.attention.gaps import GapAttention
from phonograph.engine.ops.queries import Queries, Span
from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.prefill_batch import PrefillBatch, PrefillBatches, after_rounds, rows_and_positions
from phonograph.engine.passes.prompt_scores import PromptScores, score_prompts
from phonograph.engine.passes.readback import Picked
from phonograph.engine.passes.registry import PREFILL, PassDeclaration
from phonograph.engine.passes.rounds import PickedPlaces, Rounds, joined, widened
from phonograph.engine.sampling.needs import SamplingNeeds
from phonograph.errors import DeclarationError
from phonograph.graphs.inputs.extent import Dim, Extent
from phonograph.graphs.inputs.slot import Pad, Slot
from phonograph.graphs.phases.context import BREAKING, Stage, current


class TokenStates(NamedTuple):
    """Hidden states, and all that is known of the tokens."""

    hidden: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    features: torch.Tensor | None = None
    """What rounds take of them, if anything."""


class PrefillBody:
    """Runs the model over chunks and decodes; the tail picks their tokens.

    Where a row decodes one token, the host's count of its length is exact, and spans tell of every token. Rounds have
    lengths that only the tables know: their tokens and positions are found there, and spans tell of chunks alone.
    """

    def __init__(self, parts: PassParts, rounds: Rounds | None, backend: str) -> None:
        self._parts = parts
        self._rounds = rounds
        self._attends_in_gaps = backend in BREAKING
        model = parts.model_for(backend)
        inner = model.attention
        self._model = model.with_attention(GapAttention(inner if rounds is None else ApartAttention(inner)))

    def __call__(self, batch: PrefillBatch) -> torch.Tensor | TokenStates:
        """Hidden states of the tokens that something is sampled after."""
        found = self.found(batch, batch.ends)
        return self.at_ends(found, found.hidden, batch.ends)

    def at_ends(self, found: TokenStates, hidden: torch.Tensor, ends: torch.Tensor) -> torch.Tensor | TokenStates:
        """What the tail takes of the tokens at `ends`, whose hidden states these are."""
        if self._rounds is None:
            return hidden
        features = None if found.features is None else found.features[ends]
        return TokenStates(hidden, found.tokens[ends], found.rows[ends], found.positions[ends], features)

    def found(self, batch: PrefillBatch, wanted: torch.Tensor | None) -> TokenStates:
        """Hidden states of the wanted tokens, or of all; and all that is known of every token."""
        tables, rows, rounds, positions = self._parts.tables, batch.rows, self._rounds, batch.positions
        if rounds is None:
            decoded = tables.last_token[rows]
        else:
            decoded = rounds.tokens(rows, positions * batch.decoding)
            positions = torch.where(batch.decoding, tables.length[rows] + positions, positions)
        tokens = torch.where(batch.decoding, decoded, batch.tokens)
        # A recording may not look at the host's spans; an eager pass is faster with them.
        spans = batch.spans if current().stage is Stage.EAGER else None
        queries = Queries(rows, positions, tables.pages[:, : batch.width], None, spans, batch.spans_from)
        if rounds is None:
            hidden = self._model.hidden(tokens, queries, self._parts.cache, wanted=wanted)
            return TokenStates(hidden.states, tokens, rows, positions)
        hidden = self._model.hidden(tokens, queries, self._parts.cache, wanted=wanted, taps=rounds.taps)
        if not rounds.taps:
            return TokenStates(hidden.states, tokens, rows, positions)
        # In gaps of a recording the model attends by spans. What reads its states is recorded, and attends by token.
        if self._attends_in_gaps:
            queries = replace(queries, spans=None, spans_from=0)
        features = rounds.read(tokens, batch.following, queries, hidden.taps)
        return TokenStates(hidden.states, tokens, rows, positions, features)

    def tail(self, hidden: torch.Tensor, batch: PrefillBatch) -> Picked:
        """Logits and tokens, of as many sequences as there are."""
        scores, ends = self._scores(hidden, batch), batch.ends
        if scores is not None or batch.num_stated:
            ends = ends[: batch.num_sampled]
        queries = Queries(batch.rows[ends], batch.positions[ends], self._parts.tables.pages, tokens_per_row=1)
        # A graph whose places for them never change in number puts out all of them.
        logits = self._model.logits(hidden[: ends.shape[0]])
        picked = self._parts.tail.next_tokens(logits, queries, batch.needs)
        picked = picked if scores is None else picked._replace(scores=scores)
        return self._with_states(picked, hidden, batch)

    def _with_states(self, picked: Picked, hidden: torch.Tensor, batch: PrefillBatch) -> Picked:
        """With the hidden states that requests want; of rounds they lie as their tokens do."""
        if batch.num_stated:
            picked = picked._replace(prompt_states=hidden[: batch.ends.shape[0]][-batch.num_stated :].float())
        if not batch.needs.states:
            return picked
        states, first, width = hidden[: batch.num_sampled].float(), batch.spans_from, batch.tokens_per_row
        if picked.tokens.dim() == 2:
            rounds, ends = states[:first].view(-1, width, states.shape[1]), states[first:, None]
            states = torch.cat([rounds, functional.pad(ends, (0, 0, 0, width - 1))])
        return picked._replace(states=states)

    def _scores(self, hidden: torch.Tensor, batch: PrefillBatch) -> PromptScores | None:
        """How likely the tokens of prompts are. Before anything is written: it may fail, and the step be run again."""
        if batch.targets is None:
            return None
        targets = torch.as_tensor(batch.targets)
        if hidden.is_cuda:  # from other memory, a copy would wait for the pass, and the host for the copy
            targets = targets.pin_memory()
        targets = targets.to(hidden.device, non_blocking=True)
        wanted = hidden[batch.num_sampled : batch.num_sampled + targets.shape[0]]
        return score_prompts(wanted, targets, self._model.logits, self._parts.sampler)

    def rounds_tail(self, found: TokenStates, batch: PrefillBatch) -> Picked:
        """As `tail`, where rows that decode have rounds; the rows of prompts get one token each."""
        scores = self._scores(found.hidden, batch)
        picked = self._picked_rounds(found, batch)
        picked = picked if scores is None else picked._replace(scores=scores)
        return self._with_states(picked, found.hidden, batch)

    def _picked_rounds(self, found: TokenStates, batch: PrefillBatch) -> Picked:
        assert self._rounds is not None
        count, first, width = batch.num_sampled, batch.spans_from, batch.tokens_per_row
        if not count:
            return Picked(found.tokens.new_empty((0, width) if width > 1 else 0))
        logits, parts, said = self._model.logits(found.hidden[:count]), list[Picked](), list[torch.Tensor]()
        if first:
            queries = self._queries(found, batch, slice(first), width)
            picked, tokens = self._rounds.accept(logits[:first], found.tokens[:first], queries, batch.needs)
            parts.append(picked)
            said.append(tokens.flatten())
        if first < count:
            queries = self._queries(found, batch, slice(first, count), 1)
            ends = self._parts.tail.next_tokens(logits[first:], queries, batch.needs)
            parts.append(widened(ends, width) if width > 1 and not first else ends)
            said.append(ends.tokens.clamp_min(0))
        both = joined(*parts) if len(parts) > 1 else parts[0]
        if width == 1 and self._rounds.leaves:
            return both
        handed = PickedPlaces.of(
            batch.sampled_rows,
            torch.cat(said) if len(said) > 1 else said[0],
            found.positions[:count],
            None if found.features is None else found.features[:count],
            first=first,
            width=batch.width,
            tokens_per_row=width,
        )
        return both._replace(handed=handed)

    def _queries(self, found: TokenStates, batch: PrefillBatch, part: slice, tokens_per_row: int) -> Queries:
        """Where some of the ends stand."""
        table = self._parts.tables.pages[:, : batch.width]
        return Queries(found.rows[part], found.positions[part], table, tokens_per_row=tokens_per_row)


class PrefillSample:
    """Chunks of random length, decodes among them, as far as there are rows for trials; the rest is padding."""

    def __init__(self, parts: PassParts, *, spans: bool, following: bool = False) -> None:
        self._trials = parts.trials
        self._has_following = following
        self._page_size = parts.limits.page_size
        self._width = parts.limits.tokens_per_row
        self._vocab = parts.model.config.vocab
        self._spans = spans
        """Whether samples tell their spans, as gaps between graphs want to know them."""

    def __call__(self, extent: Extent, seed: int) -> PrefillBatch:
        numbers = np.random.default_rng(seed)
        total, num_ends = extent.used["tokens"], extent.used["sampled"]
        num_rounds = self._num_rounds(numbers, total, num_ends)
        first = num_rounds * self._width
        spans = self._chunks(numbers, num_rounds, first, total)
        known = spans[-1].first + spans[-1].count if spans else first
        rows, positions = np.zeros((2, total), dtype=np.int64)
        places = [(span.row, span.start, span.count) for span in spans]
        found = rows_and_positions(*np.asarray(places, dtype=np.int64).reshape(len(spans), 3).T)
        if first:
            found = after_rounds(np.arange(1, num_rounds + 1), self._width, *found)
        rows[:known], positions[:known] = found
        ends = np.zeros(num_ends, dtype=np.int64)
        lasts = [*range(first), *(span.first + span.count - 1 for span in spans)][:num_ends]
        ends[: len(lasts)] = lasts
        tokens = numbers.integers(0, self._vocab, size=total)
        tokens[known:] = 0  # all padding writes the same to the null page, in whatever order
        told = tuple(spans) if self._spans else None
        decoding = np.zeros(total, dtype=bool)
        decoding[:first] = True
        if self._width == 1:
            decoding[[span.first for span in spans if span.count == 1]] = True
        width, needs = self._trials.width, SamplingNeeds()
        following = np.roll(tokens, -1) if self._has_following else None
        if following is not None:
            following[known:] = following[lasts] = -1
        sampled_rows = rows[np.concatenate([ends[: first : self._width], ends[first:]])]
        return PrefillBatch(
            *(tokens, rows, positions, decoding, ends, width, needs, told, first, None, following, self._width),
            sampled_rows=sampled_rows,
        )

    def _num_rounds(self, numbers: np.random.Generator, total: int, num_ends: int) -> int:
        """Rows that decode several tokens, each with all of its places."""
        if self._width == 1:
            return 0
        return int(numbers.integers(0, min(total // self._width, num_ends // self._width, self._trials.num_rows) + 1))

    def _chunks(self, numbers: np.random.Generator, num_rounds: int, first: int, total: int) -> list[Span]:
        spans = list[Span]()
        for row in range(num_rounds + 1, self._trials.num_rows + 1):
            count = min(total - first, int(numbers.integers(1, self._page_size + 1)))
            if count == 0:
                break
            spans.append(Span(row, first, self._page_size, count))
            first += count
        return spans


def prefill_pass(
    parts: PassParts, backend: str, declared: PassDeclaration = PREFILL, rounds: Rounds | None = None
) -> Pass:
    """The pass over all tokens of a step; `rounds` say what rows that decode several of them compute."""
    limits, body = parts.limits, PrefillBody(parts, rounds, backend)
    if (rounds is None) != (limits.tokens_per_row == 1):
        raise DeclarationError(
            f"the pass {declared.name!r} for {limits.tokens_per_row} tokens a row has "
            f"{'no rounds' if rounds is None else 'rounds'}. Give rounds where a row decodes several, and only there."
        )
    length, ids = parts.tables.length, (0, parts.model.config.vocab - 1)
    after = {"pad": Pad.fill(-1), "valid": (-1, ids[1])}
    read = [Slot("following", ("tokens",), torch.int64, **after)] if rounds and rounds.taps else []  # type: ignore[arg-type]

    def written(batch: PrefillBatch) -> tuple[torch.Tensor, torch.Tensor]:
        rows, positions = (torch.as_tensor(one).to(length.device) for one in (batch.rows, batch.positions))
        if rounds is not None:  # where the host knows offsets only
            positions = torch.where(
                torch.as_tensor(batch.decoding).to(length.device), length[rows] + positions, positions
            )
        return rows, positions

    return Pass(
        declared,
        tokens_per_row=None,
        bucketed="tokens",
        slots=[
            Slot("tokens", ("tokens",), torch.int64, pad=Pad.fill(0), valid=ids),
            Slot("rows", ("tokens",), torch.int64, pad=Pad.fill(0, null=True), valid=(0, limits.max_seqs)),
            Slot("positions", ("tokens",), torch.int64, pad=Pad.fill(0), valid=(0, limits.num_positions - 1)),
            Slot("decoding", ("tokens",), torch.bool, pad=Pad.fill(False)),
            Slot("ends", ("sampled",), torch.int64, pad=Pad.fill(0), valid=(0, limits.max_tokens - 1)),
            *read,
        ],
        dims=[Dim("sampled", limit=limits.num_places)],
        batch=PrefillBatches(limits, rounds).batch,
        written=written,
        public=(
            *("rows", "positions", "decoding", "ends", "width", "spans", "spans_from", "tokens_per_row"),
            "sampled_rows",
        ),
        body=body,
        free=("width", "spans_from", "tokens_per_row"),
        tail=body.tail if rounds is None else body.rounds_tail,
        sample=PrefillSample(parts, spans=backend in BREAKING, following=bool(read)),
        preserve=parts.trials.running,
    )
