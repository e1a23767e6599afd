"""ChatPlan: a chat request resolved: messages for the template, sampling parameters, and how to parse the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text import ChatTemplate, Tokenizer
from phonograph.server.http.failures import ApiError
from phonograph.server.openai import reasoning, tool_formats
from phonograph.server.openai.answer_reader import Reading
from phonograph.server.openai.reasoning import ReasoningFormat
from phonograph.server.openai.request_validation import check_message_fields, check_tool_fields
from phonograph.server.openai.requests import ChatRequest
from phonograph.server.openai.sampling_params import chat_params
from phonograph.server.openai.tool_choice import ToolChoice, choice_of, grammar_of_calls
from phonograph.server.openai.tool_formats import JSON, ToolFormat
from phonograph.server.openai.tool_messages import for_template

Message = dict[str, Any]

_END_OF_PROMPT = 16
"""Tokens at a prompt's end that are decoded to see whether the template opened reasoning."""
_MOST_TOKENS_OF_CHAR = 4
"""A token for each byte."""
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")


@dataclass(frozen=True)
class ChatPlan:
    """All that is known of a chat before its prompt is rendered."""

    params: SamplingParams
    messages: Sequence[Message]
    tools: Sequence[Message] | None
    variables: dict[str, Any]
    add_generation_prompt: bool
    continues: bool
    """Whether the last message is continued."""
    reading: Reading
    content_special_tokens: str | None = None
    """How special tokens in message texts are tokenized; None: the server's default."""
    notes: tuple[str, ...] = ()
    """Fields of the request that have no effect with this model."""
    unthinking: ReasoningFormat | None = None
    """The model's reasoning format, where the output follows a grammar and so can't contain reasoning."""

    def rendered(self, prompt: list[int], tokenizer: Tokenizer) -> tuple[list[int], Reading]:
        """The rendered prompt, and how to parse the output.

        Reasoning that the template opens is closed at once where a grammar keeps the output from closing it.
        """
        if self.continues:
            return prompt, self._continued(prompt, tokenizer)
        end = tokenizer.decode(prompt[-_END_OF_PROMPT:], skip_special=False)
        if self.unthinking is not None and self.unthinking.is_open(end):
            prompt = [*prompt, *tokenizer.encode_exactly(f"\n{self.unthinking.closing}\n\n")]
        return prompt, self.reading.after(end)

    def _continued(self, prompt: list[int], tokenizer: Tokenizer) -> Reading:
        """How to parse what goes on with the last message; only an assistant's has reasoning."""
        last = self.messages[-1]
        if self.reading.reasoning is None or last["role"] != "assistant":
            return self.reading
        begun = str(last["content"]).strip()
        num_tokens = _END_OF_PROMPT + _MOST_TOKENS_OF_CHAR * len(begun)
        before, _, _ = tokenizer.decode(prompt[-num_tokens:], skip_special=False).rpartition(begun)
        return self.reading.after(before, begun)


@dataclass(frozen=True)
class AnswerFormats:
    """How a model writes tool calls and reasoning, by its template or by flags."""

    tools: ToolFormat | None
    """None: tool calls are not parsed, except forced ones, which are JSON."""
    reasoning: ReasoningFormat | None
    tokenizer: Tokenizer | None

    @classmethod
    def of(
        cls, template: ChatTemplate, tokenizer: Tokenizer | None, tool_parser: str, reasoning_parser: str
    ) -> AnswerFormats:
        """By the flags, which may say `auto` or `none`."""
        by_flag = tool_formats.FORMATS.get(tool_parser)
        tools = tool_formats.format_of(template) if tool_parser == "auto" else by_flag
        thinks = reasoning.FORMATS.get(reasoning_parser)
        thinks = reasoning.format_of(template) if reasoning_parser == "auto" else thinks
        return cls(tools, thinks, tokenizer)

    def reading(self, choice: ToolChoice, max_calls: int | None, *, follows_grammar: bool) -> Reading:
        """How to parse the outputs of a request with these tools; an output that follows a grammar has no reasoning."""
        written = JSON if self.tools is None and choice.is_forced else self.tools
        names = choice.names if written is not None else ()
        thinks = None if follows_grammar else self.reasoning
        marks = [*(written.marks if names and written else ()), *((thinks.opening, thinks.closing) if thinks else ())]
        ids = {mark: self.tokenizer.token_id(mark) for mark in marks} if self.tokenizer is not None else {}
        special = self.tokenizer.special_ids if self.tokenizer is not None else frozenset()
        return Reading(
            tuple(names),
            written or JSON,
            max_calls,
            thinks,
            kept_tokens=frozenset(found for found in ids.values() if found is not None and found in special),
        )


