"""Attention by itself: microseconds of one layer in a graph of many, and how far that is from the memory's limit.

`--sweep` tries launches (block sizes, warps, stages, splits) and says which is best for each case, for the table in
`phonograph.engine.ops.attention.launch_config`. FlashInfer is measured beside it where it can be imported. On the CPU
the kernel is interpreted, on a tiny shape, to keep the script alive.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import report
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from attention_peer import flashinfer_call

from phonograph.devices import open_device
from phonograph.engine.cache.groups import PagedCache
from phonograph.engine.ops.attention.launch_config import Launch, Launches, launches_for, pick
from phonograph.engine.ops.attention.triton import TritonAttention
from phonograph.engine.ops.queries import Queries

Figures = dict[str, Any]
READ, MATRIX = 4.42e12, 664e12
"""Bytes a second that torch's sum reads, and operations a second of a step's matrix products, on an H200."""
MAX_SEQS = 256


@dataclass(frozen=True)
class Heads:
    """The shape of one layer."""

    queries: int = 32
    kv: int = 8
    dim: int = 128

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, in two bytes each."""
        return 2 * self.kv * self.dim * 2


@dataclass(frozen=True)
class Work:
    """A step: sequences of (cached, new) tokens, and padding."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def is_decode(self) -> bool:
        return all(new == 1 for _, new in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.sequences) + self.padding

    @property
    def num_keys(self) -> int:
        return sum(cached + new for cached, new in self.sequences)

    @property
    def num_scores(self) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(cached * new + new * (new + 1) // 2 for cached, new in self.sequences)

    def floor_us(self, heads: Heads) -> float:
        """The least that memory and matrix units allow."""
        moved = self.num_keys * heads.token_bytes + 2 * self.num_tokens * heads.queries * heads.dim * 2
        return max(moved / READ, self.num_flops(heads) / MATRIX) * 1e6

    def num_flops(self, heads: Heads) -> int:
        return 4 * self.num_scores * heads.queries * heads.dim


def works() -> list[Work]:
    """What is measured on a GPU."""
    found = [
        Work(f"decode {seqs} × {context}", ((context - 1, 1),) * seqs)
        for context in (512, 4096)
        for seqs in (1, 8, 32, 128, 256)
    ]
    ragged = tuple((64 + 896 * i // 31, 1) for i in range(32))
    found.append(Work("decode 32 × 64…960", ragged))
    for prefix in (0, 1024):
        for tokens in (128, 512, 2048, 8192):
            for seqs in (1, 8):
                behind = f" behind {prefix}" if prefix else ""
                found.append(Work(f"prefill {seqs} × {tokens // seqs}{behind}", ((prefix, tokens // seqs),) * seqs))
    found.append(Work("prefill 1 × 16 behind 1024", ((1024, 16),)))
    found.append(Work("prefill 1 × 1025 of 2048", ((0, 1025),), padding=1023))
    found.append(Work("mixed 128 × 512, 1 × 1920", ((511, 1),) * 128 + ((0, 1920),)))
    return found


class Case:
    """Random keys and values in shuffled pages, in so many layers that no cache holds them; one step of queries."""

    def __init__(self, work: Work, heads: Heads, page_size: int, device: torch.device, total_bytes: int) -> None:
        self.work, self.heads, self.device, self.page_size = work, heads, device, page_size
        self.launches = launches_for(open_device(device).hardware)
        numbers = torch.Generator().manual_seed(1)
        counts = [-(-(cached + new) // page_size) for cached, new in work.sequences]
        num_pages = 1 + sum(counts)
        width = -(-max(counts) // 16) * 16
        pages = (torch.randperm(num_pages - 1, generator=numbers) + 1).int().split(counts)
        self.table = torch.zeros(MAX_SEQS + 1, width, dtype=torch.int32)
        for row, mine in enumerate(pages):
            self.table[row + 1, : len(mine)] = mine
        rows = [row + 1 for row, (_, new) in enumerate(work.sequences) for _ in range(new)] + [0] * work.padding
        places = [cached + at for cached, new in work.sequences for at in range(new)] + [0] * work.padding
        tokens = (torch.tensor(rows, device=device), torch.tensor(places, device=device))
        self.queries = Queries(*tokens, self.table.to(device), work.is_decode)
        layer_bytes = num_pages * page_size * heads.token_bytes
        self.num_layers = max(2, min(128, total_bytes // layer_bytes, int(8000 / work.floor_us(heads))))
        shape = (self.num_layers, num_pages, page_size, heads.kv, heads.dim)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.cache = PagedCache(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)))
        # A slice of a wider tensor, as the engine has it.
        wide = torch.randn(work.num_tokens, heads.queries + 2 * heads.kv, heads.dim, device=device, dtype=dtype)
        self.q = wide[:, : heads.queries]

    @cached_property
    def sampled(self) -> list[int]:
        """Tokens that are checked: the first and last of some sequences."""
        firsts, at = [], 0
        for _, new in self.work.sequences:
            firsts.append((at, at + new - 1))
            at += new
        some = firsts[:: max(1, len(firsts) // 8)] + firsts[-1:]
        ends = [token for pair in some for token in pair]
        return sorted({*ends, *[(first + last) // 2 for first, last in some]})

    @cached_property
    def wanted(self) -> torch.Tensor:
        """The sampled tokens of layer 0, in float64."""
        out = torch.empty(len(self.sampled), self.heads.queries, self.heads.dim, dtype=torch.float64)
        for index, token in enumerate(self.sampled):
            end = int(self.queries.positions[token]) + 1
            pages = self.queries.table[self.queries.rows[token]][: -(-end // self.page_size)].long()
            group = self.heads.queries // self.heads.kv
            keys, values = (
                part[0][pages].flatten(0, 1)[:end].double().repeat_interleave(group, 1)
                for part in (self.cache.keys, self.cache.values)
            )
            scores = torch.einsum("hd,khd->hk", self.q[token].double(), keys) * self.heads.dim**-0.5
            out[index] = torch.einsum("hk,khd->hd", scores.softmax(1), values).cpu()
        return out

    def error(self, attend: Callable[[int], torch.Tensor]) -> float:
        """Relative error of layer 0 on the sampled tokens; not a number where padding is."""
        out = attend(0)
        if not bool(out.isfinite().all()):
            return math.nan
        found = out[self.sampled].double().cpu()
        return ((found - self.wanted).norm() / self.wanted.norm()).item()

    def ours(self, launch: Launch | None) -> Callable[[int], torch.Tensor]:
        """Attention of one layer, the step prepared."""
        launches = self.launches if launch is None else Launches((launch,), (launch,))
        step = TritonAttention(launches).prepare(self.cache, self.queries, self.heads.queries)
        return lambda layer: step.attend(layer, self.q, None)

    def preparation(self) -> Callable[[int], object]:
        return lambda _: TritonAttention(self.launches).prepare(self.cache, self.queries, self.heads.queries)


def layer_us(call: Callable[[int], object], num_layers: int, rounds: int = 7) -> float:
    """Median microseconds of one layer in a graph of all; without a GPU, of one call."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        call(0)
        return (time.perf_counter() - begin) * 1e6
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            call(layer)
    graph.replay()
    times = []
    for _ in range(rounds):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) * 1e3 / num_layers)
    graph.reset()
    return statistics.median(times)


