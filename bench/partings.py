"""Partings: where two answers to a prompt part, and by how much rounding must have moved logits for both to be right.

Sampled tokens too: each is the one with the highest score (logits over temperature, after penalties, and noise) of
those that truncation keeps, so float32 logits say how far a token was behind, or how far outside of what is kept.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from engine_logits import sequence_logits

from phonograph.engine.completion import Completion
from phonograph.engine.llm import LLM
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.sampling.penalties import Penalties, penalise
from phonograph.engine.sampling.sampler import SamplingRows, gumbel, kept

EXACT = 1e-3
"""Margins of float32."""
STEPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Margins that are told apart, in root mean squares of what rounding moves a logit by. Up to 4 is the rule; where a
token is kept depends on more logits than two, so now and then one is further off."""
BEYOND = "beyond"
"""What no rounding explains."""


@dataclass(frozen=True)
class Picking:
    """One place of one answer: its logits in float32, before penalties, and how its token is picked from them."""

    logits: torch.Tensor  # [vocab], float32
    prompt: tuple[int, ...]
    said: Sequence[int]
    params: SamplingParams

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        params, one = self.params, logits.new_ones(1)
        counts = torch.bincount(torch.tensor(self.said, dtype=torch.int64), minlength=len(logits)).to(logits.device)
        prompted = torch.zeros_like(counts, dtype=torch.bool)
        prompted[list(self.prompt)] = True
        nothing = torch.zeros((1, 1), dtype=torch.int64, device=logits.device)
        penalties = Penalties(
            counts=counts[None],
            prompted=prompted[None],
            bias_ids=nothing,
            bias=nothing.float(),
            repetition=one * (1.0 if params.repetition_penalty is None else params.repetition_penalty),
            presence=one * params.presence_penalty,
            frequency=one * params.frequency_penalty,
        )
        return penalise(logits[None], penalties)

    def _scored(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The score of every token, and which of them truncation keeps."""
        params, changed = self.params, self._penalised(logits)
        if not params.temperature:
            return changed[0], torch.ones_like(changed[0], dtype=torch.bool)
        scaled, one = (changed - changed.max()) / params.temperature, changed.new_ones(1)
        assert params.seed is not None
        assert params.seed >= 0, "the noise of a negative seed, or of none, is made from another"
        rows = SamplingRows(
            temperature=one * params.temperature,
            top_k=(one * (params.top_k or 0)).int(),
            top_p=one * (1.0 if params.top_p is None else params.top_p),
            min_p=one * (params.min_p or 0.0),
            seed=torch.tensor([params.seed], device=logits.device),
            positions=torch.tensor([len(self.prompt) + len(self.said)], device=logits.device),
        )
        return (scaled + gumbel(rows.seed, rows.positions, len(logits)))[0], kept(scaled, rows)[0]

    def may_be(self, token: int, margin: float) -> bool:
        """Whether it is picked if logits are off by at most half of this each, in its favour.

        Each token with a higher score has to be one that truncation may leave out then.
        """

        def moved(which: int, by: float) -> torch.Tensor:
            logits = self.logits - by
            logits[which] += 2 * by
            return logits

        score, is_kept = self._scored(moved(token, margin / 2))
        if not is_kept[token]:
            return False
        _, usually_kept = self._scored(self.logits)
        ahead = torch.nonzero((score > score[token]) & usually_kept).flatten().tolist()
        return not any(self._scored(moved(other, -margin / 2))[1][other] for other in ahead)


def off_by(reference: LLM, texts: Sequence[Sequence[int]], logits: Sequence[torch.Tensor]) -> float:
    """How far logits of texts are from those of an engine in float32, as a root mean square."""
    pairs = zip(texts, logits, strict=True)
    squares = [(sequence_logits(reference, text).cpu().float() - found.float()).square() for text, found in pairs]
    return float(torch.cat(squares).mean().sqrt())


def parting(one: Completion, other: Completion) -> int | None:
    """The first place where tokens differ; None where there is none."""
    pairs = itertools.zip_longest(one.tokens, other.tokens)
    return next((place for place, (token, another) in enumerate(pairs) if token != another), None)


class Judge:
    """Says of answers that part from others how large a margin lets both be right."""

    def __init__(self, reference: LLM, unit: float) -> None:
        """By an engine in float32 without speculation; rounding moves logits of the engines that answered by the unit,
        as a root mean square."""
        self.unit = max(unit, EXACT / 4)
        self._reference = reference
        self._known: dict[tuple[SamplingParams, tuple[int, ...], frozenset[int]], str] = {}
        """Margins of what parted before: drafters often part from plain decoding in the same places."""

    def margins(
        self, found: Sequence[Completion], wanted: Sequence[Completion], params: SamplingParams
    ) -> dict[str, int]:
        """How many answers part from the others, by margin in units; all have to be of one length."""
        told = Counter[str]()
        for one, other in zip(found, wanted, strict=True):
            if (place := parting(one, other)) is not None:
                told[self._margin(other, place, {one.tokens[place], other.tokens[place]}, params)] += 1
        return {name: told[name] for name in (*map(str, STEPS), BEYOND)}

    def _margin(self, answer: Completion, place: int, tokens: Set[int], params: SamplingParams) -> str:
        said = answer.tokens[:place]
        text = (*answer.prompt, *said)
        key = params, text, frozenset(tokens)
        if key not in self._known:
            picking = Picking(sequence_logits(self._reference, text)[-1].float(), answer.prompt, said, params)
            steps = (step for step in STEPS if all(picking.may_be(token, step * self.unit) for token in tokens))
            self._known[key] = str(next(steps, BEYOND))
        return self._known[key]
