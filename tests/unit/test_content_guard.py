"""Special tokens in messages are text: encoded exactly, and never as themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from phonograph.engine.text import ChatTemplate, ContentGuard, Tokenizer, content
from server import tiny

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }} {{ m.content | trim }}<|end|>{% endfor %}<|start|>assistant "


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny.write(tmp_path_factory.mktemp("guard") / "tiny"))


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    """A vocabulary that puts a space in front of every text."""
    chars = "▁<|>/adehnorstuxy{}:,\"'[]09\n\ue001\ue002é"
    vocab = {char: number for number, char in enumerate(dict.fromkeys(chars))}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(one, normalized=False) for one in ("<|start|>", "<|end|>", "<s>")])
    return Tokenizer(backend, {})


def encoded(tokenizer: Tokenizer, *contents: str) -> list[int]:
    messages = [{"role": "user", "content": content} for content in contents]
    template = ChatTemplate(TEMPLATE)
    return ContentGuard(tokenizer).encoded(lambda hide: template.render(hide(messages)))


def plain(tokenizer: Tokenizer, *contents: str) -> list[int]:
    messages = [{"role": "user", "content": content} for content in contents]
    return tokenizer.encode(ChatTemplate(TEMPLATE).render(messages), add_special=False)


PIECES = (
    "<|end|>",
    "<|start|>",
    "<s>",
    "<|",
    "end",
    "|>",
    "<",
    " ",
    "x",
    "\n",
    "é",
    "\ue001",
    "1",
    "\ue002",
    "\ue0012\ue002",
)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@given(contents=st.lists(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), min_size=1, max_size=3))
def test_only_the_templates_own_are_special(kind: str, contents: list[str], request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = encoded(tokenizer, *contents)
    special = [token for token in ids if token in tokenizer.special_ids]
    assert len(special) == 2 * len(contents) + 1
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.decode(
        plain(tokenizer, *contents), skip_special=False
    )


@given(
    contents=st.lists(st.text(max_size=20).filter(lambda text: "<|" not in text and "\ue001" not in text), max_size=3)
)
def test_other_messages_are_encoded_as_ever(byte_level: Tokenizer, contents: list[str]) -> None:
    if contents:
        assert encoded(byte_level, *contents) == plain(byte_level, *contents)


def test_what_is_around_stays_as_it_was(byte_level: Tokenizer) -> None:
    ids, before = encoded(byte_level, "a <|end|> b"), plain(byte_level, "a <|end|> b")
    place = before.index(byte_level.token_id("<|end|>") or -1)
    spelled = [token for char in "<|end|>" for token in byte_level.encode(char)]
    assert ids == [*before[:place], *spelled, *before[place + 1 :]]


def test_long_texts_are_searched_in_steps(byte_level: Tokenizer) -> None:
    step = content._STEP
    for start in (step - 9, step - 4, step - 1, step, 2 * step - 5):
        long = "x" * start + "<|end|>" + "y" * step + "<|start|>"
        ids = encoded(byte_level, long)
        assert len([token for token in ids if token in byte_level.special_ids]) == 3
        assert byte_level.decode(ids, skip_special=False).count("<|end|>") == 2


def test_bos_and_the_like_stay_special(byte_level: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level.to_json())
    backend.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 256)])
    tokenizer = Tokenizer(backend, {})
    template = ChatTemplate(TEMPLATE)
    messages = [{"role": "user", "content": "<|start|>"}]
    encode = ContentGuard(tokenizer).written(lambda hide: template.render(hide(messages)))
    assert encode(True) == [256, *encode(False)]
    assert encode(False).count(256) == 2


def test_names_and_lists_are_looked_through(byte_level: Tokenizer) -> None:
    template = ChatTemplate("{{ tools | tojson }}<|end|>")
    tools: list[Any] = [{"function": {"name": "<|end|>", "parameters": {"<|end|>": ["<|end|>", 5, None]}}}]
    guard = ContentGuard(byte_level)
    ids = guard.encoded(lambda hide: template.render([{"role": "user", "content": "x"}], tools=hide(tools)))
    assert ids.count(byte_level.token_id("<|end|>") or -1) == 1
    assert byte_level.decode(ids, skip_special=False).count("<|end|>") == 4


def test_a_vocabulary_without_special_tokens() -> None:
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {})
    assert encoded(tokenizer, "<|end|>") == plain(tokenizer, "<|end|>")


def test_the_folder_of_a_model(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "tiny")
    template = ChatTemplate.from_folder(folder)
    guard = ContentGuard(Tokenizer.from_folder(folder))
    ids = guard.encoded(lambda hide: template.render(hide([{"role": "user", "content": "<|end|>"}])))
    assert ids.count(257) == 1
