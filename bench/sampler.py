"""The sampler's draws against the probabilities they should have, in float64; and how long they take.

Writes `bench/results/sampler_cpu.json`, or `…_cuda.json` where there is a GPU. A fit's `p_value` is the chance that a
true sampler fits worse; `outside` counts draws of tokens that truncation excludes, or that are all but impossible.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
import torch

from phonograph.engine.requests.parameter import Sampling
from phonograph.engine.sampling.sampler import Sampler, SamplingRows, TorchSampler

LEAST_EXPECTED = 20
"""Draws that a cell of the chi-square test expects; rarer tokens share a cell."""
IMPOSSIBLE = 1e-14
_ROWS = {"cpu": 4096, "cuda": 16384}


@dataclass(frozen=True)
class Case:
    """What is asked of the sampler."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def level(self) -> Sampling:
        return Sampling.TRUNCATED if self.top_k or self.top_p < 1 or self.min_p else Sampling.SAMPLED


CASES = {
    "temperature": Case(0.7),
    "top-k": Case(top_k=40),
    "top-p": Case(top_p=0.9),
    "min-p": Case(min_p=0.02),
    "together": Case(1.3, 50, 0.8, 0.03),
}


def logits_of(vocab: int) -> torch.Tensor:
    """A few hundred tokens share nearly everything, as after a prompt; ties among them, and a long tail behind."""
    numbers = torch.Generator().manual_seed(vocab)
    logits = torch.randn(vocab, generator=numbers) * 2 - 35
    likely = torch.randperm(vocab, generator=numbers)[: max(1, vocab // 4 if vocab < 4096 else 400)]
    logits[likely] = torch.randn(len(likely), generator=numbers) * 2
    logits[likely[::5]] = logits[likely[::5]].round()
    return logits


def probabilities(logits: torch.Tensor, case: Case) -> torch.Tensor:
    """Of every token of one row, in float64, by the definition: each step renormalises what the one before left."""
    probs = (logits.double() / case.temperature).softmax(-1)
    if case.top_k:
        least = probs.sort(descending=True).values[min(case.top_k, len(probs)) - 1]
        probs = torch.where(probs >= least, probs, 0.0)
        probs = probs / probs.sum()
    if case.top_p < 1:
        ordered, tokens = probs.sort(stable=True)  # of equals the first goes first
        probs = probs.index_fill(0, tokens[ordered.cumsum(0) <= 1 - case.top_p], 0.0)
        probs = probs / probs.sum()
    if case.min_p:
        probs = torch.where(probs >= case.min_p * probs.max(), probs, 0.0)
    return probs / probs.sum()


def rows_of(case: Case, seeds: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
    """The case for each of these seeds and positions."""
    count, on = len(seeds), seeds.device
    return SamplingRows(
        torch.full((count,), case.temperature, device=on),
        torch.full((count,), case.top_k, dtype=torch.int32, device=on),
        torch.full((count,), case.top_p, device=on),
        torch.full((count,), case.min_p, device=on),
        seeds,
        positions,
    )


def draws(sampler: Sampler, logits: torch.Tensor, case: Case, count: int) -> Iterator[torch.Tensor]:
    """So many draws from one row of logits, some at a time: a thousand positions of every seed."""
    for start in range(0, count, _ROWS[logits.device.type]):
        number = torch.arange(start, min(count, start + _ROWS[logits.device.type]), device=logits.device)
        rows = rows_of(case, number // 1000, number % 1000)
        yield sampler.pick(logits.expand(len(number), -1), rows, case.level)


@dataclass(frozen=True)
class Fit:
    """How well draws fit their probabilities."""

    num_draws: int
    outside: int
    cells: int
    chi_square: float
    p_value: float

    @property
    def is_good(self) -> bool:
        """A true sampler fails one in ten million times."""
        return self.outside == 0 and self.p_value > 1e-7


def fit(counts: torch.Tensor, probs: torch.Tensor) -> Fit:
    """Pearson's test over the tokens that are drawn often enough, and the others together."""
    counts, probs = counts.double().cpu(), probs.double().cpu()
    total = counts.sum()
    expected, possible = probs * total, probs > IMPOSSIBLE
    often = possible & (expected >= LEAST_EXPECTED)
    rare = possible & ~often
    wanted, found = [expected[often]], [counts[often]]
    if expected[rare].sum() > 0:
        wanted.append(expected[rare].sum()[None])
        found.append(counts[rare].sum()[None])
    all_wanted, all_found = torch.cat(wanted), torch.cat(found)
    chi_square = ((all_found - all_wanted).square() / all_wanted.clamp_min(1e-9)).sum()
    freedom = max(1, len(all_wanted) - 1)
    p_value = torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), chi_square / 2)
    outside = int(counts[~possible].sum())
    return Fit(int(total), outside, len(all_wanted), float(chi_square), float(p_value))


def measure(sampler: Sampler, vocab: int, case: Case, count: int, device: str) -> dict[str, Any]:
    """One case: the fit, and the time of a draw."""
    logits = logits_of(vocab).to(device)
    counts = torch.zeros(vocab, dtype=torch.int64, device=device)
    for _ in draws(sampler, logits, case, _ROWS[device]):  # compiles, on a GPU
        break
    begun = time.perf_counter()
    for drawn in draws(sampler, logits, case, count):
        counts += torch.bincount(drawn.clamp_min(0), minlength=vocab)
    whole = int(counts.sum())  # waits for the device
    seconds = time.perf_counter() - begun
    found = fit(counts, probabilities(logits.cpu(), case))
    return {
        "vocab": vocab,
        **asdict(case),
        **asdict(found),
        "good": found.is_good,
        "us_per_draw": seconds / whole * 1e6,
    }


def fastest(device: str) -> Sampler:
    """The sampler that the engine takes there."""
    if device == "cuda":
        from phonograph.engine.sampling.triton.sampler import TritonSampler

        return TritonSampler()
    from phonograph.engine.ops.native.library import library
    from phonograph.engine.sampling.cpu import CpuSampler
    from phonograph.errors import DeviceError

    try:
        return CpuSampler(library())
    except DeviceError:
        return TorchSampler()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10**6, help="of every case, over the whole vocabulary on a GPU")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="the folder for the results")
    args = parser.parse_args()
    sampler = fastest(device)
    sizes = {151_936: args.draws} if device == "cuda" else {1000: args.draws, 151_936: min(args.draws, 2000)}
    figures = []
    for vocab, count in sizes.items():
        for name, case in CASES.items():
            figures.append({"case": name, **measure(sampler, vocab, case, count, device)})
            print(figures[-1], flush=True)
    print(report.write(f"sampler_{device}", {"sampler": sampler.name, "cases": figures}, args.out))


if __name__ == "__main__":
    main()
