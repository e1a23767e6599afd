"""Outputs told apart into thoughts, text and calls, however they are cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text import ChatTemplate, StopStrings, TextReader
from phonograph.server.openai import reasoning, tool_formats
from phonograph.server.openai.answer_reader import AnswerReader, Part, Reading, Thought, joined
from phonograph.server.openai.chat_plan import ChatPlan
from phonograph.server.openai.reasoning import THINK
from phonograph.server.openai.responses import FunctionCall
from phonograph.server.openai.tool_calls import ToolCallReader
from phonograph.server.openai.tool_formats import HERMES, JSON, LLAMA3, MISTRAL, ToolFormat

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
UNKNOWN = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
BARE = '[{"name": "now", "arguments": {"zone": "UTC"}}, {"name": "now", "arguments": {}}]'
ONE = '{"name": "now", "parameters": {"zone": "UTC"}}'
MADE = FunctionCall("now", '{"zone": "UTC"}')
NONE = FunctionCall("now", "{}")
INNER = '{"text": "a </tool_call> b \\" </tool_call>"}'
ODD = '{"a": 1e5, "b": 12345678901234567890.0, "a": "\\u00e9",  "c": 1}'


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def read(text: str, size: int, format: ToolFormat = HERMES) -> tuple[str, list[FunctionCall]]:
    """An answer in pieces of this size."""
    reader = ToolCallReader(["now"], format)
    found = [part for piece in cut(text, size) for part in reader.add(piece)] + reader.finish()
    _, shown, calls = joined(found)
    return shown, calls


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("plain text, 1 < 2", "plain text, 1 < 2", []),
        (CALL, "", [MADE]),
        (f"Let me see. {CALL}", "Let me see. ", [MADE]),
        (f"{CALL}\n{CALL}", "", [MADE, MADE]),
        (f"a {CALL} b", "a b", [MADE]),
        ('<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}', "", [MADE]),
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
        ("<tool_call>cut short", "<tool_call>cut short", []),
        ("it ends with <tool", "it ends with <tool", []),
        ('{"name": "now", "parameters": {"zone": "UTC"}}', "", [MADE]),
        ('[{"name": "now", "arguments": "{}"}]', "", [FunctionCall("now", "{}")]),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        (UNKNOWN, UNKNOWN, []),
        ('{"answer": 5}', '{"answer": 5}', []),
        ('{"name": "now", "arguments": {}, "answer": 5}', '{"name": "now", "arguments": {}, "answer": 5}', []),
        (
            '{"name": "now", "arguments": {}, "parameters": {}}',
            '{"name": "now", "arguments": {}, "parameters": {}}',
            [],
        ),
        ('{"id": "a", "type": "function", "name": "now", "arguments": {}}', "", [FunctionCall("now", "{}")]),
        (
            f'<tool_call>{{"name": "now", "arguments": {INNER}}}</tool_call>{CALL}',
            "",
            [FunctionCall("now", INNER), MADE],
        ),
        (f'<tool_call>{{"name": "now", "arguments": {ODD}}}</tool_call>', "", [FunctionCall("now", ODD)]),
        (f'{{"name": "now", "arguments": {ODD}}}', "", [FunctionCall("now", ODD)]),
        (f'<tool_call>{{"name": "</tool_call> a {CALL}', '<tool_call>{"name": "</tool_call> a ', [MADE]),
        ('<tool_call>it"s</tool_call> so', '<tool_call>it"s</tool_call> so', []),
        ("{not JSON", "{not JSON", []),
        ("  \n ", "  \n ", []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_however_the_text_comes(text: str, shown: str, calls: list[FunctionCall], size: int) -> None:
    assert read(text, size) == (shown, calls)


@given(st.text(st.sampled_from('<tool_cal>/{}"ax ')), st.integers(1, 9))
def test_text_without_calls_comes_through(text: str, size: int) -> None:
    assert read(text, size) == (text, [])


@pytest.mark.parametrize(
    ("format", "text", "shown", "calls"),
    [
        (LLAMA3, ONE, "", [MADE]),
        (LLAMA3, f"<|python_tag|>{ONE}", "", [MADE]),
        (LLAMA3, f"{ONE}; {ONE}", "", [MADE, MADE]),
        (LLAMA3, f"Well. <|python_tag|>{ONE};{ONE}", "Well. ", [MADE, MADE]),
        (LLAMA3, '<|python_tag|>brave_search.call("x")', '<|python_tag|>brave_search.call("x")', []),
        (LLAMA3, f"{ONE}; then", f"{ONE}; then", []),
        (LLAMA3, "a <|pyth", "a <|pyth", []),
        (MISTRAL, f"[TOOL_CALLS]{BARE}", "", [MADE, NONE]),
        (MISTRAL, f"[TOOL_CALLS] {BARE}", "", [MADE, NONE]),
        (MISTRAL, f"Well. [TOOL_CALLS]{BARE}", "Well. ", [MADE, NONE]),
        (MISTRAL, BARE, "", [MADE, NONE]),
        (MISTRAL, '[TOOL_CALLS]now{"zone": "UTC"}', "", [MADE]),
        (MISTRAL, '[TOOL_CALLS]now[ARGS]{"zone": "UTC"}[TOOL_CALLS]now[ARGS]{}', "", [MADE, NONE]),
        (MISTRAL, '[TOOL_CALLS]now[CALL_ID]abc123[ARGS]{"zone": "UTC"}', "", [MADE]),
        (MISTRAL, "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
        (MISTRAL, "[TOOL_CALLS]now[ARGS]{", "[TOOL_CALLS]now[ARGS]{", []),
        (MISTRAL, "[TOOL_CALLS]now[ARGS]{} so", "[TOOL_CALLS]now[ARGS]{} so", []),
        (MISTRAL, "[TOOL_", "[TOOL_", []),
        (MISTRAL, "[1, 2]", "[1, 2]", []),
        (JSON, BARE, "", [MADE, NONE]),
        (JSON, ONE, "", [MADE]),
        (JSON, CALL, CALL, []),
        (JSON, "plain", "plain", []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_of_each_family(format: ToolFormat, text: str, shown: str, calls: list[FunctionCall], size: int) -> None:
    assert read(text, size, format) == (shown, calls)


@pytest.mark.parametrize("text", [f"{CALL}\n{CALL}", f"a {CALL}{CALL}", BARE])
@pytest.mark.parametrize("size", [3, 1000])
def test_of_several_calls_only_so_many_are_passed_on(text: str, size: int) -> None:
    reader = ToolCallReader(["now"], most=1)
    found = [part for piece in cut(text, size) for part in reader.add(piece)] + reader.finish()
    assert joined(found)[2] == [MADE]


def test_text_is_shown_as_soon_as_it_can_be_no_call() -> None:
    reader = ToolCallReader(["now"])
    assert reader.add("Hello <") == ["Hello "]
    assert reader.add("b>") == ["<b>"]


def answer(text: str, *, thinks: bool = False, size: int = 1000) -> tuple[str, str]:
    reader = Reading(reasoning=THINK, thinks=thinks).reader()
    found = [part for piece in cut(text, size) for part in reader.add(piece)] + reader.finish()
    thought, said, _ = joined(found)
    return thought, said


@pytest.mark.parametrize(
    ("text", "thinks", "found"),
    [
        ("plain", False, ("", "plain")),
        ("  plain ", False, ("", "  plain ")),
        ("<think>\nhm, so\n</think>\n\nYes. ", False, ("hm, so", "Yes. ")),
        ("\n<think>a  b</think>c", False, ("a  b", "c")),
        ("hm\n</think>\n\nYes.", True, ("hm", "Yes.")),
        ("<think>hm</think>Yes.", True, ("hm", "Yes.")),
        ("hm </thin", True, ("hm </thin", "")),
        ("hm ", True, ("hm", "")),
        ("<thi", False, ("", "<thi")),
        ("<thi", True, ("<thi", "")),
        ("<think>", False, ("", "")),
        ("<think></think>", False, ("", "")),
        ("<think>\n\n</think>\n\na", False, ("", "a")),
        ("a <think>b</think>", False, ("", "a <think>b</think>")),
        ("<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("", True, ("", "")),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_thoughts_come_before_answers(text: str, thinks: bool, found: tuple[str, str], size: int) -> None:
    assert answer(text, thinks=thinks, size=size) == found


PIECES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]"),
    *(CALL, UNKNOWN, BARE, ONE, '{"name": "now", "arguments": {}}', "{", "}", "[", "]", '"', "\\", "; "),
    *(" ", "\n", "a", "now", "<", "é", "tool", "_call>"),
)
READINGS = [
    Reading(("now",) if has_tools else (), written, most, THINK if thinks else None, thinks=is_open)
    for written in (HERMES, LLAMA3, MISTRAL, JSON)
    for has_tools in (False, True)
    for most in (None, 1)
    for thinks, is_open in ((False, False), (True, False), (True, True))
]


def merged(parts: list[Part]) -> list[Part]:
    """With texts that follow each other as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, str) and isinstance(last, str):
            found[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + part.text)
        else:
            found.append(part)
    return found


