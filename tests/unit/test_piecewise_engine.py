"""The engine's own passes under tc_piecewise: tokens as ever, one program for all buckets, and no copy of the cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phonograph import LLM, EmulatedDevice, PlanError, SamplingParams, Slot, graphed, verify
from phonograph.engine.checkpoints.random import RandomCheckpoint
from phonograph.engine.execution.executor import Executor
from phonograph.engine.execution.sizing import plan_for
from phonograph.engine.models import decoder, registry
from phonograph.engine.models.config import SHAPES
from phonograph.engine.options import EngineOptions
from phonograph.graphs.planning.settings import ask
from phonograph.graphs.progress import Progress, silent
from phonograph.graphs.recording.backends.compilers import COMPILERS
from phonograph.graphs.recording.backends.tc_piecewise import TcPiecewiseBackend
from watched_pieces import watched_pieces

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 200, 3], [7], list(range(20, 61)), [11] * 9, list(range(100, 117))]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=10, temperature=0.9, top_k=20, top_p=0.9, seed=3, ignore_eos=True)
DETAILED = SamplingParams(max_tokens=6, temperature=0.7, seed=5, presence_penalty=0.5, logprobs=3, ignore_eos=True)


def make(cache_tokens: int | None = None, progress: Progress = silent, **backends: str) -> LLM:
    options = EngineOptions(
        max_seqs=4, max_tokens=32, max_len=96, page_size=8, dtype=torch.float32, cache_tokens=cache_tokens
    )
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase, backend in backends.items()]
    device = EmulatedDevice(poison=True)
    return LLM(RandomCheckpoint(SHAPES["tiny"]), device=device, options=options, asked=asked, progress=progress)


@pytest.fixture(scope="module")
def compiled() -> LLM:
    return make(decode="tc_piecewise", prefill="tc_piecewise")


@pytest.fixture(scope="module")
def eager() -> LLM:
    return make(decode="disabled", prefill="disabled")


def backend_of(llm: LLM, phase: str) -> TcPiecewiseBackend:
    backend = llm.executor.runners[phase].backend
    assert isinstance(backend, TcPiecewiseBackend)
    return backend


@pytest.mark.parametrize("params", [GREEDY, DRAWN, DETAILED], ids=["greedy", "drawn", "detailed"])
def test_tokens_and_logprobs_equal_eager(compiled: LLM, eager: LLM, params: SamplingParams) -> None:
    found, wanted = (llm.generate(PROMPTS, params) for llm in (compiled, eager))
    compiled.core.scheduler.integrity()
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert _logprobs(found) == pytest.approx(_logprobs(wanted), abs=1e-5)
    assert all(runner.stats.eager.total() == 0 for runner in compiled.executor.runners.values())


def _logprobs(results: Any) -> list[float]:
    return [step.logprob for one in results for step in one.logprobs or ()]


def test_one_program_for_all_buckets_of_a_product(compiled: LLM) -> None:
    assert backend_of(compiled, "prefill").num_programs == 1
    assert backend_of(compiled, "decode").num_programs == 3  # greedy, sampled, detailed
    prefill = compiled.executor.runners["prefill"]
    num_layers = SHAPES["tiny"].num_layers
    assert {len(prefill.recording(key).graphs) for key in prefill.captured} == {num_layers + 1}
    decode = compiled.executor.runners["decode"]
    assert {len(decode.recording(key).graphs) for key in decode.captured} == {1}
    assert "compiled by eager" in compiled.explain()
    assert "compiled: decode, prefill: layers in torch ops" in compiled.explain()


def adapted(folder: Path, name: str, backend: str = "tc_piecewise", **options: Any) -> LLM:
    """An engine over the layers of transformers."""
    pytest.importorskip("transformers")
    import adapted as families

    family = families.saved(families.made(families.SERVED[name]), folder)
    sizes = {"max_seqs": 4, "max_tokens": 16, "max_len": 40, "page_size": 4, "model_impl": "hf"}
    asked = [ask(f"{phase}.backend", backend, origin="test") for phase in ("decode", "prefill")]
    asked += [
        ask(f"{phase}.buckets", sizes, origin="test") for phase, sizes in (("decode", (2, 4)), ("prefill", (8, 16)))
    ]
    return LLM(family, device=EmulatedDevice(poison=True), options=EngineOptions(**{**sizes, **options}), asked=asked)


@pytest.mark.parametrize("layers", ["native", "Gemma 2", "DeepSeek-V3"])
def test_no_piece_writes_or_copies_the_cache_or_a_table(
    layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces gather rows of tables and hand on a view of the page table; the cache is not even among their inputs."""
    with watched_pieces(monkeypatch) as watched:
        llm = make(decode="tc_piecewise", prefill="tc_piecewise") if layers == "native" else adapted(tmp_path, layers)
    tables = llm.executor.tables
    kept = [tables[column.name] for column in tables.columns if tables.is_made(column.group)]
    assert watched.num_calls > 50
    assert watched.reads([tables.length])
    assert watched.misuses([one for one in kept if one is not tables.pages]) == []
    assert set(watched.misuses([tables.pages])) <= {"returned"}
    assert not watched.reads(llm.executor.cache.tensors)
    for phase in ("decode", "prefill"):
        for program in backend_of(llm, phase).programs:
            written = {name for part in program.calls if part.mark is not None for name in part.mark.mutates}
            assert {"keys", "values"} <= written


