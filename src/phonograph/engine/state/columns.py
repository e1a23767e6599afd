"""Columns of the engine: all state that a request has on the device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from phonograph.engine.requests.parameter import Sampling, SamplingParameter
from phonograph.engine.requests.request import MAX_BIASED
from phonograph.engine.requests.token_masks import TokenMasks, Words
from phonograph.engine.state.column import Access, Array, Column, Form, Group, RowSource, TrialRows, Width, Writer

_LARGEST = 2**31 - 1
"""More than any vocabulary has."""
_MOST = torch.iinfo(torch.int16).max
_NONE: Array = np.zeros(0, dtype=np.int64)


def _trial_pages(trial: TrialRows) -> torch.Tensor:
    """Page 1, which all rows read, and each row's own."""
    own = torch.arange(2, trial.count * trial.num_pages + 2).view(trial.count, trial.num_pages)
    return torch.cat([torch.ones_like(own[:, :1]), own], dim=1)


def _counted(entry: RowSource) -> tuple[Array, Array]:
    """What the sequence has put out so far: nothing, but after a preemption."""
    said = entry.sequence.outputs
    if not said:
        return _NONE, _NONE
    tokens, counts = np.unique(np.fromiter(said, dtype=np.int64, count=len(said)), return_counts=True)
    return tokens, np.minimum(counts, _MOST)


def _prompted(entry: RowSource) -> tuple[Array, Array]:
    given = entry.sequence.request.prompt
    prompt = np.fromiter(given, dtype=np.int64, count=len(given))  # several times as fast as asarray of a tuple
    return prompt, np.ones(len(prompt), dtype=bool)


def _mask(entry: RowSource) -> Array:
    assert entry.sequence.constraint is not None
    mask: Array = entry.sequence.constraint.mask()
    return mask


PLACE = (
    Column(
        "last_token",
        torch.int64,
        writer=Writer.GRAPH,
        restored=lambda entry: entry.sequence.known()[entry.start],
        from_prompt=False,  # the end of a prompt is computed in every case
        access=Access.BY_ROW,
        trial=lambda trial: trial.whole(0, trial.vocab),
    ),
    Column(
        "length",
        torch.int64,
        writer=Writer.ENTRY | Writer.GRAPH,
        value=lambda entry: entry.start,
        access=Access.BY_ROW,
        trial=lambda trial: trial.whole(trial.page_size, trial.last_start + 1),
        is_public=True,
    ),
    Column(
        "pages",
        torch.int32,
        width=Width.PAGES,
        writer=Writer.STEP,
        # Whatever lies past a row's own pages goes to the null page: the former owner's are gone at entry.
        form=Form.PAIRS | Form.RESET,
        changes=lambda step: step.page_updates,
        access=Access.BY_ROW,
        trial=_trial_pages,
        is_public=True,
    ),
)
"""Where a sequence is: its last token, how many are computed, and the pages that they are in."""

TEMPERATURE = Column(
    "temperature",
    torch.float32,
    value=lambda entry: entry.params.temperature,
    trial=lambda trial: trial.whole(0, 3) / 2,
    parameter=SamplingParameter("temperature", Sampling.SAMPLED, off=0.0),
    is_public=True,
)
TOP_K = Column(
    "top_k",
    torch.int32,
    value=lambda entry: min(entry.params.top_k or 0, _LARGEST),
    trial=lambda trial: trial.whole(0, 9),
    parameter=SamplingParameter("top_k", Sampling.TRUNCATED, off=0, of_draws=True),
    is_public=True,
)
TOP_P = Column(
    "top_p",
    torch.float32,
    default=1,
    value=lambda entry: entry.params.top_p,
    trial=lambda trial: 0.5 + trial.whole(0, 6) / 10,
    parameter=SamplingParameter("top_p", Sampling.TRUNCATED, off=1.0, of_draws=True),
    is_public=True,
)
MIN_P = Column(
    "min_p",
    torch.float32,
    value=lambda entry: entry.params.min_p,
    trial=lambda trial: trial.whole(0, 2) / 20,
    parameter=SamplingParameter("min_p", Sampling.TRUNCATED, off=0.0, of_draws=True),
    is_public=True,
)
SEED = Column(
    "seed",
    torch.int64,
    value=lambda entry: entry.sequence.noise_seed,
    trial=lambda trial: trial.whole(0, 1 << 40),
    parameter=SamplingParameter("seed", Sampling.SAMPLED, of_draws=True),
    is_public=True,
)

