"""Rerun: the batch of a reproducer, by replay and eagerly, and the first segment at which the two differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.reproducer import Reproducer
from phonograph.engine.execution.shadow import Shadow, Shadowing
from phonograph.engine.ops.attention.layer_marks import LayerMarks
from phonograph.errors import VerifyError
from phonograph.graphs.phases.decisions import Replay, ShapeKey
from phonograph.graphs.progress import silent
from phonograph.graphs.running.runner import Runner
from phonograph.graphs.trust.bisection import Bisected, bisect
from phonograph.graphs.trust.shadow import Mismatch, StatePart, shadowed


@dataclass(frozen=True)
class Rerun:
    """The outcome of a rerun."""

    mismatch: Mismatch | None
    """None where replay and eager run give the same bits here."""
    bisected: Bisected | None = None
    recorded_again: bool = False
    """Whether that is of a second recording, with a segment for each layer: the first is one graph."""
    served_by: str = ""
    """The recording that serves the batch here, where it is not of the size that was wrong, and what to do; and whether
    the batch ran on noise, since the file has no keys and values."""
    other_weights: str = ""
    """How the weights here differ from those that were served; empty where they don't."""

    @property
    def is_verdict(self) -> bool:
        """Whether the outcome is conclusive: with other weights, no fault shows nothing."""
        return self.mismatch is not None or not self.other_weights

    def __str__(self) -> str:
        return "\n".join([*self._on_weights(), *self._on_batch()])

    def _on_weights(self) -> Iterator[str]:
        if self.other_weights:
            yield (
                f"the weights here are not those that were served: {self.other_weights}. Open it with the model that "
                "was; if this is that one, its weights were changed while it served"
            )

    def _on_batch(self) -> Iterator[str]:
        if self.mismatch is None:
            end = "" if self.is_verdict else ", which with other weights is inconclusive"
            yield f"replay and eager give the same bits here{self.served_by}{end}"
            return
        yield f"reproduced: {self.mismatch}{self.served_by}"
        if self.bisected is None:
            return
        if not self.recorded_again:
            yield str(self.bisected)
            return
        again = f"recorded again in {self.bisected.num_segments} segments"
        if self.bisected.boundary is None:
            yield f"{again}, nothing differs: the fault is in that one recording, or in what runs in gaps now"
        else:
            yield f"{again}: {self.bisected}"


@torch.inference_mode()
def rerun(executor: Executor, found: Reproducer) -> Rerun:
    """Run the batch of a reproducer again; afterwards tables and cache are what they were."""
    path = found.source
    found.check_model(executor.model.config)
    runner, chosen = executor.runners.get(found.phase), executor.passes.get(found.phase)
    if runner is None or chosen is None or chosen.written is None:
        known = ", ".join(name for name, one in executor.passes.items() if one.written is not None)
        raise VerifyError(f"{path}: it is of the pass {found.phase!r}, and this engine checks {known}.")
    batch = found.batch(runner)
    decision = runner.decide(batch)
    if not isinstance(decision, Replay):
        raise VerifyError(f"{path}: no recording serves its batch here ({decision}). Capture it.")
    with found.placed(executor.state):
        state = Shadow(Shadowing(0), executor.state).state(*chosen.written(batch))
        ran = _ran(executor, found, runner, batch, decision.key, state)
    if ran.mismatch is None and found.is_repeat and runner.can_repeat:
        with found.placed(executor.state):
            ran = Rerun(shadowed(runner, batch, state, repeats=True)[1])
    served_by = _served_by(found, decision.key) + _on_noise(found)
    if found.is_repeat and ran.mismatch is None:
        served_by += " (it was a repeat, of buffers that may have been overwritten: what they held is not in the file)"
    return replace(ran, served_by=served_by, other_weights=found.other_weights(executor.state))


def _ran(
    executor: Executor, found: Reproducer, runner: Runner, batch: Any, key: ShapeKey, state: Sequence[StatePart]
) -> Rerun:
    mismatch = shadowed(runner, batch, state)[1]
    if mismatch is None:
        return Rerun(None)
    if runner.recording(key).gaps:
        return Rerun(mismatch, bisect(runner, batch, state))
    marked = _in_segments(executor, runner, key.size)
    again = found.batch(marked) if marked.captured else None
    if again is None or not isinstance(marked.decide(again), Replay):
        return Rerun(mismatch)
    return Rerun(mismatch, bisect(marked, again, state), recorded_again=True)


def _served_by(found: Reproducer, key: ShapeKey) -> str:
    size = found.content["size"]
    if key.size == size:
        return ""
    wrong = replace(key, size=size)
    return f" (by {key}; the file is of {wrong}: to try that one, record {size} and no smaller size that fits)"


def _on_noise(found: Reproducer) -> str:
    if not found.lacks_cache:
        return ""
    return " (on noise: the file has no token ids, keys and values, which only an engine with --log-prompts writes)"


def _in_segments(executor: Executor, runner: Runner, size: int) -> Runner:
    """The same pass, recorded at one size with a segment for every layer."""
    model = executor.parts.model
    parts = replace(executor.parts, model=model.with_attention(LayerMarks(model.attention)))
    phase = executor.passes[runner.phase.name].declared.make(parts, "breakable").phase()
    plan = replace(runner.plan, backend="breakable", buckets=(size,))
    marked = Runner(phase, executor.device, plan, options=replace(runner.options, strict=False, guard="off"))
    marked.capture(silent)
    return marked
