"""Request limits: bounds of every list, text and number, checked before any work is done for them."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.engine.requests.request import MAX_BIASED, MAX_LOGPROBS
from phonograph.server.http.failures import ApiError
from phonograph.server.http.json_shape import Shape


@dataclass(frozen=True)
class Bound:
    """The most that a field may have; a refusal names the field, the bound and what was found."""

    field: str
    most: int
    unit: str

    def check(self, found: int, field: str | None = None) -> None:
        """Raise if there is more; `field` names the place more closely."""
        if found > self.most:
            raise self.refusal(f"{found:,}", field or self.field)

    def check_size(self, value: object, field: str | None = None) -> None:
        """Raise if a JSON value is larger; measuring stops at the bound."""
        if (found := json_size(value, self.most)) > self.most:
            raise self.refusal(f"{found:,} or more", field or self.field)

    def refusal(self, found: str, name: str, status: int = 400) -> ApiError:
        """The error for the client."""
        is_field = not name.startswith("the ")
        named = f"`{name}`" if is_field else name
        message = f"{named}: found {found} {self.unit}; at most {self.most:,} are taken. Send less."
        return ApiError(status, message, param=name if is_field else None, code="limit_exceeded")


_SIZE = "characters and values"
"""How JSON values are measured: the characters of texts and names, and one for each value."""

URL = Bound("the URL", 8 << 10, "bytes")
HEADERS = Bound("the headers", 64 << 10, "bytes")
NUM_HEADERS = Bound("the headers", 128, "lines")
PIPELINED = Bound("the connection", 16, "requests at once")
DEPTH = Bound("the body", 64, "levels of nesting")
CONTAINERS = Bound("the body", 32 << 10, "lists and objects")
# A number near the ends of the double range takes 50 µs to decode, one with a fraction or many digits up to 0.5 µs.
EXPONENTS = Bound("the body", 64, "numbers with an exponent")
FRACTIONS = Bound("the body", 4096, "numbers with a fraction")
FURTHER_DIGITS = Bound("the body", 4096, "digits of numbers after their 20th")
CHOICES = Bound("n", 128, "choices")
TOP_LOGPROBS = Bound("top_logprobs", MAX_LOGPROBS, "alternatives")
LOGPROBS = Bound("logprobs", 1 << 20, "entries (`n` × `max_tokens` × (1 + `top_logprobs`))")
RESPONSE_LOGPROBS = Bound("include", 8192, "entries of logprobs (`max_output_tokens` × (1 + `top_logprobs`))")
INCLUDES = Bound("include", 64, "names")
PROMPT_LOGPROBS = Bound("prompt_logprobs, echo", 1 << 20, "entries (`n` × tokens of prompts × (1 + `prompt_logprobs`))")
STOPS = Bound("stop", 16, "texts")
STOP_CHARS = Bound("stop[]", 1024, "characters")
STOP_TOKENS = Bound("stop_token_ids", 64, "token ids")
ALLOWED_TOKENS = Bound("allowed_token_ids", 32 << 10, "token ids")
BAD_WORDS = Bound("bad_words", 128, "texts")
BAD_WORD_CHARS = Bound("bad_words[]", 256, "characters")
BIASED = Bound("logit_bias", MAX_BIASED, "tokens")
MESSAGES = Bound("messages", 2048, "messages")
TOOLS = Bound("tools", 128, "tools")
TOOLS_SIZE = Bound("tools", 256 << 10, _SIZE)
TEMPLATE_SIZE = Bound("chat_template_kwargs", 16 << 10, _SIZE)
GRAMMAR_CHARS = Bound("guided_regex, guided_grammar", 64 << 10, "characters")
SCHEMA_SIZE = Bound("guided_json, response_format", 64 << 10, _SIZE)
GUIDED_CHOICES = Bound("guided_choice", 1024, "texts")
GUIDED_CHOICE_SIZE = Bound("guided_choice", 64 << 10, _SIZE)
METADATA_SIZE = Bound("metadata", 16 << 10, _SIZE)
LABEL_CHARS = Bound(
    "model, user, service_tier, safety_identifier, prompt_cache_key, previous_response_id", 1024, "characters"
)

FIXED = (
    *(URL, HEADERS, NUM_HEADERS, PIPELINED, DEPTH, CONTAINERS, EXPONENTS, FRACTIONS, FURTHER_DIGITS),
    *(CHOICES, TOP_LOGPROBS, LOGPROBS, PROMPT_LOGPROBS, RESPONSE_LOGPROBS, INCLUDES, STOPS, STOP_CHARS),
    *(
        STOP_TOKENS,
        ALLOWED_TOKENS,
        BAD_WORDS,
        BAD_WORD_CHARS,
        BIASED,
        MESSAGES,
        TOOLS,
        TOOLS_SIZE,
        TEMPLATE_SIZE,
        GRAMMAR_CHARS,
        SCHEMA_SIZE,
        GUIDED_CHOICES,
    ),
    *(GUIDED_CHOICE_SIZE, METADATA_SIZE, LABEL_CHARS),
)

MANY_TOKENS, MANY_TO_DECODE = 1 << 17, 1 << 15


@dataclass(frozen=True)
class ModelBounds:
    """Bounds that depend on the model's context and vocabulary."""

    prompts: Bound
    prompt_chars: Bound
    """Of one prompt, or of all messages. More can't fit the context: no token has more characters than the longest."""
    prompt_tokens: Bound
    """Of all prompts together."""
    tokens: Bound
    """Token ids of one /detokenize."""
    values: Bound
    """Of one body: numbers, texts, lists and objects."""

    @classmethod
    def of(cls, max_len: int, longest_token: int, max_prompts: int, max_chars: int | None) -> ModelBounds:
        """For a context of `max_len` tokens; `max_chars` is the server's own limit."""
        fit = max_len * longest_token
        return cls(
            Bound("prompt", max_prompts, "prompts"),
            Bound("prompt", fit if max_chars is None else min(fit, max_chars), "characters"),
            Bound("prompt", max(MANY_TOKENS, max_len), "tokens in all prompts"),
            Bound("tokens", max(MANY_TO_DECODE, max_len), "token ids"),
            Bound("the body", 2 * max(MANY_TOKENS, max_len), "values"),
        )

    def check_shape(self, shape: Shape, field: str | None = None) -> None:
        """Raise if a JSON text would take long to decode, which is one call that holds the GIL."""
        DEPTH.check(shape.depth, field)
        CONTAINERS.check(shape.containers, field)
        self.values.check(shape.values, field)
        EXPONENTS.check(shape.exponents, field)
        FRACTIONS.check(shape.fractions, field)
        FURTHER_DIGITS.check(shape.further_digits, field)