KEPT, PLACES = torch.zeros(5, 4), torch.tensor([3, 4])
MISUSES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "written": (lambda x: KEPT[:2].copy_(x) + x, "copy_.default writes"),
    "put": (lambda x: x + KEPT.index_put_((PLACES,), x)[:2], "index_put_.default writes"),
    "copied": (lambda x: x + KEPT.index_add(0, PLACES, x)[:2], "index_add.default copies"),
    "cast": (lambda x: x + KEPT.double().sum(0).float(), "_to_copy.default copies"),
    "returned": (lambda x: (x + 1, KEPT[1:3]), "returned"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_piece_that_does_is_found(misuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, found = MISUSES[misuse]
    with watched_pieces(monkeypatch) as watched:
        run = graphed(
            body,
            slots=[Slot("x", ("seqs", 4), torch.float32)],
            bucketed="seqs",
            buckets=[2],
            backend="tc_piecewise",
            device=EmulatedDevice(),
            guard="off",
            facts="off",
        )
        run.capture(silent)
    assert watched.num_calls > 0
    assert any(found in one for one in watched.misuses([KEPT])), watched.misuses([KEPT])


def test_inductor_hands_a_view_on_and_copies_nothing() -> None:
    """What pieces do with the page table, by the compiler that makes code of its own."""
    table, found = torch.arange(60).reshape(5, 12), []

    def backend(module: Any, examples: Any) -> Any:
        for node, value in zip(module.graph.nodes, examples, strict=False):
            node.meta["example_value"] = value
        found.append(COMPILERS["inductor"](module))
        return module.forward

    def body(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return table[:, :8], x + 1

    torch.compile(body, backend=backend, fullgraph=True, dynamic=False)(torch.ones(2), table)
    view, _ = found[0](table, torch.ones(2))  # in the order in which the body uses them
    assert torch.equal(view, table[:, :8])
    assert view.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()


def test_no_recording_has_a_copy_of_the_cache() -> None:
    large = make(cache_tokens=40_000, decode="tc_piecewise", prefill="tc_piecewise")
    least = min(min(kept.keys.nbytes, kept.values.nbytes) for kept, _ in large.executor.cache.places)
    assert least > 5e6
    for report in large.reports:
        assert not report.failures
        assert all(row.num_bytes < least / 2 for row in report.rows), report
    # What a copy would look like.
    cache = torch.zeros(least // 4)
    slots = [Slot("x", ("seqs", 4), torch.float32)]

    def copies(x: torch.Tensor) -> torch.Tensor:
        return x + cache.index_add(0, torch.zeros(4, dtype=torch.int64), x[0])[:4]

    run = graphed(
        copies, slots=slots, bucketed="seqs", buckets=[2], backend="tc_piecewise", device=EmulatedDevice(), guard="off"
    )
    assert run.capture(silent).rows[0].num_bytes >= least


def test_prefill_of_many_requests_rejects_none(compiled: LLM, eager: LLM) -> None:
    prompts = [[(7 * row + place) % 200 for place in range(1 + row % 13)] for row in range(40)]
    before = {name: runner.stats.eager.total() for name, runner in compiled.executor.runners.items()}
    found, wanted = (llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0.0)) for llm in (compiled, eager))
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert all(one.finish is not None and not one.error for one in found)
    assert before == {name: runner.stats.eager.total() for name, runner in compiled.executor.runners.items()}


def test_the_recordings_are_right(compiled: LLM) -> None:
    for runner in compiled.executor.runners.values():
        report = verify(runner, batches=1)
        assert report.ok, report


def test_an_architecture_that_is_known_to_fail_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.UNCOMPILED, SHAPES["tiny"].architecture, "its router reads from the host")
    device, asked = EmulatedDevice(), [ask("prefill.backend", "tc_piecewise", origin="test")]
    with pytest.raises(PlanError, match=r"'tc-architecture'.*its router reads from the host"):
        plan_for(device, asked, on_cpu_by_default=False, architecture=SHAPES["tiny"].architecture)
    assert plan_for(device, asked, on_cpu_by_default=False, architecture="other").is_recorded
    with pytest.raises(PlanError, match="'tc-architecture'"):
        make(prefill="tc_piecewise")


def test_kernels_that_multiply_packed_weights_are_refused_by_name() -> None:
    asked = [ask("decode.backend", "tc_piecewise", origin="test")]
    with pytest.raises(PlanError, match=r"'tc-packed-weights'.*torch ops can't"):
        plan_for(EmulatedDevice(), asked, EngineOptions(kernels="cpu"), on_cpu_by_default=False)


def test_one_program_also_where_long_steps_are_cut(eager: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "PIECE", 8)
    monkeypatch.setattr(decoder, "_STEP", 4)
    llm = make(decode="full", prefill="tc_piecewise")
    assert backend_of(llm, "prefill").num_programs == 1
    assert [row.error for report in llm.reports for row in report.failures] == []
    found, wanted = (one.generate(PROMPTS, GREEDY) for one in (llm, eager))
    assert [one.tokens for one in found] == [one.tokens for one in wanted]


def test_every_shape_of_every_phase_is_compiled_before_the_first_capture() -> None:
    """By what is told, and by Dynamo's own count, which a capture finds where it stays."""
    told: list[tuple[str, int]] = []
    counts = importlib.import_module("torch._dynamo.utils").counters["stats"]
    begun = counts["unique_graphs"]
    llm = make(
        cache_tokens=512,
        progress=lambda doing, done, total: told.append((doing, counts["unique_graphs"] - begun)),
        decode="tc_piecewise",
        prefill="tc_piecewise",
    )
    doing = [name for name, _ in told]
    for phase in ("decode", "prefill"):
        keys = {str(key) for key in llm.executor.runners[phase].captured}
        assert keys == {name.removeprefix("compiling ") for name in doing if name.startswith(f"compiling {phase}[")}
        assert any(name.startswith(f"capturing {phase}") for name in doing)
    first = next(index for index, name in enumerate(doing) if name.startswith("capturing"))
    assert not [name for name in doing[first:] if name.startswith("compiling")]
    num_programs = sum(backend_of(llm, phase).num_programs for phase in ("decode", "prefill"))
    assert [count for _, count in told[first:]] == [num_programs] * len(told[first:])


def test_a_trial_for_its_memory_compiles_nothing(compiled: LLM) -> None:
    served = compiled.executor
    parts = served.parts
    trial = Executor(parts.model, parts.sampler, compiled.device, compiled.plan, served.limits, largest_only=True)
    trial.capture(silent)
    assert {trial.runners[name].backend.name for name in ("decode", "prefill")} == {"breakable"}
    assert [len(trial.runners[name].captured) for name in ("decode", "prefill")] == [3, 1]
    assert trial.num_recordings == served.num_recordings
