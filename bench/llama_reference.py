"""Runs llama.cpp on the default model, keeps what the tests compare with, and measures how far our engine is from it.

Two files are run: the model as it is, whose Q4_1 weights make llama.cpp round the activations to 8 bits as well, and
the same weights unpacked to float32. Keys and values are float32 and flash attention is off unless the figures say so.
On busy cores OMP_WAIT_POLICY=passive makes llama.cpp many times faster.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import report
import torch
from agreement import DECIMALS, NEAR_TIE, Answer, Glimpse, Picks, Reference, Window
from engine_logits import sequence_logits
from rounded_activations import RoundedActivations
from unpacked_gguf import write_unpacked

from phonograph.engine.checkpoints import default_model, open_checkpoint
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import SamplingParams

try:
    import llama_cpp
except ImportError:
    sys.exit("running llama.cpp: its Python package is not installed. Run: pip install llama-cpp-python (it compiles)")

REFERENCE = Path(__file__).parent.parent / "tests" / "data" / "llama_cpp_smollm2.json"
NEW_TOKENS = 48
WINDOW = 1024
WINDOWS = 8
WINDOWS_KEPT = 2
GLIMPSE_EVERY = 32
"""Positions of a window between two glimpses; every token of an answer has one."""

QUESTIONS = ["What is the capital of France?", "Write a short poem about the sea.", "Why is the sky blue?"]
PROMPTS = [
    "The quick brown fox jumps over the lazy dog, and then",
    "Once upon a time there was a lost key",
    "List three facts about the moon:\n1.",
    'def fibonacci(n):\n    """The n-th number, counted from 0."""\n',
    "import numpy as np\n\nx = np.arange(10)\n",
    "Q: A train travels 120 miles in 2 hours. How fast does it go?\nA:",
    "In 1492, 1789 and 1945,",
    "La capitale de l'Italie est",
    "Der Zug nach München fährt um 8:45 Uhr ab – ",
    "今天天气很好，",
]

Figures = dict[str, Any]

_default_params = llama_cpp.llama_model_default_params


def _plain_kernels() -> Any:
    """Without kernels that repack weights for one kind of CPU: those for AMX end the process in some virtual machines.

    `Llama` has no argument for it.
    """
    params = _default_params()
    params.use_extra_bufts = False
    return params


class LlamaCpp:
    """A GGUF file in llama.cpp, on the CPU."""

    def __init__(self, path: Path, kv_type: int) -> None:
        with patch.object(llama_cpp.llama_cpp, "llama_model_default_params", _plain_kernels):
            self._llama = llama_cpp.Llama(
                str(path),
                n_ctx=WINDOW,
                n_threads=torch.get_num_threads(),
                n_threads_batch=torch.get_num_threads(),
                logits_all=True,
                type_k=kv_type,
                type_v=kv_type,
                flash_attn=False,
                verbose=False,
            )

    def encode(self, text: str) -> list[int]:
        """With bos and eos as the file wants them, and special tokens read as such."""
        ids: list[int] = self._llama.tokenize(text.encode(), add_bos=True, special=True)
        return ids

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """After every token, [num_tokens, vocab]; a view that the next call overwrites."""
        self._llama.reset()
        self._llama.eval(ids)
        return torch.from_numpy(self._llama.scores[: len(ids)])

    def answer(self, prompt: str) -> tuple[Answer, torch.Tensor]:
        """The greedy continuation, one token a step, past any eos; with the logits that it was picked from."""
        ids = self.encode(prompt)
        sequence, start = list(ids), len(ids) - 1
        self._llama.reset()
        self._llama.eval(ids)
        for _ in range(NEW_TOKENS - 1):
            sequence.append(int(self._llama.scores[len(sequence) - 1].argmax()))
            self._llama.eval(sequence[-1:])
        logits = torch.from_numpy(self._llama.scores[: len(sequence)])
        picks = Picks.of(logits[start:])
        glimpses = [Glimpse.top(logits, position) for position in range(start, len(sequence))]
        glimpses.append(Glimpse.spread(logits, len(sequence) - 1))
        text = self._llama.detokenize(picks.ids).decode("utf-8", "replace")
        return Answer(prompt, ids, picks, text, glimpses), logits


class Tally:
    """How far our logits are from theirs, over the whole vocabulary, sequence by sequence."""

    def __init__(self) -> None:
        self._positions = self._same = self._sure_differences = 0
        self._largest = self._mean_squares = self._margin = 0.0

    def add(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Logits of one sequence."""
        difference = ours - theirs
        top, ids = theirs.topk(2, -1)
        margins, same = top[:, 0] - top[:, 1], ours.argmax(-1) == ids[:, 0]
        self._positions += len(ours)
        self._same += int(same.sum())
        self._sure_differences += int((~same & (margins > NEAR_TIE)).sum())
        self._largest = max(self._largest, difference.abs().max().item())
        self._mean_squares += difference.square().mean(-1).sum().item()
        self._margin = max(self._margin, margins[~same].max().item() if not same.all() else 0.0)

    def figures(self) -> Figures:
        return {
            "positions": self._positions,
            "largest_difference": float(f"{self._largest:.3g}"),
            "rms_difference": float(f"{(self._mean_squares / self._positions) ** 0.5:.3g}"),
            "same_top_1": self._same,
            "top_1_agreement": round(self._same / self._positions, 5),
            "top_1_differences_beyond_near_ties": self._sure_differences,
            "largest_margin_of_a_difference": float(f"{self._margin:.3g}"),
        }


