"""What another engine computed, kept in a file, and how far our logits and tokens are from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-3
"""Where the two largest logits are closer than this, float32 leaves open which one is picked."""
DECIMALS = 5
"""Of the logits in the file: their rounding is far below any tolerance."""

_TOP = 5
_STRIDE = 199
"""The spread of a vocabulary is every so many-th token of it."""


@dataclass(frozen=True)
class Glimpse:
    """Some of the logits after one token of a sequence."""

    position: int
    ids: list[int]
    logits: list[float]

    @classmethod
    def top(cls, logits: torch.Tensor, position: int) -> Glimpse:
        """Of the likeliest tokens."""
        values, ids = logits[position].topk(_TOP)
        return cls(position, ids.tolist(), _rounded(values))

    @classmethod
    def spread(cls, logits: torch.Tensor, position: int) -> Glimpse:
        """Of tokens from all over the vocabulary, most of which are unlikely."""
        return cls(position, list(range(0, logits.shape[1], _STRIDE)), _rounded(logits[position, ::_STRIDE]))


@dataclass(frozen=True)
class Picks:
    """The likeliest token after each token of a sequence, and how far it is ahead of the second."""

    ids: list[int]
    margins: list[float]

    @classmethod
    def of(cls, logits: torch.Tensor) -> Picks:
        values, ids = logits.topk(2, -1)
        return cls(ids[:, 0].tolist(), _rounded(values[:, 0] - values[:, 1]))


@dataclass(frozen=True)
class Answer:
    """A prompt and its greedy continuation."""

    prompt: str
    prompt_ids: list[int]
    picks: Picks
    text: str
    glimpses: list[Glimpse]

    @property
    def sequence(self) -> list[int]:
        """Everything that has logits in the glimpses: all but the last token, which nothing comes after."""
        return [*self.prompt_ids, *self.picks.ids[:-1]]

    def first_difference(self, tokens: Sequence[int]) -> int | None:
        """The first token that is another one; what follows it continues another text."""
        assert len(tokens) == len(self.picks.ids), "continuations of one length are compared"
        pairs = enumerate(zip(tokens, self.picks.ids, strict=True))
        return next((index for index, (ours, theirs) in pairs if ours != theirs), None)


@dataclass(frozen=True)
class Window:
    """A stretch of text, each token of it given: no pick changes what follows."""

    ids: list[int]
    f32: Picks
    q4_1: Picks
    glimpses: list[Glimpse]


@dataclass(frozen=True)
class Reference:
    """The content of the file."""

    made: dict[str, Any]
    """How: command, versions, settings, hashes."""
    answers: list[Answer]
    text_ids: list[int]
    """A text as the other engine's tokenizer cuts it; the windows are its beginning."""
    text_sha256: str
    windows: list[Window]

    def write(self, path: Path) -> None:
        """As JSON, a prompt or window to a line."""
        values = asdict(self)
        lists = {name: values.pop(name) for name in ("answers", "windows")}
        lines = [f'"{name}": {_json(value)}' for name, value in values.items()]
        for name, items in lists.items():
            lines.append(f'"{name}": [\n' + ",\n".join(_json(item) for item in items) + "\n]")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Reference:
        values = json.loads(path.read_text(encoding="utf-8"))
        answers = [
            Answer(**{**item, "picks": Picks(**item["picks"]), "glimpses": _glimpses(item)})
            for item in values.pop("answers")
        ]
        windows = [
            Window(item["ids"], Picks(**item["f32"]), Picks(**item["q4_1"]), _glimpses(item))
            for item in values.pop("windows")
        ]
        return cls(answers=answers, windows=windows, **values)


def largest_difference(logits: torch.Tensor, glimpses: Sequence[Glimpse]) -> float:
    """Between our logits of a sequence and those that were kept."""
    assert glimpses, "nothing to compare with"
    return max((logits[one.position, one.ids].cpu() - torch.tensor(one.logits)).abs().max().item() for one in glimpses)


def same_picks(logits: torch.Tensor, picks: Picks) -> torch.Tensor:
    """Whether our likeliest token is theirs, for each token of a sequence."""
    return logits.argmax(-1).cpu() == torch.tensor(picks.ids)


def _glimpses(item: dict[str, Any]) -> list[Glimpse]:
    return [Glimpse(**glimpse) for glimpse in item["glimpses"]]


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, DECIMALS) for value in values.tolist()]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
