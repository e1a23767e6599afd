"""Speculation measured: tokens a round, tokens a second against plain decoding, what a round costs, and under load.

    python bench/speculating.py --data DATA [--head HEAD] [--only rounds rates …]      # on a GPU
    python bench/speculating.py --tiny                                                 # all of it, on any machine

DATA has prompts (`eagle_text`); without it, and for random weights, prompts are random. Parts:
  same     answers of each drafter against those of plain decoding: greedy, drawn, and drawn with penalties; where they
           part, the margin by which rounding explains it, in root mean squares of what it moves a logit by
  exact    the same in float32
  rounds   tokens a round of each drafter on held-out prompts, by kind of text; drafters are compared by those of all
           rounds, since one that seldom drafts is right more often where it does
  rates    tokens a second at each batch size, with rounds always, and without
  curve    up through many batch sizes and down again where rounds run if they pay, against plain decoding, and the
           largest drop from one size to the next
  wrong    drafts of which none is ever accepted, over 512 tokens a sequence, prompts included; every run begins with
           a policy that knows nothing. Plain decoding is measured in two engines: losses are against their mean, and
           what they differ by is what engines that are opened anew differ by
  costs    device time of acceptance, extend and draft, against their bytes at 4.6 TB/s and 0.1 ms
  steps    device time of every recording: plain steps against those of plain decoding, rounds, and catching up
  shape    the 8B shape with random weights at batch 1, drafts accepted at set rates (`synthetic_acceptance`: what it
           says is not what its model says); by chance more or fewer are than the rate says, so that speed is also
           told for the tokens a round that are expected
  poisson  requests that come by chance: the share of decode steps that were rounds
Writes bench/results/speculation_cpu.json or …_cuda.json; parts that were left out stay as they are there.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch
from eagle_text import Prompt, Prompts
from engine_turns import Engine, Figures, Part, Turns
from random_head import write_random_head
from round_costs import round_costs
from same_answers import Answers, answers, compared, plain_answers
from speculating_plot import draw
from speculating_setting import FULL, TINY, Setting
from synthetic_acceptance import accepting, expected, rates_of

from phonograph.bench.engine_driver import EngineDriver
from phonograph.bench.workloads import Ids, Job
from phonograph.devices import Device, open_device
from phonograph.engine.execution.speculation import measured_costs
from phonograph.engine.execution.step_timing import EVERY
from phonograph.engine.llm import LLM
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.registry import DECODE, DRAFT, DRAFT_EXTEND, TARGET_VERIFY
from phonograph.engine.passes.target_verify import PLAIN_STEPS
from phonograph.engine.requests.request import SamplingParams
from phonograph.engine.scheduling.step_width import StepWidth, WhereDrafted
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.trust.coverage import steady_seconds

GOALS = {(4, 0.8): 2.3, (3, 0.7): 1.8, (2, 0.5): 1.3}
"""By depth and rate of acceptance: how many times as fast as plain decoding the 8B shape is to be."""

_MANY = 8
"""Sequences that bring enough tokens in few steps; fewer are measured for longer."""
_FILLED = 0.2
"""Of the time in which requests come, when as many as there will be are there."""


class Benchmark:
    """The parts."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._prompts: dict[tuple[int, int, bool], list[Prompt]] = {}
        self._head: tempfile.TemporaryDirectory[str] | None = None

    def open(self, engine: Engine) -> LLM:
        """With a cache for all rows and no more, so that others may use the device too."""
        setting, changes = self.setting, dict(engine.changes)
        usual: dict[str, Any] = {"max_seqs": max(setting.batches), "max_len": setting.max_len, "dtype": setting.dtype}
        decodes = "decode"
        if changes.get("speculate", "off") != "off":
            usual |= {"speculate_depth": setting.depth, "speculate_when": "pays"}
            decodes = "target_verify"
        usual |= {"verify": "off", "prefix_cache": False, **changes}
        sizes = [size for size in setting.curve if size <= usual["max_seqs"]]
        asked = [ask("guard", "off", origin="benchmark"), ask(f"{decodes}.buckets", sizes, origin="benchmark")]
        if decodes != "decode":
            asked += [ask(f"{name}.buckets", sizes, origin="benchmark") for name in (DRAFT_EXTEND.name, DRAFT.name)]
        if setting.mixed:
            asked.append(ask("prefill.buckets", list(setting.mixed), origin="benchmark"))
        usual.setdefault("cache_tokens", (usual["max_seqs"] + 4) * usual["max_len"])
        begun = time.perf_counter()
        with nullcontext() if engine.accepts == "right" else accepting(engine.accepts):
            model = engine.model or setting.model
            llm = LLM(model, device=setting.device, options=EngineOptions(**usual), asked=asked)
            # What runs eagerly later on, as tails of mixed steps do, accepts as recordings do.
            kernels: Any = llm.executor.model.kernels
            kernels.rounds = kernels.rounds
        gc.collect()
        gc.freeze()  # as in service
        print(f"opened in {time.perf_counter() - begun:.1f} s: {changes or 'plain'}", flush=True)
        return llm

    def prompts(self, llm: LLM, count: int) -> list[Prompt]:
        """Held-out ones where there are some, or random ones; the same for all engines of a model."""
        key = count, llm.checkpoint.config.vocab, llm.tokenizer is not None
        if key not in self._prompts:
            self._prompts[key] = self._made_prompts(llm, count)
        return self._prompts[key]

    def _made_prompts(self, llm: LLM, count: int) -> list[Prompt]:
        data = self.setting.data
        if data is not None and llm.tokenizer is not None:
            found = Prompts(data, llm, seed=0).held_out(max(36, count))
            random.Random(0).shuffle(found)
            return (found * -(-count // len(found)))[:count]
        numbers, vocab = random.Random(7), llm.checkpoint.config.vocab
        longest = min(200, self.setting.max_len // 4)
        lengths = [numbers.randrange(longest // 2, longest) for _ in range(count)]
        return [Prompt("random", tuple(numbers.randrange(10, vocab) for _ in range(one))) for one in lengths]

    def rate(self, llm: LLM, num_seqs: int, new_tokens: int) -> float:
        """Tokens a second of so many sequences that decode together, prompts left out; the median of some runs.

        Sequences with more luck go on, so that the batch is whole until so many tokens have come for each on average:
        as with requests that take the places of those that end. What waits for the last one would tell of it alone.
        """
        prompts: list[Ids] = [list(prompt.tokens) for prompt in self.prompts(llm, num_seqs)]
        return statistics.median(self._rate(llm, prompts, new_tokens) for _ in range(self.setting.repeats))

    def _rate(self, llm: LLM, prompts: Sequence[Ids], new_tokens: int) -> float:
        driver = _driver(llm)
        most = min(llm.limits.max_len - max(map(len, prompts)), new_tokens * (self.setting.depth + 1))
        sequences = driver.seat(prompts, most)
        for _ in range(llm.limits.max_ahead + 1):
            driver.step()  # as many steps are in flight when the clock starts as when it stops
        count, ended, begun = 0, False, time.perf_counter()
        while count < new_tokens * len(prompts) and not ended:
            for _, tokens, finish in driver.step():
                count, ended = count + len(tokens), ended or finish is not None
        seconds = time.perf_counter() - begun
        driver.drain(sequences)
        return count / seconds

    # -- the parts ------------------------------------------------------------------------------------------------

    def same(self) -> Part:
        """Answers of each drafter against plain decoding, rounded as in service."""
        return self._same(self.setting.dtype)

    def exact(self) -> Part:
        """The same in float32, where nothing but a tie may part them."""
        return self._same(torch.float32)

    def _same(self, dtype: torch.dtype) -> Part:
        new_tokens = self.setting.new_tokens // 4

        def prompts(llm: LLM) -> list[Ids]:
            return [list(prompt.tokens) for prompt in self.prompts(llm, self.setting.compared)]

        def work(llm: LLM) -> Answers:
            with always(llm):
                return answers(llm, prompts(llm), new_tokens)

        changes: Figures = {} if dtype == self.setting.dtype else {"dtype": dtype}
        beside = yield Engine.of(**changes), lambda llm: plain_answers(llm, prompts(llm), new_tokens)
        found = dict[str, Answers]()
        for name, drafter in self.setting.drafters.items():
            found[name] = yield Engine.of(**drafter, **changes), work
        reference = Engine.of(dtype=torch.float32, max_seqs=1)
        return (yield reference, lambda llm: compared(llm, found, beside, new_tokens))

    def rounds(self) -> Part:
        """Tokens a round by drafter and kind of text."""

        def work(llm: LLM) -> Figures:
            prompts = self.prompts(llm, self.setting.prompts)
            first, found = _counts(llm), dict[str, Any]()
            for kind in sorted({prompt.kind for prompt in prompts}):
                before, some = _counts(llm), [prompt.tokens for prompt in prompts if prompt.kind == kind]
                with always(llm):
                    llm.generate(some, SamplingParams(max_tokens=self.setting.new_tokens, temperature=0.0))
                found[kind] = {"prompts": len(some), **_rounds_between(before, _counts(llm))}
            return {"all": {"prompts": len(prompts), **_rounds_between(first, _counts(llm))}, **found}

        found: Figures = {}
        for name, changes in self.setting.drafters.items():
            found[name] = yield Engine.of(**changes), work
        return found

    def _by_batch(self, llm: LLM, new_tokens: int) -> dict[int, float]:
        return {count: self.rate(llm, count, new_tokens) for count in self.setting.batches}

    def rates(self) -> Part:
        """Tokens a second with rounds always, and how many times plain decoding's."""

        def work(llm: LLM) -> tuple[dict[int, float], str]:
            with always(llm):
                rates = self._by_batch(llm, self.setting.new_tokens)
            return rates, str(measured_costs(llm.executor))

        plain = yield Engine(), partial(self._by_batch, new_tokens=self.setting.new_tokens)
        found: Figures = {"plain": {f"{count}": round(rate, 1) for count, rate in plain.items()}}
        for name, changes in self.setting.drafters.items():
            rates, ratios = yield Engine.of(**changes), work
            found[f"{name} always"] = {
                f"{count}": {"tokens_per_s": round(rate, 1), "times_plain": round(rate / plain[count], 3)}
                for count, rate in rates.items()
            } | {"ratios": ratios}
        return found

    def curve(self) -> Part:
        """Up and down again, in one engine each: the largest loss against plain decoding, and between the two ways."""
        sizes, new_tokens = [*self.setting.curve, *self.setting.curve[-2::-1]], self.setting.new_tokens // 2

        def work(llm: LLM) -> tuple[list[float], list[float]]:
            found, shares = list[float](), list[float]()
            for count in sizes:
                prompts: list[Ids] = [list(prompt.tokens) for prompt in self.prompts(llm, count)]
                before = _steps(llm)
                found.append(
                    round(self._rate(llm, prompts, new_tokens if count >= _MANY else self.setting.long_tokens), 1)
                )
                shares.append(_share_of_rounds(before, _steps(llm)))
            return found, shares

        plain, _ = yield Engine(), work
        both, shares, singles = {"plain": plain}, dict[str, list[float]](), self.setting.single_drafters
        for name, changes in singles.items():
            both[name], shares[name] = yield Engine.of(**changes), work
        found: Figures = {"batches": sizes, "tokens_per_s": both, "share_of_steps_that_were_rounds": shares}
        for name in singles:
            times = [rate / plain for rate, plain in zip(both[name], both["plain"], strict=True)]
            ways = zip(both[name], both[name][::-1], strict=True)
            found[name] = {
                "times_plain": [round(one, 3) for one in times],
                "largest_loss": round(1 - min(times), 4),
                "largest_difference_of_ways": round(max(abs(up / down - 1) for up, down in ways), 4),
                "largest_drop_to_the_next_size": round(_largest_drop(both[name][: len(self.setting.curve)]), 4),
                "largest_drop_of_plain": round(_largest_drop(both["plain"][: len(self.setting.curve)]), 4),
                "goal": "no loss above 0.02, no drop or difference above 0.05",
            }
        return found

    def wrong(self) -> Part:
        """No draft is accepted: what probing costs."""

        def rates(llm: LLM) -> dict[int, Figures]:
            policy = copy.deepcopy(llm.core.scheduler.width)
            return {count: _summed_up(self._whole_rates(llm, count, policy)) for count in self.setting.batches}

        def work(llm: LLM) -> Figures:
            reached, counts = rates(llm), _counts(llm)
            seen = {"rounds": counts.rounds, "accepted": counts.tokens - counts.rounds, "probes": counts.probed}
            return {"rates": reached, **seen, "plain": dict(counts.plain)}

        def between(one: Figures, other: Figures) -> float:
            return round(1 - one["median"] / other["median"], 4)

        first = yield Engine(), rates
        rows = {}
        for name, changes in self.setting.single_drafters.items():
            rows[name] = yield Engine.of(accepts=None, **changes), work
        other = yield Engine(instance=1), rates
        plain = {count: {"median": (one["median"] + other[count]["median"]) / 2} for count, one in first.items()}
        noise = {f"{count}": between(one, other[count]) for count, one in first.items()}
        found: Figures = {"plain": [first, other], "another plain engine": noise}
        for name, row in rows.items():
            losses = {f"{count}": between(one, plain[count]) for count, one in row["rates"].items()}
            found[name] = {"losses": losses, **row, "goal": "no loss above 0.02, none accepted"}
        return found

    def _whole_rates(self, llm: LLM, num_seqs: int, policy: StepWidth) -> list[float]:
        """Tokens a second of sequences from their prompts on in each run, where nothing is known of drafts at first."""
        prompts, rates = [list(prompt.tokens) for prompt in self.prompts(llm, num_seqs)], []
        for _ in range(self.setting.whole_runs):
            driver, llm.core.scheduler.width = _driver(llm), copy.deepcopy(policy)
            llm.device.synchronize()
            begun = time.perf_counter()
            sequences = [driver.add(prompt, self.setting.long_tokens) for prompt in prompts]
            driver.drain()
            rates.append(sum(len(one.outputs) for one in sequences) / (time.perf_counter() - begun))
        return rates

    def costs(self) -> Part:
        """Of each drafter with the model itself, and of a random head with the large shape."""

        def work(llm: LLM) -> Figures:
            return {
                f"{count}": round_costs(llm, count) for count in self.setting.batches if count <= llm.limits.max_seqs
            }

        found: Figures = {}
        for name, changes in self.setting.single_drafters.items():
            found[name] = yield Engine.of(**changes), work
        depth, rate = next(iter(GOALS))
        found["random head, large shape"] = yield self._large(depth, rate), work
        return found

    def steps(self) -> Part:
        """Microseconds of greedy recordings, one after the other without loads, by phase, sequences and drafts."""

        def work(llm: LLM) -> Figures:
            names = (DECODE.name, TARGET_VERIFY.name, DRAFT_EXTEND.name)
            resume = llm.executor.model.kernels.resume_overlap
            with torch.inference_mode():
                return {
                    f"{name} {key.size} {key.axes}".rstrip(): round(steady_seconds(runner, key, resume) * 1e6, 1)
                    for name, runner in llm.executor.runners.items()
                    for key in reversed(runner.captured)
                    if name in names and "sampling" not in key.axes
                }

        found: Figures = {"plain": (yield Engine(), work)}
        for name, changes in self.setting.single_drafters.items():
            row = found[name] = yield Engine.of(**changes), work
            steps = {size: row[f"{TARGET_VERIFY.name} {size} {PLAIN_STEPS}"] for size in self.setting.curve}
            row["plain steps over plain decoding"] = {
                size: round(taken / found["plain"][f"{DECODE.name} {size}"], 4) for size, taken in steps.items()
            }
        return found

    def _large(self, depth: int, rate: float) -> Engine:
        if self._head is None:
            self._head, setting = tempfile.TemporaryDirectory(), self.setting
            write_random_head(Path(self._head.name), setting.shape.config, setting.draft_vocab, setting.dtype)
        draft = Path(self._head.name)
        changes = {"speculate": "eagle", "draft": draft, "speculate_depth": depth, "max_seqs": 1}
        return Engine.of(self.setting.shape, rate, **changes)

    def shape(self) -> Part:
        """The large shape at batch 1 with acceptance at set rates, a random head's costs included."""

        def work(llm: LLM) -> tuple[float, Any]:
            with always(llm):
                return self.rate(llm, 1, self.setting.new_tokens), llm.core.speculation and _counts(llm)

        plain, _ = yield Engine.of(self.setting.shape, max_seqs=1), work
        found: Figures = {"plain": round(plain, 1)}
        for (depth, rate), goal in GOALS.items():
            reached, counts = yield self._large(depth, rate), work
            found[f"depth {depth} at {rate}"] = {
                "tokens_per_s": round(reached, 1),
                "times_plain": round(reached / plain, 3),
                "times_plain_at_tokens_expected": round(
                    reached / plain * expected(rate, depth) / counts.tokens_per_round, 3
                ),
                "goal": goal,
                "tokens_a_round": round(counts.tokens_per_round, 3),
                "tokens_a_round_expected": round(expected(rate, depth), 3),
                "accepted_of_those_reached": rates_of(counts.accepted, counts.rounds),
            }
        return found

    def poisson(self) -> Part:
        """Requests by chance, at a third and at two thirds of what plain decoding does with all rows."""
        rows = max(self.setting.batches)
        most = yield Engine(), lambda llm: self.rate(llm, rows, self.setting.new_tokens)

        def work(llm: LLM) -> Figures:
            capacity = most / self.setting.new_tokens
            return {f"{share:.2f} of capacity": self._poisson(llm, capacity * share) for share in (1 / 3, 2 / 3)}

        found: Figures = {"plain": (yield Engine(), work)}
        for name, changes in self.setting.single_drafters.items():
            found[name] = yield Engine.of(**changes), work
        return found

    def _poisson(self, llm: LLM, per_second: float) -> Figures:
        numbers, due, jobs = random.Random(3), 0.0, list[Job]()
        for prompt in self.prompts(llm, self.setting.requests):
            jobs.append(Job(due, list(prompt.tokens), self.setting.new_tokens))
            due += numbers.expovariate(per_second)
        runners, steps = llm.executor.runners.values(), _steps(llm)
        counts = None if llm.core.speculation is None else _counts(llm)
        eager = sum(runner.stats.eager.total() for runner in runners)
        begun = time.perf_counter()
        streams = _driver(llm).serve(jobs)
        seconds = time.perf_counter() - begun
        gaps = [gap for stream in streams for gap in stream.gaps]
        since, until = _FILLED * jobs[-1].due, jobs[-1].due
        among = sum(since <= moment < until for stream in streams for moment in stream.times)
        found: Figures = {
            "requests_per_s": round(per_second, 2),
            "tokens_per_s": round(sum(len(stream.times) for stream in streams) / seconds, 1),
            "tokens_per_s_while_requests_came": round(among / (until - since), 1),
            "median_time_to_first_token_s": round(statistics.median(stream.first for stream in streams), 4),
            "mean_time_of_a_token_s": round(statistics.fmean(gaps), 6) if gaps else None,
            "eager_steps": sum(runner.stats.eager.total() for runner in runners) - eager,
        }
        if counts is None:
            return found
        after = _counts(llm)
        return found | {
            "share_of_steps_that_were_rounds": _share_of_rounds(steps, _steps(llm)),
            "tokens_a_round": round((after.tokens - counts.tokens) / max(1, after.rounds - counts.rounds), 3),
        }


@contextmanager
def always(llm: LLM) -> Iterator[None]:
    """Rounds wherever there are drafts, whether they pay or not."""
    scheduler = llm.core.scheduler
    before, scheduler.width = scheduler.width, WhereDrafted(llm.limits)
    try:
        yield
    finally:
        scheduler.width = before


def _summed_up(rates: Sequence[float]) -> Figures:
    """Runs differ: what is less than their range is noise."""
    return {name: round(of(rates), 1) for name, of in (("median", statistics.median), ("least", min), ("most", max))}


def _counts(llm: LLM) -> Any:
    assert llm.core.speculation is not None
    return llm.core.speculation.counts


def _steps(llm: LLM) -> dict[str, int]:
    """How many there were of each kind; none where nothing is drafted."""
    return {} if llm.core.speculation is None else dict(_counts(llm).steps)


def _share_of_rounds(before: dict[str, int], after: dict[str, int]) -> float:
    grown = {kind: count - before.get(kind, 0) for kind, count in after.items()}
    return round(grown.get("round", 0) / max(1, sum(grown.values())), 4)


def _driver(llm: LLM) -> EngineDriver:
    """One by which steps are timed as often as in service."""
    driver = EngineDriver(llm)
    llm.executor.timing.every = EVERY
    return driver


def _rounds_between(before: Any, after: Any) -> Figures:
    rounds, tokens = after.rounds - before.rounds, after.tokens - before.tokens
    without = after.plain["no_draft"] - before.plain["no_draft"]

    def grown(now: Sequence[int], then: Sequence[int]) -> list[int]:
        return [count - earlier for count, earlier in zip(now, then or (0,) * len(now), strict=True)]

    places = zip(grown(after.accepted, before.accepted), grown(after.drafted, before.drafted), strict=True)
    return {
        "rounds": rounds,
        "rounds_without_drafts": without,
        "tokens_a_round": round(tokens / rounds, 3) if rounds else None,
        "tokens_a_round_with_or_without_drafts": round((tokens + without) / max(1, rounds + without), 3),
        "accepted_by_place": [round(count / most, 4) if most else None for count, most in places],
    }


def _largest_drop(rates: Sequence[float]) -> float:
    """From one size to the next larger one, relative; 0 where all rise."""
    return max(0.0, *(1 - after / before for before, after in itertools.pairwise(rates)))


def _clean(device: str) -> None:
    gc.unfreeze()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


PARTS: dict[str, Callable[[Benchmark], Part]] = {
    "same": Benchmark.same,
    "exact": Benchmark.exact,
    "rounds": Benchmark.rounds,
    "shape": Benchmark.shape,
    "costs": Benchmark.costs,
    "steps": Benchmark.steps,
    "rates": Benchmark.rates,
    "curve": Benchmark.curve,
    "wrong": Benchmark.wrong,
    "poisson": Benchmark.poisson,
}


def measure(setting: Setting, only: Sequence[str], out: Path, device: Device) -> tuple[Path, list[str]]:
    """The parts; the path of the file that has them, and those that failed."""
    name = f"speculation_{device.torch_device.type}"
    path = out / f"{name}.json"
    earlier = json.loads(path.read_text())["figures"] if path.exists() else {}
    bench = Benchmark(setting)
    turns = Turns({name: PARTS[name](bench) for name in only}, bench.open, partial(_clean, setting.device))
    turns.run(lambda figures: print(report.write(name, earlier | figures, out), flush=True))
    return path, [part for part in only if "failed" in turns.figures.get(part, ("failed",))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with prompts")
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the model")
    parser.add_argument("--model", help="a folder or GGUF file; the default model where it is left out")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--depth", type=int, default=FULL.depth)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the emulated device, to try the script")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    parser.add_argument("--plot", type=Path, help="draw what was found into this .svg or .png file")
    args = parser.parse_args()
    setting = TINY if args.tiny else replace(FULL, model=args.model, data=args.data, head=args.head)
    path, failed = measure(replace(setting, depth=args.depth), args.only, args.out, open_device(setting.device))
    if args.plot is not None:
        draw(path, args.plot)
    print(path)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
