"""EagleText: prompts from a folder, the model's own questions, and the texts that it writes after them.

A head learns from what its target says, so nothing but prompts comes from elsewhere. Of the folder, `*.jsonl` files
have lines with a `question`, those with `test` in their names held out; `*.txt` files have prose, of which the last
part is held out. Half of the texts are answers to questions that the model makes up itself: what it says where a
user's turn begins, at temperature 1.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phonograph.engine.llm import LLM
from phonograph.engine.requests.request import MAX_CHOICES, SamplingParams
from phonograph.errors import PlanError

HELD_OUT_PROSE = 0.15
CHUNK = 1024
"""Prompts that are sent together."""
_MARK = "\u2022question\u2022"
_ASKS = (
    "Summarize this text in two sentences.",
    "What is this text about?",
    "List the most important facts of this text.",
    "Explain this text to a child.",
    "Which names are mentioned here, and why?",
    "Rewrite this text in simpler words.",
)
_HELD_OUT_ASKS = ("What are the key points of this text?", "Give this text a title, and say why it fits.")
_CHATS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Why is the sky blue?",
    "How do I cook rice so that it does not stick?",
    "Give me five ideas for a birthday present for my sister.",
    "Explain what a hash table is.",
    "Write a Python function that reverses a string.",
    "What should I see in Rome in two days?",
    "How can I sleep better?",
    "Tell me a joke about a programmer.",
    "What is the difference between weather and climate?",
    "Write an email to my landlord about a broken heater.",
    "Who was Marie Curie?",
    "How does a bicycle stay upright?",
    "Translate 'good morning' into Spanish, French and German.",
    "What are the benefits of learning an instrument?",
    "Write the beginning of a story about a lost key.",
    "How do vaccines work?",
    "Which is larger, a kilobyte or a kibibyte?",
    "Give me a plan for running five kilometres in eight weeks.",
)
"""Held out, as somebody would write them."""


@dataclass(frozen=True)
class Prompt:
    """What the model is to go on from."""

    kind: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A prompt and what the model said after it."""

    kind: str
    tokens: tuple[int, ...]
    first: int
    """Tokens of the prompt."""


