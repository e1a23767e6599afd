"""Streams of text: whatever the tokens and however they are cut, the pieces add up, and nothing leaks or lingers."""

from __future__ import annotations

from itertools import pairwise

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from phonograph.engine.text import Detokenizer, StopStrings, Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LONGER = ["ðŁ", "ðŁĳį", "ĳį", "Ã©", "Ġa", "æĹ", "¥æľ", "ä", "íł"]
"""Whole characters, beginnings, ends, the end of one with the beginning of the next, and half a surrogate."""


class Counting(Tokenizer):
    """Counts the tokens that are looked at."""

    num_looks = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.num_looks += 1
        return super().token_bytes(token_id)


def _backend() -> tokenizers.Tokenizer:
    tokens = list(dict.fromkeys([*ALPHABET, *LONGER]))
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<|é x|>"), AddedToken("<|end|>", special=True)])
    return backend


def _sentencepiece() -> tokenizers.Tokenizer:
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "a", "▁a", "é"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return backend


BACKEND = _backend()
TOKENIZER = Tokenizer(BACKEND, {})
SENTENCEPIECE = Tokenizer(_sentencepiece(), {})


@st.composite
def cut(draw: st.DrawFn, length: int) -> list[slice]:
    """A list of this length, in pieces, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, length), max_size=8)))
    return [slice(start, end) for start, end in pairwise([0, *places, length])]


token_ids = st.lists(st.integers(0, BACKEND.get_vocab_size() + 2), max_size=40)


class TestDetokenizer:
    @given(st.data(), token_ids, st.booleans())
    def test_the_pieces_are_the_text_of_all_tokens(self, data: st.DataObject, ids: list[int], skip: bool) -> None:
        """Any tokens, also such as are no UTF-8; the library decodes them all at once."""
        stream = Detokenizer(TOKENIZER, skip_special=skip)
        pieces = [stream.add(ids[piece]) for piece in data.draw(cut(len(ids)))]
        text = "".join(pieces) + stream.finish()
        assert text == BACKEND.decode(ids, skip_special_tokens=skip)
        assert text == TOKENIZER.decode(ids, skip_special=skip)

    @given(st.data(), st.text(max_size=30))
    def test_no_character_is_split(self, data: st.DataObject, text: str) -> None:
        ids = TOKENIZER.encode(text)
        stream = Detokenizer(TOKENIZER, skip_special=False)
        done = ""
        for piece in data.draw(cut(len(ids))):
            new = stream.add(ids[piece])
            assert text.startswith(done + new)
            done += new
        assert done == text
        assert stream.finish() == ""

    @given(st.text(min_size=1, max_size=20))
    def test_a_character_comes_with_its_last_token(self, text: str) -> None:
        ids = TOKENIZER.encode(text)
        for num_tokens in range(len(ids) + 1):
            so_far = b"".join(map(TOKENIZER.token_bytes, ids[:num_tokens]))
            whole = so_far.decode("utf-8", "ignore")
            assert Detokenizer(TOKENIZER, skip_special=False).add(ids[:num_tokens]) == whole

    @given(st.data(), st.lists(st.integers(0, 262), max_size=20))
    def test_leading_spaces_are_cut_once(self, data: st.DataObject, ids: list[int]) -> None:
        stream = Detokenizer(SENTENCEPIECE)
        pieces = [stream.add(ids[piece]) for piece in data.draw(cut(len(ids)))]
        assert "".join(pieces) + stream.finish() == SENTENCEPIECE.decode(ids)

    def test_each_token_is_looked_at_once(self) -> None:
        tokenizer = Counting(_backend(), {})
        stream = Detokenizer(tokenizer)
        for token in range(200):
            stream.add([token] * 5)
        assert tokenizer.num_looks == 1000


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What `StopStrings` promises, by trying everything."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def must_hold(text: str, stops: list[str]) -> int:
    """How long an end of the text is that may still become a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


few = st.text("ab<", max_size=30)
some_stops = st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4)


class TestStops:
    @given(st.data(), few, some_stops)
    def test_any_cut_gives_the_same(self, data: st.DataObject, text: str, stops: list[str]) -> None:
        stream = StopStrings(stops)
        given_out, hit = "", None
        for piece in data.draw(cut(len(text))):
            new, hit = stream.add(text[piece])
            given_out += new
        assert (given_out + stream.flush(), hit) == first_stop(text, stops)

    @given(st.data(), few, some_stops)
    def test_no_more_is_held_back_than_must_be(self, data: st.DataObject, text: str, stops: list[str]) -> None:
        stream = StopStrings(stops)
        given_out, seen = "", ""
        for piece in data.draw(cut(len(text))):
            new, hit = stream.add(text[piece])
            given_out, seen = given_out + new, seen + text[piece]
            if hit is not None:
                break
            assert given_out == seen[: len(seen) - must_hold(seen, stops)]

    @given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=3), max_size=3))
    def test_any_text(self, text: str, stops: list[str]) -> None:
        stream = StopStrings(stops)
        pieces = [stream.add(char) for char in text]
        hit = stream.hit
        assert ("".join(new for new, _ in pieces) + stream.flush(), hit) == first_stop(text, stops)
