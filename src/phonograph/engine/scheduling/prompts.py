"""Prompts of a caller: texts, or token ids of any integer type, and their parameters; what is neither is refused."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.scheduling.admission import UNORDERED, refuse_unlike_prompts
from phonograph.errors import RequestError


def as_prompts(prompts: object) -> list[Any]:
    """Texts, or lists of token ids; refuses what is neither."""
    is_many = isinstance(prompts, Iterable) and not isinstance(prompts, (str, *UNORDERED))
    many: list[Any] = list(prompts) if is_many else [prompts]  # type: ignore[call-overload]
    for prompt in many:
        refuse_unlike_prompts(prompt)
    return many


def as_params(params: object, num_prompts: int) -> list[SamplingParams]:
    """Parameters of each prompt, from those of all or from a list; refuses what is neither."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    each: list[Any] = list(params) if isinstance(params, Sequence) else [params]
    for one in each:
        if not isinstance(one, SamplingParams):
            problem = f"found {reprlib.repr(one)} ({type(one).__name__})"
            raise RequestError(f"parameters are SamplingParams, or a list of them; {problem}. Give SamplingParams(…).")
    if len(each) != num_prompts:
        problem = f"found {len(each)} for {num_prompts} prompts"
        raise RequestError(
            f"a list of parameters has one entry for each prompt; {problem}. Give as many, or one for all."
        )
    return each


def as_token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Token ids as Python's own integers; numpy's and torch's are taken too."""
    refuse_unlike_prompts(prompt)
    return tuple([token if type(token) is int else _as_token_id(token) for token in prompt])


def _as_token_id(token: Any) -> int:
    try:
        if not isinstance(token, bool):  # it has an index; as a token it is a slip
            return operator.index(token)
    except TypeError:
        pass
    raise RequestError(
        f"a prompt of token ids holds whole numbers; found {reprlib.repr(token)} ({type(token).__name__}). "
        "Give a text, or the ids that the model's tokenizer makes of it.",
        field="prompt",
    )
