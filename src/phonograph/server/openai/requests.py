"""Request bodies: OpenAI's fields, and those of vLLM's extensions that are supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from phonograph.engine.requests.request import MAX_DRAFTS
from phonograph.server.http import request_limits as limits
from phonograph.server.http.neutral_fields import NeutralField
from phonograph.server.openai import message_schemas

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tokens = Annotated[list[TokenId], Meta(min_length=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, extra_json_schema={"maxLength": limits.STOP_CHARS.most})]
Stops = Annotated[list[Stop], Meta(extra_json_schema={"maxItems": limits.STOPS.most})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
ContentTokens = Literal["text", "special"]
Verbosity = Literal["low", "medium", "high"]
Drafts = bool | Annotated[int, Meta(ge=0, le=MAX_DRAFTS)]
BadWord = Annotated[str, Meta(min_length=1, extra_json_schema={"maxLength": limits.BAD_WORD_CHARS.most})]
_MAX_ALLOWED = {"maxItems": limits.ALLOWED_TOKENS.most}
WHOLE = {"maximum": 2**63 - 1}
FLOAT32 = {"maximum": 2.0**128 - 2.0**104}
"""Representable values, for the OpenAPI document; larger ones are refused where they are used."""
_SOME = {"minLength": 1}
_ANY_OF_SOME = {"minItems": 1}
Message = Annotated[dict[str, Any], Meta(extra_json_schema=message_schemas.MESSAGE)]
Tool = Annotated[dict[str, Any], Meta(extra_json_schema=message_schemas.TOOL)]

WITHOUT_EFFECT = {
    "user": "for OpenAI's own accounts",
    "metadata": "kept with a completion that OpenAI stores",
    "store": "nothing is stored here, and no answer depends on it",
    "service_tier": "there is one tier",
    "safety_identifier": "for OpenAI's own policies",
    "prompt_cache_key": "prompts share what they begin with, whoever sends them",
    "modalities": "text is the only modality",
    "include_obfuscation": "nothing is obfuscated",
}
"""Fields that are accepted and ignored, with the reason why no output depends on them. All others are read."""

_ONLY_TEXT = "only text is read and written"
_SHARED = "prompts share what they begin with, whoever sends them"
_ONE_TEMPLATE = "messages are rendered by the model's own template"

ONLY_NEUTRAL = {
    "spaces_between_special_tokens": NeutralField("no space is put between special tokens either way", (True, False)),
    "use_beam_search": NeutralField("there is no beam search", (False,)),
    "length_penalty": NeutralField("it is of beam search, and tokens are sampled", (1,)),
    "early_stopping": NeutralField("it is of beam search, and tokens are sampled", (False,)),
    "typical_p": NeutralField("this kind of sampling is not built in", (1,)),
    "top_a": NeutralField("this kind of sampling is not built in", (0,)),
    "logits_processors": NeutralField("code from requests is not run"),
    "guided_decoding_backend": NeutralField("there is one"),
    "guided_whitespace_pattern": NeutralField("the grammar's own white space rules apply"),
    "add_generation_prompt": NeutralField("a prompt is rendered by no template", (True,)),
    "continue_final_message": NeutralField("a prompt is always continued", (False,)),
    "chat_template": NeutralField(f"{_ONE_TEMPLATE}, or by --chat-template"),
    "documents": NeutralField(f"{_ONE_TEMPLATE}, which is given none"),
    "reasoning_effort": NeutralField("a prompt is rendered by no template"),
    "verbosity": NeutralField("a prompt is rendered by no template"),
    "prediction": NeutralField("predicted outputs are not supported"),
    "audio": NeutralField(_ONLY_TEXT),
    "mm_processor_kwargs": NeutralField(_ONLY_TEXT),
    "web_search_options": NeutralField("there is no web search"),
    "functions": NeutralField("OpenAI has put `tools` in its place", ([],)),
    "function_call": NeutralField("OpenAI has put `tool_choice` in its place"),
    "cache_salt": NeutralField(_SHARED),
    "moderation": NeutralField("nothing is moderated"),
    "prompt_cache_options": NeutralField(_SHARED),
    "prompt_cache_retention": NeutralField(_SHARED),
    "request_id": NeutralField("the server gives ids, and a response has its own"),
    "prompt_embeds": NeutralField("prompts are texts or token ids"),
    "structural_tag": NeutralField("use `response_format` or a `guided_` field"),
    "include_reasoning": NeutralField("reasoning is returned separately, and never left out", (True,)),
    "kv_transfer_params": NeutralField("there is no disaggregated prefill"),
    "media_io_kwargs": NeutralField(_ONLY_TEXT),
    "vllm_xargs": NeutralField("there are no plugins that would read them"),
    "echo": NeutralField("the prompt is not repeated", (False,)),
    "best_of": NeutralField("as many choices are made as are returned: leave it out, or let it be `n`"),
}
"""Fields of OpenAI's and of other servers that some clients always send: accepted at values that match what is done
anyway, refused by name with the reason at others."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: bool = False
    """Send token counts in a last event."""
    include_obfuscation: bool = False
    """Accepted; nothing is obfuscated here."""
    continuous_usage_stats: bool = False
    """Send token counts so far in every event. Not in OpenAI's API."""


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of both completions and chats. Unknown fields are refused: they would have no effect.

    Where temperature, top_p, top_k, min_p or repetition_penalty is left out, the model's default applies (/v1/models).
    """

    model: str | None = None
    """A name from /v1/models; may be left out."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=limits.CHOICES.most)] | None = None
    """Choices for one prompt."""
    temperature: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """0 is greedy: always the most likely token. Default: the model's own, else 1."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str, Meta(extra_json_schema={"maxLength": limits.STOP_CHARS.most})] | Stops | None = None
    """Stop strings: they end the output, and are not part of it. An empty string in place of a list means none."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=-100, le=100)]],
            Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
        ]
        | None
    ) = None
    """Token id → what is added to its logit."""

    top_k: Annotated[int, Meta(ge=-1, extra_json_schema=WHOLE)] | None = None
    """Sample from this many most likely tokens; 0 and -1 are off. Not in OpenAI's API."""
    min_p: Probability | None = None
    """Leave out tokens less likely than this fraction of the most likely one's probability. Not in OpenAI's API."""
    repetition_penalty: Annotated[float, Meta(gt=0, extra_json_schema=FLOAT32)] | None = None
    """Not in OpenAI's API."""
    ignore_eos: bool | None = None
    """Continue after the end-of-sequence token. Not in OpenAI's API."""
    stop_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    """Not in OpenAI's API."""
    skip_special_tokens: bool | None = None
    """False leaves special tokens in the text, and in the logprobs. Not in OpenAI's API."""
    include_stop_str_in_output: bool | None = None
    """Let the text end with the stop string or token that ended it. Not in OpenAI's API."""
    return_token_ids: bool | None = None
    """Add `token_ids` to choices, and `prompt_token_ids`. Not in OpenAI's API."""
    return_hidden_states: bool | None = None
    """Add `hidden_states` to choices: what the last token was picked from, after the last norm. Not in OpenAI's API."""
    return_tokens_as_token_ids: bool | None = None
    """In logprobs, show tokens as `token_id:7`. Not in OpenAI's API."""
    min_tokens: Annotated[int, Meta(ge=0, extra_json_schema=WHOLE)] | None = None
    """The least number of tokens; before that nothing ends the output. Not in OpenAI's API."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, extra_json_schema=_MAX_ALLOWED)] | None = None
    """Only these tokens may be generated. Not in OpenAI's API."""
    bad_words: Annotated[list[BadWord], Meta(extra_json_schema={"maxItems": limits.BAD_WORDS.most})] | None = None
    """Texts that may not be generated, inside of words or at their beginnings. Not in OpenAI's API."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS.most)] | None = None
    """How many alternatives to report for each token of the prompt. Not in OpenAI's API."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, extra_json_schema={"not": {"const": 0}})] | None = None
    """Keep at most this many of the prompt's last tokens; -1 keeps as many as fit. Not in OpenAI's API."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Among waiting requests the lowest goes first. Default: 0. Not in OpenAI's API."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS. Default: true; false for a chat, whose template adds them.
    Not in OpenAI's API."""
    speculate: Drafts | None = None
    """Whether to draft tokens for it, or how many per round; the output does not depend on it. Not in OpenAI's API."""

    response_format: Annotated[dict[str, Any], Meta(extra_json_schema=message_schemas.RESPONSE_FORMAT)] | None = None
    guided_json: Any = None
    guided_regex: Annotated[str, Meta(extra_json_schema=_SOME)] | None = None
    guided_choice: (
        Annotated[list[Annotated[str, Meta(extra_json_schema=_SOME)]], Meta(extra_json_schema=_ANY_OF_SOME)] | None
    ) = None
    guided_grammar: Annotated[str, Meta(extra_json_schema=_SOME)] | None = None
    structured_outputs: Annotated[dict[str, Any], Meta(extra_json_schema=message_schemas.STRUCTURED_OUTPUTS)] | None = (
        None
    )
    """vLLM's form of the `guided_` fields: an object with one of json, json_object, regex, choice and grammar."""

    # Accepted, and without effect: `WITHOUT_EFFECT` says why.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | Tokens], Meta(min_length=1)]
    """A text, several texts, token ids, or several lists of token ids."""
    max_tokens: Annotated[int, Meta(ge=0, extra_json_schema=WHOLE)] | None = None
    """Default: 16. With 0 only the prompt is computed, and scored where that is asked for."""
    logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS.most)] | None = None
    """How many alternatives to report for each token."""
    echo: bool | None = None
    """Begin the text with the prompt, and with `logprobs` report those of its tokens."""
    best_of: int | None = None
    suffix: Annotated[str, Meta(extra_json_schema={"maxLength": 0})] | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    """Each with a role (system, developer, user, assistant, tool) and content: a text or text parts."""
    max_tokens: Annotated[int, Meta(ge=0, extra_json_schema=WHOLE)] | None = None
    """Default: up to the end of the context."""
    max_completion_tokens: Annotated[int, Meta(ge=0, extra_json_schema=WHOLE)] | None = None
    """OpenAI's newer name for max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS.most)] | None = None
    tools: list[Tool] | None = None
    """Functions that the model may call; the chat template renders them."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template. Not in OpenAI's API."""
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of an answer. Default: true. Not in OpenAI's API."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it. Not in OpenAI's API."""
    reasoning_effort: Effort | None = None
    """For chat templates that read it; with others it has no effect, and a header says so."""
    verbosity: Verbosity | None = None
    """As `reasoning_effort`."""
    content_special_tokens: ContentTokens | None = None
    """How special tokens in message texts are tokenized. Default: the server's (`text`). Not in OpenAI's API."""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS. Default: true; not for messages, whose template adds them."""
    add_generation_prompt: bool | None = None
    """Of messages: end with the beginning of an answer. Default: true."""
    continue_final_message: bool | None = None
    """Of messages: end within the last one, without the template's end-of-turn."""
    content_special_tokens: ContentTokens | None = None
    """Of messages: as in a chat."""
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