@dataclass(frozen=True)
class Runs:
    """The model in llama.cpp: unpacked and as it is, with a float32 KV cache and with llama.cpp's default, float16."""

    f32: LlamaCpp
    f32_f16_cache: LlamaCpp
    q4_1: LlamaCpp
    q4_1_f16_cache: LlamaCpp

    @classmethod
    def load(cls, unpacked: Path, model: Path) -> Runs:
        full, half = llama_cpp.GGML_TYPE_F32, llama_cpp.GGML_TYPE_F16
        return cls(LlamaCpp(unpacked, full), LlamaCpp(unpacked, half), LlamaCpp(model, full), LlamaCpp(model, half))


def answers(llm: LLM, runs: Runs, prompts: Sequence[str]) -> tuple[list[Answer], Figures]:
    """Greedy answers of the unpacked file, theirs to keep and ours to compare."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    prefill, decodes, quantised = Tally(), Tally(), Tally()
    kept: list[Answer] = []
    identical = identical_texts = 0
    differences: list[Figures] = []
    for done, prompt in zip(llm.generate(list(prompts), params), prompts, strict=True):
        answer, theirs = runs.f32.answer(prompt)
        assert list(done.prompt) == answer.prompt_ids, f"the tokenizers differ on {prompt!r}"
        ours = sequence_logits(llm, answer.sequence)
        prefill.add(ours, theirs)
        decodes.add(sequence_logits(llm, answer.sequence, as_decodes=True), theirs)
        quantised.add(ours, runs.q4_1.logits(answer.sequence))
        index = answer.first_difference(done.tokens)
        identical += index is None
        identical_texts += done.text == answer.text
        if index is not None:
            differences.append({"prompt": prompt, "token": index, "margin": answer.picks.margins[index]})
        kept.append(answer)
    return kept, {
        "prompts": len(kept),
        "new_tokens_each": NEW_TOKENS,
        "identical_tokens": identical,
        "identical_texts": identical_texts,
        "smallest_margin": min(min(answer.picks.margins) for answer in kept),
        "differences_at_near_ties": sum(one["margin"] < NEAR_TIE for one in differences),
        "differences": differences,
        "f32": prefill.figures(),
        "f32_with_the_attention_of_decodes": decodes.figures(),
        "q4_1": quantised.figures(),
    }


def windows(llm: LLM, runs: Runs, ids: Sequence[int]) -> tuple[list[Window], Figures]:
    """The beginning of a text, every token of it given: we against llama.cpp, and each against itself."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    kept: list[Window] = []
    for start in range(0, WINDOWS * WINDOW, WINDOW):
        window = list(ids[start : start + WINDOW])
        ours = sequence_logits(llm, window)
        with RoundedActivations():
            ours_rounded = sequence_logits(llm, window)
        f32, q4_1, q4_1_f16_cache = (run.logits(window) for run in (runs.f32, runs.q4_1, runs.q4_1_f16_cache))
        tallies["f32"].add(ours, f32)
        tallies["f32_with_f16_cache"].add(ours, runs.f32_f16_cache.logits(window))
        tallies["q4_1"].add(ours, q4_1)
        tallies["q4_1_with_f16_cache"].add(ours, q4_1_f16_cache)
        tallies["llama_cpp_f32_against_its_q4_1"].add(f32, q4_1)
        tallies["llama_cpp_q4_1_with_f16_cache_against_its_f32_cache"].add(q4_1_f16_cache, q4_1)
        tallies["ours_with_rounded_activations_against_ours"].add(ours_rounded, ours)
        if len(kept) < WINDOWS_KEPT:
            glimpses = [Glimpse.top(f32, position) for position in range(0, WINDOW, GLIMPSE_EVERY)]
            glimpses.append(Glimpse.spread(f32, WINDOW - 1))
            kept.append(Window(window, Picks.of(f32), Picks.of(q4_1), glimpses))
    return kept, {"window": WINDOW, **{name: tally.figures() for name, tally in tallies.items()}}