def attempt(case: Case, make: Callable[[], Callable[[int], torch.Tensor]]) -> Figures:
    """Microseconds and error of one way, or why there are none."""
    try:
        with torch.inference_mode():
            call = make()
            error = case.error(call)
            if not error <= 1e-2:
                return {"problem": f"wrong: relative error {error:.2g}"}
            return {"us": round(layer_us(call, case.num_layers), 2), "error": float(f"{error:.1e}")}
    except Exception as problem:  # a launch that can't be compiled or run is a result, whatever it raises
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # a device that does not answer any more ends the run here
        return {"problem": f"{type(problem).__name__}: {problem}".strip().splitlines()[0][:160]}


def rates(work: Work, heads: Heads, us: float) -> Figures:
    """Bandwidth of a decode, operations a second of a prefill, and the ratio to the floor."""
    floor = work.floor_us(heads)
    rate = {"TB/s": work.num_keys * heads.token_bytes / us / 1e6} if work.is_decode else {}
    rate = rate or {"TFLOP/s": work.num_flops(heads) / us / 1e6}
    return {**{name: round(value, 2) for name, value in rate.items()}, "floor_us": round(floor, 2), "x": us / floor}


# -- the sweep --------------------------------------------------------------------------------------------------

# block_n, warps, stages
_DECODE = ((32, 1, 3), (32, 2, 3), (32, 4, 3), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3))
# block_m, block_n, warps, stages
_FEW_TOKENS = ((16, 64, 4, 3), (32, 64, 4, 3), (32, 32, 4, 4), (64, 64, 4, 3), (64, 32, 4, 3))
_MANY_TOKENS = (
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3),
    (128, 64, 8, 4), (128, 128, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4),
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One launch with a given number of splits."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    part_keys: int
    max_registers: int | None = None
    apart: bool = False

    def launch(self, work: Work, heads: Heads) -> Launch:
        """The launch whose number of programs gives these splits for this step."""
        group_rows = 1 << (heads.queries // heads.kv - 1).bit_length()
        tile_tokens = 1 if work.is_decode else max(self.block_m, group_rows) // group_rows
        programs = self.splits * -(-work.num_tokens // tile_tokens) * heads.kv
        shape = (self.block_m, self.block_n, self.num_warps, self.num_stages)
        return Launch(work.num_tokens, *shape, programs, self.part_keys, self.max_registers, self.apart)


def trials(work: Work, heads: Heads) -> Iterator[Trial]:
    """The launches worth trying: splits up to eight programs for each of 132 multiprocessors."""
    tokens = work.num_tokens
    if work.is_decode:
        most = max(2, 8 * 132 // (tokens * heads.kv))
        splits = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= most][-3:]
        for shape in _DECODE:
            yield from (Trial(16, *shape, count, least) for count in splits for least in (64, 256, 1024))
    elif tokens <= 256:
        yield from (Trial(*shape, count, 128) for shape in _FEW_TOKENS for count in (1, 2, 4, 8))
    else:
        for registers, apart in ((None, False), (None, True), (128, False), (128, True)):
            yield from (Trial(*shape, 1, 0, max_registers=registers, apart=apart) for shape in _MANY_TOKENS)


def compile_all(wanted: list[Work], heads: Heads, page_size: int, workers: int) -> list[str]:
    """Compile all trials in processes of their own, into the compiler's cache on disk; returns what failed."""
    every = {(work.is_decode, replace(trial, part_keys=0)) for work in wanted for trial in trials(work, heads)}
    jobs = sorted(every, key=str)
    problems = []
    begin = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(_compile, *job, heads, page_size): job for job in jobs}
        for task in as_completed(tasks):
            if task.exception() is not None:
                problems.append(f"{tasks[task][1]}: {task.exception()}".splitlines()[0][:200])
    seconds = time.perf_counter() - begin
    print(f"{len(jobs)} kernels compiled in {seconds:.0f} s, {len(problems)} could not be", *problems[:5], sep="\n  ")
    return problems


def _compile(is_decode: bool, trial: Trial, heads: Heads, page_size: int) -> None:
    """Runs the trial on a step of its own: neither lengths nor the number of tokens are compiled in."""
    work = Work("few", ((40, 1),) if is_decode else ((40, 64),))
    case = Case(work, heads, page_size, torch.device("cuda"), total_bytes=0)
    case.ours(trial.launch(work, heads))(0)
    torch.cuda.synchronize()


def swept(case: Case) -> Figures:
    """All trials of a case, the fastest first."""
    found = []
    for trial in trials(case.work, case.heads):
        launch = trial.launch(case.work, case.heads)
        found.append({**asdict(trial), **attempt(case, partial(case.ours, launch))})
    return {"trials": sorted(found, key=lambda one: one.get("us", math.inf))}


def suggestions(wanted: list[Work], figures: Figures) -> Iterator[str]:
    """For each bucket the trial that is, on average over its cases, nearest to the best of each."""
    buckets: dict[tuple[bool, int], list[list[Figures]]] = {}
    for work in wanted:
        found = [one for one in figures.get(work.name, {}).get("trials", []) if "us" in one]
        if found:
            buckets.setdefault((not work.is_decode, work.num_tokens), []).append(found)
    for (is_prefill, num_tokens), cases in sorted(buckets.items()):
        ratios: dict[Trial, list[float]] = {}
        for found in cases:
            for one in found:
                trial = Trial(*(one[field.name] for field in fields(Trial)))
                ratios.setdefault(trial, []).append(one["us"] / found[0]["us"])
        whole = {trial: sum(all_) / len(all_) for trial, all_ in ratios.items() if len(all_) == len(cases)}
        for trial, ratio in sorted(whole.items(), key=lambda pair: pair[1])[:3]:
            phase = "prefill" if is_prefill else "decode"
            yield f"{phase} of {num_tokens} tokens: {ratio:.3f} × the best of {len(cases)} cases by {trial}"


# -- the report -------------------------------------------------------------------------------------------------


def measured(case: Case, args: argparse.Namespace) -> Figures:
    """One case: with the launches of the table, swept, and by FlashInfer."""
    work, heads = case.work, case.heads
    known = case.launches
    table = pick(known.decode if work.is_decode else known.prefill, work.num_tokens, heads.dim * 2)
    figures: Figures = {"layers": case.num_layers, **attempt(case, partial(case.ours, None)), "launch": asdict(table)}
    if "us" in figures:
        figures |= rates(work, heads, figures["us"])
        with torch.inference_mode():
            figures["prepare_us"] = round(layer_us(case.preparation(), 8), 2)
    if args.sweep:
        figures |= swept(case)
    if args.flashinfer:
        call = partial(flashinfer_call, case.cache, case.table, work.sequences, case.q)
        figures["flashinfer"] = attempt(case, call)
    return figures


def line(name: str, figures: Figures) -> str:
    """One row of the printed table."""
    if "us" not in figures:
        return f"{name:<30} {figures['problem']}"
    rate = f"{figures['TB/s']:6.2f} TB/s  " if "TB/s" in figures else f"{figures['TFLOP/s']:6.0f} TFLOP/s"
    text = f"{name:<30} {figures['us']:9.2f} us {rate} {figures['x']:5.2f} × floor"
    text += f", prepare {figures['prepare_us']:5.1f} us"
    if "trials" in figures:
        best = figures["trials"][0]
        shape = [best[part] for part in ("block_m", "block_n", "num_warps", "num_stages", "splits", "part_keys")]
        text += f"; best {best.get('us', math.nan):9.2f} us by {shape}"
    if "flashinfer" in figures:
        peer = figures["flashinfer"]
        text += f"; FlashInfer {peer['us']:9.2f} us" if "us" in peer else f"; FlashInfer: {peer['problem'][:60]}"
    return text


def tiny() -> list[Work]:
    """What the interpreter can do."""
    return [Work("decode 2 × 20", ((19, 1),) * 2), Work("prefill 1 × 5 behind 8", ((8, 5),), padding=3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try many launches and name the best of each case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--page-size", type=int, nargs="+", default=[16])
    parser.add_argument("--no-flashinfer", dest="flashinfer", action="store_false")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--seconds", type=float, default=120.0, help="no case begins after this many")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder for the result file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu, begin = device.type == "cuda", time.monotonic()
    heads, known = (Heads(), works()) if on_gpu else (Heads(4, 2, 16), tiny())
    wanted = [work for work in known if args.only in work.name]
    args.sweep = args.sweep and on_gpu
    args.flashinfer = args.flashinfer and on_gpu and find_spec("flashinfer") is not None
    figures: Figures = {}
    try:
        for page_size in args.page_size if on_gpu else [4]:
            ours = figures.setdefault(f"page size {page_size}", {})
            if args.sweep:
                ours["could not be compiled"] = compile_all(wanted, heads, page_size, args.workers)
            for work in wanted:
                if time.monotonic() - begin > args.seconds:
                    ours[work.name] = {"problem": f"not measured: {args.seconds:.0f} s were over"}
                else:
                    case = Case(work, heads, page_size, device, total_bytes=(1 << 30) if on_gpu else 0)
                    ours[work.name] = measured(case, args)
                    del case
                print(line(work.name, ours[work.name]), flush=True)
            ours["suggested"] = list(suggestions(wanted, ours))
            print(*ours["suggested"], sep="\n")
    finally:
        name = f"attention_{'sweep_' if args.sweep else ''}{device.type}"
        print(report.write(name, figures, args.out))


if __name__ == "__main__":
    main()
