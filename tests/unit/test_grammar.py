"""Output that follows a grammar, alone and beside others, on graphs and without."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, normalizers

from phonograph import LLM, Device, EngineOptions, RequestError, SamplingParams
from phonograph.engine.checkpoints import default_model
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.models.config import SHAPES
from phonograph.engine.process.generation import Generation
from phonograph.engine.process.messages import Output
from phonograph.engine.process.observer import Observers
from phonograph.engine.requests.request import FinishReason, GrammarSpec, Request
from phonograph.engine.text.guidance import Guidance
from phonograph.engine.text.tokenizer import Tokenizer
from phonograph.errors import CheckpointError
from phonograph.graphs.planning.settings import ask
from server import tiny

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def with_grammar(kind: str, text: str, **changes: object) -> SamplingParams:
    grammar = GrammarSpec(kind, text)  # type: ignore[arg-type]
    return SamplingParams(**{"max_tokens": 48, "temperature": 0.0, "grammar": grammar, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llm() -> LLM:
    try:
        default_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    return LLM(device="cpu", options=EngineOptions(max_seqs=2, max_len=256, max_tokens=128, dtype=torch.float32))


def test_a_json_schema_is_followed(llm: LLM) -> None:
    done = llm.generate("A person as JSON:", with_grammar("json_schema", json.dumps(SCHEMA)))[0]
    found = json.loads(done.text)
    assert set(found) == {"name", "age"}
    assert found["age"] <= 99
    assert done.finish is FinishReason.STOP


def test_several_answers_follow_a_grammar_each(llm: LLM) -> None:
    params = with_grammar("regex", "[ab]{6}[cd]{6}", temperature=1.5, seed=1, n=2)
    first, second = llm.generate("Letters:", params)
    assert first.text != second.text
    assert re.fullmatch("[ab]{6}[cd]{6}", first.text)
    assert re.fullmatch("[ab]{6}[cd]{6}", second.text)


@pytest.mark.parametrize("eos", [(), (300,)], ids=["none", "behind the vocabulary"])
def test_a_vocabulary_that_grammars_can_not_have_is_told_to_who_asks_for_one(tmp_path: Path, eos: tuple[int]) -> None:
    folder = tiny.write(tmp_path / "tiny")
    (folder / "tokenizer_config.json").unlink()
    grammars = Guidance(Tokenizer.from_folder(folder, eos))
    grammars.prepare()  # by a server, for which nobody may ever ask
    with pytest.raises(RequestError, match="vocabulary can't follow a grammar: "):
        grammars.start(GrammarSpec("regex", "a+"))


def test_a_pattern_and_a_choice_are_followed(llm: LLM) -> None:
    pattern = r"[0-9]{3}-[a-f]{2}"
    done = llm.generate("Code:", with_grammar("regex", pattern, temperature=1.5, seed=1))[0]
    assert re.fullmatch(pattern, done.text)
    done = llm.generate("Is water wet?", with_grammar("choice", '["maybe so", "never ever"]'))[0]
    assert done.text in ("maybe so", "never ever")


SPELLED = [
    ("choice", '["a<|im_end|>b"]', "a<|im_end|>b"),
    ("choice", '["<filename>"]', "<filename>"),
    ("json_schema", '{"enum": ["<|im_end|>"]}', '"<|im_end|>"'),
    ("json_schema", '{"const": "x<|im_start|>"}', '"x<|im_start|>"'),
    ("regex", r"a<\|im_end\|><empty_output>b", "a<|im_end|><empty_output>b"),
    ("lark", 'start: "<|endoftext|>"', "<|endoftext|>"),
]


@pytest.mark.parametrize(("kind", "grammar", "text"), SPELLED)
def test_the_name_of_a_special_token_is_spelled_with_others(llm: LLM, kind: str, grammar: str, text: str) -> None:
    done = llm.generate("Say it:", with_grammar(kind, grammar))[0]
    assert done.text == text
    assert done.finish is FinishReason.STOP


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("text", ["a<|end|>b", " a  b", "Zürich 🎉", "e\u0301"])
def test_a_forced_text_is_spelled_whatever_the_vocabulary(tmp_path: Path, text: str, is_special: bool) -> None:
    """With a vocabulary that puts a space in front of texts, composes characters, and ends with any token."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "<", "e"]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("<|end|>", special=is_special, normalized=False)])
    tokenizer = Tokenizer(backend, {"eos_token": "<|end|>"})
    (guided,) = Guidance(tokenizer).start(GrammarSpec("choice", json.dumps([text])))
    spelled: list[int] = []
    while (token := int(np.unpackbits(guided.mask().view(np.uint8), bitorder="little").argmax())) != tokenizer.eos_ids[
        0
    ]:
        guided.accept(token)
        spelled.append(token)
    assert b"".join(map(tokenizer.token_bytes, spelled)).decode() == text


