"""New requests: what a caller asks for, as requests that the core can serve; any thread may make them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from phonograph.engine.process.messages import Ready
from phonograph.engine.requests.pooling import Pooling
from phonograph.engine.requests.request import Request, SamplingParams
from phonograph.engine.scheduling.admission import (
    refuse_oversized,
    refuse_pooling,
    refuse_unknown_tokens,
    refuse_unlike_prompts,
)
from phonograph.engine.text import Tokenizer
from phonograph.engine.text.bad_words import with_bad_words
from phonograph.engine.text.stops import with_special_stops
from phonograph.errors import RequestError


@dataclass(frozen=True)
class Asked:
    """What is the same for all prompts of one call."""

    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    pooling: Pooling | None = None
    """How prompts are embedded; None where they are answered."""


def new_requests(
    prompts: Sequence[Sequence[int]],
    asked: Asked,
    name: str,
    about: Ready,
    tokenizer: Tokenizer | None,
    *,
    most: int,
    embeddings: bool,
) -> list[Request]:
    """One for each prompt; refuses what the core would refuse, and more than `most` sequences."""
    now = time.monotonic()
    params = with_bad_words(with_special_stops(asked.params, tokenizer, about.vocab), tokenizer)
    deadline = None if asked.timeout is None else now + asked.timeout
    added = len(prompts) * params.n
    if not prompts or added > most:
        problem = f"the request makes {added} sequences; expected 1 to {most}, which may run or wait here. Send fewer."
        raise RequestError(problem, field="n" if params.n > 1 else "prompt")
    for prompt in prompts:
        refuse_unlike_prompts(prompt)
    names = [f"{name}-{place}" if place else name for place in range(len(prompts))]
    requests = [
        Request(one, tuple(prompt), params, asked.priority, deadline, now, pooling=asked.pooling)
        for one, prompt in zip(names, prompts, strict=True)
    ]
    for request in requests:
        refuse_pooling(request, embeddings=embeddings)
        _refuse_all_states(request)
        refuse_unknown_tokens(request, about.vocab)
        refuse_oversized(request, about.limits)
    return requests


def _refuse_all_states(request: Request) -> None:
    """Those of a whole prompt are no message between processes."""
    if request.params.return_hidden_states == "all":
        raise RequestError(
            "return_hidden_states is 'all', and an engine in a process of its own gives those of outputs alone. Ask "
            "for 'last', or use LLM.",
            field="return_hidden_states",
        )
