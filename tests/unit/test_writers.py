"""What answers look like: bodies, events, logprobs and tool calls."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from phonograph.engine.process.generation import Delta, TokenUsage
from phonograph.engine.requests.request import FinishReason
from phonograph.engine.requests.sequence import TokenLogprob as Logprob
from phonograph.engine.text import Detokenizer, Tokenizer
from phonograph.server.openai.answer_reader import Reading
from phonograph.server.openai.logprobs import LogprobWriter
from phonograph.server.openai.reasoning import THINK
from phonograph.server.openai.writers import BLOCK, ChatWriter, CompletionWriter, Head, split
from server import tiny

STOP = FinishReason.STOP
HEAD = Head("chatcmpl-abc", 7, "tiny")
USAGE = TokenUsage(prompt_tokens=5, output_tokens=3, cached_tokens=2)
READING = Reading(("now",))
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


def events(data: bytes) -> list[Any]:
    written = data.decode().removesuffix("data: [DONE]\n\n").split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in written if event]


def whole(pieces: list[bytes]) -> Any:
    return json.loads(b"".join(pieces))


def test_a_chat_with_calls_whole() -> None:
    writer = ChatWriter(HEAD, None, READING)
    body = whole(writer.body([Delta(0, CALL, [1, 2], finish=FinishReason.STOP)], USAGE))
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "now", "arguments": '{"zone": "UTC"}'}
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_chat_with_calls_as_events() -> None:
    writer = ChatWriter(HEAD, None, READING)
    found = events(writer.events([Delta(0, "Wait. <tool")]))
    found += events(writer.events([Delta(0, CALL[5:] + CALL)]))
    found += events(writer.events([Delta(0, "", finish=FinishReason.STOP)]))
    deltas = [event["choices"][0]["delta"] for event in found]
    assert deltas[0] == {"role": "assistant", "content": "Wait. "}
    assert [call["index"] for call in deltas[1]["tool_calls"]] == [0, 1]
    assert len({call["id"] for call in deltas[1]["tool_calls"]}) == 2
    assert deltas[2] == {}
    assert found[2]["choices"][0]["finish_reason"] == "tool_calls"


def test_thoughts_have_a_field_of_their_own() -> None:
    reading = Reading(("now",), reasoning=THINK)
    text = f"<think>\nhm\n</think>\n\nWell. {CALL}"
    tokens, widths = [5, 5, 9, 5, 5], [8, 2, 9, 2, len(text) - 21]
    body = whole(ChatWriter(HEAD, None, reading).body([Delta(0, text, tokens, finish=STOP, widths=widths)] * 2, USAGE))
    assert len(body["choices"]) == 2
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Well. ")
    assert message["tool_calls"][0]["function"]["name"] == "now"
    one = whole(ChatWriter(HEAD, None, reading).body([Delta(0, text, tokens, finish=STOP, widths=widths)], USAGE))
    assert one["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    writer = ChatWriter(Head("chatcmpl-abc", 7, "tiny", streams_usage=True), None, reading)
    found = events(writer.events([Delta(0, "<think>\nhm", [5, 5], widths=widths[:2])]))
    found += events(writer.events([Delta(0, text[10:], tokens[2:], finish=STOP, widths=widths[2:])]))
    found += events(writer.end(USAGE))
    deltas = [event["choices"][0]["delta"] for event in found[:-1]]
    assert deltas[0] == {"role": "assistant", "reasoning_content": "hm"}
    assert deltas[1]["content"] == "Well. "
    assert "reasoning_content" not in deltas[1]
    assert found[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


@given(
    st.lists(st.sampled_from(["<think>", "</think>", CALL, "<tool_call>", "a", " ", "\n", "{", "<"]), max_size=8),
    st.lists(st.integers(0, 120)),
)
def test_deltas_of_a_chat_add_up_to_the_whole(written: list[str], places: list[int]) -> None:
    reading = Reading(("now",), reasoning=THINK)
    text = "".join(written)
    (choice,) = whole(ChatWriter(HEAD, None, reading).body([Delta(0, text, finish=STOP)], USAGE))["choices"]
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    writer = ChatWriter(HEAD, None, reading)
    found = [
        event["choices"][0]
        for start, end in zip([0, *ends], ends, strict=False)
        for event in events(writer.events([Delta(0, text[start:end], [5])]))
    ]
    found += [event["choices"][0] for event in events(writer.events([Delta(0, finish=STOP)]))]
    deltas = [one["delta"] for one in found]
    message = choice["message"]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (message.get(name) or "")
    calls = [{**call, "index": None} for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [{**call, "index": None} for call in message.get("tool_calls", ())]
    assert found[-1]["finish_reason"] == choice["finish_reason"]


def test_an_answer_without_text_has_its_events_all_the_same() -> None:
    found = events(ChatWriter(HEAD, None, None).events([Delta(0, "", [5], finish=FinishReason.LENGTH)]))
    assert [event["choices"][0]["delta"] for event in found] == [{"role": "assistant", "content": ""}, {}]
    assert found[1]["choices"][0]["finish_reason"] == "length"
    assert "usage" not in found[0]


def test_what_is_held_back_makes_no_event() -> None:
    writer = CompletionWriter(HEAD, None)
    assert writer.events([Delta(0, "", [5])]) == b""
    chat = ChatWriter(HEAD, None, None)
    chat.events([Delta(0, "a")])
    assert chat.events([Delta(0, "", [5])]) == b""


def test_logprobs_of_both_kinds() -> None:
    found = [Logprob(3, -0.5, ((3, -0.5), (4, -1.5))), Logprob(12, -2.0, ())]
    deltas = [Delta(0, "3 12 ", [3, 12], found), Delta(0, "3 ", [3], found[:1], FinishReason.STOP)]
    logprobs = LogprobWriter(None)
    first, second = events(CompletionWriter(HEAD, logprobs).events(deltas))
    assert first["choices"][0]["logprobs"] == {
        "tokens": ["token_id:3", "token_id:12"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"token_id:3": -0.5, "token_id:4": -1.5}, {}],
        "text_offset": [0, 2],
    }
    assert second["choices"][0]["logprobs"]["text_offset"] == [5]
    chat = whole(ChatWriter(HEAD, logprobs, None).body(deltas[1:], USAGE))
    (token,) = chat["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], bytes(token["bytes"])) == ("token_id:3", -0.5, b"token_id:3")
    assert [top["token"] for top in token["top_logprobs"]] == ["token_id:3", "token_id:4"]


@pytest.mark.parametrize("sizes", [[0], [1], [BLOCK], [BLOCK + 1, 0, 3 * BLOCK], [5] * 40, [20 * BLOCK]])
@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
def test_a_long_answer_is_the_same_in_pieces(kind: type[ChatWriter | CompletionWriter], sizes: list[int]) -> None:
    """As a body and as events: nothing is lost between blocks."""

    def deltas() -> list[Delta]:
        top = tuple((token, -0.5 * token) for token in range(21))
        return [
            Delta(choice, f'"choices":[] {choice}', [], [Logprob(n % 21, -float(n), top) for n in range(size)], STOP)
            for choice, size in enumerate(sizes)
        ]

    def written() -> ChatWriter | CompletionWriter:
        logprobs = LogprobWriter(None)
        return ChatWriter(HEAD, logprobs, None) if kind is ChatWriter else CompletionWriter(HEAD, logprobs)

    def entries(logprobs: Any) -> list[Any]:
        if kind is ChatWriter:
            return list(logprobs["content"])
        return [list(entry) for entry in zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)]

    pieces = written().body(deltas(), USAGE)
    assert max(map(len, pieces)) < 1 << 20
    choices = whole(pieces)["choices"]
    assert [len(entries(choice["logprobs"])) for choice in choices] == sizes
    streamed: list[list[Any]] = [[] for _ in sizes]
    writer = written()
    for group in split(deltas()):
        assert sum(len(delta.logprobs) for delta in group) <= BLOCK
        for event in events(writer.events(group)):
            (choice,) = event["choices"]
            streamed[choice["index"]] += entries(choice["logprobs"]) if choice["logprobs"] else []
    assert streamed == [entries(choice["logprobs"]) for choice in choices]


class Spelled:
    """A vocabulary of these bytes."""

    special_ids = frozenset[int]()

    def __init__(self, *tokens: bytes) -> None:
        self.token_bytes = tokens.__getitem__


def test_every_token_of_a_completion_has_a_name_of_its_own() -> None:
    logprobs = LogprobWriter(Spelled(b"\xf0\x9f", b"\x98", b"x", b"x", b"x", b"bytes:\\x78"))  # type: ignore[arg-type]
    found = [
        Logprob(0, -0.1, ((0, -0.1), (1, -3.0))),
        Logprob(3, -2.0, ((2, -0.5), (3, -2.0), (4, -4.0))),
        Logprob(3, -5.0, ((5, -0.1), (2, -0.5))),
    ]
    (event,) = events(CompletionWriter(HEAD, logprobs).events([Delta(0, "x", [0, 3, 3], found)]))
    shown = event["choices"][0]["logprobs"]
    assert shown["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x78", "token_id:3"]
    assert shown["top_logprobs"] == [
        {"bytes:\\xf0\\x9f": -0.1, "bytes:\\x98": -3.0},
        {"x": -0.5, "bytes:\\x78": -2.0, "token_id:4": -4.0},
        {"bytes:\\x78": -0.1, "x": -0.5},
    ]
    for token, logprob, top in zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True):
        assert top.get(token, logprob) == logprob


def test_offsets_are_places_in_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny.write(tmp_path / "tiny"))
    text, whole = "a日b\ufffdcé", "a日b".encode() + b"\xe6" + "cé".encode()
    tokens = [token for byte in whole for token in range(256) if tokenizer.token_bytes(token) == bytes([byte])]
    tokens.insert(5, tokenizer.eos_ids[0])  # special tokens are no text, and have no entry
    writer = CompletionWriter(HEAD, LogprobWriter(tokenizer))
    deltas = [Delta(0, "", [token], [Logprob(token, -1.0, ())]) for token in tokens]
    found = [
        place for event in events(writer.events(deltas)) for place in event["choices"][0]["logprobs"]["text_offset"]
    ]
    assert tokenizer.decode(tokens) == text
    assert found == [0, 1, 1, 1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("prompt", [[], [1], [1, 5], [1, 4]])
@pytest.mark.parametrize("answer", [[4, 5, 4, 6], [4, 4, 5], [5, 4], [3, 6]])
@pytest.mark.parametrize("verbatim", [False, True])
def test_offsets_leave_out_the_space_that_the_text_leaves_out(
    prompt: list[int], answer: list[int], verbatim: bool
) -> None:
    vocab = {piece: number for number, piece in enumerate(["<unk>", "<s>", "</s>", "▁▁", "▁", "a", "▁b"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = Tokenizer(backend, {})
    logprobs = LogprobWriter(tokenizer)
    writer = CompletionWriter(HEAD, logprobs, lambda choice: logprobs.offsets(prompt, verbatim=verbatim))
    deltas = [Delta(0, "", [token], [Logprob(token, -1.0, ())]) for token in answer]
    found = [
        place for event in events(writer.events(deltas)) for place in event["choices"][0]["logprobs"]["text_offset"]
    ]
    text = Detokenizer(tokenizer, after=prompt, verbatim=verbatim)
    ends = list(itertools.accumulate(len(text.add([token])) for token in answer))
    assert found == [0, *ends[:-1]]