def parts_of(reader: AnswerReader, pieces: list[str]) -> list[Part]:
    found = [part for piece in pieces for part in reader.add(piece)]
    return merged(found + reader.finish())


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.lists(st.integers(0, 200)), st.sampled_from(READINGS))
def test_pieces_add_up_to_the_whole(written: list[str], places: list[int], reading: Reading) -> None:
    text = "".join(written)
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert "".join(pieces) == text
    assert parts_of(reading.reader(), pieces) == parts_of(reading.reader(), [text])


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(READINGS))
def test_calls_are_of_tools_that_were_given(written: list[str], reading: Reading) -> None:
    calls = joined(parts_of(reading.reader(), ["".join(written)]))[2]
    assert all(call.name in reading.tools for call in calls)
    assert reading.max_calls is None or len(calls) <= reading.max_calls


@pytest.mark.parametrize(
    ("tokens", "thinks", "counted"),
    [
        (["a", " b", "", "</think>", "c"], True, 4),
        (["a", " b"], True, 2),
        (["a", "</", "thi", "nk>", "c"], True, 4),
        (["a", "</", "thi", "nk> c", "d"], True, 4),
        (["a", "</thi"], True, 2),
        (["<thi"], True, 1),
        (["", " "], True, 2),
        (["a</think>", "", "b</think>"], True, 1),
        (["<", "think>", "hm", "</think>", "c", "</think>"], False, 4),
        (["<", "think>", "hm"], False, 3),
        (["<think>", "</think>"], False, 2),
        (["<thi"], False, 0),
        ([" ", "a", "</think>", "c"], False, 0),
        (["a", "<think>", "b", "</think>", "c"], False, 0),
        ([], True, 0),
    ],
)
@pytest.mark.parametrize("most_held", [0, 3, 100])
@pytest.mark.parametrize("size", [1, 2, 100])
def test_tokens_of_thoughts_are_counted_to_their_end(
    tokens: list[str], thinks: bool, counted: int, most_held: int, size: int
) -> None:
    """Some characters of the text are held back until the end, as for a stop string."""
    reader = Reading(reasoning=THINK, thinks=thinks).reader()
    text, shown = "", 0
    counts = [0]
    for start in range(0, len(tokens), size):
        new = tokens[start : start + size]
        text += "".join(new)
        end = max(shown, len(text) - most_held)
        reader.add(text[shown:end], list(map(len, new)))
        shown = end
        counts.append(reader.num_thought)
    reader.add(text[shown:])
    reader.finish()
    assert reader.num_thought == counted
    assert counts == sorted(counts)
    assert counts[-1] <= counted, "no count is taken back"


