"""What the adapter says of folders that it can't serve: damaged weights, configurations that raise, models that look at
their whole batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("transformers")
import torch
import transformers
from safetensors.torch import load_file, save_file

from adapted import ALSO_SERVED, SERVED, VOCAB, greedy, made, saved
from phonograph import LLM, EngineOptions, SamplingParams
from phonograph.engine.checkpoints import open_checkpoint
from phonograph.engine.checkpoints.loading import load_model
from phonograph.engine.models.interface import Model, ModelParts
from phonograph.engine.ops.attention.reference import ReferenceAttention
from phonograph.engine.ops.layers.reference import ReferenceKernels
from phonograph.errors import CheckpointError
from phonograph.hf.adapter.outline import outline_of

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj.weight"


def loaded(folder: Path, max_len: int = 128, **options: Any) -> Model:
    parts = ModelParts(ReferenceAttention(), ReferenceKernels(), max_len)
    return load_model(open_checkpoint(folder, "hf", **options), parts, torch.float32, CPU)


def rewrite(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(made(SERVED["Gemma 2"]), tmp_path)


class TestNotNative:
    """What native layers of an architecture do not compute, and transformers does."""

    ASKED: ClassVar[dict[str, dict[str, Any]]] = {
        "hidden_act is 'gelu'; supported is silu": {"hidden_act": "gelu"},
        "partial_rotary_factor is 0.5; supported is 1": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        },
        "rope_type is 'longrope'; supported are": {
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
                "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [4.0] * 4,
            },
        },
    }  # fmt: skip

    def folder(self, tmp_path: Path, **values: Any) -> tuple[Path, Any]:
        sizes = {**SERVED["Llama"].config().to_dict(), "head_dim": 8, **values}
        model = made(replace(SERVED["Llama"], config=lambda: transformers.LlamaConfig(**sizes)))
        return saved(model, tmp_path), model

    @pytest.mark.parametrize("problem", ASKED)
    def test_auto_takes_the_layers_of_transformers(self, tmp_path: Path, problem: str) -> None:
        folder, model = self.folder(tmp_path, **self.ASKED[problem])
        llm = LLM(folder, device="cpu", options=EngineOptions(max_seqs=2, max_tokens=16, max_len=40))
        assert llm.implementation.startswith("hf: LlamaForCausalLM of transformers ")
        assert f"; not native: {problem}" in llm.explain()
        greedily = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        assert llm.generate([[5, 9, 11]], greedily)[0].tokens == greedy(model, [5, 9, 11], 6)
        with pytest.raises(CheckpointError, match=rf"{problem}.*--model-impl hf"):
            open_checkpoint(folder, "native")

    def test_without_transformers_its_layers_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder, _ = self.folder(tmp_path, hidden_act="gelu")
        monkeypatch.setattr("phonograph.engine.checkpoints.find_spec", lambda name: None)
        with pytest.raises(CheckpointError, match=r"hidden_act is 'gelu'.*--model-impl hf"):
            open_checkpoint(folder)

    def test_what_transformers_ignores_is_refused_all_the_same(self, tmp_path: Path) -> None:
        folder, _ = self.folder(tmp_path, hidden_act="gelu")
        rewrite(folder / "config.json", attention_multiplier=0.5)
        with pytest.raises(CheckpointError, match=r"attention_multiplier is 0\.5, which this decoder does not compute"):
            open_checkpoint(folder)

    def test_an_activation_that_nobody_knows(self, tmp_path: Path) -> None:
        folder, _ = self.folder(tmp_path)
        rewrite(folder / "config.json", hidden_act="none_such")
        with pytest.raises(CheckpointError, match=r"it can't be made as a causal language model \(.*none_such"):
            open_checkpoint(folder).config  # noqa: B018


class TestWeights:
    def change(self, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        weights = load_file(folder / "model.safetensors")
        save_file({**weights, UP: change(weights[UP]).clone()}, folder / "model.safetensors", {"format": "pt"})

    def test_a_tensor_of_another_shape(self, folder: Path) -> None:
        self.change(folder, lambda weight: weight[:-1])
        with pytest.raises(CheckpointError, match=rf"{UP} has shape \[\d+, 16\], but the configuration makes it "):
            loaded(folder)

    def test_a_smaller_vocabulary_than_the_file_has(self, folder: Path) -> None:
        rewrite(folder / "config.json", vocab_size=VOCAB - 7)
        with pytest.raises(CheckpointError, match=rf"(embed_tokens|lm_head).weight has shape \[{VOCAB}, 16\], but"):
            loaded(folder)

    def test_a_file_that_is_cut_short(self, folder: Path) -> None:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(5000)
        with pytest.raises(CheckpointError, match=r"model.safetensors: it can't be read .* cut short or damaged"):
            loaded(folder)

    def test_values_that_are_not_finite_are_named(self, folder: Path) -> None:
        self.change(folder, lambda weight: weight * float("nan"))
        with pytest.raises(CheckpointError, match=rf"of the [\d,]+ values of {UP} are NaN or infinite in float32"):
            loaded(folder)

    def test_logits_that_are_not_finite(self, folder: Path) -> None:
        """By finite weights, which no loader refuses."""
        weights = load_file(folder / "model.safetensors")
        large = {name: weight * 1e30 if "o_proj" in name else weight for name, weight in weights.items()}
        large = {name: weight * 0 + 1e38 if "layernorm" in name else weight for name, weight in large.items()}
        save_file(large, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match="logits of a short batch are not finite, with its own eager attent"):
            loaded(folder)

    def test_an_error_of_transformers_is_told(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no such tensor.\nmore")

        monkeypatch.setattr(transformers.Gemma2ForCausalLM, "_load_pretrained_model", fail)
        with pytest.raises(CheckpointError, match=r"its weights can't be loaded \(RuntimeError: no such tensor\)"):
            loaded(folder)

    def test_an_adapter_that_is_not_applied(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
        with caplog.at_level(logging.WARNING, logger="phonograph"):
            loaded(folder)
        assert "adapter_config.json: the adapter that it describes is not applied" in caplog.text


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnLayers(LlamaModel):
    config_class = OwnConfig
    def forward(self, input_ids=None, inputs_embeds=None, position_ids=None, past_key_values=None, **others):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        num_seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1])[None] + num_seen
        inputs_embeds = inputs_embeds * SCALE
        given = {"position_ids": position_ids, "past_key_values": past_key_values}
        return super().forward(inputs_embeds=inputs_embeds, **given, **others)
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnLayers(config)
        self.post_init()
"""


