"""A model without a tokenizer: token ids in, their numbers as text, and what needs a text is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.llm import LLM
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.text import StopStrings, TextReader
from phonograph.errors import RequestError
from server.conftest import TINY_FLAGS, Server, serving

TEXT = "/v1/completions"
ASKED: dict[str, Any] = {"prompt": [5, 9], "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def ids_server() -> Iterator[Server]:
    with serving("--shape", "tiny", *TINY_FLAGS) as server:
        yield server


def choice_of(server: Server, **further: object) -> dict[str, Any]:
    said = server.post(TEXT, {**ASKED, **further})
    assert said.status_code == 200, said.text
    found: dict[str, Any] = said.json()["choices"][0]
    return found


@pytest.mark.parametrize("stop", ["5", ["x", "y"]])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_strings_are_refused(ids_server: Server, stop: object, is_streamed: bool) -> None:
    said = ids_server.post(TEXT, {**ASKED, "stop": stop, "stream": is_streamed})
    assert said.status_code == 400
    error = said.json()["error"]
    assert error["param"] == "stop"
    assert "without a tokenizer" in error["message"]
    assert "stop_token_ids" in error["message"]
    assert ids_server.post(TEXT, {**ASKED, "stop": []}).status_code == 200


def test_stop_strings_are_refused_in_process_too() -> None:
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=EngineOptions(max_seqs=2))
    with pytest.raises(RequestError, match="without a tokenizer"):
        llm.generate([[5, 9]], SamplingParams(stop=("x",)))


def test_the_token_that_ends_the_output_is_no_text(ids_server: Server) -> None:
    whole = choice_of(ids_server)["text"].split()
    assert len(whole) == 6
    end = next(place for place in range(1, 6) if whole[place] not in whole[:place])
    found = choice_of(ids_server, stop_token_ids=[int(whole[end])], logprobs=0)
    assert found["text"].split() == whole[:end]
    assert found["finish_reason"] == "stop"
    assert found["logprobs"]["tokens"] == [f"token_id:{token}" for token in whole[: end + 1]]
    assert found["logprobs"]["text_offset"][-1] == len(found["text"])


def test_the_models_own_end_is_no_text_either(ids_server: Server) -> None:
    found = choice_of(ids_server, ignore_eos=False, logit_bias={"2": 100})  # 2 is the shape's end token
    assert (found["text"], found["finish_reason"]) == ("", "stop")
    assert "2 " in choice_of(ids_server, logit_bias={"2": 100})["text"]


def test_offsets_are_places_in_the_text(ids_server: Server) -> None:
    found = choice_of(ids_server, logprobs=2)
    places = [*found["logprobs"]["text_offset"], len(found["text"])]
    parts = [found["text"][begin:end] for begin, end in pairwise(places)]
    assert [f"token_id:{part.strip()}" for part in parts] == found["logprobs"]["tokens"]


def test_a_reader_without_a_tokenizer_leaves_out_what_ends() -> None:
    reader = TextReader(None, StopStrings(()), stop_ids={7})
    assert reader.take([3, 12], is_last=False) == ("3 12 ", [2, 3], False)
    assert reader.take([4, 7], is_last=True) == ("4 ", [2, 0], False)