@pytest.mark.parametrize("stops", [(), ("Yes indeed",), ("</think>",)])
def test_tokens_of_thoughts_are_counted_in_the_text_of_a_tokenizer(stops: tuple[str, ...]) -> None:
    tokenizer = open_checkpoint(None).tokenizer()
    thought = tokenizer.encode("hm 🦤 so</think>", add_special=False)
    assert tokenizer.token_id("</think>") is None
    assert len(tokenizer.encode("🦤", add_special=False)) > 1
    tokens = [*thought, *tokenizer.encode("Yes. 🦤</think>", add_special=False)]
    text, reader = TextReader(tokenizer, StopStrings(stops)), Reading(reasoning=THINK, thinks=True).reader()
    found = list[Part]()
    for place, token in enumerate(tokens, 1):
        read = text.take([token], is_last=place == len(tokens))
        found += reader.add(read.text, read.widths)
        if read.is_stopped:
            break
    assert joined(found + reader.finish())[:2] == ("hm 🦤 so", "" if "</think>" in stops else "Yes. 🦤</think>")
    assert reader.num_thought == len(thought)


@pytest.mark.parametrize(
    ("prompt", "role", "content", "thinks"),
    [
        ("assistant\n<think>so far", "assistant", "<think>so far", True),
        ("assistant\nUse <think> is", "assistant", "Use <think> is", False),
        ("assistant\nUse <think>", "assistant", " Use <think>", False),
        ("assistant\n<think>\nso far", "assistant", "so far", True),
        ("assistant\n<think>\n</think>so far", "assistant", "so far", False),
        ("user\n<think> is a tag", "user", "<think> is a tag", False),
    ],
)
def test_a_message_that_is_gone_on_with_may_be_a_thought(prompt: str, role: str, content: str, thinks: bool) -> None:
    tokenizer, messages = open_checkpoint(None).tokenizer(), [{"role": role, "content": content}]
    plan = ChatPlan(SamplingParams(), messages, None, {}, False, True, Reading(reasoning=THINK))
    ids = tokenizer.encode_exactly(prompt)
    given, reading = plan.rendered(ids, tokenizer)
    assert (given, reading.thinks) == (ids, thinks)


