"""Spelling: the bytes of each token: a text is the bytes of its tokens, and a character may be split over several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

from phonograph.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that GPT-2's vocabulary writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """GPT-2's spelling; an added token that is not spelled so stands for itself."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """SentencePiece's spelling: ▁ is a space, and <0x0A> is a byte."""
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace("▁", " ").encode()


@dataclass(frozen=True)
class Spelling:
    """How a vocabulary writes its tokens."""

    to_bytes: Callable[[str], bytes]
    num_leading_spaces: int = 0
    """How many spaces it puts in front of every text, which are not part of it."""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, source: str) -> Spelling:
        """Read off the decoder of a tokenizer."""
        decoder = backend.decoder
        state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
        parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds: list[str] = [part["type"] for part in parts]
        if kinds == ["ByteLevel"]:
            return cls(byte_level_bytes)
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and parts[0]["pattern"] == {"String": "▁"}:
            if kinds[3:] == ["Strip"] and parts[3]["content"] == " " and parts[3]["stop"] == 0:
                return cls(sentencepiece_bytes, num_leading_spaces=parts[3]["start"])
            if len(kinds) == 3:
                return cls(sentencepiece_bytes)
        raise CheckpointError(
            f"opening the tokenizer of {source}: its decoder is {' + '.join(kinds)}; supported are ByteLevel, "
            "and Replace(▁) + ByteFallback + Fuse (+ Strip). Use a model with one of these."
        )
