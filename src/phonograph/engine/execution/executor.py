"""Executor: runs the steps that the scheduler plans; every forward pass goes through a runner of the graph layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from phonograph.devices import Device, Fence
from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.execution.reproducer_files import EngineState
from phonograph.engine.execution.shadow import Shadow, Shadowing, expect_exact
from phonograph.engine.execution.step_builder import StepTables
from phonograph.engine.execution.step_order import StepOrder
from phonograph.engine.execution.step_timing import StepTiming, TimedSteps
from phonograph.engine.models.interface import Model
from phonograph.engine.passes.base import Pass, PassParts
from phonograph.engine.passes.column_use import check_column_use
from phonograph.engine.passes.readback import Pending, Picked, Readback
from phonograph.engine.passes.registry import HEARTBEAT, PASSES, PassDeclaration
from phonograph.engine.passes.step import Step, Undone
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.step import Sampled, kind_of
from phonograph.engine.sampling.sampler import Sampler, check_declared
from phonograph.engine.state.column import TableSizes
from phonograph.engine.state.columns import MASKS, PENALTIES, PLACE, TOKEN_MASKS
from phonograph.engine.state.tables import RequestTables
from phonograph.errors import CoverageError, DeclarationError, PlanError, VerifyError, allocating
from phonograph.graphs.inputs.pool import BufferPool
from phonograph.graphs.phases.decisions import Replay
from phonograph.graphs.phases.phase import Phase
from phonograph.graphs.phases.selection import select
from phonograph.graphs.planning.resolve import PhasePlan, Plan
from phonograph.graphs.progress import Progress, bar
from phonograph.graphs.recording.capture_report import CaptureReport
from phonograph.graphs.recording.tensor_state import generators_restored
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.running.runner_options import RunnerOptions, buckets_for, options_of
from phonograph.graphs.trust.coverage import Coverage, coverage
from phonograph.sizes import ceil_div

log = logging.getLogger("phonograph")


@dataclass(frozen=True)
class Launched:
    """A step in flight; its results are being copied to the host."""

    step: Step
    timed: TimedSteps
    """All of its phase and kind."""
    path: str
    """`replay` or `eager`."""
    begun: Fence | None
    """Where its device time is measured."""
    pending: Pending


class Executor:
    """Owns the KV cache, the request tables and one runner per pass."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        device: Device,
        plan: Plan,
        limits: Limits,
        *,
        passes: Sequence[PassDeclaration] = PASSES,
        options: RunnerOptions = RunnerOptions(facts="verify", guarded="ends"),
        largest_only: bool = False,
        shadow: Shadowing | None = None,
    ) -> None:
        """Of the `options`, `eager_copies`, `facts` and `guarded` are used; the plan has the others. With
        `largest_only`, only the largest recording of each kind is made, to measure the memory they take."""
        self._declared = tuple(passes)
        self.device = device
        self.limits = limits
        self.model = model
        self.vocab = model.config.vocab
        _check_state(model, limits)
        check_declared(sampler)
        self.cache, beside = self._new_caches(passes)
        max_pages = ceil_div(limits.num_positions, limits.page_size)
        sizes = TableSizes(limits.max_seqs, self.vocab, max_pages, limits.num_positions)
        own = [*model.columns, *(column for one in passes for column in one.columns())]
        self.tables = RequestTables(device, (*PLACE, *sampler.columns, *PENALTIES, *MASKS, *TOKEN_MASKS, *own), sizes)
        by_row = {column.name: self.tables[column.name] for column in model.columns}
        self.cache = replace(self.cache, by_row=by_row) if by_row else self.cache
        plans = {one.name: _within(plan.phase(one.name), one.limit(limits)) for one in passes}
        self.parts = PassParts(
            model, sampler, self.tables, self.cache, beside, limits, any(one.gives_states for one in passes)
        )
        self.passes = {one.name: one.make(self.parts, plans[one.name].backend) for one in passes}
        for one in self.passes.values():
            _check(one, self.passes, limits)
            if one.picks_in_recording and plans[one.name].backend != "disabled":
                self.tables.make_all()
        shared = {*(column.name for column in (*PLACE, *model.columns))}
        check_column_use(self.passes.values(), self.tables.columns, shared)
        phases = {name: one.phase() for name, one in self.passes.items()}
        self.num_recordings = sum(_num_recordings(phases[name], plans[name]) for name in phases)
        if largest_only:
            plans = {name: _largest(plans[name], phases[name].bucketed) for name in plans}
        self.runners = self._new_runners(phases, plans, _planned(options, plan, is_trial=largest_only))
        depth = self._depth = limits.max_ahead + 2
        """Of rings for what steps in flight have each."""
        with allocating(f"host memory for the results of {limits.max_seqs:,} sequences", "Lower max_seqs."):
            most = limits.max_seqs * limits.tokens_per_row
            pooled = (limits.max_seqs, model.config.hidden) if any(one.pools for one in passes) else None
            self._readback = Readback(device, most, depth, limits.num_places, pooled)
        self.timing = StepTiming(device, depth, self.passes)
        self._order = StepOrder()
        self._replays = {name for name, one in self.passes.items() if one.picks_in_recording}
        self._is_interrupted = False
        """Whether a step with launches outside of its recordings came last, as those that are no single replay have."""
        self.state = EngineState(self.tables, (self.cache, *beside.values()), model.config, model.weights)
        if shadow is not None:
            expect_exact(self.runners)
        self.shadow = Shadow(shadow, self.state) if shadow is not None else None
        self._is_trial = largest_only
        self.coverage: dict[str, Coverage] = {}
        """By pass that serves requests, which batches have a graph; known after capture."""

    def _new_caches(self, passes: Sequence[PassDeclaration]) -> tuple[CacheGroup, dict[str, CacheGroup]]:
        """The model's, and what passes keep beside it on the same pages."""
        model, limits = self.model, self.limits
        with allocating(
            f"a KV cache of {limits.capacity:,} tokens", "Lower cache_tokens, or max_seqs if it is not set."
        ):
            cache = CacheGroup.empty(
                model.keeps, limits.num_pages, limits.page_size, dtype=model.dtype, device=self.device.torch_device
            )
            return cache, {one.name: cache.beside(one.keeps(model)) for one in passes if one.keeps is not None}

    def _new_runners(
        self, phases: Mapping[str, Phase], plans: Mapping[str, PhasePlan], options: RunnerOptions
    ) -> dict[str, Runner]:
        pool, memory = BufferPool(self.device), self.device.new_pool()
        # A heartbeat serves no request: it need not have a graph, and can't give anybody a wrong token.
        lenient = replace(options, strict=False, facts="off")
        by_name = {name: options if one.declared.serves else lenient for name, one in self.passes.items()}
        return {
            name: Runner(phase, self.device, plans[name], pool=pool, memory=memory, options=by_name[name])
            for name, phase in phases.items()
        }

    @property
    def step_tables(self) -> StepTables:
        """What steps for this executor are made with."""
        of_model = {column.name for column in self.model.columns}
        states = [one for one in self.tables.columns if one.is_of_graph or one.name in of_model]
        prompt_state = tuple(column.name for column in states if column.from_prompt)
        return StepTables(self.tables.columns, self.tables.sizes, prompt_state, self._declared)

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> list[CaptureReport]:
        """Record all phases, the largest first: the others reuse its pool memory."""
        if not self._is_trial:
            self._check_passes()
        largest = sorted(self.runners.values(), key=lambda runner: -runner.buckets.largest if runner.buckets else 0)
        shown = progress if progress is not None else bar()
        with ExitStack() as stack:
            records = [stack.enter_context(runner.warmed(shown)) for runner in largest]
            reports = [record() for record in records]
        if not self._is_trial:
            self.coverage = {name: self._covered(name) for name in self.runners if self.passes[name].declared.serves}
        self.model.kernels.resume_overlap()  # which compiles what the first step would
        for covered in self.coverage.values():
            level = logging.WARNING if covered.gaps and self.runners[covered.phase].selection else logging.INFO
            log.log(level, "%s", covered)
        if self.shadow is not None and not self.is_checkable:
            log.warning("nothing is recorded, so --shadow-verify checks no step")
        return reports

    def _check_passes(self) -> None:
        with generators_restored(self.device):
            for one in self.passes.values():
                if one.check is not None:
                    one.check()

    @property
    def is_checkable(self) -> bool:
        """Whether there are recordings that a check in service can look at."""
        return any(one.written is not None and self.runners[name].captured for name, one in self.passes.items())

    def _covered(self, name: str) -> Coverage:
        """Which batches of a pass that the limits admit have a graph; a gap is measured, unless nothing is recorded."""
        runner, largest = self.runners[name], self.passes[name].declared.limit(self.limits)
        return coverage(runner, range(1, largest + 1), measured=runner.selection is not None)

    def coverage_of(self, name: str) -> Coverage | None:
        """As of start-up, or anew where recordings were released since; None for a pass that serves no requests."""
        stated = self.coverage.get(name)
        if stated is not None and stated.num_recordings != len(self.runners[name].captured):
            stated = self.coverage[name] = coverage(self.runners[name], stated.sizes)
        return stated

    def coverage_lines(self) -> list[str]:
        """What is covered, in words, for every pass that serves requests."""
        return [str(found) for name in self.runners if (found := self.coverage_of(name)) is not None]

    def refuse_gaps(self) -> None:
        """Raise where a batch that the limits admit has no graph."""
        for covered in self.coverage.values():
            covered.refuse_gaps()

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Update the tables, launch the forward pass, and start the copy of its sampled tokens to the host.

        Each step is launched once, in the order in which they were built.
        """
        self._order.take(step)
        timed = self.timing.steps[step.pass_name, kind_of(step.tokens_per_row)]
        begun = timed.begin()
        if step.updates is not None:
            self.tables.apply(step.updates)
        self._resume(step)
        runner = self.runners[step.pass_name]
        picked = self._run(runner, step)
        path = "replay" if isinstance(runner.last, Replay) else "eager"
        return Launched(step, timed, path, begun, self._readback.start(picked))

    def _resume(self, step: Step) -> None:
        """Before a step that is one replay, where other launches came since the last: its own, or a mixed step's."""
        is_replay = step.pass_name in self._replays
        if is_replay and (self._is_interrupted or step.updates is not None):
            self.model.kernels.resume_overlap()
        self._is_interrupted = not is_replay

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Before the first request: steps that are nobody's, which are neither counted nor checked in service."""
        shadow, self.shadow = self.shadow, None
        try:
            yield
        finally:
            self.shadow, self.timing = shadow, StepTiming(self.device, self._depth, self.passes)
            for runner in self.runners.values():
                runner.stats.clear()
            self.device.synchronize()

    @torch.inference_mode()
    def put_back(self, undone: Undone) -> None:
        """Undo what a step that raised has written to the tables."""
        self._order.check_put_back(undone)
        self.tables.apply(undone.updates)

    def collect(self, launched: Launched) -> Sampled:
        """The sampled tokens of a step; waits for the device. Each step is collected once, in launch order."""
        step, order = launched.step, self._order
        if step.follows != order.collected:
            order.check_collect(step)
        sampled = launched.pending.wait()
        order.collected = step.serial
        launched.timed.add(launched.path, launched.begun, launched.pending.fence)
        return sampled

    @torch.inference_mode()
    def heartbeat(self) -> None:
        """A pass without requests; raises if the device does not answer."""
        self._run(self.runners[HEARTBEAT.name], _NO_REQUESTS)
        self.device.synchronize()

    def _run(self, runner: Runner, step: Step) -> Picked:
        chosen = self.passes[step.pass_name]
        is_checked = self.shadow is not None and chosen.written is not None and self.shadow.is_due()
        drafts: Any = None
        if step.catches_up and chosen.before is not None and step.decodes.rows.size:
            first = self.passes[chosen.before]
            drafts = self._beside(first, first.batch(step), is_checked=is_checked)
        picked = self._pick(chosen, step, runner, is_checked=is_checked)
        return picked if drafts is None or not step.probes else picked._replace(probed=drafts)

    def _pick(self, chosen: Pass, step: Step, runner: Runner, *, is_checked: bool) -> Picked:
        repeats = chosen.is_steady(step) and runner.can_repeat
        if repeats and not is_checked:
            # The tables have all that changes from step to step, so the buffers need no load.
            return _picked(runner.repeat())
        picked = _picked(self._serve(chosen, chosen.batch(step), is_checked=is_checked, repeats=repeats))
        if chosen.then is not None and picked.handed is not None:
            self._beside(self.passes[chosen.then], picked.handed, is_checked=is_checked)
        return picked

    def _beside(self, chosen: Pass, batch: Any, *, is_checked: bool) -> Any:
        """Run a pass before or after another that picks the tokens, and return what it puts out: but for what is
        checked or strict, no token depends on it."""
        try:
            return self._serve(chosen, batch, is_checked=is_checked)
        except (CoverageError, VerifyError):
            raise
        except Exception as error:
            log.warning("%s failed, and its rows go on as they are: %s: %s", chosen.name, type(error).__name__, error)
            return None

    def _serve(self, chosen: Pass, batch: Any, *, is_checked: bool, repeats: bool = False) -> object:
        runner = self.runners[chosen.name]
        if is_checked and chosen.written is not None:
            assert self.shadow is not None
            return self.shadow.run(runner, batch, chosen, repeats=repeats)
        return runner.run(batch)