QWEN = "{% for t in tools %}{{ t | tojson }}{% endfor %}<tool_call></tool_call>{% if enable_thinking %}<think></think>"
QWEN += "{% endif %}"


@pytest.mark.parametrize(
    ("template", "format", "thinks"),
    [
        (QWEN, HERMES, THINK),
        ("{{ tools }}<|python_tag|>", LLAMA3, None),
        ('{{ tools }}{"name": function name, "parameters": dictionary of argument name', LLAMA3, None),
        ("{{ tools }}[TOOL_CALLS][/THINK]", MISTRAL, reasoning.MISTRAL),
        ("{{ messages[0].content }}<|im_start|>assistant\n<think>\n", HERMES, THINK),
        ("{{ tools }}[TOOL_CALLS][THINK]", MISTRAL, reasoning.MISTRAL),
        ("{{ tools }}", JSON, None),
        ("{{ tools }}<tool_call><function=", JSON, None),
        ("{{ messages[0].content }}", HERMES, None),
    ],
)
def test_formats_are_told_from_the_template(
    template: str, format: ToolFormat, thinks: reasoning.ReasoningFormat | None
) -> None:
    assert tool_formats.format_of(ChatTemplate(template)) is format
    assert reasoning.format_of(ChatTemplate(template)) is thinks


@pytest.mark.parametrize(
    ("end", "begun", "thinks"),
    [
        ("<|assistant|><think>\n", "", True),
        ("<|assistant|><think>\n\n</think>\n\n", "", False),
        ("what is <think>?<|end|><|assistant|>", "", False),
        ("<|assistant|>", "<think>so far", True),
        ("<|assistant|>", "\n <think>so far", True),
        ("<|assistant|>", "<think>so</think> far", False),
        ("<|assistant|>", "<think>so</think> Use <think> is", False),
        ("<|assistant|>", "The `<think>` tag is", False),
        ("<|assistant|>", "far", False),
        ("<|assistant|><think>\n", "so far", True),
        ("<|assistant|><think>\n", "so</think> far", False),
    ],
)
def test_a_prompt_may_begin_the_thought(end: str, begun: str, thinks: bool) -> None:
    assert Reading(reasoning=THINK).after(end, begun).thinks is thinks
    assert not Reading().after(end, begun).thinks
