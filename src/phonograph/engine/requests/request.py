"""Request and SamplingParams: a prompt, how to sample from it, and when to stop."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Literal, get_args

from phonograph.engine.requests.pooling import Pooling, check_pooling
from phonograph.errors import RequestError
from phonograph.numbers import MAX_WHOLE, expect_finite, expect_whole, shown

MAX_BIASED = 300
MAX_LOGPROBS = 20
MAX_CHOICES = 1024
"""Of one prompt: each is a sequence that the scheduler keeps from the start."""
MAX_DRAFTS = 1024
"""Of a round, that a request may ask for; it gets those that the engine drafts."""
_INEXACT = 2**53
"""From here on a float64, as which numbers of a grammar are parsed, can't represent every integer."""
_OF_NUMBERS = frozenset(("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
"""Keywords of JSON schemas whose values are compared with numbers."""
_MAX_TOKEN_ID = 2**31 - 1
_FLOAT32 = (2.0**-126, 2.0**128 - 2.0**104)
"""The range of sampling parameters on the device: the smallest normal and the largest float32."""

HiddenStates = Literal["last", "all"]
"""Those that outputs were picked from, or those of prompt and output."""

NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""The fields of `SamplingParams` for which a model may have defaults of its own, and what they are if it has none."""

READ_BY_ENGINE = frozenset(
    (
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "logprobs", "prompt_logprobs"),
        *("allowed_token_ids", "bad_words", "bad_token_ids", "grammar", "speculate"),
        "return_hidden_states",
    )
)
"""The fields of `SamplingParams` that every engine reads, whatever its sampler is: ends, choices, what is reported,
which tokens there may be, and grammars. Of all others a column says how they reach the sampler."""


class FinishReason(Enum):
    """Why a sequence has no further tokens."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True)
class GrammarSpec:
    """What the output must look like."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    """The schema as JSON (`{}` for any JSON), the pattern, a JSON list of texts, or the grammar."""
    field: str = "grammar"
    """What the request calls it, for errors."""

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "choice", "lark"):
            raise RequestError(
                f"a grammar is a json_schema, regex, choice or lark, found {shown(self.kind)}.", field=self.field
            )
        if not isinstance(self.text, str) or not self.text:
            raise RequestError(
                f"the {self.kind} grammar must be a text that isn't empty, found {shown(self.text)}.", field=self.field
            )
        if self.kind in ("json_schema", "choice"):
            self._check_json()

    def _check_json(self) -> None:
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"the {self.kind} grammar is no JSON: {error}. Send well-formed JSON.", field=self.field
            ) from None
        if self.kind == "json_schema":
            self._check_numbers(found)
        texts = isinstance(found, list) and found and all(isinstance(text, str) and text for text in found)
        if self.kind == "choice" and not texts:
            problem = f"expected a list of texts that aren't empty, at least one, found {shown(self.text)}"
            raise RequestError(f"the choice grammar: {problem}.", field=self.field)

    def _check_numbers(self, schema: object) -> None:
        """Refuse numbers that only a float of more than 64 bits holds: another one would be followed in silence."""
        waiting: list[tuple[str, object]] = [("", schema)]
        while waiting:
            keyword, found = waiting.pop()
            if isinstance(found, dict):
                waiting += [(keyword or (name if name in _OF_NUMBERS else ""), part) for name, part in found.items()]
            elif isinstance(found, list):
                waiting += [(keyword, part) for part in found]
            elif keyword and isinstance(found, int | float) and abs(found) >= _INEXACT:
                problem = (
                    f"`{keyword}` has the number {str(found)[:100]}, which is 2^53 or more and can't be kept exactly"
                )
                raise RequestError(
                    f"the json_schema grammar: {problem}. Use a smaller one, or a string.", field=self.field
                )


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, and when to stop; every value is checked when it is made.

    A field of `NEUTRAL` that is None is left open: the model's own default holds, or the neutral value if it has none.
    """

    max_tokens: int = 16
    """The most tokens to generate; fewer where the context ends first. With 0 the prompt is computed, and no more."""
    temperature: float | None = None
    """0 is greedy, 1 is neutral."""
    top_k: int | None = None
    """Sample from this many most likely tokens; 0 is off."""
    top_p: float | None = None
    """Sample from the most likely tokens of this total probability; 1 is off."""
    min_p: float | None = None
    """Drop tokens less likely than this fraction of the most likely one's probability; 0 is off."""
    repetition_penalty: float | None = None
    """Above 1, tokens that were in prompt or output become less likely; 1 is off."""
    presence_penalty: float = 0.0
    """From -2 to 2: subtracted once from the logit of each token that is in the output."""
    frequency_penalty: float = 0.0
    """From -2 to 2: subtracted from a token's logit as often as it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Token id → what is added to its logit."""
    seed: int | None = None
    """The same seed draws the same tokens; of n sequences the first has it, the others have seeds of their own."""
    stop: tuple[str, ...] = ()
    """Stop strings; one that is the text of a special token stops at that token."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the generation, besides the model's own; they are not part of the text."""
    ignore_eos: bool = False
    """Continue past the model's own end-of-sequence tokens."""
    n: int = 1
    """How many sequences to generate from the prompt, up to 1024."""
    logprobs: int | None = None
    """How many alternatives to report for each token, besides its own; None reports nothing."""
    grammar: GrammarSpec | None = None
    """What the output must look like."""
    prompt_logprobs: int | None = None
    """How many alternatives to report for each token of the prompt but the first, besides its own; None: nothing."""
    min_tokens: int = 0
    """The least number of tokens: before that no end-of-sequence token, stop token or stop string ends the output."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be generated; None allows all."""
    bad_words: tuple[str, ...] = ()
    """Texts that may not be generated, at the beginning of a word or inside of one."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not be generated: the last token is masked where an output ends with the others. The
    tokens of `bad_words` are added to them."""
    speculate: bool | int | None = None
    """Tokens that may be drafted for it per round, where the engine speculates: a number up to 1024, all that it
    drafts (True, None), or none (False). Changes how fast the output is generated, and not what is in it."""
    return_hidden_states: HiddenStates | None = None
    """Report hidden states after the last norm: `last` those that outputs were picked from, `all` those of prompt and
    outputs but the last. Needs EngineOptions(return_hidden_states=True)."""

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, least=0)
        _whole("min_tokens", self.min_tokens, least=0)
        _whole("top_k", self.top_k, least=0)
        _whole("n", self.n, least=1, most=MAX_CHOICES)
        _float32("temperature", self.temperature, 0, math.inf)
        _float32("top_p", self.top_p, 0, 1, open_below=True)
        _float32("min_p", self.min_p, 0, 1)
        _float32("repetition_penalty", self.repetition_penalty, 0, math.inf, open_below=True)
        _float32("presence_penalty", self.presence_penalty, -2, 2)
        _float32("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _whole("seed", self.seed, least=-MAX_WHOLE - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, least=0, most=MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, least=0, most=MAX_LOGPROBS)
        if self.speculate is not None and not isinstance(self.speculate, bool):
            _whole("speculate", self.speculate, least=0, most=MAX_DRAFTS)
        if self.return_hidden_states not in (None, *get_args(HiddenStates)):
            problem = f"return_hidden_states is 'last' or 'all', or None, found {shown(self.return_hidden_states)}."
            raise RequestError(problem, field="return_hidden_states")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is True or False, found {self.ignore_eos!r}.", field="ignore_eos")
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise RequestError(f"grammar must be a GrammarSpec, found {shown(self.grammar)}.", field="grammar")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "stop", _texts("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._check_tokens()

    def _check_tokens(self) -> None:
        """Those that say which tokens there may be."""
        if self.min_tokens > self.max_tokens:
            problem = (
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}. Lower the one or raise the other."
            )
            raise RequestError(problem, field="min_tokens")
        if self.allowed_token_ids is not None:
            allowed = tuple(dict.fromkeys(_token_ids("allowed_token_ids", self.allowed_token_ids)))
            if not allowed:
                problem = "allowed_token_ids is empty, and no token could be generated. Name some, or leave it out."
                raise RequestError(problem, field="allowed_token_ids")
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _texts("bad_words", self.bad_words))
        words = self.bad_token_ids
        if not isinstance(words, list | tuple) or not all(isinstance(word, list | tuple) and word for word in words):
            problem = f"bad_token_ids must be a tuple of tuples of token ids that aren't empty, found {shown(words)}."
            raise RequestError(problem, field="bad_token_ids")
        object.__setattr__(self, "bad_token_ids", tuple(_token_ids("bad_token_ids", word) for word in words))

    def resolved(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """With a value for everything that is left open: that of `defaults`, else the neutral one."""
        found: dict[str, Any] = {}
        for name, neutral in NEUTRAL.items():
            if getattr(self, name) is None:
                said = None if defaults is None else getattr(defaults, name)
                found[name] = neutral if said is None else said
        return replace(self, **found) if found else self

    def stop_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end an output and are not part of its text, of a model with these ends."""
        return frozenset([*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)])

    @property
    def follows_text(self) -> bool:
        """Whether what may come next depends on the tokens so far, which only the host looks at."""
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_token_ids)


@dataclass(frozen=True)
class Request:
    """One request of a user, independent of rows, pages and steps."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    """Nothing is left open in it."""
    priority: int = 0
    """Higher goes first."""
    deadline: float | None = None
    """Its deadline, in seconds of the scheduler's clock."""
    arrival: float = 0.0
    """Its arrival, in seconds of the scheduler's clock; of equal priorities the earlier goes first."""
    run_ahead: bool = True
    """False where the next step depends on the text so far (a grammar, words of several tokens that may not come): each
    step waits for the last one's token."""
    pooling: Pooling | None = None
    """How hidden states of the prompt become the one vector that is wanted of it; it generates nothing then."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise RequestError(f"a request's id is a text that isn't empty, found {self.id!r}.", field="id")
        object.__setattr__(self, "prompt", _token_ids("prompt", self.prompt))
        if not isinstance(self.params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, found {shown(self.params)}.", field="params")
        object.__setattr__(self, "params", self.params.resolved())
        _whole("priority", self.priority)
        if self.deadline is not None:
            _number("deadline", self.deadline, -math.inf, math.inf)
        _number("arrival", self.arrival, -math.inf, math.inf)
        if not isinstance(self.run_ahead, bool):
            raise RequestError(f"run_ahead is True or False, found {self.run_ahead!r}.", field="run_ahead")
        if self.params.follows_text:
            object.__setattr__(self, "run_ahead", False)
        if self.pooling is not None:
            check_pooling(self.pooling)
            _whole("n, of a request that is pooled,", self.params.n, least=1, most=1, field="n")
            _whole("max_tokens, of a request that is pooled,", self.params.max_tokens, most=0, field="max_tokens")


def _whole(
    name: str, value: object, least: int | None = None, most: int = MAX_WHOLE, *, field: str | None = None
) -> None:
    if value is None and name in NEUTRAL:
        return
    expect_whole(name, value, partial(RequestError, field=field or name), least=least, most=most)


def _number(
    name: str, value: object, least: float, most: float, *, open_below: bool = False, field: str | None = None
) -> None:
    if value is None and name in NEUTRAL:
        return
    error = partial(RequestError, field=field or name)
    expect_finite(name, value, error, least=least, most=most, open_below=open_below)


def _float32(
    name: str, value: object, least: float, most: float, *, open_below: bool = False, field: str | None = None
) -> None:
    """A number that is the same, but for rounding, where the device computes with it."""
    _number(name, value, least, most, open_below=open_below, field=field)
    smallest, largest = _FLOAT32
    if value not in (None, 0) and not smallest <= abs(value) <= largest:  # type: ignore[arg-type]
        bounds = f"from {smallest:.3g} to {largest:.3g} in size" + (", or 0" if least <= 0 and not open_below else "")
        raise RequestError(
            f"{name} must fit into 32 bits, {bounds}, found {shown(value)}. Take a less extreme one.",
            field=field or name,
        )


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} must be a tuple of token ids, found {shown(value)}.", field=name)
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) > _MAX_TOKEN_ID):
        wrong = next(token for token in value if type(token) is not int or not 0 <= token <= _MAX_TOKEN_ID)
        problem = f"{name} must hold whole numbers from 0 to {_MAX_TOKEN_ID}, found {shown(wrong)}."
        raise RequestError(problem, field=name)
    return tuple(value)


def _texts(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        hint = f" Write ({value[:40]!r},)." if isinstance(value, str) else ""
        raise RequestError(f"{name} must be a tuple of texts, found {shown(value)}.{hint}", field=name)
    for text in value:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} must hold texts that aren't empty, found {shown(text)}.", field=name)
    return tuple(value)


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, found {shown(value)}.", field="logit_bias")
    if len(value) > MAX_BIASED:
        problem = f"logit_bias names {len(value)} tokens; at most {MAX_BIASED} can be biased. Name fewer."
        raise RequestError(problem, field="logit_bias")
    for token, bias in value.items():
        _whole("a token id in logit_bias", token, least=0, field="logit_bias")
        _float32(f"logit_bias of token {token}", bias, -100, 100, field="logit_bias")
    return {token: float(bias) for token, bias in value.items()}
