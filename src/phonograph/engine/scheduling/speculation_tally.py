"""SpeculationTally: acceptance of drafts by position, tokens per round, and why rows decoded without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat

from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Sampled, ScheduledStep, StepKind, Update, kind_of
from phonograph.engine.scheduling.acceptance import Brought
from phonograph.engine.scheduling.probes import Probes

PLAIN_REASONS: Mapping[str, str] = {
    "grammar": "a grammar, or forbidden words of several tokens",
    "request": "the request takes no drafts",
    "cost": "rounds would not have paid",
    "no_draft": "there was no draft to verify",
}
"""Why a row decodes plainly: names, and what they mean. Under `grammar`, what may come next depends on the text."""


@dataclass(frozen=True)
class SpeculationCounts:
    """Of rows that decoded in rounds, so far."""

    rounds: int = 0
    """Rounds of rows for which something was drafted, and that brought a token at least."""
    tokens: int = 0
    """Tokens that those brought, the one that the target adds to the accepted ones included."""
    drafted: tuple[int, ...] = ()
    """How often there was a draft in each place of a round. One that no sequence could take, since it came after the
    sequence's last token, is none."""
    accepted: tuple[int, ...] = ()
    """How often the draft in each place was accepted."""
    plain: Mapping[str, int] = field(default_factory=dict)
    """Steps in which a row decoded one token, by reason."""
    steps: Mapping[StepKind, int] = field(default_factory=dict)
    """Steps with rows that decode."""
    probed: int = 0
    """Rows for which something was drafted, and compared with the tokens of plain steps."""
    probed_tokens: int = 0
    """Tokens that rounds would have brought these, the target's own included; up to where they are known."""

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    def __str__(self) -> str:
        pairs = zip(self.accepted, self.drafted, strict=True)
        places = ", ".join(f"{taken / most:.0%}" if most else "–" for taken, most in pairs)
        plain = ", ".join(f"{count:,} by {name} ({PLAIN_REASONS[name]})" for name, count in self.plain.items() if count)
        steps, rounds = sum(self.steps.values()), self.steps.get("round", 0)
        brought = f"{self.tokens_per_round:.2f} tokens a round over {self.rounds:,} rounds"
        each = self.probed_tokens / max(1, self.probed)
        return (
            f"{f'{brought}; accepted by position: {places}' if self.rounds else 'no drafts verified yet'}"
            f"{f'; decoded plainly: {plain}' if plain else ''}"
            f"{f'; {each:.2f} tokens a round by probes of {self.probed:,} rows in plain steps' if self.probed else ''}"
            f"{f'; {rounds / steps:.0%} of {steps:,} steps were rounds' if steps else ''}"
        )


class SpeculationTally:
    """Follows the commits of an engine whose rows decode in rounds of so many drafts."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._rounds: Counter[tuple[int, int]] = Counter()
        """By how much was drafted, and how much of it accepted."""
        self._plain: Counter[str] = Counter(dict.fromkeys(PLAIN_REASONS, 0))
        self._steps: dict[StepKind, int] = {"round": 0, "plain": 0}
        self._probes = Probes(depth)
        self._decodes: tuple[Sequence, ...] = ()
        self._depths: dict[Sequence, int] = {}
        """Of these, how many drafts each takes at most."""
        self._undrafted: dict[Sequence, str] = {}
        """Of these, why some take none."""

    def note(self, step: ScheduledStep, updates: Iterable[Update], sampled: Sampled) -> list[Counter[Brought]]:
        """What the commit of a step brought; returns what rounds would have, of each probe that ends with it."""
        if not step.decodes:
            return []
        probed = list(self._probes.took(step, updates, sampled))
        self._note_rows(step, updates, sampled)
        return probed

    def _note_rows(self, step: ScheduledStep, updates: Iterable[Update], sampled: Sampled) -> None:
        kind = kind_of(step.tokens_per_row)
        self._steps[kind] += 1
        if step.decodes is not self._decodes:
            self._decodes, known, depth = step.decodes, self._depths, self._depth
            self._depths = {one: known[one] if one in known else one.draft_depth(depth) for one in step.decodes}
            self._undrafted = {one: _why_undrafted(one) for one, depth in self._depths.items() if not depth}
        depths, places = self._depths, step.tokens_per_row - 1
        if not places:
            self._note_plain(step, updates)
            return
        # What was sampled of a step comes in the order of its decodes, then of its prompts.
        said = repeat(places) if sampled.drafted is None else sampled.drafted
        rows, seen = dict(zip(step.decodes, said, strict=False)), self._rounds
        for update in updates:
            sequence, tokens, finish = update
            if not tokens or sequence not in rows:
                continue
            depth = depths[sequence]
            verified = min(rows[sequence], depth, places)
            if not verified:
                self._plain[self._undrafted.get(sequence, "no_draft")] += 1
                continue
            drafted, accepted = verified, len(tokens) - 1
            if finish is not None or sequence.max_outputs - len(sequence.outputs) <= verified:
                drafted = min(verified, acceptable(update))
            seen[drafted, accepted] += 1
            sequence.num_drafted += drafted
            sequence.num_accepted += accepted

    def _note_plain(self, step: ScheduledStep, updates: Iterable[Update]) -> None:
        """One token of each row, of many in most steps: what they have in common is counted at once."""
        ends, undrafted = {*step.sampling[len(step.decodes) :]}, self._undrafted
        got = [sequence for sequence, tokens, _ in updates if tokens and sequence not in ends]
        why = [undrafted[sequence] for sequence in got if sequence in undrafted] if undrafted else []
        self._plain.update(why)
        self._plain["cost"] += len(got) - len(why)

    @property
    def counts(self) -> SpeculationCounts:
        found = self._rounds.items()
        places = range(self._depth)
        return SpeculationCounts(
            rounds=self._rounds.total(),
            tokens=sum(count * (accepted + 1) for (_, accepted), count in found),
            drafted=tuple(sum(count for (drafted, _), count in found if drafted > place) for place in places),
            accepted=tuple(sum(count for (_, accepted), count in found if accepted > place) for place in places),
            plain=dict(self._plain),
            steps=dict(self._steps),
            probed=self._probes.num_rows,
            probed_tokens=self._probes.num_tokens,
        )


def _why_undrafted(sequence: Sequence) -> str:
    return "request" if sequence.constraint is None else "grammar"


def acceptable(update: Update) -> int:
    """How many drafts of a round could have been accepted: those before the last token that its sequence may have.

    An accepted draft is followed by another token: the next draft, or what the target picks instead. So a draft of the
    last token, by `max_tokens`, the end of the context or a stop token, is never accepted, nor rejected: the target's
    own is that token.
    """
    sequence, tokens, finish = update
    count = len(tokens)
    room = sequence.max_outputs - (len(sequence.outputs) - count) - 1
    return room if finish is not FinishReason.STOP else min(room, count - 1)