class TestCode:
    """Models that a folder brings."""

    def own(self, tmp_path: Path, monkeypatch: Any, scale: str) -> Path:
        folder = saved(made(SERVED["Llama"]), tmp_path / "own")
        names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        rewrite(folder / "config.json", model_type="own", architectures=["OwnModel"], auto_map=names)
        (folder / "own.py").write_text(CODE.replace("SCALE", scale))
        monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        return folder

    @pytest.mark.parametrize("scale", ["1.0", "torch.where(position_ids > 90, 0.5, 1.0)[..., None]"])
    def test_each_token_for_itself_is_served(self, tmp_path: Path, monkeypatch: Any, scale: str) -> None:
        loaded(self.own(tmp_path, monkeypatch, scale), trust_remote_code=True)

    @pytest.mark.parametrize("scale", [
        "torch.where(position_ids.max() > 90, 0.5, 1.0)",
        "0.5 if num_seen + inputs_embeds.shape[1] > 90 else 1.0",
    ])  # fmt: skip
    def test_looks_at_the_longest_sequence_are_refused(self, tmp_path: Path, monkeypatch: Any, scale: str) -> None:
        folder = self.own(tmp_path, monkeypatch, f"({scale})")
        with pytest.raises(CheckpointError, match=r"other logits than .* or it looks at its batch as a whole"):
            loaded(folder, trust_remote_code=True)
        loaded(folder, max_len=60, trust_remote_code=True)  # no sequence becomes so long


def test_a_model_that_raises_on_some_tokens(tmp_path: Path) -> None:
    """The pass without weights reads no values."""
    config = ALSO_SERVED["Gemma 4"].config()
    config.vocab_size_per_layer_input = VOCAB // 2
    torch.manual_seed(0)
    folder = saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"Gemma4ForCausalLM raises IndexError \(.*\) with its own eager attention"
    ):
        loaded(folder)


@pytest.mark.parametrize(("kind", "said"), [
    ("linear_attention", "layers are 'linear_attention', which keep no keys and values"),
    ("indexed_attention", "layers are 'indexed_attention', an attention that ours does not compute"),
])  # fmt: skip
def test_layers_of_another_kind(kind: str, said: str) -> None:
    config = SERVED["Llama"].config()
    config.layer_types = [kind, kind]
    with pytest.raises(CheckpointError, match=said):
        outline_of(config, "llama")
