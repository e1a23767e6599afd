"""Hugging Face folders of any architecture: greedy tokens of plain transformers in every backend, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch

from adapted import ALSO_SERVED, PAGE, REFUSED, SERVED, VOCAB, Family, greedy, made, page, saved
from phonograph import LLM, Device, EmulatedDevice
from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import FinishReason, SamplingParams
from phonograph.errors import CheckpointError
from phonograph.graphs.planning.settings import ask
from phonograph.hf.adapter.model import HfModel

PROMPTS = [[(7 * start + 5 * place) % (VOCAB - 3) + 3 for place in range(length)] for start, length in
           enumerate((3, 11, 1, 17, 6, 9))]  # fmt: skip
NUM_TOKENS = 9
"""Prompts and answers cross windows; six of them, four rows and chunks of 16 tokens make ragged and mixed steps."""
BACKENDS = ("full", "breakable", "tc_piecewise", "disabled")


class Zoo:
    """Folders and tokens of families, made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, tuple[Path, list[list[int]]]] = {}

    def get(self, name: str, family: Family) -> tuple[Path, list[list[int]]]:
        if name not in self._made:
            model = made(family)
            folder = saved(model, self._root / str(len(self._made)))
            self._made[name] = folder, [greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
        return self._made[name]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo(tmp_path_factory.mktemp("families"))


def opened(folder: Path, decode: str, prefill: str, device: str | Device | None = None, **options: Any) -> LLM:
    asked = [ask("tc_compiler", "eager", origin="test")]
    for phase, backend, buckets in (("decode", decode, (2, 4)), ("prefill", prefill, (8, 16))):
        asked.append(ask(f"{phase}.backend", backend, origin="test"))
        if backend != "disabled":
            asked.append(ask(f"{phase}.buckets", buckets, origin="test"))
            asked.append(ask(f"{phase}.max_recordings", len(buckets), origin="test"))  # greedy ones alone
    sizes = {"max_seqs": 4, "max_tokens": 16, "max_len": 40, "page_size": 4, "model_impl": "hf"}
    on = EmulatedDevice(poison=True) if device is None else device
    return LLM(folder, device=on, options=EngineOptions(**{**sizes, **options}), asked=asked)


def generated(llm: LLM) -> list[list[int]]:
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    return [one.tokens for one in done]


ATTENTION = "GapAttention.attend"
NUM_LAYERS = 2


def assert_recorded(llm: LLM, **gaps: list[str] | None) -> None:
    """No step was eager, but where nothing is recorded (None); gaps are as named, with graphs around them; what was
    recorded was verified, and all that it took for granted still holds."""
    assert [str(row.error) for report in llm.reports for row in report.failures] == []
    for name, wanted in gaps.items():
        runner = llm.executor.runners[name]
        if wanted is None:
            assert runner.stats.replays.total() == 0
            continue
        assert runner.stats.replays.total() > 0
        assert not runner.stats.eager, runner.stats.eager
        for key in runner.captured:
            recording = runner.recording(key)
            assert [gap.name for gap in recording.gaps] == wanted, key
            assert len(recording.graphs) == len(wanted) + 1, key
        assert llm.verified[name].ok
        assert_facts_hold(llm, name)


def assert_facts_hold(llm: LLM, name: str) -> None:
    """By a look at all of them, with every parameter among them that no gap reads anew."""
    runner, model = llm.executor.runners[name], llm.executor.parts.model
    assert isinstance(model, HfModel)
    assert runner.stale.find() is None
    assert runner.facts.stale is None
    watched, owner = {fact.name for fact in runner.facts}, type(model.decoder).__name__
    for parameter, _ in model.decoder.named_parameters():
        if not f"{model.outline.decoder}.{parameter}".startswith(model.outline.breaks):
            assert f"{owner}.{parameter}" in watched


def gaps_of(phase: str, backend: str) -> list[str] | None:
    """Attention is the gap of prefill. In decode it is recorded: its kernels plan nothing on the host."""
    if backend == "disabled":
        return None
    return [ATTENTION] * NUM_LAYERS if phase == "prefill" and backend != "full" else []


FAST = {("GPT-2", "full"), ("Gemma 2", "breakable")}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param(name, backend, marks=() if (name, backend) in FAST else pytest.mark.slow)
        for name in SERVED
        for backend in BACKENDS
    ],
)
def test_tokens_are_those_of_plain_transformers(zoo: Zoo, name: str, backend: str) -> None:
    """Decode and prefill by this backend, on padded buckets, with several requests in a step."""
    folder, wanted = zoo.get(name, SERVED[name])
    llm = opened(folder, backend, backend)
    assert generated(llm) == wanted
    assert_recorded(llm, decode=gaps_of("decode", backend), prefill=gaps_of("prefill", backend))


MIXED = [
    ("GPT-2", "full", "breakable"),
    ("Mistral", "full", "tc_piecewise"),
    ("Gemma 2", "tc_piecewise", "breakable"),
    ("gpt-oss", "breakable", "full"),
    ("DeepSeek-V3", "tc_piecewise", "full"),
    ("Qwen3-MoE", "disabled", "tc_piecewise"),
    ("Phi-3", "breakable", "disabled"),
]