_BIAS = SamplingParameter("logit_bias", Sampling.PENALISED, off={})
_REPETITION = SamplingParameter("repetition_penalty", Sampling.PENALISED, off=1.0)
_PRESENCE = SamplingParameter("presence_penalty", Sampling.PENALISED, off=0.0)
_FREQUENCY = SamplingParameter("frequency_penalty", Sampling.PENALISED, off=0.0)
PENALISED = Group.asked_by("penalty tables", _BIAS, _REPETITION, _PRESENCE, _FREQUENCY)
PENALTIES = (
    Column(
        "counts",
        torch.int16,
        width=Width.VOCABULARY,
        writer=Writer.ENTRY | Writer.GRAPH,
        form=Form.PAIRS | Form.RESET,
        value=_counted,
        group=PENALISED,
    ),
    Column(
        "prompted",
        torch.bool,
        width=Width.VOCABULARY,
        form=Form.PAIRS | Form.RESET,
        value=_prompted,
        group=PENALISED,
    ),
    Column(
        "bias_ids",
        torch.int64,
        width=MAX_BIASED,
        form=Form.PAIRS | Form.RESET,
        value=lambda entry: (range(len(entry.params.logit_bias)), list(entry.params.logit_bias)),
        parameter=_BIAS,
        group=PENALISED,
    ),
    Column(
        "bias",
        torch.float32,
        width=MAX_BIASED,
        form=Form.PAIRS | Form.RESET,
        value=lambda entry: (range(len(entry.params.logit_bias)), list(entry.params.logit_bias.values())),
        parameter=_BIAS,
        group=PENALISED,
    ),
    Column(
        "repetition",
        torch.float32,
        default=1,
        value=lambda entry: entry.params.repetition_penalty,
        trial=lambda trial: 1 + trial.whole(0, 3) / 4,
        parameter=_REPETITION,
        group=PENALISED,
        is_public=True,
    ),
    Column(
        "presence",
        torch.float32,
        value=lambda entry: entry.params.presence_penalty,
        trial=lambda trial: trial.whole(-2, 3) / 2,
        parameter=_PRESENCE,
        group=PENALISED,
        is_public=True,
    ),
    Column(
        "frequency",
        torch.float32,
        value=lambda entry: entry.params.frequency_penalty,
        trial=lambda trial: trial.whole(-2, 3) / 2,
        parameter=_FREQUENCY,
        group=PENALISED,
        is_public=True,
    ),
)
"""What changes logits by what was said so far: as wide as the vocabulary, for requests that ask for it."""


def _words(words: Callable[[TokenMasks], Words]) -> Callable[[RowSource], Words]:
    def value(entry: RowSource) -> Words:
        assert entry.sequence.masks is not None
        return words(entry.sequence.masks)

    return value


def _least_length(entry: RowSource) -> int:
    assert entry.sequence.masks is not None
    return entry.sequence.masks.least_length


def _trial_words(trial: TrialRows) -> torch.Tensor:
    """Some of the first tokens, the very first among them: something must be allowed."""
    return (trial.whole(-(2**31), 2**31) | 1)[:, None]


CONSTRAINED = Group("grammar masks", lambda sequence: sequence.constraint is not None)
MASKS = (
    Column(
        "allowed",
        torch.int32,
        default=-1,
        width=Width.BITS,
        writer=Writer.STEP,
        value=_mask,
        group=CONSTRAINED,
    ),
)
"""Which tokens a grammar allows next; a row without one allows everything."""

MASKED = Group("token masks", lambda sequence: sequence.masks is not None)
TOKEN_MASKS = (
    Column(
        "early_tokens",
        torch.int32,
        default=-1,
        width=Width.BITS,
        value=_words(lambda masks: masks.early),
        trial=_trial_words,
        group=MASKED,
    ),
    Column(
        "late_tokens",
        torch.int32,
        default=-1,
        width=Width.BITS,
        value=_words(lambda masks: masks.late),
        trial=_trial_words,
        group=MASKED,
    ),
    Column(
        "least_length",
        torch.int64,
        value=_least_length,
        trial=lambda trial: trial.whole(trial.page_size, trial.num_positions),
        group=MASKED,
        is_public=True,
    ),
)
"""Which tokens a request allows before a length is reached, and from there on; a row without allows everything."""