_NO_REQUESTS = Step(0, HEARTBEAT.name)


def _planned(options: RunnerOptions, plan: Plan, *, is_trial: bool) -> RunnerOptions:
    return replace(
        options_of(plan),
        outputs="view",
        strict=plan.graphs == "strict",
        eager_copies=options.eager_copies,
        guard="off" if is_trial else plan.guard,
        guarded=options.guarded,
        facts="off" if is_trial else options.facts,
    )


def _check_state(model: Model, limits: Limits) -> None:
    """Refuse rounds for a model that can't take tokens back."""
    if model.columns and limits.tokens_per_row > 1:
        names = ", ".join(column.name for column in model.columns)
        raise PlanError(
            f"rule 'speculation-state-by-row': the model keeps state by row ({names}), from which no token can be "
            f"taken back, and limits.tokens_per_row is {limits.tokens_per_row}. Decode one token a step."
        )


def _check(one: Pass, passes: Mapping[str, Pass], limits: Limits) -> None:
    """Refuse a pass that computes another number of tokens for a row that decodes than the scheduler counts, and one
    that is followed by a pass which is not there."""
    for where, other in (("followed", one.then), ("preceded", one.before)):
        if other is not None and other not in passes:
            raise DeclarationError(
                f"the pass {one.name!r} is {where} by {other!r}, and this engine has {', '.join(passes)}. Give the "
                "executor that pass too."
            )
    if one.declared.serves and one.tokens_per_row not in (None, limits.tokens_per_row):
        raise DeclarationError(
            f"the pass {one.name!r} computes {one.tokens_per_row} tokens a row, and limits.tokens_per_row is "
            f"{limits.tokens_per_row}. Give the executor a pass of that width."
        )


def _picked(outputs: object) -> Picked:
    assert isinstance(outputs, Picked)
    return outputs


def _num_recordings(phase: Phase, plan: PhasePlan) -> int:
    buckets = buckets_for(plan, phase.bucketed)
    if buckets is None or plan.backend == "disabled":
        return 0
    return len(select(phase, buckets, plan.max_recordings).keys)


def _largest(plan: PhasePlan, bucketed: str) -> PhasePlan:
    """The largest recording alone. What would be compiled is recorded as it is: the plain ops take as much memory, or
    more, and a trace takes many seconds."""
    backend = "breakable" if plan.backend == "tc_piecewise" else plan.backend
    buckets = buckets_for(plan, bucketed)
    return replace(plan, backend=backend, buckets=plan.buckets if buckets is None else (buckets.largest,))


def _within(plan: PhasePlan, limit: int) -> PhasePlan:
    """The phase's plan, with the engine's limit where nothing else says how far buckets go."""
    if plan.backend == "disabled" or plan.buckets is not None or (plan.limit is not None and plan.limit <= limit):
        return plan
    return replace(plan, limit=limit)
