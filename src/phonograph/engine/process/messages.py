"""Messages of front and core: the wire format of the engine process, at most one frame each way per step."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from phonograph.engine.process.statistics import EngineStats
from phonograph.engine.process.traces import SequenceTrace
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import FinishReason, GrammarSpec, Request, SamplingParams
from phonograph.engine.requests.sequence import PromptLogprob, TokenLogprob
from phonograph.engine.scheduling.counts import Counts
from phonograph.errors import RequestError


class _ToCore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the front to the core; a frame is a list of them."""


class Add(_ToCore, frozen=True):
    """Serve a request; one that can't be served brings an output with `refused`."""

    request: Request

    def __post_init__(self) -> None:
        request = self.request
        _refuse_subclass(request, Request, "request")
        _refuse_subclass(request.params, SamplingParams, "params")
        if request.params.grammar is not None:
            _refuse_subclass(request.params.grammar, GrammarSpec, "grammar")


def _refuse_subclass(found: Any, kind: type[Any], field: str) -> None:
    """The core decodes the class itself: what a subclass adds would be lost silently."""
    if type(found) is kind:
        return
    further = [one.name for one in fields(found) if one.name not in kind.__dataclass_fields__]
    raise RequestError(
        f"{type(found).__name__} has {', '.join(further) or 'methods of its own'}, and the engine core in its own "
        f"process knows {kind.__name__} alone. Give a {kind.__name__}, or use an LLM in this process.",
        field=further[0] if further else field,
    )


class Cancel(_ToCore, frozen=True):
    """Cancel a request; no output has to follow."""

    request_id: str


class Finish(_ToCore, frozen=True):
    """End one sequence: the text that came of it has reached a stop string."""

    request_id: str
    index: int


class CheckIntegrity(_ToCore, frozen=True):
    """Look for lost rows, pages and sequences; the response is an `IntegrityReport`."""


class Shutdown(_ToCore, frozen=True):
    """End the process; what still runs is dropped."""


ToCore = Add | Cancel | Finish | CheckIntegrity | Shutdown


class _FromCore(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the core to the front; a frame is one of them."""


class LoadProgress(_FromCore, frozen=True):
    """How far loading and capture are."""

    doing: str
    done: int
    total: int


class SpeculationInfo(msgspec.Struct, frozen=True):
    """The drafter of an engine, and when it is used."""

    drafter: str
    depth: int
    """Tokens that it drafts for a sequence in each round."""
    when: str
    """When rounds are launched, in words, and what they cost where that was measured."""
    why: str = ""
    """How it came to be this one, where nobody asked for it by name."""

    def __str__(self) -> str:
        named = f"{self.drafter} ({self.why})" if self.why else self.drafter
        return f"{named}, {self.depth} token{'' if self.depth == 1 else 's'} a round; rounds run {self.when}"


class Ready(_FromCore, frozen=True):
    """The core accepts requests; its resolved configuration."""

    limits: Limits
    vocab: int
    source: str
    architecture: str
    num_layers: int
    implementation: str
    """The model implementation: `native: …` or `hf: …`, and findings of start-up."""
    dtype: str
    device: str
    plan: str
    """The plan with the reason of each value."""
    captured: tuple[str, ...]
    """What capture reports, a text for each phase."""
    coverage: str
    """What every phase has captured and counted."""
    checks: str
    """How replays are compared with the eager path."""
    speculation: SpeculationInfo | None = None
    """None where nothing is drafted."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    error: str = ""
    """What went wrong, for FinishReason.ERROR."""
    cached: int = 0
    """Prompt tokens that were not computed, since their pages were cached."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token, where the request has logprobs."""
    refused: bool = False
    """The whole request was not taken, for `error`."""
    field: str = ""
    """The field of the request that is at fault for `error`, where one is."""
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    """Of further tokens of the prompt, where the request has them; the request's first sequence has them for all."""
    embedding: bytes = b""
    """Of a request that is pooled, its vector: numbers of float32, once it has ended."""
    drafts: tuple[int, int] = (0, 0)
    """Tokens that were drafted for it so far, and those of them that it took."""
    states: bytes = b""
    """What each of the tokens was picked from, where the request wants that: numbers of float32."""


class StepOutput(_FromCore, frozen=True):
    """What one step brought."""

    outputs: tuple[Output, ...]
    stats: EngineStats | None = None
    """Now and then, and when there is nothing to do."""
    ended: tuple[SequenceTrace, ...] = ()
    """What became of sequences that ended in it."""


class IntegrityReport(_FromCore, frozen=True):
    """The response to `CheckIntegrity`."""

    problem: str
    """Empty where nothing is lost."""
    counts: Counts
    num_pages: int
    """Pages that can be given out."""


class Logged(_FromCore, frozen=True):
    """A line of the core's log."""

    level: int
    text: str


class Failed(_FromCore, frozen=True):
    """The last message of a core that can't continue."""

    reason: str


FromCore = LoadProgress | Ready | StepOutput | IntegrityReport | Logged | Failed