@pytest.mark.parametrize(
    ("name", "decode", "prefill"),
    [pytest.param(*one, marks=() if one[0] == "GPT-2" else pytest.mark.slow) for one in MIXED],
)
def test_phases_may_have_different_backends(zoo: Zoo, name: str, decode: str, prefill: str) -> None:
    folder, wanted = zoo.get(name, SERVED[name])
    llm = opened(folder, decode, prefill)
    assert generated(llm) == wanted
    assert_recorded(llm, decode=gaps_of("decode", decode), prefill=gaps_of("prefill", prefill))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("GPT-2", "breakable"),
        pytest.param("GPT-2", "tc_piecewise", marks=pytest.mark.slow),
        pytest.param("gpt-oss", "full", marks=pytest.mark.slow),
    ],
)
def test_prefill_of_many_requests_rejects_none(zoo: Zoo, name: str, backend: str) -> None:
    """So many at once that a step has the beginnings and ends of several."""
    folder, _ = zoo.get(name, SERVED[name])
    prompts = [[(7 * row + place) % (VOCAB - 3) + 3 for place in range(1 + row % 13)] for row in range(40)]
    llm = opened(folder, backend, backend)
    done = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    assert [(one.finish, one.error) for one in done] == [(FinishReason.LENGTH, "")] * len(prompts)
    model = made(SERVED[name])
    assert [one.tokens for one in done] == [greedy(model, prompt, 2) for prompt in prompts]
    assert_recorded(llm, decode=gaps_of("decode", backend), prefill=gaps_of("prefill", backend))


def test_a_parameter_that_was_replaced_is_named(zoo: Zoo) -> None:
    folder, _ = zoo.get("GPT-2", SERVED["GPT-2"])
    llm = opened(folder, "full", "full")
    assert_facts_hold(llm, "decode")
    model = llm.executor.parts.model
    assert isinstance(model, HfModel)
    layer = model.decoder.h[1].mlp.c_fc
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    for name in ("decode", "prefill"):
        fact = llm.executor.runners[name].stale.find()
        assert fact is not None
        assert fact.name == "GPT2Model.h.1.mlp.c_fc.weight"


@pytest.mark.slow
@pytest.mark.parametrize("name", ALSO_SERVED)
def test_tokens_of_further_families(zoo: Zoo, name: str) -> None:
    folder, wanted = zoo.get(name, ALSO_SERVED[name])
    assert generated(opened(folder, "disabled", "disabled", device="cpu")) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["breakable", "tc_piecewise"])
def test_experts_that_the_host_routes_run_between_graphs(zoo: Zoo, backend: str) -> None:
    folder, wanted = zoo.get("DBRX", ALSO_SERVED["DBRX"])
    llm = opened(folder, backend, backend)
    assert generated(llm) == wanted
    experts = ["DbrxExperts.forward"]
    assert_recorded(llm, decode=experts * NUM_LAYERS, prefill=[ATTENTION, *experts] * NUM_LAYERS)
    assert "experts run between graphs: transformer.blocks.0.ffn.experts, " in llm.implementation


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_before_weights_are_read(tmp_path: Path, name: str) -> None:
    config = REFUSED[name].config()
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights are read")
    saved_tokenizer(tmp_path)
    with pytest.raises(CheckpointError) as raised:
        opened(tmp_path, "full", "full", dtype=torch.float32)
    assert REFUSED[name].refusal in str(raised.value)
    assert str(raised.value).endswith(".")


def saved_tokenizer(folder: Path) -> None:
    class Nothing:
        def save_pretrained(self, folder: Path) -> None: ...

    saved(Nothing(), folder)


def test_an_architecture_of_ours_has_our_layers_unless_others_are_asked_for(zoo: Zoo) -> None:
    folder, wanted = zoo.get("Llama", SERVED["Llama"])
    native = opened(folder, "disabled", "disabled", device="cpu", model_impl="auto")
    assert native.implementation == "native: LlamaForCausalLM in layers of our own"
    assert generated(native) == wanted
    adapted = opened(folder, "disabled", "disabled", device="cpu", model_impl="hf")
    assert adapted.implementation.startswith("hf: LlamaForCausalLM of transformers ")
    assert "checked against the model's own eager attention" in adapted.implementation
    assert f"model: {adapted.implementation}" in adapted.explain()
    assert generated(adapted) == wanted


def test_another_architecture_has_the_layers_of_transformers(zoo: Zoo) -> None:
    folder, wanted = zoo.get("GPT-2", SERVED["GPT-2"])
    llm = opened(folder, "full", "breakable", model_impl="auto")
    assert llm.implementation.startswith("hf: GPT2LMHeadModel of transformers ")
    assert "2 attention layers in transformer" in llm.implementation
    assert generated(llm) == wanted
    with pytest.raises(CheckpointError, match="supported are LlamaForCausalLM"):
        open_checkpoint(folder, "native")


def test_the_page_of_models_says_what_is_tested() -> None:
    """`python tests/adapted.py` writes it."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", ["GPT-2"])
def test_a_configuration_that_fits_no_weights_is_refused(zoo: Zoo, tmp_path: Path, name: str) -> None:
    folder, _ = zoo.get(name, SERVED[name])
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "n_layer": 3}))
    with pytest.raises(CheckpointError, match="missing keys"):
        opened(tmp_path, "disabled", "disabled", device="cpu")
