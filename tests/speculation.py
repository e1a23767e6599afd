"""Engines that speculate on a tiny model, the plain engine that they must agree with, and drafters for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from phonograph import LLM, EmulatedDevice, EngineOptions, SamplingParams
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor
from phonograph.engine.models.config import SHAPES
from phonograph.engine.passes.base import PassParts
from phonograph.engine.passes.drafting import Accepted, Drafting
from phonograph.engine.passes.registry import step_passes_for
from phonograph.engine.passes.target_verify import speculating_passes
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import Request
from phonograph.engine.requests.sequence import Sequence as Seq
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.step_width import Planned
from phonograph.engine.state.column import Column, Width
from phonograph.graphs.planning.resolve import resolve
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.running.runner_options import facts_of

MAX_LEN = 96
POISON = 1e4
Tokens = tuple[int, ...]


@cache
def plain_llm() -> LLM:
    """Plain decoding, one sequence after the other, and the model that all engines here have."""
    options = EngineOptions(
        max_seqs=4, max_tokens=64, max_len=MAX_LEN + 16, page_size=8, dtype=torch.float32,
        attention="reference", kernels="reference", prefix_cache=False,
    )  # fmt: skip
    asked = [ask(f"{name}.backend", "disabled", origin="test") for name in ("decode", "prefill", "idle")]
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device="emulated", options=options, asked=asked)


@dataclass(frozen=True)
class Wanted:
    """What plain decoding says."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[tuple[int, ...], ...]


@cache
def plain(prompt: Tokens, params: SamplingParams) -> Wanted:
    """The answer of a request that is alone in its engine; the context ends where that of the others does."""
    most = min(params.max_tokens, MAX_LEN - len(prompt))
    found = plain_llm().generate([prompt], replace(params, max_tokens=most, speculate=None))[0]
    tops = tuple(tuple(token for token, _ in one.top) for one in found.logprobs)
    return Wanted(tuple(found.tokens), tuple(one.logprob for one in found.logprobs), tops)


def hashed(*numbers: torch.Tensor | int) -> torch.Tensor:
    """Numbers that look random, made from what is in the tables."""
    mixed: Any = 12345
    for place, number in enumerate(numbers):
        mixed = (mixed + number * (7919 + 104729 * place)) * 2654435761 % (1 << 40)
    return (mixed >> 11) ^ (mixed >> 23)


class Oracle:
    """Knows what plain decoding says, and spoils a share of it, in hundredths."""

    reads: Sequence[str] = ("oracle",)
    writes: Sequence[str] = ()

    def __init__(self, parts: PassParts, spoiled: int) -> None:
        self._tables, self._vocab, self._spoiled = parts.tables, parts.model.config.vocab, spoiled

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        rows, oracle = accepted.rows[:, None], self._tables["oracle"]
        places = self._tables.length[rows] + 1 + torch.arange(depth)
        said = oracle[rows, places.clamp_max(oracle.shape[1] - 1)]
        wrong = hashed(places, rows, self._spoiled) % 100 < self._spoiled
        return (said + wrong) % self._vocab

    def keep_up(self, accepted: Accepted) -> None:
        pass


def oracle(depth: int, spoiled: int) -> Drafting:
    def said(entry: Any) -> list[int]:
        request = entry.sequence.request
        return [*request.prompt, *plain(request.prompt, request.params).tokens]

    column = Column("oracle", torch.int64, width=Width.POSITIONS, value=said)
    return Drafting("oracle", depth, lambda parts: Oracle(parts, spoiled), lambda: (column,))


@dataclass(frozen=True)
class Says:
    """A drafter that says what a function makes of the accepted rows."""

    say: Callable[[Accepted], torch.Tensor]
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()

    def draft(self, accepted: Accepted, depth: int) -> torch.Tensor:
        return self.say(accepted)[:, :depth]

    def keep_up(self, accepted: Accepted) -> None:
        pass


def saying(depth: int, say: Callable[[Accepted], torch.Tensor]) -> Drafting:
    return Drafting("says", depth, lambda parts: Says(say))


