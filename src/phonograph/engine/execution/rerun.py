"""Rerun: the batch of a reproducer once more, by replay and eagerly, and the segment at which the two part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

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
from phonograph.graphs.trust.shadow import Mismatch, shadowed


@dataclass(frozen=True)
class Rerun:
    """What became of a batch this time."""

    mismatch: Mismatch | None
    """None where replay and eager run give the same bits here."""
    bisected: Bisected | None = None
    recorded_again: bool = False
    """Whether that is of a second recording, with a segment for each layer: the first is one graph."""
    served_by: str = ""
    """The recording that serves the batch here, where it is not of the size that was wrong, and what to do; and whether
    the batch ran on noise, since the file has no keys and values."""

    def __str__(self) -> str:
        if self.mismatch is None:
            return f"replay and eager give the same bits here{self.served_by}"
        said = f"reproduced: {self.mismatch}{self.served_by}"
        if self.bisected is None:
            return said
        if not self.recorded_again:
            return f"{said}\n{self.bisected}"
        again = f"recorded again in {self.bisected.num_segments} segments"
        if self.bisected.boundary is None:
            return f"{said}\n{again}, nothing differs: the fault is in that one recording, or in what runs in gaps now"
        return f"{said}\n{again}: {self.bisected}"


@torch.inference_mode()
def rerun(executor: Executor, path: Path) -> Rerun:
    """Run the batch of a reproducer again; afterwards tables and cache are what they were."""
    found = Reproducer.read(path)
    found.check_model(executor.model.config)
    runner, chosen = executor.runners.get(found.phase), executor.passes.get(found.phase)
    if runner is None or chosen is None or chosen.written is None:
        known = ", ".join(name for name, one in executor.passes.items() if one.written is not None)
        raise VerifyError(f"{path}: it is of the pass {found.phase!r}, and this engine checks {known}.")
    batch = found.batch(runner)
    decision = runner.decide(batch)
    if not isinstance(decision, Replay):
        raise VerifyError(f"{path}: no recording serves its batch here ({decision}). Capture it.")
    shadow, served_by = Shadow(Shadowing(0), executor.state), _served_by(found, decision.key) + _on_noise(found)
    with found.placed(executor.state):
        state = shadow.state(*chosen.written(batch))
        mismatch = shadowed(runner, batch, state)[1]
        if mismatch is None:
            return Rerun(None, served_by=served_by)
        if runner.recording(decision.key).gaps:
            return Rerun(mismatch, bisect(runner, batch, state), served_by=served_by)
        marked = _in_segments(executor, runner, decision.key.size)
        again = found.batch(marked) if marked.captured else None
        if again is None or not isinstance(marked.decide(again), Replay):
            return Rerun(mismatch, served_by=served_by)
        return Rerun(mismatch, bisect(marked, again, state), recorded_again=True, served_by=served_by)


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
