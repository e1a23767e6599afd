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
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from phonograph.engine.core import EngineCore
from phonograph.engine.execution.executor import Executor, Launched
from phonograph.engine.execution.speculation import costs_for
from phonograph.engine.options import EngineOptions
from phonograph.engine.passes.registry import StepPasses
from phonograph.engine.passes.step import Step
from phonograph.engine.requests.request import Request, SamplingParams
from phonograph.engine.requests.step_costs import StepCosts
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.scheduling.step_width import Planned
from phonograph.graphs.progress import Progress, silent
from phonograph.sizes import ceil_div

log = logging.getLogger("phonograph")

_PROMPT = 128
"""Tokens of the longest prompt in a step, as far as there is room."""
_APART = 16
"""Of one number of rows that is timed to the next."""
_ENTERING = 16
"""Steps in which all rows must have entered."""
_FIRST, _STEPS, _LOOKS = 2, 6, 3
"""Steps that don't count, after those that fill the pipeline; steps of a look; looks, of which the shortest counts."""
_ENOUGH = 2.0
"""Seconds after the first look, which compiles and allocates, after which no third one begins."""


class _UnsteadyError(Exception):
    """Steps were not what was to be timed."""


class _StepFailed(BaseException):
    """A step raised. No `Exception`: a core would try the rows of such a step one by one, whose time is no step's."""


class _OneWidth:
    """The protocol `StepWidth`: steps of one width."""

    def __init__(self, width: int) -> None:
        self._planned = Planned(width)

    def of(self, *args: object) -> Planned:
        return self._planned

    def took(self, *args: object) -> None:
        """Stateless: nothing to record."""


class _UntilOneFails:
    """The protocol `StepExecutor`: steps of another one until the first that raises. It counts those in which so many
    rows decoded among prompts."""

    def __init__(self, executor: Executor, num_rows: int) -> None:
        self._inner, self._num_rows = executor, num_rows
        self.vocab, self.step_tables = executor.vocab, executor.step_tables
        self.collect, self.put_back, self.heartbeat = executor.collect, executor.put_back, executor.heartbeat
        self.num_whole = 0

    def launch(self, step: Step) -> Launched:
        self.num_whole += bool(step.prefills) and len(step.decodes.rows) == self._num_rows
        try:
            return self._inner.launch(step)
        except Exception as error:
            raise _StepFailed from error


