"""Trains an EAGLE-3 head for a model by self-distillation: on texts that the model writes itself.

    python bench/train_eagle.py DATA FOLDER [--model DIR] [--device cuda] [--minutes 5]

DATA has prompts (`eagle_text`), FOLDER becomes what `--draft` takes: config.json, model.safetensors, and README.md with
the recipe and how many tokens a round brings on held-out prompts. Texts and the state of training are kept in
FOLDER/training, so that the same command goes on where it was ended; delete that folder when the head is good.
Time is shared: a quarter for texts, what is left for training, whose rate falls as the steps or the time end.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from eagle_text import Prompts, Text, training_texts, written
from eagle_training import Batch, Head, Recipe, draft_vocabulary, rounds_of, taps_of

from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.checkpoints.draft_head import drafted_for
from phonograph.engine.llm import LLM
from phonograph.engine.models.decoder import Decoder
from phonograph.engine.ops.queries import Queries, Span
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import SamplingParams

PAGE = 16
STEP_TOKENS = 16_384
"""Tokens that the target computes at a time."""
SHARE_OF_TEXTS = 0.25
RESERVED = 15.0
"""Seconds that are left for measuring the head."""
SAVED_EVERY = 60.0
"""Seconds between two states of training on disk."""
SHOWN = (1, 2, 3, 4, 5, 6)
"""Depths for which tokens a round are told."""


MEASURED_TOKENS = 8192


@dataclass(frozen=True)
class Computed:
    """A text, and what the target computed for each of its tokens."""

    text: Text
    tokens: torch.Tensor  # [length]
    taps: torch.Tensor  # [length, num_taps * hidden]
    states: torch.Tensor  # [length, hidden]
    best: torch.Tensor  # [length]


T = TypeVar("T", Text, Computed)


@torch.no_grad()
def computed(model: Decoder, texts: Sequence[Text]) -> list[Computed]:
    """All texts through the target, some at a time; results stay on its device."""
    found, on, taps = list[Computed](), model.weights.embedding.device, taps_of(model.config)
    for group in _groups(texts, STEP_TOKENS):
        sizes = [len(text.tokens) for text in group]
        pages = [-(-size // PAGE) for size in sizes]
        table = torch.zeros(len(group) + 1, max(pages), dtype=torch.int32)
        first, spans = 0, list[Span]()
        for number, (size, count) in enumerate(zip(sizes, pages, strict=True)):
            begun = 1 + sum(pages[:number])
            table[number + 1, :count] = torch.arange(begun, begun + count, dtype=torch.int32)
            spans.append(Span(number + 1, first, 0, size))
            first += size
        cache = CacheGroup.empty(model.keeps, 1 + sum(pages), PAGE, dtype=model.dtype, device=on)
        rows = torch.repeat_interleave(torch.arange(1, len(group) + 1), torch.tensor(sizes))
        positions = torch.cat([torch.arange(size) for size in sizes])
        queries = Queries(rows.to(on), positions.to(on), table.to(on), tokens_per_row=None, spans=tuple(spans))
        tokens = torch.tensor([token for text in group for token in text.tokens], device=on)
        hidden = model.hidden(tokens, queries, cache, taps=taps)
        joined = torch.cat([state.to(model.dtype) for state in hidden.taps], -1)
        best = torch.cat([model.logits(part).argmax(-1) for part in hidden.states.split(2048)])
        split = (part.split(sizes) for part in (tokens, joined, hidden.states, best))
        found += [Computed(text, *parts) for text, *parts in zip(group, *split, strict=True)]
    return found


def _groups(found: Sequence[T], most: int) -> Iterator[list[T]]:
    """One after the other, of so many tokens at most."""
    group, count = list[T](), 0
    for one in found:
        if group and count + len(one.tokens) > most:
            yield group
            group, count = [], 0
        group.append(one)
        count += len(one.tokens)
    if group:
        yield group


def batched(group: Sequence[Computed]) -> Batch:
    """Sequences of about the same length, padded to the longest."""
    pad = torch.nn.utils.rnn.pad_sequence
    on = group[0].tokens.device
    parts = (pad([getattr(one, name) for one in group], batch_first=True) for name in ("tokens", "taps", "states"))
    tokens, taps, states = parts
    best = pad([one.best for one in group], batch_first=True)
    first = torch.tensor([one.text.first for one in group], device=on)
    length = torch.tensor([len(one.tokens) for one in group], device=on)
    return Batch(tokens, taps, states, best, first, length)


def epochs(found: Sequence[Computed], batch_tokens: int, seed: int, skip: int = 0) -> Iterator[list[Computed]]:
    """Batches without end: every epoch has all sequences, by about the same length, in an order of its own."""
    epoch = number = 0
    while True:
        numbers = torch.Generator().manual_seed(seed * 100_003 + epoch)
        noise = torch.rand(len(found), generator=numbers).tolist()
        ordered = sorted(range(len(found)), key=lambda one: len(found[one].tokens) * (0.9 + 0.2 * noise[one]))
        groups, group = list[list[Computed]](), list[Computed]()
        for one in ordered:  # ascending, so that the last of a group is nearly the longest
            if group and (len(group) + 1) * len(found[one].tokens) > batch_tokens:
                groups.append(group)
                group = []
            group.append(found[one])
        groups.append(group)
        for place in torch.randperm(len(groups), generator=numbers).tolist():
            if number >= skip:
                yield groups[place]
            number += 1
        epoch += 1


def measured(head: Head, found: Sequence[Computed], depths: Sequence[int]) -> dict[int, dict[str, float]]:
    """For each depth, tokens a round by kind of text and over all: what greedy decoding with such drafts would take."""
    rounds, tokens = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for group in _groups(found, MEASURED_TOKENS):
        right = head.right(batched(group), max(depths)).tolist()
        for (one, rows), depth in itertools.product(zip(group, right, strict=True), depths):
            taken, brought = rounds_of([row[:depth] for row in rows], one.text.first, len(one.tokens))
            for kind in (one.text.kind, "all"):
                rounds[depth, kind] += taken
                tokens[depth, kind] += brought
    return {
        depth: {
            kind: round(tokens[at, kind] / taken, 3) for (at, kind), taken in rounds.items() if at == depth and taken
        }
        for depth in depths
    }


def optimizers(
    recipe: Recipe, matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """For matrices Muon, whose steps have the size of AdamW's, or AdamW; for vectors AdamW."""
    plain = torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(matrices, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.01), plain]
    return [torch.optim.Muon(matrices, lr=recipe.rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"), plain]


class Training:
    """The loop: steps, their rate, and a state on disk to go on from."""

    def __init__(self, head: Head, state: Path) -> None:
        self.head, self.recipe, self._state = head, head.recipe, state
        weights = list(head.weights.values())
        decayed = [weight for weight in weights if weight.dim() > 1]
        others = [weight for weight in weights if weight.dim() == 1]
        self._optimizers = optimizers(self.recipe, decayed, others)
        self.step, self.spent = 0, 0.0
        self.losses: list[float] = []

    def resume(self) -> bool:
        """Go on from what is on disk, where there is something of this recipe."""
        if not self._state.is_file():
            return False
        kept = torch.load(self._state, weights_only=True, map_location=self.head.ids.device)
        if kept["recipe"] != asdict(self.recipe) or not torch.equal(kept["ids"], self.head.ids):
            return False
        with torch.no_grad():
            for name, weight in self.head.weights.items():
                weight.copy_(kept["weights"][name])
        for optimizer, state in zip(self._optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.spent, self.losses = kept["step"], kept["spent"], kept["losses"]
        return True

    def save(self) -> None:
        weights = {name: weight.detach() for name, weight in self.head.weights.items()}
        kept = {"recipe": asdict(self.recipe), "ids": self.head.ids, "weights": weights, "step": self.step}
        states = [optimizer.state_dict() for optimizer in self._optimizers]
        more = {"optimizers": states, "spent": self.spent, "losses": self.losses}
        part = self._state.with_suffix(".part")
        torch.save(kept | more, part)
        part.rename(self._state)

    def run(self, found: Sequence[Computed], seconds: float = math.inf) -> None:
        """Steps until they, or the seconds of all runs together, are done; progress is shown."""
        on_gpu, begun, saved = self.head.ids.device.type == "cuda", time.monotonic() - self.spent, time.monotonic()
        for group in epochs(found, self.recipe.batch_tokens, self.recipe.seed, self.step):
            done = max(self.step / self.recipe.steps, self.spent / seconds)
            if done >= 1:
                break
            rate = self.recipe.rate * min(1.0, (self.step + 1) / (self.recipe.warm_up * self.recipe.steps + 1))
            for parameters in (group for one in self._optimizers for group in one.param_groups):
                parameters["lr"] = rate * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                loss = self.head.loss(batched(group))
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(self.head.weights.values()), 1.0)
            for optimizer in self._optimizers:
                optimizer.step()
            self.step, self.spent = self.step + 1, time.monotonic() - begun
            if self.step % 25 == 1:
                self.losses.append(loss.item())
                print(f"step {self.step:5}  {self.spent:5.0f} s  loss {self.losses[-1]:.4f}", flush=True)
            if time.monotonic() - saved > SAVED_EVERY:
                saved = time.monotonic()
                self.save()
        self.save()


def card(
    target: str, head: Head, size: int, texts: Sequence[Text], training: Training,
    found: Mapping[int, Mapping[str, float]],
) -> str:  # fmt: skip
    """What the head is, in Markdown."""
    recipe, new = head.recipe, sum(len(text.tokens) - text.first for text in texts)
    kinds = [*sorted(kind for kind in found[SHOWN[0]] if kind != "all"), "all"]
    numbers = [f"| {kind} | {' | '.join(f'{found[depth][kind]:.2f}' for depth in SHOWN)} |" for kind in kinds]
    settings = ", ".join(f"{field.name} {getattr(recipe, field.name)}" for field in fields(recipe))
    return "\n".join(
        [
            f"# An EAGLE-3 head for {target}",
            "",
            f"Drafts tokens that {target} then verifies: outputs are the model's own.",
            "Used by `--speculate eagle --draft FOLDER`.",
            "",
            f"{size / 1e6:.1f} MB in float16, {sum(one.numel() for one in head.weights.values()) / 1e6:.2f} M weights, "
            f"{len(head.ids):,} tokens to draft; hidden states after the layers {', '.join(map(str, head.taps))}, "
            "from 0. Embeddings, and the rows that logits are made of, are the target's own.",
            "",
            f"Trained by `bench/train_eagle.py` on {len(texts):,} texts of the target's own "
            f"({new / 1e6:.2f} M new tokens), {training.step:,} steps in {training.spent:.0f} s. {settings}.",
            "",
            "Tokens a round (the target's own counted) of greedy decoding on held-out prompts, by depth:",
            "",
            f"| | {' | '.join(map(str, SHOWN))} |",
            f"| --- |{' --- |' * len(SHOWN)}",
            *numbers,
            "",
        ]
    )  # fmt: skip


def options_for(device: str, max_seqs: int) -> EngineOptions:
    """Small enough to leave the device's memory to training."""
    dtype = torch.float32 if device in ("cpu", "emulated") else torch.bfloat16
    return EngineOptions(
        max_seqs=max_seqs, max_len=1024, cache_tokens=max_seqs * 512, dtype=dtype, model_impl="native", verify="off"
    )


def texts_for(llm: LLM, data: Path, kept: Path, args: argparse.Namespace) -> tuple[list[Text], list[Text]]:
    """Texts to train on, and held-out ones; from disk where they were written before."""
    if kept.is_file():
        both = json.loads(kept.read_text())
        return tuple([Text(kind, tuple(tokens), first) for kind, tokens, first in part] for part in both)  # type: ignore[return-value]
    prompts = Prompts(data, llm, args.seed)
    held_out = written(
        llm, prompts.held_out(args.held_out), SamplingParams(max_tokens=args.new_tokens, temperature=0.0)
    )
    seconds = args.minutes * 60 * SHARE_OF_TEXTS

    def told(count: int, tokens: int) -> None:
        print(f"{count:,} texts, {tokens:,} new tokens", flush=True)

    texts = training_texts(llm, prompts, args.sequences, args.new_tokens, seconds, told, args.seed)
    kept.write_text(json.dumps([[(one.kind, one.tokens, one.first) for one in part] for part in (texts, held_out)]))
    return texts, held_out


def main() -> None:
    args = arguments()
    begun, state = time.monotonic(), args.folder / "training"
    state.mkdir(parents=True, exist_ok=True)
    llm = LLM(args.model, device=args.device, options=options_for(args.device, args.max_seqs))
    model, target = drafted_for(llm.executor.model), Path(llm.checkpoint.source).name
    texts, held_out = texts_for(llm, args.data, state / "texts.json", args)
    recipe = Recipe(
        depth=args.depth, draft_vocab=args.draft_vocab, steps=args.steps, batch_tokens=args.batch_tokens,
        rate=args.rate, optimizer=args.optimizer, seed=args.seed,
    )  # fmt: skip
    del llm
    gc.collect()
    learned, tried = computed(model, texts), computed(model, held_out)
    ids = draft_vocabulary([one.tokens[one.first :] for one in texts], model.config, recipe.draft_vocab)
    longest = max(len(one.tokens) for one in (*texts, *held_out))
    head = Head(model, ids.to(model.weights.embedding.device), recipe, longest)
    head.scale_to(learned[0].taps)
    training = Training(head, state / "state.pt")
    print(
        f"{'resumed' if training.resume() else 'begun'} at step {training.step}, after {time.monotonic() - begun:.0f} s"
    )
    left = args.minutes * 60 - (time.monotonic() - begun) - RESERVED
    training.run(learned, max(1.0, training.spent + left))
    size = head.write(args.folder)
    found = measured(head, tried, SHOWN)
    (args.folder / "README.md").write_text(card(target, head, size, texts, training, found))
    figures: dict[str, Any] = {
        "bytes": size,
        "steps": training.step,
        "losses": training.losses,
        "tokens_a_round": found,
    }
    (args.folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(found, indent=2))


def arguments() -> argparse.Namespace:
    recipe = Recipe()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with prompts")
    parser.add_argument("folder", type=Path, help="where the head goes")
    parser.add_argument("--model", help="a folder or GGUF file; the default model where it is left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=5.0, help="for texts and training together, about")
    parser.add_argument("--sequences", type=int, default=40_000, help="texts to write, if time allows")
    parser.add_argument("--new-tokens", type=int, default=224, help="of each text, at most")
    parser.add_argument("--held-out", type=int, default=360, help="prompts to measure with, besides 20 chats")
    parser.add_argument("--max-seqs", type=int, default=256, help="texts that are written at a time")
    parser.add_argument("--steps", type=int, default=recipe.steps)
    parser.add_argument("--batch-tokens", type=int, default=recipe.batch_tokens)
    parser.add_argument("--depth", type=int, default=recipe.depth)
    parser.add_argument("--draft-vocab", type=int, default=recipe.draft_vocab)
    parser.add_argument("--rate", type=float, default=recipe.rate)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default=recipe.optimizer)
    parser.add_argument("--seed", type=int, default=recipe.seed)
    return parser.parse_args()


if __name__ == "__main__":
    main()