def speculating(
    drafting: Drafting,
    backend: str = "full",
    *,
    mixed: bool = True,
    prefix_cache: bool = True,
    narrows: bool = False,
    **changes: Any,
) -> EngineCore[Executor]:
    """An engine on the emulated device, with everything recorded; rounds of half as many drafts only on request."""
    usual: dict[str, Any] = {"max_seqs": 4, "max_len": MAX_LEN, "page_size": 8, "num_pages": 60, "max_ahead": 2}
    usual["unread_places"] = 0 if drafting.unread is None else drafting.unread.places
    usual |= {"tokens_per_row": drafting.depth + 1, "max_tokens": 4 * (drafting.depth + 1) + 16}
    limits = Limits(**{**usual, **changes})
    device, passes = EmulatedDevice(poison=True), speculating_passes(drafting, narrows=narrows)
    asked = [ask(f"{one.name}.backend", backend, origin="test") for one in passes]
    plan = resolve(asked, facts_of(device), [one.defaults for one in passes])
    executor = Executor(plain_llm().executor.model, TorchSampler(), device, plan, limits, passes=passes)
    executor.capture()
    named = step_passes_for(speculates=True)
    return EngineCore(Scheduler(limits, mixed=mixed, prefix_cache=prefix_cache, passes=named), executor)


@dataclass
class Switching:
    """Steps of several widths, some of each before the next; of plain ones every so many probes, or none."""

    widths: Sequence[int]
    every: int = 2
    calls: int = 0
    probes: int = 0

    def of(self, decodes: Any, chunks: Any = ()) -> Planned:
        self.calls += 1
        width = self.widths[self.calls // self.every % len(self.widths)]
        return Planned(width, bool(self.probes) and width == 1 and self.calls % self.probes == 0)

    def took(self, step: Any, updates: Any, probed: Any) -> None:
        pass


@dataclass
class Driver:
    """Runs requests that come one after the other, and looks around every step at what nobody may touch."""

    core: EngineCore[Executor]
    every: int = 3
    """A request comes every so many steps."""

    def run(
        self, requests: Sequence[tuple[Tokens, SamplingParams]], act: Callable[[int, list[Seq]], None] | None = None
    ) -> list[Seq]:
        sequences, waiting, launch = list[Seq](), list(enumerate(requests)), self.core.executor.launch
        self.core.executor.launch = self._guarded(launch)  # type: ignore[assignment, method-assign]
        for moment in range(5000):
            if waiting and moment % self.every == 0:
                number, (prompt, params) = waiting.pop(0)
                sequences += self.core.add(Request(f"{number}", prompt, params))
            if act is not None:
                act(moment, sequences)
            self.core.step()
            if not waiting and self.core.is_idle:
                break
        self.core.executor.launch = launch  # type: ignore[method-assign]
        assert self.core.is_idle
        self.core.scheduler.integrity()
        tables = self.core.executor.tables
        assert bool((tables.length <= tables["limit"]).all()), "rounds launched ahead of a row's end take nothing"
        return sequences

    def _guarded(self, launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Free pages hold what is put there: a step writes nothing to them, and nobody gets anything from them."""
        pool = self.core.scheduler.rows.reservations.pool
        memory = [tensor for group in self.core.executor.state.caches for tensor in group.tensors]

        def guarded(step: Any) -> Any:
            free = [page for page in range(1, pool.num_pages) if not pool.references(page)]
            for tensor in memory:
                tensor[:, free] = POISON
            launched = launch(step)
            assert all(bool((tensor[:, free] == POISON).all()) for tensor in memory), "a free page was written"
            return launched

        return guarded


def check(sequences: Sequence[Seq]) -> None:
    """They say what plain decoding says, logprobs included."""
    for sequence in sequences:
        request = sequence.request
        wanted = plain(request.prompt, request.params)
        assert sequence.error == ""
        assert tuple(sequence.outputs) == wanted.tokens, request
        if request.params.logprobs is not None:
            found = [one.logprob for one in sequence.logprobs]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted.logprobs), atol=1e-5, rtol=0)
            assert tuple(tuple(token for token, _ in one.top) for one in sequence.logprobs) == wanted.tops


class Even:
    """Allows tokens with even numbers, and tells what came."""

    def __init__(self) -> None:
        self.came: list[int] = []

    def mask(self) -> Any:
        return np.full(64, 0x55555555, dtype=np.int32)

    def accept(self, token: int) -> None:
        self.came.append(token)
