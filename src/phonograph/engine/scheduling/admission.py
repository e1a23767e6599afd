"""Admission: requests that can never be served are refused; the others become sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import chain

from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.sequence import Sequence
from phonograph.errors import RequestError

UNORDERED = (bytes, bytearray, memoryview, Mapping, Set)
"""They can be iterated over, but what comes of it is no text and no list of token ids."""


NO_EMBEDDINGS = (
    "this engine makes no embeddings: the recordings for them are made only where they are asked for. Start it with "
    "--embeddings, or EngineOptions(embeddings=True)."
)

NO_HIDDEN_STATES = (
    "this engine gives no hidden states: the recordings for them are made only where they are asked for. Start it with "
    "--return-hidden-states, or EngineOptions(return_hidden_states=True)."
)


def refuse_unlike_prompts(prompt: object) -> None:
    """Refuse what is neither a text nor a list of token ids."""
    if isinstance(prompt, UNORDERED) or not isinstance(prompt, Iterable) or getattr(prompt, "ndim", 1) != 1:
        raise RequestError(
            "prompts are a text, a list of texts, or a list of prompts that are lists of token ids each, as "
            f"[[1, 2, 3]]; found {type(prompt).__name__} where a prompt belongs.",
            field="prompt",
        )


def sequences_of(request: Request, limits: Limits, serial: int) -> list[Sequence]:
    """The n sequences of a request, with `max_tokens` clipped to what fits; one that can never fit is refused."""
    refuse_oversized(request, limits)
    refuse_speculation(request, limits)
    params, num_prompt = request.params, len(request.prompt)
    # The last output is never computed, so a sequence may be one token longer than its pages.
    max_len = min(limits.max_len, limits.capacity + 1)
    max_outputs = min(params.max_tokens, max_len - num_prompt)
    stop_ids = params.stop_ids(limits.eos_ids)
    return [
        Sequence(request, index, max_outputs, stop_ids, rank=(1, -request.priority, request.arrival, serial + index))
        for index in range(params.n)
    ]


def refuse_unknown_tokens(request: Request, vocab: int) -> None:
    """Refuse ids that are no row of the embedding table: on a device they would read whatever lies there, or, as the
    end of an output, never come."""
    params = request.params
    named: dict[str, Iterable[int]] = {
        "prompt": request.prompt,
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words" if params.bad_words else "bad_token_ids": chain.from_iterable(params.bad_token_ids),
    }
    for field, tokens in named.items():
        if (highest := max(tokens, default=0)) >= vocab:
            what = "" if field == "prompt" else f" of {field}"
            raise RequestError(
                f"request {request.id}: token {highest}{what} is not in the vocabulary of {vocab}. "
                "Encode the text with the model's own tokenizer.",
                field=field,
            )


def refuse_speculation(request: Request, limits: Limits) -> None:
    """Refuse a request that is to be drafted for, where nothing is drafted."""
    if request.params.speculate and limits.tokens_per_row == 1:
        raise RequestError(
            f"request {request.id!r}: speculate is {request.params.speculate}, and this engine drafts nothing. Leave "
            "it out, or start the engine with --speculate ngram.",
            field="speculate",
        )


def refuse_pooling(request: Request, *, embeddings: bool) -> None:
    """Refuse a request for a vector where no pass makes one."""
    if request.pooling is not None and not embeddings:
        raise RequestError(NO_EMBEDDINGS, field="pooling")


def refuse_hidden_states(request: Request, *, given: bool) -> None:
    """Refuse a request for hidden states where recordings give none."""
    if request.params.return_hidden_states is not None and not given:
        raise RequestError(NO_HIDDEN_STATES, field="return_hidden_states")


def refuse_oversized(request: Request, limits: Limits) -> None:
    """Refuse a prompt that is empty, or too long for the context or for the KV cache."""
    if problem := limits.misfit(len(request.prompt), request.params.max_tokens):
        raise RequestError(f"request {request.id!r}: {problem}", field="prompt")
