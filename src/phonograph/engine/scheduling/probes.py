"""Probes: drafts that were made before plain steps, compared with the tokens that come: no round is run to see them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Sampled, ScheduledStep, Update
from phonograph.engine.scheduling.acceptance import Brought


@dataclass
class _Probe:
    drafts: list[tuple[Sequence, int, list[int]]]
    """Of each row, with the number of its outputs before them."""
    num_left: int
    """Commits of steps with decodes until all of the tokens are known."""


class Probes:
    """Those whose tokens are not known yet."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._waiting: deque[_Probe] = deque()
        self.num_rows = self.num_tokens = 0
        """Of all that ended: rows with a draft that they could take, and what rounds would have brought these."""

    def took(self, step: ScheduledStep, updates: Iterable[Update], sampled: Sampled) -> Iterator[Counter[Brought]]:
        """The commit of a step with decodes; yields what a round would have brought, of each probe that is known."""
        for probe in self._waiting:
            probe.num_left -= 1
        if step.probes and sampled.probed is not None:
            places = dict(zip(step.decodes, sampled.probed.tolist(), strict=True))
            drafts = [
                (sequence, len(sequence.outputs) - len(tokens), places[sequence])
                for sequence, tokens, _ in updates
                if tokens and sequence in places
            ]
            self._waiting.append(_Probe(drafts, self._depth - 1))
        while self._waiting and self._waiting[0].num_left <= 0:
            if counts := Counter(self._brought(self._waiting.popleft().drafts)):
                yield counts

    def _brought(self, found: list[tuple[Sequence, int, list[int]]]) -> Iterator[Brought]:
        """Left out are rows that a stop token or somebody ended, and those that take no drafts. One whose tokens are
        not all known, since a limit ended it or some of the steps left it out, is cut off after those that are; one
        that takes fewer drafts, after these."""
        for sequence, first, drafts in found:
            if sequence.finish not in (None, FinishReason.LENGTH):
                continue
            if not (most := sequence.draft_depth(self._depth)):
                continue
            said, right = sequence.outputs[first : first + self._depth], 0
            known = min(most, len(said))
            while right < known and drafts[right] == said[right]:
                right += 1
            if drafts[0] >= 0:
                self.num_rows += 1
                self.num_tokens += right + (right < len(said) or right == most)
            yield right + 1, right == known < self._depth
