"""Passes: what the engine knows of them before a model is there, and how the executor checks them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import phonograph
from phonograph import LLM, DeclarationError, EmulatedDevice, EngineOptions
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.step_builder import StepBuilder, StepTables
from phonograph.engine.models.config import SHAPES
from phonograph.engine.ops.queries import Span
from phonograph.engine.passes.prefill_batch import PrefillBatches
from phonograph.engine.passes.registry import DECODE, HEARTBEAT, PASSES, PHASES, PREFILL
from phonograph.engine.requests.limits import Limits
from phonograph.engine.requests.request import Request, SamplingParams
from phonograph.engine.requests.step import Sampled, ScheduledStep
from phonograph.engine.sampling.sampler import TorchSampler
from phonograph.engine.scheduling.scheduler import Scheduler
from phonograph.engine.state.column import TableSizes
from phonograph.graphs.planning.resolve import resolve
from phonograph.graphs.running.runner_options import facts_of

ENGINE = Path(phonograph.__file__).parent


def test_the_registry_imports_no_torch_of_its_own() -> None:
    """Whatever it imports when it is imported must not bring the engine's arithmetic along."""
    code = (
        "import sys; import phonograph.engine.passes.registry; assert 'torch' not in sys.modules;"
        "new = [name for name in sys.modules if name.startswith('phonograph.engine')];"
        "assert all(name.count('.') <= 3 for name in new), new;"
        "assert 'phonograph.engine.passes.base' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pass_names_stand_in_the_registry_alone() -> None:
    names = {declared.name for declared in PASSES}
    for folder in ("engine", "cli", "server"):
        for path in (ENGINE / folder).rglob("*.py"):
            said = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert path.name == "registry.py" or not said & names, f"{path} names a pass"


def test_plans_and_sizes_follow_the_declarations() -> None:
    limits = Limits(max_seqs=3, max_tokens=20, max_len=32, page_size=8, num_pages=9)
    assert [declared.limit(limits) for declared in PASSES] == [3, 20, 1]
    assert tuple(declared.defaults for declared in PASSES) == PHASES
    assert [declared.is_ragged for declared in (DECODE, PREFILL, HEARTBEAT)] == [False, True, False]
    assert [declared.serves for declared in (DECODE, PREFILL, HEARTBEAT)] == [True, True, False]


def test_a_step_names_its_pass() -> None:
    scheduler = Scheduler(Limits(max_seqs=3, max_tokens=20, max_len=32, page_size=8, num_pages=9))
    scheduler.add(Request("a", (1, 2, 3), SamplingParams(max_tokens=4)))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert (first.pass_name, second.pass_name) == (PREFILL.name, DECODE.name)


def test_a_pass_of_another_width_than_the_scheduler_counts_is_refused() -> None:
    options = EngineOptions(max_seqs=2, max_tokens=16, max_len=32, page_size=8, dtype=torch.float32)
    model = LLM(RandomCheckpoint(SHAPES["tiny"]), device="cpu", options=options).executor.model
    device = EmulatedDevice()
    plan = resolve([], facts_of(device), PHASES)
    limits = Limits(max_seqs=2, max_tokens=16, max_len=30, page_size=8, num_pages=9, tokens_per_row=3)
    with pytest.raises(DeclarationError, match=r"decode' computes 1 tokens a row, and limits.tokens_per_row is 3"):
        Executor(model, TorchSampler(), device, plan, limits, passes=(DECODE,))


def launched(scheduler: Scheduler) -> ScheduledStep:
    step = scheduler.schedule()
    assert step is not None
    return step


@pytest.mark.parametrize("width", [1, 3])
def test_a_mixed_batch_says_what_the_host_knows(width: int) -> None:
    """Positions and spans of decodes where each has one token; else offsets, and spans of prompts alone."""
    limits = Limits(max_seqs=3, max_tokens=32, max_len=64, page_size=4, num_pages=40, tokens_per_row=width)
    scheduler, batches = Scheduler(limits), PrefillBatches(limits)
    for name in "ab":
        scheduler.add(Request(name, (1, 2, 3, 4, 5), SamplingParams(max_tokens=20)))
    scheduler.commit(launched(scheduler), Sampled([7, 7]))
    scheduler.add(Request("c", (9, 8, 7, 6), SamplingParams(max_tokens=20)))
    tables = StepTables((), TableSizes(3, 100, 16))
    batch = batches.batch(StepBuilder(tables).build(launched(scheduler)))
    assert batch.rows.tolist() == [1] * width + [2] * width + [3] * 4
    assert batch.decoding.tolist() == [True] * 2 * width + [False] * 4
    assert batch.tokens.tolist() == [0] * 2 * width + [9, 8, 7, 6]
    assert batch.ends.tolist() == [*range(2 * width), 2 * width + 3]
    for one in (batch.rows, batch.tokens, batch.ends, batch.positions):
        assert one.dtype == np.int64, "a load refuses others, and the step is tried row by row"
    prompt = Span(3, 2 * width, 0, 4)
    if width == 1:
        assert batch.positions.tolist() == [5, 5, 0, 1, 2, 3]
        assert (tuple(batch.spans or ()), batch.spans_from) == ((Span(1, 0, 5, 1), Span(2, 1, 5, 1), prompt), 0)
        assert batch.width == 2
    else:
        assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
        assert (tuple(batch.spans or ()), batch.spans_from) == ((prompt,), 6)
        assert batch.width == 2, "pages for the most that a round can compute"
