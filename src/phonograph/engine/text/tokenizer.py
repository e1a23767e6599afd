"""Tokenizer: text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path

import tokenizers

from phonograph.engine.text import gguf_vocabulary
from phonograph.engine.text.pieces import Spelling
from phonograph.engine.text.side_files import SideFiles
from phonograph.errors import CheckpointError, RequestError

_SHORT = 1024
"""Characters that are encoded faster than a batch is begun."""


class Tokenizer:
    """The vocabulary of a model; `decode` is the bytes of the tokens read as UTF-8, what is no UTF-8 becomes U+FFFD."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int] = (),
        source: str = "a tokenizer",
    ) -> None:
        # A tokenizer.json may carry the limits of its training run, and would silently cut prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = Spelling.of(backend, source)
        self._bytes: dict[int, bytes] = {}
        self.source = source
        self.special_tokens = dict(special_tokens)
        """The tokens with a role: bos_token, eos_token, …"""
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        """The tokens that are no text."""
        self.bos_id = self._id_of("bos_token")
        eos_id = self._id_of("eos_token")
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([] if eos_id is None else [eos_id])]))
        """The tokens that end an output."""

    @classmethod
    def from_folder(cls, folder: Path, eos_ids: Iterable[int] = ()) -> Tokenizer:
        """From the tokenizer.json of a Hugging Face folder, and its side files."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"opening the tokenizer of {folder}: it has no tokenizer.json. "
                "Make one: transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # what the library raises has no class of its own
            raise CheckpointError(f"reading {path}: not a tokenizer ({error}). Get the file again.") from None
        side_files = SideFiles.read(folder)
        side_files.add_to(backend)
        side_files.warn_of_switches(backend)
        return cls(backend, side_files.special_tokens, eos_ids, str(folder))

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], eos_ids: Iterable[int] = (), source: str = "the GGUF metadata"
    ) -> Tokenizer:
        """From the metadata of a GGUF file."""
        backend = gguf_vocabulary.build_tokenizer(metadata, source)
        return cls(backend, gguf_vocabulary.special_tokens(metadata, source), eos_ids, source)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; the model may have rows for more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of more than n times as many has more than n tokens."""
        return max((len(token) for token in self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def num_leading_spaces(self) -> int:
        """How many spaces the vocabulary puts in front of every text, which are not part of it."""
        return self._spelling.num_leading_spaces

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text; `add_special` puts bos and the like around it, which a rendered chat already has."""
        try:
            if isinstance(text, str) and len(text) > _SHORT:
                # A batch is encoded without Python's lock: meanwhile the other threads go on.
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError):
            # The library takes UTF-8; JSON can smuggle in halves of characters that have none.
            raise RequestError(
                f"encoding a prompt: it {_unencodable(text)}, which is no Unicode text. Send well-formed text.",
                field="prompt",
            ) from None

    def encode_places(
        self, text: str, *, add_special: bool = True
    ) -> tuple[list[int], Callable[[int], tuple[int, int] | None]]:
        """As `encode`, and a function from an id's place to the characters that it is of; none if it was put around."""
        (found,) = self._backend.encode_batch([text], add_special_tokens=add_special)
        return found.ids, found.token_to_chars

    def encode_exactly(self, text: str) -> list[int]:
        """The ids whose bytes are those of a text, without spaces that the vocabulary puts in front of every text."""
        wanted = text.encode()
        for before in ("", "\n"):
            ids = self._backend.encode(before + text, add_special_tokens=False).ids
            found = b""
            for place in reversed(range(len(ids))):
                found = self.token_bytes(ids[place]) + found
                if found == wanted:
                    return ids[place:]
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of ids; ids that are no token are left out."""
        data = b"".join(self.token_bytes(i) for i in token_ids if not (skip_special and i in self.special_ids))
        text = data.decode("utf-8", "replace")
        num_spaces = len(text) - len(text.lstrip(" "))
        return text[min(num_spaces, self.num_leading_spaces) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id that is no token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            found = self._bytes[token_id] = b"" if token is None else self._spelling.to_bytes(token)
        return found

    def to_json(self) -> str:
        """The vocabulary in the form of a tokenizer.json."""
        return self._backend.to_str()

    def token_text(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, such as `<|im_end|>`."""
        return self._backend.token_to_id(token)

    def _id_of(self, role: str) -> int | None:
        return self.token_id(self.special_tokens[role]) if role in self.special_tokens else None


def _unencodable(text: object) -> str:
    if not isinstance(text, str):
        return f"is of type {type(text).__name__}"
    place = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), 0)
    return f"has half of a surrogate pair ({text[place]!r} at character {place})"