DERIVED = (
    ("the body", "`--max-body-bytes`", "bytes (413)"),
    ("the body", f"the larger of {2 * MANY_TOKENS:,} and 2 × `--max-len`", "values"),
    ("prompt, input", "`--max-seqs` + `--max-queue`", "prompts"),
    (
        "prompt, input, messages",
        "`--max-len` × the longest token of the vocabulary, and `--max-prompt-chars`",
        "characters",
    ),
    ("prompt, input", f"the larger of {MANY_TOKENS:,} and `--max-len`", "tokens in all prompts"),
    ("tokens", f"the larger of {MANY_TO_DECODE:,} and `--max-len`", "token ids"),
)


def table() -> list[str]:
    """All bounds, as rows of the documentation's table."""
    fixed = [f"| {_codes(bound.field)} | {bound.most:,} | {bound.unit} |" for bound in FIXED]
    derived = [f"| {_codes(field)} | {most} | {unit} |" for field, most, unit in DERIVED]
    return ["| what | at most | of |", "| --- | --- | --- |", *derived, *fixed]


def _codes(names: str) -> str:
    return ", ".join(name if name.startswith("the ") else f"`{name}`" for name in names.split(", "))


def json_size(value: object, enough: int) -> int:
    """Characters of all texts and names in a JSON value, and one for each value; counting ends above `enough`."""
    size, waiting = 0, [value]
    while waiting and size <= enough:
        found = waiting.pop()
        size += 1
        if isinstance(found, str):
            size += len(found)
        elif isinstance(found, dict):
            size += sum(map(len, found))
            waiting.extend(found.values())
        elif isinstance(found, list):
            if len(found) + size > enough:
                return size + len(found)
            waiting.extend(found)
    return size
