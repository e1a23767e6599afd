"""Tool choices, the grammar of calls that must be made, and tools for templates that know none."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from phonograph.cli import serve
from phonograph.engine.requests.request import GrammarSpec
from phonograph.engine.text import ChatTemplate
from phonograph.server.http.failures import ApiError
from phonograph.server.openai import reasoning, tool_formats
from phonograph.server.openai.answer_reader import Reading
from phonograph.server.openai.tool_choice import ToolChoice, choice_of, grammar_of_calls
from phonograph.server.openai.tool_formats import FORMATS, HERMES, JSON, ToolFormat, read_json
from phonograph.server.openai.tool_messages import for_template

SCHEMA = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/$defs/zone"}, "n": {"type": "integer"}},
    "required": ["zone"],
    "$defs": {"zone": {"enum": ["UTC", "CET"]}},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": SCHEMA}}
ADD: dict[str, Any] = {"type": "function", "function": {"name": 'a "dd" é', "description": "adds"}}
TOOLS = [NOW, ADD]
PLAIN = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")


def test_flags_name_the_formats_that_there_are() -> None:
    assert serve.TOOL_PARSERS == tool_formats.CHOICES
    assert serve.REASONING_PARSERS == reasoning.CHOICES
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    args = parser.parse_args(["--tool-call-parser", "hermes", "--enable-auto-tool-choice"])
    assert (args.tool_parser, args.reasoning_parser) == ("hermes", "auto")


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_choices() -> None:
    assert choice_of(None, None) == ToolChoice()
    assert choice_of("auto", TOOLS).names == ("now", 'a "dd" é')
    assert choice_of("none", TOOLS) == ToolChoice((), "none")
    assert choice_of("required", TOOLS).is_forced
    assert choice_of(named("now"), TOOLS) == ToolChoice((NOW,), "required", is_named=True)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("now")]}}
    assert choice_of(allowed, TOOLS) == ToolChoice((NOW,), "auto")


@pytest.mark.parametrize(
    ("given", "tools", "says", "param"),
    [
        ("required", [], "needs `tools`", "tool_choice"),
        ("any", TOOLS, "it is 'any'", "tool_choice"),
        (named("later"), TOOLS, "'later' is not among `tools`", "tool_choice"),
        (named("now"), None, "not among `tools`", "tool_choice"),
        ({"type": "function"}, TOOLS, "a function is named by", "tool_choice"),
        ({"type": "custom"}, TOOLS, "its type is 'custom'", "tool_choice"),
        ({**named("now"), "strict": True}, TOOLS, "unknown field", "tool_choice.strict"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none"}}, TOOLS, "must be", "tool_choice"),
        ("auto", [{"type": "function"}], "`tools[0]` must be", "tools[0]"),
        ("none", [NOW, {"type": "web_search"}], "`tools[1]` must be", "tools[1]"),
    ],
)
def test_choices_that_are_refused(given: Any, tools: Any, says: str, param: str) -> None:
    with pytest.raises(ApiError) as found:
        choice_of(given, tools)
    assert says in found.value.error.message
    assert found.value.error.param == param


def follows(choice: ToolChoice, format: ToolFormat, text: str, *, parallel: bool = True) -> bool:
    """Whether a text, byte by byte, follows the grammar of calls to its end."""
    llguidance = pytest.importorskip("llguidance")
    spec = grammar_of_calls(choice, format.spelling, parallel=parallel)
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_lark(spec.text)
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    for byte in text.encode():
        if not matcher.consume_tokens([byte]):
            return False
    return matcher.is_accepting()


def written(format: ToolFormat, *calls: tuple[str, str]) -> str:
    one = format.spelling
    texts = [
        f'{one.before}{{"name": {json.dumps(name, ensure_ascii=False)}, "{one.key}": {arguments}}}{one.after}'
        for name, arguments in calls
    ]
    return one.begin + one.separator.join(texts) + one.end


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_grammar_takes_calls_that_fit_and_no_others(format: ToolFormat) -> None:
    good, other = ("now", '{"zone": "UTC"}'), ('a "dd" é', "{}")
    choice = choice_of("required", TOOLS)
    assert follows(choice, format, written(format, good))
    assert follows(choice, format, written(format, good, other, good))
    assert not follows(choice, format, written(format, good, other), parallel=False)
    assert follows(choice, format, written(format, other), parallel=False)
    assert not follows(choice, format, written(format))
    assert not follows(choice, format, "text")
    for wrong in ('{"zone": "PST"}', "{}", '{"zone": "UTC", "n": 1.5}', '{"zone":   "UTC"}'):
        assert not follows(choice, format, written(format, ("now", wrong)))
    assert not follows(choice, format, written(format, ("other", "{}")))
    only = choice_of(named("now"), TOOLS)
    assert follows(only, format, written(format, good))
    assert not follows(only, format, written(format, good, good))
    assert not follows(only, format, written(format, other))


def test_an_output_may_be_calls_or_what_a_schema_says() -> None:
    llguidance = pytest.importorskip("llguidance")
    said = GrammarSpec("json_schema", '{"const": {"name": "now", "arguments": {}}}', "response_format")
    spec = grammar_of_calls(choice_of("auto", TOOLS), HERMES.spelling, parallel=True, instead=said)
    assert spec.field == "response_format"
    for text in ('{"name":"now","arguments":{}}', written(HERMES, ("now", '{"zone": "UTC"}'), ('a "dd" é', "{}"))):
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(spec.text)
        )
        assert matcher.consume_tokens(list(text.encode()))
        assert matcher.is_accepting()
    reader = Reading(("now",), HERMES, takes_bare=False).reader()
    assert reader.add('{"name":"now","arguments":{}}') == ['{"name":"now","arguments":{}}']
    assert reader.finish() == []


def test_strict_closes_objects() -> None:
    further = ("now", '{"zone": "UTC", "x": 1}')
    strict = {**NOW, "function": {**NOW["function"], "strict": True}}
    assert follows(choice_of("required", [NOW]), JSON, written(JSON, further))
    assert not follows(choice_of("required", [strict]), JSON, written(JSON, further))
    inner = {"type": "object", "properties": {"properties": {"type": "object", "properties": {"a": {"const": 1}}}}}
    nested = {"type": "function", "function": {"name": "f", "parameters": inner, "strict": True}}
    assert follows(choice_of("required", [nested]), JSON, written(JSON, ("f", '{"properties": {"a": 1}}')))
    assert not follows(choice_of("required", [nested]), JSON, written(JSON, ("f", '{"properties": {"b": 1}}')))


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_the_grammar_takes_is_read_as_calls(format: ToolFormat) -> None:
    from phonograph.server.openai.tool_calls import ToolCallReader

    reader = ToolCallReader(["now"], format)
    text = written(format, ("now", '{"zone": "UTC"}'), ("now", "{}"))
    found = [*reader.add(text), *reader.finish()]
    assert [one.arguments for one in found if not isinstance(one, str)] == ['{"zone": "UTC"}', "{}"]
    assert not any(isinstance(one, str) for one in found)
    assert read_json('{"name": "now", "arguments": {}}')


def test_parameters_that_are_no_schema() -> None:
    for parameters in (5, [1], {"const": 2**60}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with pytest.raises(Exception, match=r"schema"):
            grammar_of_calls(choice_of("required", [tool]), JSON.spelling, parallel=True)


def test_tools_are_written_where_the_template_has_none() -> None:
    messages, tools = for_template([{"role": "user", "content": "hi"}], TOOLS, PLAIN, HERMES)
    assert tools is None
    assert [one["role"] for one in messages] == ["system", "user"]
    assert json.dumps(NOW) in messages[0]["content"]
    assert json.dumps(ADD, ensure_ascii=False) in messages[0]["content"]
    assert '{"name": "the function\'s name", "arguments": {' in messages[0]["content"]
    first = {"role": "system", "content": "Be brief."}
    (joined, _), _ = for_template([first, {"role": "user", "content": "hi"}], TOOLS, PLAIN, HERMES)
    assert joined["content"].startswith("Be brief.\n\nYou may call")
    parts = {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}
    (joined, _), _ = for_template([parts, {"role": "user", "content": "hi"}], TOOLS, PLAIN, HERMES)
    assert [part["text"][:9] for part in joined["content"]] == ["Be brief.", "You may c"]
    assert for_template([first], [], PLAIN, HERMES) == ([first], None)


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DROPS = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", [REFUSES + "{{ messages[0].content }}", DROPS])
def test_tools_go_before_the_first_words_where_there_is_no_system_message(template: str) -> None:
    chat = ChatTemplate(template)
    assert not chat.takes_system
    assert PLAIN.takes_system
    (message,), _ = for_template([{"role": "user", "content": "hi"}], TOOLS, chat, HERMES)
    assert message["role"] == "user"
    assert message["content"].startswith("You may call")
    assert message["content"].endswith("answer as usual.\n\nhi")
    parts = [{"type": "text", "text": "hi"}]
    (message,), _ = for_template([{"role": "user", "content": parts}], TOOLS, chat, HERMES)
    assert [part["text"][:7] for part in message["content"]] == ["You may", "hi"]


def called(*names: str, content: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": '{"zone": "UTC"}'}}
        for name in names
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def test_calls_and_results_are_written_where_the_template_reads_none() -> None:
    results = [{"role": "tool", "tool_call_id": f"id-{name}", "content": f"result {name}"} for name in ("b", "a")]
    asked = {"role": "user", "content": "hi"}
    messages, _ = for_template([asked, called("a", "b", content="Well."), *results, asked], None, PLAIN, HERMES)
    assert [one["role"] for one in messages] == ["user", "assistant", "user", "user"]
    spoken = messages[1]["content"]
    assert spoken.startswith(
        'Well.\n<tool_call>\n{"name": "a", "arguments": {"zone": "UTC"}}\n</tool_call>\n<tool_call>'
    )
    assert "tool_calls" not in messages[1]
    assert messages[2]["content"] == (
        '<tool_response>\n{"name": "b", "content": "result b"}\n</tool_response>\n'
        '<tool_response>\n{"name": "a", "content": "result a"}\n</tool_response>'
    )
    plain, _ = for_template([asked, {"role": "tool", "content": "x"}], None, PLAIN, HERMES)
    assert plain[-1] == {"role": "user", "content": "<tool_response>\nx\n</tool_response>"}
    with pytest.raises(ApiError) as found:
        for_template([asked, results[0]], None, PLAIN, HERMES)
    assert found.value.error.param == "messages[1].tool_call_id"


def test_arguments_of_earlier_calls_become_objects() -> None:
    reads = ChatTemplate("{{ messages[0].tool_calls }}")

    def message(arguments: object) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": arguments}}]}

    def given(one: dict[str, Any]) -> list[dict[str, Any]]:
        return for_template([one], None, reads, HERMES)[0]

    assert given(message('{"zone": 1}')) == [message({"zone": 1})]
    for left_alone in (message("no JSON"), message("[1]"), {"role": "user", "tool_calls": 5}, {"role": "user"}):
        assert given(left_alone) == [left_alone]
