"""Runs the steps that the scheduler plans: every forward pass goes through a runner of the graph layer."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch

from phonograph.devices import Device, Fence
from phonograph.engine.batches import BatchBuilder, DecodeBatch, Wants
from phonograph.engine.cache.groups import CacheGroup
from phonograph.engine.limits import Limits
from phonograph.engine.models.interface import Model
from phonograph.engine.passes import Passes
from phonograph.engine.readback import Pending, Picked, Readback
from phonograph.engine.sampler import Sampler
from phonograph.engine.state.updates import UpdateBuilder
from phonograph.engine.step import Sampled, Step
from phonograph.errors import allocating
from phonograph.graphs.capture_report import CaptureReport
from phonograph.graphs.decisions import Replay
from phonograph.graphs.phase import Phase
from phonograph.graphs.pool import BufferPool
from phonograph.graphs.progress import Progress, bar
from phonograph.graphs.resolve import PhasePlan, Plan
from phonograph.graphs.runner import Runner, RunnerOptions, buckets_for
from phonograph.graphs.selection import select


@dataclass(frozen=True)
class Launched:
    """A step on its way; its results come to the host meanwhile."""

    step: Step
    phase: str
    path: str
    """`replay` or `eager`."""
    begun: Fence
    pending: Pending


class Executor:
    """Owns the KV cache, the request tables and one runner per phase."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        device: Device,
        plan: Plan,
        limits: Limits,
        *,
        eager_copies: bool = False,
        largest_only: bool = False,
    ) -> None:
        """With `largest_only`, just the largest recording of each kind is made: to see how much memory they take."""
        self.device = device
        self.limits = limits
        self.model = model
        self.vocab = model.config.vocab
        with allocating(
            f"a KV cache of {limits.capacity:,} tokens", "Lower cache_tokens, or max_seqs if it is not set."
        ):
            self.cache = CacheGroup.empty(
                model.keeps, limits.num_pages, limits.page_size, dtype=model.dtype, device=device.torch_device
            )
        self.passes = Passes(model, sampler, device, limits, self.cache)
        self.device_seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        """Time on the device by phase and path; grows as results are read."""
        pool, memory = BufferPool(device), device.new_pool()
        options = RunnerOptions(
            outputs="view",
            strict=plan.graphs == "strict",
            debug=plan.debug,
            collect_garbage=plan.gc,
            eager_copies=eager_copies,
            profile=plan.profile,
        )
        largest = {"decode": limits.max_seqs, "prefill": limits.max_tokens, "idle": 1}
        plans = {name: _within(plan.phase(name), limit) for name, limit in largest.items()}
        phases = self.passes.phases({name: plan.backend for name, plan in plans.items()})
        self.num_recordings = sum(_num_recordings(phases[name], plans[name]) for name in phases)
        if largest_only:
            plans = {name: _largest(plans[name], phases[name].bucketed) for name in plans}
        # A pass for nobody is no batch that must have a graph.
        lenient = {"idle": replace(options, strict=False)}
        self.runners = {
            name: Runner(phase, device, plans[name], pool=pool, memory=memory, options=lenient.get(name, options))
            for name, phase in phases.items()
        }
        self._batches = BatchBuilder(limits)
        self._updates = UpdateBuilder(self.passes.tables.columns, self.passes.tables.sizes)
        depth = limits.max_ahead + 2
        with allocating(f"host memory for the results of {limits.max_seqs:,} sequences", "Lower max_seqs."):
            self._readback = Readback(device, limits.max_seqs * limits.tokens_per_row, depth)
        self._begun = [device.fence(timed=True) for _ in range(depth)]
        self._num_launched = 0

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> list[CaptureReport]:
        """Record all phases, the largest first: the others find room in the memory that it leaves."""
        largest = sorted(self.runners.values(), key=lambda runner: -runner.buckets.largest if runner.buckets else 0)
        shown = progress if progress is not None else bar()
        with ExitStack() as stack:
            records = [stack.enter_context(runner.warmed(shown)) for runner in largest]
            return [record() for record in records]

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Bring the tables up to date, start the forward pass, and the way back of what it samples."""
        begun = self._begun[self._num_launched % len(self._begun)]
        self._num_launched += 1
        begun.record()
        self._update_tables(step)
        runner = self.runners["decode" if step.is_decode else "prefill"]
        picked = self._run(runner, step)
        path = "replay" if isinstance(runner.last, Replay) else "eager"
        return Launched(step, runner.phase.name, path, begun, self._readback.start(picked))

    def collect(self, launched: Launched) -> Sampled:
        """What a step sampled; waits for the device."""
        sampled = launched.pending.wait()
        self.device_seconds[launched.phase, launched.path] += launched.pending.fence.seconds_since(launched.begun)
        return sampled

    @torch.inference_mode()
    def idle(self) -> None:
        """A pass for nobody; raises if the device does not answer."""
        runner = self.runners["idle"]
        runner.run(DecodeBatch(np.zeros(1, dtype=np.int64), 1, Wants()))
        self.device.synchronize()

    def _run(self, runner: Runner, step: Step) -> Picked:
        if self._batches.is_steady(step) and runner.can_repeat:
            # The tables have all that changes from step to step, so the buffers need no load.
            return _picked(runner.repeat())
        batch = self._batches.decode(step) if step.is_decode else self._batches.prefill(step)
        return _picked(runner.run(batch))

    def _update_tables(self, step: Step) -> None:
        updates = self._updates.build(step)
        if updates is not None:
            self.passes.tables.apply(updates)


def _picked(outputs: object) -> Picked:
    assert isinstance(outputs, Picked)
    return outputs


def _num_recordings(phase: Phase, plan: PhasePlan) -> int:
    buckets = buckets_for(plan, phase.bucketed)
    if buckets is None or plan.backend == "disabled":
        return 0
    return len(select(phase, buckets, plan.max_recordings).keys)


def _largest(plan: PhasePlan, bucketed: str) -> PhasePlan:
    buckets = buckets_for(plan, bucketed)
    return plan if buckets is None else replace(plan, buckets=(buckets.largest,))


def _within(plan: PhasePlan, limit: int) -> PhasePlan:
    """The phase's plan, with the engine's limit where nothing else says how far buckets go."""
    if plan.backend == "disabled" or plan.buckets is not None or (plan.limit is not None and plan.limit <= limit):
        return plan
    return replace(plan, limit=limit)
