"""Scoring over HTTP: prompts that are echoed and scored, whole and streamed, have `transformers`' log-probabilities."""

from __future__ import annotations

import concurrent.futures
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from server import tiny
from server.conftest import TINY_FLAGS, Server, serving

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0}
PROMPT = "The sea is <|start|>wide, and é is two bytes."


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def logprobs_of(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = reference(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    return found


def asked(server: Server, path: str, **body: Any) -> Any:
    said = server.post(path, body)
    assert said.status_code == 200, said.text
    return said.json()


def streamed(server: Server, path: str, **body: Any) -> list[Any]:
    said = httpx.post(server.url + path, json={"stream": True, **body}, timeout=60)
    assert said.status_code == 200, said.text
    lines = [line.removeprefix("data: ") for line in said.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def expect_echo(found: Any, tokens: list[int], reference: Any, num_top: int) -> None:
    """OpenAI's layout, of a prompt and whatever follows it."""
    logprobs = logprobs_of(reference, tokens)
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(tokens)
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    for place in range(1, len(tokens)):
        row = logprobs[place - 1]
        assert found["token_logprobs"][place] == pytest.approx(row[tokens[place]].item(), abs=1e-4)
        values = sorted(found["top_logprobs"][place].values(), reverse=True)
        assert values == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_is_scored_and_nothing_generated(
    tiny_server: Server, reference: Any, num_top: int, as_ids: bool
) -> None:
    tokens = tiny_server.tokens(PROMPT)
    prompt = tokens if as_ids else PROMPT
    found = asked(tiny_server, TEXT, prompt=prompt, echo=True, logprobs=num_top, max_tokens=0)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert found["usage"]["completion_tokens"] == 0
    assert found["usage"]["prompt_tokens"] == len(tokens)
    expect_echo(choice["logprobs"], tokens, reference, num_top)
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert token.startswith("bytes:") or PROMPT[offset:].startswith(token)


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_and_its_output_in_one_text(tiny_server: Server, reference: Any, as_ids: bool) -> None:
    tokens = tiny_server.tokens(PROMPT)
    prompt = tokens if as_ids else PROMPT
    plain = asked(tiny_server, TEXT, prompt=prompt, max_tokens=5, logprobs=2, ignore_eos=True, **GREEDY)["choices"][0]
    found = asked(tiny_server, TEXT, prompt=prompt, max_tokens=5, logprobs=2, ignore_eos=True, echo=True, **GREEDY)
    (choice,) = found["choices"]
    assert choice["text"] == PROMPT + plain["text"]
    count = len(plain["logprobs"]["tokens"])
    assert choice["logprobs"]["tokens"][-count:] == plain["logprobs"]["tokens"]
    shifted = [len(PROMPT) + offset for offset in plain["logprobs"]["text_offset"]]
    assert choice["logprobs"]["text_offset"][-count:] == shifted
    # Every token has an entry after an echo, so that clients can count.
    assert len(choice["logprobs"]["tokens"]) == len(tokens) + 5
    without = asked(tiny_server, TEXT, prompt=prompt, max_tokens=5, ignore_eos=True, echo=True, **GREEDY)["choices"][0]
    assert (without["text"], without["logprobs"]) == (choice["text"], None)


@pytest.mark.parametrize("prompt", [[7], [7, 8], list(range(3, 200))], ids=len)
def test_prompts_of_all_lengths(tiny_server: Server, reference: Any, prompt: list[int]) -> None:
    (choice,) = asked(tiny_server, TEXT, prompt=prompt, echo=True, logprobs=2, max_tokens=0)["choices"]
    expect_echo(choice["logprobs"], prompt, reference, 2)


def test_the_last_position_of_the_context(tiny_server: Server, reference: Any) -> None:
    prompt = [(13 * place) % 250 for place in range(tiny.CONTEXT)]
    (choice,) = asked(tiny_server, TEXT, prompt=prompt, echo=True, logprobs=1, max_tokens=0)["choices"]
    expect_echo(choice["logprobs"], prompt, reference, 1)
    said = tiny_server.post(TEXT, {"prompt": prompt, "max_tokens": 1})
    assert said.json()["error"]["code"] == "context_length_exceeded"
    said = tiny_server.post(TEXT, {"prompt": [*prompt, 1], "max_tokens": 0})
    assert said.json()["error"]["code"] == "context_length_exceeded"


def test_a_prefix_that_is_cached_is_scored(tiny_server: Server, reference: Any) -> None:
    prompt = [(17 * place + 5) % 250 for place in range(100)]
    asked(tiny_server, TEXT, prompt=prompt, max_tokens=1)
    for _ in range(2):
        found = asked(tiny_server, TEXT, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        expect_echo(found["choices"][0]["logprobs"], prompt, reference, 1)
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_several_prompts_and_choices(tiny_server: Server, reference: Any) -> None:
    prompts = [list(range(20, 70)), [9], list(range(100, 110))]
    body = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 3, "max_tokens": 2, "seed": 4, "ignore_eos": True}
    found = asked(tiny_server, TEXT, **body, prompt_logprobs=1)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    for choice in found["choices"]:
        prompt = prompts[choice["index"] // 2]
        logprobs = {name: column[: len(prompt)] for name, column in choice["logprobs"].items()}
        expect_echo(logprobs, prompt, reference, 3)
        expect_ranked(choice["prompt_logprobs"], prompt, reference, 1)


def expect_ranked(found: Any, tokens: list[int], reference: Any, num_top: int) -> None:
    """vLLM's layout."""
    assert found[0] is None
    assert len(found) == len(tokens)
    logprobs = logprobs_of(reference, tokens)
    for place in range(1, len(tokens)):
        row, entries = logprobs[place - 1], found[place]
        own = entries[str(tokens[place])]
        assert own["logprob"] == pytest.approx(row[tokens[place]].item(), abs=1e-4)
        assert next(iter(entries)) == str(tokens[place])
        for token, entry in entries.items():
            rank = int((row > row[int(token)] + 1e-4).sum()), int((row > row[int(token)] - 1e-4).sum())
            assert rank[0] + 1 <= entry["rank"] <= max(rank[1], rank[0] + 1)
            assert isinstance(entry["decoded_token"], str)
        assert num_top <= len(entries) <= num_top + 1


@pytest.mark.parametrize("num_top", [0, 20])
def test_ranked_logprobs_of_a_prompt(tiny_server: Server, reference: Any, num_top: int) -> None:
    tokens = tiny_server.tokens(PROMPT)
    found = asked(tiny_server, TEXT, prompt=PROMPT, max_tokens=3, prompt_logprobs=num_top, **GREEDY)
    (choice,) = found["choices"]
    assert choice["logprobs"] is None
    assert not choice["text"].startswith(PROMPT)
    expect_ranked(choice["prompt_logprobs"], tokens, reference, num_top)
    plain = asked(tiny_server, TEXT, prompt=PROMPT, max_tokens=3, **GREEDY)["choices"][0]
    assert plain == {name: value for name, value in choice.items() if name != "prompt_logprobs"}


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_chat_is_scored(tiny_server: Server, reference: Any, max_tokens: int) -> None:
    messages = [{"role": "user", "content": "how wide is the sea?"}]
    tokens = tiny_server.post("/tokenize", {"messages": messages}).json()["tokens"]
    body = {"messages": messages, "max_tokens": max_tokens, "n": 2, "logprobs": True, **GREEDY}
    found = asked(tiny_server, CHAT, **body, prompt_logprobs=2)
    expect_ranked(found["prompt_logprobs"], tokens, reference, 2)
    assert len(found["choices"]) == 2
    plain = asked(tiny_server, CHAT, **body)
    assert [choice["message"] for choice in plain["choices"]] == [choice["message"] for choice in found["choices"]]
    assert "prompt_logprobs" not in plain


@pytest.mark.parametrize("num_top", [None, 0, 2])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_streams_with_an_echo_add_up(tiny_server: Server, num_top: int | None, max_tokens: int) -> None:
    prompts = ["x" * 150, "The sea"]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "seed": 1, "echo": True, "max_tokens": max_tokens}
    body |= {"ignore_eos": True, "logprobs": num_top}
    whole = asked(tiny_server, TEXT, **body)["choices"]
    texts = dict.fromkeys(range(4), "")
    columns: dict[int, dict[str, list[Any]]] = {choice: {} for choice in range(4)}
    ends: dict[int, str] = {}
    for event in streamed(tiny_server, TEXT, **body):
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in ends
            texts[index] += choice["text"]
            for name, column in (choice["logprobs"] or {}).items():
                columns[index].setdefault(name, []).extend(column)
            if choice["finish_reason"]:
                ends[index] = choice["finish_reason"]
    for choice in whole:
        index = choice["index"]
        assert texts[index] == choice["text"]
        assert texts[index].startswith(prompts[index // 2])
        assert (columns[index] or None) == choice["logprobs"]
        assert ends[index] == choice["finish_reason"]


def test_nothing_is_generated(tiny_server: Server) -> None:
    (choice,) = asked(tiny_server, TEXT, prompt="x", max_tokens=0)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)
    events = streamed(tiny_server, TEXT, prompt="x", max_tokens=0)
    assert [event["choices"][0]["finish_reason"] for event in events] == ["length"]


def test_a_response_with_scores_is_bounded(tiny_server: Server) -> None:
    said = tiny_server.post(TEXT, {"prompt": [[1] * 500] * 20, "n": 128, "max_tokens": 0, "prompt_logprobs": 0})
    error = said.json()["error"]
    assert (said.status_code, error["param"], error["code"]) == (400, "prompt_logprobs", "limit_exceeded")


def test_the_end_of_a_prompt(tiny_server: Server) -> None:
    def echoed(**fields: Any) -> Any:
        body = {"prompt": "abcdefgh", "echo": True, "max_tokens": 0, **fields}
        return asked(tiny_server, TEXT, **body)

    assert echoed(truncate_prompt_tokens=3)["choices"][0]["text"] == "fgh"
    assert echoed(truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3
    assert echoed(truncate_prompt_tokens=100)["choices"][0]["text"] == "abcdefgh"
    long = "a" * (tiny.CONTEXT + 50)
    assert tiny_server.post(TEXT, {"prompt": long}).status_code == 400
    assert echoed(prompt=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == tiny.CONTEXT
    cut = asked(tiny_server, TEXT, prompt=long, truncate_prompt_tokens=-1, max_tokens=1)
    assert cut["usage"]["prompt_tokens"] == tiny.CONTEXT - 1
    ids = asked(tiny_server, TEXT, prompt=[5, 6, 7, 8], truncate_prompt_tokens=2, max_tokens=1)
    assert ids["usage"]["prompt_tokens"] == 2
    messages = [{"role": "user", "content": "x" * 600}]
    chat = asked(tiny_server, CHAT, messages=messages, truncate_prompt_tokens=-1, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == tiny.CONTEXT - 1


def test_the_fewest_tokens_and_those_that_may_come(tiny_server: Server) -> None:
    """The stop token is what comes first, so that it would end the output at once."""
    plain: dict[str, Any] = {"prompt": "x", "max_tokens": 8, "ignore_eos": True, "logprobs": 1, **GREEDY}
    first = asked(tiny_server, TEXT, **plain, return_token_ids=None)["choices"][0]["logprobs"]["tokens"][0]
    (stop,) = tiny_server.tokens(first)
    ended = asked(tiny_server, TEXT, **plain, stop_token_ids=[stop])
    assert ended["usage"]["completion_tokens"] == 1
    longer = asked(tiny_server, TEXT, **plain, stop_token_ids=[stop], min_tokens=6)
    assert longer["usage"]["completion_tokens"] >= 6
    letters = list(range(10, 14))
    found = asked(tiny_server, TEXT, **plain, allowed_token_ids=letters)["choices"][0]["logprobs"]["tokens"]
    assert {token for text in found for token in tiny_server.tokens(text)} <= set(letters)


def test_fields_that_leave_no_token_are_at_fault(tiny_server: Server) -> None:
    said = tiny_server.post(TEXT, {"prompt": "x", "allowed_token_ids": [65], "stop_token_ids": [65], "min_tokens": 2})
    assert (said.status_code, said.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_words_that_do_not_come(tiny_server: Server) -> None:
    choices = {"prompt": "x", "max_tokens": 12, "guided_regex": "[ab]{6}", "seed": 3, "n": 8}
    said = asked(tiny_server, TEXT, **choices, bad_words=["aa", "bb"])
    assert {choice["text"] for choice in said["choices"]} <= {"ababab", "bababa"}
    freely = asked(tiny_server, TEXT, **choices, bad_words=[])
    assert any("aa" in choice["text"] or "bb" in choice["text"] for choice in freely["choices"])


def test_special_tokens_around_a_prompt(tmp_path: Path) -> None:
    """Of a tokenizer that puts a token in front of every text, and where that token is in an echo."""
    folder = tiny.write(tmp_path / "with_start")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    start = {"SpecialToken": {"id": "<|start|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"<|start|>": {"id": "<|start|>", "ids": [256], "tokens": ["<|start|>"]}}
    pair = [start, text, {"Sequence": {"id": "B", "type_id": 1}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": pair,
        "special_tokens": tokens,
    }
    file.write_text(json.dumps(content))
    with serving("--model", str(folder), *TINY_FLAGS) as server:
        body: dict[str, Any] = {"prompt": "abcd", "echo": True, "logprobs": 0, "max_tokens": 0}
        found = asked(server, TEXT, **body)["choices"][0]
        assert found["text"] == "abcd"
        assert found["logprobs"]["tokens"] == ["<|start|>", "a", "b", "c", "d"]
        assert found["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
        without = asked(server, TEXT, **body, add_special_tokens=False)["choices"][0]
        assert without["logprobs"]["tokens"] == ["a", "b", "c", "d"]
        cut = asked(server, TEXT, **body, truncate_prompt_tokens=3)["choices"][0]
        assert cut["logprobs"]["tokens"] == ["<|start|>", "c", "d"]
        messages = [{"role": "user", "content": "x"}]
        counts = [
            asked(server, CHAT, messages=messages, max_tokens=1, **fields)["usage"]["prompt_tokens"]
            for fields in ({}, {"add_special_tokens": False}, {"add_special_tokens": True})
        ]
        assert counts == [counts[0], counts[0], counts[0] + 1]


def test_the_lowest_priority_goes_first(tiny_model: Path) -> None:
    """Of what waits for the one row that there is."""
    flags = ("--device", "cpu", "--max-seqs", "1", "--port", "0")
    with serving("--model", str(tiny_model), *flags) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        ended: list[int] = []

        def ask(priority: int, max_tokens: int, n: int = 1) -> None:
            asked(server, TEXT, prompt=[5, 6], max_tokens=max_tokens, ignore_eos=True, priority=priority, n=n)
            ended.append(priority)

        # One after the other: long enough for the rest to come, and fewer steps than make age count for more.
        running = [pool.submit(ask, -100, 480, 2)]
        time.sleep(0.05)
        for priority in (3, -2, 0):
            running.append(pool.submit(ask, priority, 20))
            time.sleep(0.02)
        for one in running:
            one.result()
    assert ended == [-100, -2, 0, 3]
