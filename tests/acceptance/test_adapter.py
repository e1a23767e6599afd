"""Hugging Face folders of any architecture: greedy tokens of plain transformers in every backend, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch

from adapted import ALSO_SERVED, PAGE, REFUSED, SERVED, VOCAB, Family, greedy, made, page, saved
from phonograph import LLM
from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.options import EngineOptions
from phonograph.engine.requests.request import SamplingParams
from phonograph.errors import CheckpointError
from phonograph.graphs.planning.settings import ask

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


def opened(folder: Path, decode: str, prefill: str, device: str = "emulated", **options: Any) -> LLM:
    asked = [ask("tc_compiler", "eager", origin="test")]
    for phase, backend, buckets in (("decode", decode, (2, 4)), ("prefill", prefill, (8, 16))):
        asked.append(ask(f"{phase}.backend", backend, origin="test"))
        if backend != "disabled":
            asked.append(ask(f"{phase}.buckets", buckets, origin="test"))
            asked.append(ask(f"{phase}.max_recordings", len(buckets), origin="test"))  # greedy ones alone
    sizes = {"max_seqs": 4, "max_tokens": 16, "max_len": 40, "page_size": 4, "model_impl": "hf"}
    return LLM(folder, device=device, options=EngineOptions(**{**sizes, **options}), asked=asked)


def generated(llm: LLM) -> list[list[int]]:
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    return [one.tokens for one in done]


def assert_recorded(llm: LLM, backend: str) -> None:
    """No step was eager, but where nothing is recorded; and what was recorded was verified."""
    for name in ("decode", "prefill"):
        stats = llm.executor.runners[name].stats
        if backend == "disabled":
            assert stats.replays.total() == 0
        else:
            assert stats.replays.total() > 0
            assert not stats.eager, stats.eager
    assert all(report.ok for report in llm.verified.values())


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
    assert_recorded(llm, backend)


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
    assert_recorded(llm, backend)
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