def beginning(text: str, llama: LlamaCpp, num_tokens: int) -> str:
    """The first whole lines that have so many tokens."""
    end = 0
    while end < len(text):
        end = text.find("\n", end + 4 * num_tokens) + 1 or len(text)
        if len(llama.encode(text[:end])) >= num_tokens:
            return text[:end]
    sys.exit(f"taking {num_tokens} tokens of the text: it has only {len(llama.encode(text))}. Give a longer one.")


def tokenizers(llm: LLM, llama: LlamaCpp, texts: Sequence[Path]) -> Figures:
    """Whether both cut whole files alike."""
    assert llm.tokenizer is not None
    figures: Figures = {}
    for path in texts:
        text = path.read_text(encoding="utf-8")
        theirs = llama.encode(text)
        figures[path.name] = {"tokens": len(theirs), "identical": llm.tokenizer.encode(text) == theirs}
    return figures


def check_weights(unpacked: Path) -> int:
    """Make sure that the unpacked file is the default model; tell how many tensors are equal to the last bit."""
    ours, theirs = open_checkpoint(None), open_checkpoint(unpacked)
    assert ours.config == theirs.config
    pairs = list(zip(ours.tensors(), theirs.tensors(), strict=True))
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)
    return len(pairs)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def origin(model: Path, unpacked: Path, text: Path) -> Figures:
    """How the reference was made."""
    return {
        "by": "llama.cpp in llama-cpp-python " + llama_cpp.__version__,
        "command": report.command(),
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cpu": llama_cpp.llama_print_system_info().decode().strip(),
        "model": {"file": model.name, "sha256": sha256(model)},
        "unpacked": {"file": unpacked.name, "sha256": sha256(unpacked), "gguf": version("gguf")},
        "settings": "keys and values in float32, no flash attention, no repacked weights; answers one token a step",
        "text": f"the beginning of {text.name}",
        "decimals_of_logits": DECIMALS,
    }


def measured(llm: LLM, unpacked: Path, texts: Sequence[Path]) -> tuple[Reference, Figures]:
    """Run everything that is kept or compared."""
    model = default_model()
    write_unpacked(model, unpacked)
    equal_tensors = check_weights(unpacked)
    runs = Runs.load(unpacked, model)
    template = llm.checkpoint.chat_template()
    chats = [template.render([{"role": "user", "content": question}]) for question in QUESTIONS]
    kept_answers, greedy = answers(llm, runs, [*chats, *PROMPTS])
    text = beginning(texts[0].read_text(encoding="utf-8"), runs.f32, WINDOWS * WINDOW)
    kept_windows, given = windows(llm, runs, runs.f32.encode(text))
    kept_text = beginning(text, runs.f32, WINDOWS_KEPT * WINDOW)
    made = origin(model, unpacked, texts[0])
    digest = hashlib.sha256(kept_text.encode()).hexdigest()
    reference = Reference(made, kept_answers, runs.f32.encode(kept_text), digest, kept_windows)
    return reference, {
        "llama_cpp": made["by"],
        "settings": made["settings"],
        "threads": torch.get_num_threads(),
        "model": made["model"],
        "unpacked": made["unpacked"],
        "equal_tensors": equal_tensors,
        "tokenizer": tokenizers(llm, runs.f32, texts),
        "greedy": greedy,
        "text": given,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "texts",
        type=Path,
        nargs="+",
        help="the first is scored, such as WikiText-2's test part; all are cut into tokens",
    )
    parser.add_argument("--reference", type=Path, default=REFERENCE, help="the file that the tests compare with")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    args = parser.parse_args()
    options = EngineOptions(max_seqs=16, max_len=WINDOW, dtype=torch.float32, attention="reference")
    llm = LLM(device="cpu", options=options)
    with tempfile.TemporaryDirectory() as folder:
        name = default_model().name.replace("Q4_1", "F32")
        reference, figures = measured(llm, Path(folder) / name, args.texts)
    reference.write(args.reference)
    print(json.dumps(figures, indent=2, ensure_ascii=False))
    print(args.reference)
    print(report.write("llama_cpp_cpu", figures, args.out))


if __name__ == "__main__":
    main()