class Alternating:
    """A grammar of its own: tokens from two ranges in turn."""

    def __init__(self, ranges: list[range]) -> None:
        self._ranges = ranges

    def mask(self) -> Any:
        allowed = np.zeros(256, dtype=bool)
        allowed[list(self._ranges[0])] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token in self._ranges[0]
        self._ranges.reverse()


class Alternations:
    def prepare(self) -> None:
        """There is nothing to share."""

    def start(self, spec: GrammarSpec, count: int = 1) -> list[Alternating]:
        return [Alternating([range(10, 20), range(200, 256)]) for _ in range(count)]


@pytest.mark.parametrize("backend", ["disabled", "full"])
def test_who_has_no_grammar_is_not_held_by_another_ones(device: Device, backend: str) -> None:
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
    options = EngineOptions(max_seqs=2, max_len=96, max_tokens=32, page_size=8, dtype=torch.float32)
    llm = LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=options, asked=asked)
    llm.core = EngineCore(llm.core.scheduler, llm.executor, Alternations())
    free = SamplingParams(max_tokens=10, temperature=0.0, logprobs=1, ignore_eos=True)
    alone = llm.generate([[3, 4, 5]], free)[0].tokens
    held = with_grammar("lark", "start: x", max_tokens=10, ignore_eos=True, temperature=1.0, seed=1)
    readers = {**llm._submit([(7, 8)], held), **llm._submit([(3, 4, 5)], free)}
    for _ in llm._run(readers):
        pass
    first, second = (reader.done for reader in readers.values())
    assert all(token in range(10, 20) for token in first.tokens[::2])
    assert all(token in range(200, 256) for token in first.tokens[1::2])
    assert len(first.tokens) == 10
    assert second.tokens == alone
    # The rows are free again for whoever comes next.
    assert [done.tokens for done in llm.generate([[3, 4, 5]] * 2, free)] == [alone, alone]
    assert (llm.executor.runners["decode"].stats.eager.total() == 0) == (backend == "full")
    llm.core.scheduler.integrity()


def test_a_grammar_that_makes_no_sense_is_refused(llm: LLM) -> None:
    for kind, text in (("regex", "[0-9"), ("json_schema", '{"type": "nonsense"}'), ("lark", "start: nowhere")):
        with pytest.raises(RequestError, match=kind):
            llm.generate("x", with_grammar(kind, text))
    with pytest.raises(RequestError, match="no JSON"):
        with_grammar("json_schema", "{")
    with pytest.raises(RequestError, match="json_schema, regex, choice or lark"):
        with_grammar("gbnf", "root ::= x")
    assert llm.core.is_idle


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", r"[^\s\S]"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'),
        ("json_schema", "false"),
    ],
)
def test_a_grammar_that_no_text_follows_is_refused(llm: LLM, kind: str, text: str) -> None:
    with pytest.raises(RequestError, match="can't be followed") as found:
        llm.generate("x", with_grammar(kind, text))
    assert found.value.field == "grammar"
    assert ".rs" not in str(found.value)


def sentencepiece(folder: Path) -> Path:
    """The tiny model with a vocabulary that puts a space in front of every text."""
    others = ["<unk>", "<s>", "▁", *map(chr, range(33, 127))]
    pieces = [*others, *(f"<0x{byte:02X}>" for byte in range(tiny.VOCAB - len(others) - 1)), "</s>"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    tiny.write(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def test_spaces_that_a_grammar_asks_for_are_in_the_text(tmp_path: Path) -> None:
    llm = LLM(sentencepiece(tmp_path / "m"), device="cpu", options=EngineOptions(max_seqs=2, max_len=64))
    assert llm.tokenizer is not None
    for pattern in (" yes", "yes", "  x", " ?y"):
        params = with_grammar("regex", pattern)
        found = [llm.chat([{"role": "user", "content": "hi"}], params), *llm.generate([[1], [1, 40]], params)]
        for done in found:
            assert re.fullmatch(pattern, done.text), (pattern, done.text)
            assert "".join(llm.stream([1], params)) == found[1].text
        request = Request("r", (1,), params)
        generation = Generation(
            [request], llm.tokenizer, Observers([]), lambda generation, left: None, eos_ids=llm.tokenizer.eos_ids
        )
        generation.put(Output("r", 0, tuple(found[0].tokens), FinishReason.STOP), 0.0)
        assert asyncio.run(generation.take())[0].text == found[0].text
    # Without a grammar the space in front is the vocabulary's.
    biased = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logit_bias={2: 100.0})
    assert [done.text for done in llm.generate([[1], [1, 40]], biased)] == [" ", "  "]