class Prompts:
    """The prompts of a folder for one model."""

    def __init__(self, folder: Path, llm: LLM, seed: int) -> None:
        if llm.tokenizer is None:
            raise PlanError("writing texts to learn from: this model has no tokenizer. Give one with text.")
        self._tokenizer, self._template = llm.tokenizer, llm.checkpoint.chat_template()
        self._numbers = random.Random(seed)
        lines = {path: path.read_text().splitlines() for path in sorted(folder.glob("*.jsonl"))}
        asked = {path: [json.loads(line)["question"] for line in found] for path, found in lines.items()}
        self._questions = [one for path, found in asked.items() if "test" not in path.name for one in found]
        self._held_out = [one for path, found in asked.items() if "test" in path.name for one in found]
        prose = [piece for path in sorted(folder.glob("*.txt")) for piece in _paragraphs(path.read_text())]
        self._folder = folder
        if not (self._held_out and prose):
            raise self._lacks("a *.jsonl file with `test` in its name and a `question` a line, and a *.txt file")
        border = round(len(prose) * (1 - HELD_OUT_PROSE))
        self._prose, self._held_out_prose = prose[:border], prose[border:]

    def _lacks(self, wanted: str) -> PlanError:
        return PlanError(
            f"reading prompts from {self._folder}: expected {wanted}. GSM8K and WikiText-2 are such files."
        )

    def _chat(self, kind: str, content: str) -> Prompt:
        text = self._template.render([{"role": "user", "content": content}])
        return Prompt(kind, tuple(self._tokenizer.encode(text, add_special=False)))

    def _continued(self, piece: str) -> Prompt:
        return Prompt("prose", tuple(self._tokenizer.encode(piece)[: self._numbers.randrange(48, 160)]))

    def _about(self, piece: str, asks: Sequence[str]) -> Prompt:
        return self._chat("articles", f"{piece[:800]}\n\n{self._numbers.choice(asks)}")

    @property
    def users_turn(self) -> tuple[int, ...]:
        """A conversation up to where its first question begins."""
        text = self._template.render([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        return tuple(self._tokenizer.encode(text.partition(_MARK)[0], add_special=False))

    def asked(self, question: str) -> Prompt:
        return self._chat("chat", question)

    def training(self, count: int) -> list[Prompt]:
        """So many, in any order: questions, prose to go on with, and questions on prose."""
        if not self._questions:
            raise self._lacks("a *.jsonl file without `test` in its name, with a `question` a line")
        found = []
        for number in range(count):
            kind = number % 4
            if kind < 2:
                found.append(self._chat("questions", self._numbers.choice(self._questions)))
            elif kind == 2:
                found.append(self._continued(self._numbers.choice(self._prose)))
            else:
                found.append(self._about(self._numbers.choice(self._prose), _ASKS))
        return found

    def held_out(self, count: int) -> list[Prompt]:
        """About so many that no training has, and 20 chats."""
        questions, prose = self._held_out, self._held_out_prose
        some = [self._chat("questions", one) for one in questions[: count * 5 // 9]]
        some += [self._continued(one) for one in prose[:: max(1, len(prose) * 4 // count)][: count // 4]]
        about = prose[1 :: max(1, len(prose) * 6 // count)][: count // 6]
        return [*some, *(self._about(one, _HELD_OUT_ASKS) for one in about), *map(self.asked, _CHATS)]


def _paragraphs(text: str) -> list[str]:
    """Those that are long enough to go on from."""
    return [line.strip() for line in text.splitlines() if len(line) > 400 and not line.lstrip().startswith("=")]


Written = Callable[[int, int], None]
"""Called with the number of texts so far, and of their tokens."""


def written(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[Text]:
    """What the model says after these; nothing is left of one that says nothing."""
    done = llm.generate([prompt.tokens for prompt in prompts], params)
    pairs = zip(prompts, done, strict=True)
    return [Text(prompt.kind, (*prompt.tokens, *one.tokens), len(prompt.tokens)) for prompt, one in pairs if one.tokens]


def training_texts(
    llm: LLM, prompts: Prompts, count: int, new_tokens: int, seconds: float, told: Written, seed: int
) -> list[Text]:
    """Up to `count` texts, as many as the time allows: half of them greedy, half of them conversations of its own."""
    found, num_tokens, begun = list[Text](), 0, time.monotonic()
    for number, chunk in enumerate(_chunks(llm, prompts, count, seed)):
        greedy = number % 2 == 0
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0 if greedy else 0.7, seed=seed + number)
        more = written(llm, chunk, params)
        found += more
        num_tokens += sum(len(text.tokens) - text.first for text in more)
        told(len(found), num_tokens)
        if time.monotonic() - begun > seconds:
            break
    return found


def _chunks(llm: LLM, prompts: Prompts, count: int, seed: int) -> Iterator[list[Prompt]]:
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        own = _own_questions(llm, prompts, size // 2, seed + start)
        yield [*map(prompts.asked, own), *prompts.training(size - size // 2)]


def _own_questions(llm: LLM, prompts: Prompts, count: int, seed: int) -> list[str]:
    """What the model says where a user's turn begins: sequences of one request have noise of their own each."""
    assert llm.tokenizer is not None
    said = list[str]()
    for start in range(0, count, MAX_CHOICES):
        some = min(MAX_CHOICES, count - start)
        params = SamplingParams(max_tokens=64, temperature=1.0, top_p=0.98, seed=seed + start, n=some)
        said += [llm.tokenizer.decode(one.tokens).strip() for one in llm.generate([prompts.users_turn], params)]
    return [one for one in said if one]