class _Load:
    """Rows that decode on, and a prompt before every step, of which one token is wanted."""

    def __init__(self, executor: Executor, passes: StepPasses, prompt: int, num_rows: int, width: int) -> None:
        self._steps = _UntilOneFails(executor, num_rows)
        self._max_ahead = executor.limits.max_ahead
        scheduler = Scheduler(executor.limits, prefix_cache=False, passes=passes)
        scheduler.width = _OneWidth(width)
        self._core = EngineCore(scheduler, self._steps)
        self._ids, numbers = itertools.count(), random.Random(0)
        self._prompt = tuple(numbers.randrange(executor.vocab) for _ in range(prompt))
        for _ in range(num_rows):
            self._add((numbers.randrange(executor.vocab),), executor.limits.max_len - 1)

    def _add(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._core.add(Request(f"rehearsal-{next(self._ids)}", prompt, wanted))

    def _enter(self) -> None:
        for _ in range(_ENTERING):
            self._core.step()
            if not self._core.scheduler.counts.waiting:
                return
        raise _UnsteadyError("not all rows have room")

    def _run(self, num_steps: int) -> None:
        """Prompts differ in length, lest one width alone goes into a larger recording."""
        for number in range(num_steps):
            self._add(self._prompt[: ceil_div(len(self._prompt) * (number % _STEPS + 1), _STEPS)], 1)
            self._core.step()

    def seconds(self) -> float:
        """Of a step among others of its kind: each waits for one before it, so the clock sees the device's time too."""
        self._enter()
        self._run(self._max_ahead + _FIRST)
        before, begun = self._steps.num_whole, time.perf_counter()
        self._run(_STEPS)
        seconds = time.perf_counter() - begun
        if (whole := self._steps.num_whole - before) < _STEPS:
            raise _UnsteadyError(f"{whole} of {_STEPS} steps had all rows and a prompt")
        return seconds / _STEPS


def step_costs(
    options: EngineOptions, executor: Executor, passes: StepPasses, progress: Progress = silent
) -> StepCosts | None:
    """The measured cost of rounds, among prompts too; None where they are launched whatever they cost."""
    costs = costs_for(options, executor)
    if costs is None:
        return None
    if not options.mixed:
        return replace(costs, untimed="they have steps of their own")
    return with_prompts(costs, executor, passes, progress)


def with_prompts(costs: StepCosts, executor: Executor, passes: StepPasses, progress: Progress = silent) -> StepCosts:
    """With what rounds cost among prompts, where that can be timed. No request depends on it."""
    try:
        with executor.rehearsing():
            return _measured(costs, executor, passes, progress)
    except _UnsteadyError as error:
        why = f"{error}"
        log.info("what rounds cost among prompts was not measured: %s", why)
    except _StepFailed as failed:
        why = f"{type(failed.__cause__).__name__}: {failed.__cause__}"
        log.warning("what rounds cost among prompts was not measured: %s", why)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        log.warning("what rounds cost among prompts was not measured: %s", why)
    executor.heartbeat()  # a device that answers no more is no matter of the measurement alone
    return replace(costs, untimed=why)


def _measured(costs: StepCosts, executor: Executor, passes: StepPasses, progress: Progress) -> StepCosts:
    """With how many plain steps longer a step with prompts takes, at each size; between the numbers of rows that were
    timed it grows evenly, and of more it is that of the most."""
    limits = executor.limits
    kept = limits.max_ahead + 2  # prompts that ended have their rows until their steps are committed
    room = limits.max_seqs - kept
    if room < 1:
        raise _UnsteadyError(f"that takes {kept + 1} sequences at once, and {limits.max_seqs} may run")
    prompt = min(_PROMPT, limits.max_chunk, limits.max_tokens - room * limits.tokens_per_row, limits.longest_prompt())
    widths = (*costs.widths, 1)

    def look(num_rows: int) -> dict[int, float]:
        return {width: _Load(executor, passes, prompt, num_rows, width).seconds() for width in widths}

    found = _least(look, list(_timed(costs.sizes, room)), progress)

    def longer(width: int) -> tuple[float, ...]:
        seconds = [max(0.0, by_width[width] - by_width[1]) for by_width in found.values()]
        return tuple((np.interp(costs.sizes, [*found], seconds) / np.array(costs.plain_seconds)).tolist())

    return replace(costs, among_prompts={width: longer(width) for width in costs.widths}, among_rows=tuple(found))


def _least(look: Callable[[int], dict[int, float]], rows: list[int], progress: Progress) -> dict[int, dict[int, float]]:
    """By rows and width the shortest time of some looks; rows that were not steady are left out.

    All rows and widths take turns: what disturbs the host for a while makes none of them look dear, or cheap.
    """
    found, begun, total = dict[int, dict[int, float]](), 0.0, _LOOKS * len(rows)
    for done in range(0, total, len(rows)):
        if done == len(rows):
            begun = time.perf_counter()
        elif done and time.perf_counter() - begun > _ENOUGH:
            break
        for index, num_rows in enumerate(rows):
            progress("timing rounds among prompts", done + index, total)
            if done and num_rows not in found:
                continue
            try:
                seconds = look(num_rows)
            except _UnsteadyError as error:
                log.info("what rounds cost among prompts was not measured with %d rows: %s", num_rows, error)
                continue
            least = found.get(num_rows, seconds)
            found[num_rows] = {width: min(taken, least[width]) for width, taken in seconds.items()}
    progress("timing rounds among prompts", total, total)
    if not found:
        raise _UnsteadyError("no number of rows was steady")
    return found


def _timed(sizes: tuple[int, ...], room: int) -> Iterator[int]:
    """Rows of which steps are timed: the fewest, so many times more each, and the most."""
    most, num_rows = min(sizes[-1], room), min(sizes[0], room)
    while num_rows < most:
        yield num_rows
        num_rows *= _APART
    yield most