def planned(body: ChatRequest, template: ChatTemplate, formats: AnswerFormats, max_len: int) -> ChatPlan:
    """The plan of a request whose sizes were checked; refuses what can't be served."""
    check_message_fields(body.messages, template.message_fields)
    choice = choice_of(body.tool_choice, body.tools)
    checked_tools(choice.tools, template)
    params = chat_params(body, max_len)
    parallel = body.parallel_tool_calls is not False
    spelled = formats.tools or JSON
    if choice.is_forced:
        params = _forced(body, params, choice, spelled, parallel=parallel)
    may_call = _is_either(choice, params, spelled)
    if may_call:
        grammar = grammar_of_calls(choice, spelled.spelling, parallel=parallel, instead=params.grammar)
        params = replace(params, grammar=grammar)
    given, dropped = _without_thoughts(body.messages, template)
    messages, tools = for_template(given, choice.tools, template, spelled)
    variables, notes = _variables(body, template)
    if dropped:
        notes.append("messages[].reasoning_content: the chat template does not read it; earlier reasoning is left out")
    if choice.mode == "auto" and not may_call and any(tool["function"].get("strict") for tool in choice.tools):
        notes.append('tools[].function.strict: enforced only under tool_choice "required" or a named function')
    if choice.mode == "auto" and choice.tools and params.grammar is not None and not may_call:
        notes.append("tools: an output that follows a grammar has no tool calls")
    continues = check_continued(body.messages, body.add_generation_prompt, body.continue_final_message)
    max_calls = None if parallel else 1
    has_calls = choice.is_forced or may_call or params.grammar is None
    reading = formats.reading(choice if has_calls else ToolChoice(), max_calls, follows_grammar=bool(params.grammar))
    if may_call:
        reading = replace(reading, takes_bare=False)
    is_begun = not continues and body.add_generation_prompt is not False
    special = body.content_special_tokens
    unthinking = formats.reasoning if params.grammar is not None else None
    return ChatPlan(params, messages, tools, variables, is_begun, continues, reading, special, tuple(notes), unthinking)


def checked_tools(tools: Sequence[Message], template: ChatTemplate) -> Sequence[Message]:
    """The tools; refuses fields of theirs that the template would drop. A template without tools gets them as JSON."""
    shown_whole = template.shows_tools_whole or not template.takes_tools
    check_tool_fields(tools, template.message_fields, shown_whole=shown_whole)
    return tools


def check_continued(messages: Sequence[Message], begins: bool | None, continues: bool | None) -> bool:
    """Whether the last message is continued; refuses `add_generation_prompt` together with it."""
    if not continues:
        return False
    if begins:
        raise _refusal("`add_generation_prompt` asks for a new one. Send one of the two")
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise _refusal("the last message has no text to continue. Send one as a string")
    return True


def _refusal(because: str) -> ApiError:
    field = "continue_final_message"
    return ApiError(400, f"`{field}` can't be served: {because}.", param=field, code="invalid_value")


def _forced(
    body: ChatRequest, params: SamplingParams, choice: ToolChoice, format: ToolFormat, *, parallel: bool
) -> SamplingParams:
    """With the grammar of forced calls; refuses `guided_` fields. `response_format` is about content: there is none."""
    for name in _GUIDED:
        if getattr(body, name) is not None:
            problem = f"`{name}` can't be served: the output can follow one grammar, and `tool_choice` asks for calls."
            raise ApiError(400, f"{problem} Leave one out.", param=name, code="unsupported")
    return replace(params, grammar=grammar_of_calls(choice, format.spelling, parallel=parallel))


def _is_either(choice: ToolChoice, params: SamplingParams, format: ToolFormat) -> bool:
    """Whether an output is either tool calls or `response_format` content, told apart by tags."""
    grammar = params.grammar
    is_format = grammar is not None and grammar.field == "response_format"
    return is_format and choice.mode == "auto" and bool(choice.tools) and bool(format.spelling.before)


def _without_thoughts(messages: Sequence[Message], template: ChatTemplate) -> tuple[list[Message], bool]:
    """Messages without reasoning_content where the template does not read it, and whether there was any."""
    if "reasoning_content" in template.message_fields:
        return list(messages), False
    found = [{name: value for name, value in one.items() if name != "reasoning_content"} for one in messages]
    return found, any(one.get("reasoning_content") for one in messages)


def _variables(body: ChatRequest, template: ChatTemplate) -> tuple[dict[str, Any], list[str]]:
    """Template variables besides the messages, and the fields that the template does not read."""
    found = dict(body.chat_template_kwargs or {})
    notes: list[str] = []
    for name, value in (("reasoning_effort", body.reasoning_effort), ("verbosity", body.verbosity)):
        if value is None:
            continue
        if name in found and found[name] != value:
            problem = f"`{name}` is {value!r}, and `chat_template_kwargs` has another value of it. Send one of them."
            raise ApiError(400, problem, param=name, code="invalid_value")
        if name in template.variables:
            found[name] = value
        elif name == "reasoning_effort" and value == "none" and "enable_thinking" in template.variables:
            found.setdefault("enable_thinking", False)
        else:
            notes.append(f"{name}: the model's chat template does not read it; it has no effect")
    return found, notes
