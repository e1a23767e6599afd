"""Mixed costs: how much longer steps with prompts take for rounds, by the host's clock, before the first request.

Such a step is no single replay: tokens are picked op by op, and the host books what came for each row. Where a model is
small, the device waits for that, so device times of recordings don't tell what rounds cost there. Whole steps do: an
engine core of its own runs them on the executor, with requests that are nobody's.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor, Launched
from phonograph.engine.execution.speculation import costs_for
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.registry import StepPasses
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.request import Request, SamplingParams
from phonograph.engine.requests.sequence import Sequence
from phonograph.engine.requests.step import Chunk
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.step_width import Planned
from phonograph.graphs.progress import Progress, silent

log = logging.getLogger("phonograph")

_PROMPT = 128
"""Tokens of the prompt in each step, as far as there is room."""
_APART = 16
"""Of one number of rows that is timed to the next."""
_ENTERING = 16
"""Steps in which all rows must have entered."""
_FIRST, _STEPS, _LOOKS = 2, 6, 3
"""Steps that don't count, after those that fill the pipeline; steps of a look; looks, of which the shortest counts."""


class _UnsteadyError(Exception):
    """Steps were not what was to be timed."""


class _OneWidth:
    """The protocol `StepWidth`: steps of one width. It counts those in which so many rows decoded among prompts."""

    def __init__(self, width: int, num_rows: int) -> None:
        self._planned, self._num_rows = Planned(width), num_rows
        self.num_whole = 0

    def of(self, decodes: tuple[Sequence, ...], chunks: Collection[Chunk] = ()) -> Planned:
        self.num_whole += bool(chunks) and len(decodes) == self._num_rows
        return self._planned

    def took(self, *args: object) -> None:
        """Stateless: nothing to record."""


class _UntilOneFails:
    """The protocol `StepExecutor`. A core tries a step that raises row by row, which must not be timed: after the first
    no other is launched."""

    def __init__(self, executor: Executor) -> None:
        self._inner = executor
        self.vocab, self.step_tables = executor.vocab, executor.step_tables
        self.collect, self.put_back, self.heartbeat = executor.collect, executor.put_back, executor.heartbeat
        self.error: Exception | None = None

    def launch(self, step: Step) -> Launched:
        if self.error is not None:
            raise self.error
        try:
            return self._inner.launch(step)
        except Exception as error:
            self.error = error
            raise


class _Load:
    """Rows that decode on, and a prompt before every step, of which one token is wanted."""

    def __init__(self, executor: Executor, passes: StepPasses, prompt: int, num_rows: int, width: int) -> None:
        self._executor, self._policy = _UntilOneFails(executor), _OneWidth(width, num_rows)
        self._max_ahead = executor.limits.max_ahead
        scheduler = Scheduler(executor.limits, prefix_cache=False, passes=passes)
        scheduler.width = self._policy
        self._core = EngineCore(scheduler, self._executor)
        self._ids, numbers = itertools.count(), random.Random(0)
        self._prompt = tuple(numbers.randrange(executor.vocab) for _ in range(prompt))
        for _ in range(num_rows):
            self._add((numbers.randrange(executor.vocab),), executor.limits.max_len - 1)

    def _add(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._core.add(Request(f"rehearsal-{next(self._ids)}", prompt, wanted))

    def _enter(self) -> None:
        for _ in range(_ENTERING):
            self._step()
            if not self._core.scheduler.counts.waiting:
                return
        raise _UnsteadyError("not all rows have room")

    def _run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._add(self._prompt, 1)
            self._step()

    def _step(self) -> None:
        self._core.step()
        if self._executor.error is not None:
            raise self._executor.error

    def seconds(self) -> float:
        """Of a step among others of its kind: each waits for one before it, so the clock sees the device's time too."""
        times = list[float]()
        self._enter()
        self._run(self._max_ahead + _FIRST)
        before = self._policy.num_whole
        for _ in range(_LOOKS):
            begun = time.perf_counter()
            self._run(_STEPS)
            times.append((time.perf_counter() - begun) / _STEPS)
        if (whole := self._policy.num_whole - before) < _LOOKS * _STEPS:
            raise _UnsteadyError(f"{whole} of {_LOOKS * _STEPS} steps had all rows and a prompt")
        return min(times)


def step_costs(
    options: EngineOptions, executor: Executor, passes: StepPasses, progress: Progress = silent
) -> StepCosts | None:
    """The measured cost of rounds, among prompts too; None where they are launched whatever they cost."""
    costs = costs_for(options, executor)
    return with_prompts(costs, executor, passes, progress) if costs is not None and options.mixed else costs


def with_prompts(costs: StepCosts, executor: Executor, passes: StepPasses, progress: Progress = silent) -> StepCosts:
    """With what rounds cost among prompts, where that can be timed. No request depends on it."""
    try:
        with executor.rehearsing():
            return replace(costs, among_prompts=_measured(costs, executor, passes, progress))
    except _UnsteadyError as error:
        log.info("what rounds cost among prompts was not measured: %s", error)
    except Exception as error:
        log.warning("what rounds cost among prompts was not measured: %s: %s", type(error).__name__, error)
    executor.heartbeat()  # a device that answers no more is no matter of the measurement alone
    return costs


def _measured(
    costs: StepCosts, executor: Executor, passes: StepPasses, progress: Progress
) -> dict[int, tuple[float, ...]]:
    """By width, how many plain steps longer a step with prompts takes, at each size; between those that were timed it
    grows evenly."""
    limits = executor.limits
    room = limits.max_seqs - limits.max_ahead - 2  # prompts that ended have their rows until their steps are committed
    if room < 1:
        raise _UnsteadyError(f"{limits.max_seqs} rows have no room for prompts")
    prompt = min(_PROMPT, limits.max_chunk, limits.max_tokens - room * limits.tokens_per_row, limits.longest_prompt())
    rows, widths = list(_timed(costs.sizes, room)), (*costs.widths, 1)
    seconds = dict[tuple[int, int], float]()
    for done, (num_rows, width) in enumerate(itertools.product(rows, widths), 1):
        seconds[num_rows, width] = _Load(executor, passes, prompt, num_rows, width).seconds()
        progress("timing rounds among prompts", done, len(rows) * len(widths))
    found = dict[int, tuple[float, ...]]()
    for width in costs.widths:
        longer = [max(0.0, seconds[num_rows, width] - seconds[num_rows, 1]) for num_rows in rows]
        by_size = np.interp(costs.sizes, rows, longer) / np.array(costs.plain_seconds)
        found[width] = tuple(by_size.tolist())
    return found


def _timed(sizes: tuple[int, ...], room: int) -> Iterator[int]:
    """Rows of which steps are timed: the fewest, so many times more each, and the most."""
    most, num_rows = min(sizes[-1], room), min(sizes[0], room)
    while num_rows < most:
        yield num_rows
        num_rows *= _APART
    yield most
