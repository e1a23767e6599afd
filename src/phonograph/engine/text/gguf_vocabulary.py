"""GGUF vocabulary: a tokenizer from a file's metadata: byte-level BPE, and pre-tokenizers known by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from phonograph.engine.json_fields import Fields
from phonograph.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""The kinds of token that are found in text before it is cut into words."""

_AGAIN = "Convert the model again, or get the file again."
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""What chat templates call the tokens that the metadata name."""

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@dataclass(frozen=True)
class PreTokenizer:
    """What a name in `tokenizer.ggml.pre` stands for."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False
    """A word that is in the vocabulary is taken as it is, whatever the merges say."""
    composes: bool = False
    """Text is brought to Unicode's composed form first."""
    adds_bos: bool = False
    """Where the metadata don't say."""


_LLAMA3 = PreTokenizer(_words(_LLAMA3_WORDS), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer(_words(_QWEN2_WORDS), composes=True)
PRE_TOKENIZERS = {
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": PreTokenizer(_gpt2),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": PreTokenizer(_single_digits),
    "starcoder": PreTokenizer(_single_digits),
}


def build_tokenizer(metadata: Mapping[str, object], source: str) -> tokenizers.Tokenizer:
    """The tokenizer that the metadata of a GGUF file describe."""
    fields = Fields(source, metadata).below("tokenizer.ggml.")
    if (model := fields.text("model", "none")) != "gpt2":
        raise CheckpointError(
            f"opening the tokenizer of {source}: tokenizer.ggml.model is {model!r}; supported is gpt2. "
            "Use the safetensors checkpoint, which has a tokenizer.json."
        )
    name = fields.text("pre", "default")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(
            f"opening the tokenizer of {source}: tokenizer.ggml.pre is {name!r}; supported are {known}. "
            "Use the safetensors checkpoint, which has a tokenizer.json."
        )
    pre = PRE_TOKENIZERS[name]
    backend = tokenizers.Tokenizer(_bpe(fields, pre.whole_words))
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.make()
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, fields)
    _add_ends(backend, fields, pre.adds_bos)
    return backend


def special_tokens(metadata: Mapping[str, object], source: str) -> dict[str, str]:
    """The tokens with a role: bos_token, eos_token, …"""
    fields = Fields(source, metadata).below("tokenizer.ggml.")
    return {role: _token(fields, f"{name}_token_id") for role, name in _SPECIAL.items() if f"{name}_token_id" in fields}


def _bpe(fields: Fields, whole_words: bool) -> models.BPE:
    tokens = fields.texts("tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        found = f"{len(tokens)} entries, of which {len(tokens) - len(vocabulary)} are there twice"
        raise CheckpointError(f"reading {fields.source}: tokens has {found}; expected each token once. {_AGAIN}")
    merges: list[tuple[str, str]] = []
    for merge in fields.texts("merges"):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(
                f"reading {fields.source}: merges has {merge!r}; expected two tokens and a space. {_AGAIN}"
            )
        merges.append((left, right))
    try:
        return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words)
    except Exception as error:  # what the library raises has no class of its own
        raise CheckpointError(f"reading {fields.source}: the merges don't fit the tokens ({error}). {_AGAIN}") from None


def _add_tokens(backend: tokenizers.Tokenizer, fields: Fields) -> None:
    """Make control and user-defined tokens be found in text as a whole."""
    tokens, kinds = fields.texts("tokens"), fields.integers("token_type")
    if kinds and len(kinds) != len(tokens):
        found = f"{len(kinds)} entries; expected {len(tokens)}, as many as there are tokens"
        raise CheckpointError(f"reading {fields.source}: token_type has {found}. {_AGAIN}")
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)


def _add_ends(backend: tokenizers.Tokenizer, fields: Fields, adds_bos: bool) -> None:
    """Put bos before and eos after a text, if the metadata want it."""
    template, used = ["$A"], []
    if fields.flag("add_bos_token", adds_bos):
        template.insert(0, _token(fields, "bos_token_id"))
        used.append((template[0], fields.integer("bos_token_id")))
    if fields.flag("add_eos_token", False):
        template.append(_token(fields, "eos_token_id"))
        used.append((template[-1], fields.integer("eos_token_id")))
    if used:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)


def _token(fields: Fields, name: str) -> str:
    tokens, index = fields.texts("tokens"), fields.integer(name)
    if not 0 <= index < len(tokens):
        raise CheckpointError(
            f"reading {fields.source}: {name} is {index}, but there are {len(tokens)} tokens. {_AGAIN}"
        )
    return tokens[index]
