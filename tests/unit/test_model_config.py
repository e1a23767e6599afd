"""The model's configuration: what a config.json means, as transformers means it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from phonograph.engine.checkpoints import expected_shapes
from phonograph.engine.models.config import SHAPES, ModelConfig
from phonograph.engine.models.rope_scaling import FactorsRope, LinearRope

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILY: dict[str, dict[str, Any]] = {
    "Qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": 24, "head_dim": 16},
}


def hf(kind: str) -> dict[str, Any]:
    """The fields of a config.json that transformers writes; its model_type names the architecture."""
    fields: dict[str, Any] = getattr(transformers, f"{kind}Config")(**SIZES, **FAMILY[kind]).to_dict()
    return fields


class TestFamily:
    def test_qwen2_windows_its_later_layers(self) -> None:
        config = ModelConfig.from_hf(hf("Qwen2"))
        assert [config.window(layer) for layer in range(3)] == [None, 16, 16]
        assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)

    def test_qwen2_without_the_switch_has_no_window(self) -> None:
        config = ModelConfig.from_hf({**hf("Qwen2"), "use_sliding_window": False})
        assert (config.sliding_window, config.sliding_layers) == (None, frozenset())

    def test_layer_types_say_which_layers_have_a_window(self) -> None:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = ModelConfig.from_hf({**hf("Qwen2"), "layer_types": kinds})
        assert [config.window(layer) for layer in range(3)] == [16, None, 16]

    def test_mistral_windows_every_layer(self) -> None:
        values = hf("Mistral")
        assert [ModelConfig.from_hf(values).window(layer) for layer in range(3)] == [24] * 3
        assert ModelConfig.from_hf({**values, "sliding_window": None}).window(0) is None
        del values["sliding_window"]
        assert ModelConfig.from_hf(values).window(0) == 4096

    def test_qwen3_norms_queries_and_keys(self) -> None:
        config = ModelConfig.from_hf(hf("Qwen3"))
        assert (config.qk_norm, config.qkv_bias, config.head_dim, config.tied_embeddings) == (True, False, 16, True)

    def test_an_old_config_json(self) -> None:
        """As of Llama 2, before transformers 5 renamed things."""
        old = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
        old |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "num_key_value_heads": None}
        config = ModelConfig.from_hf(old)
        assert (config.rope_theta, config.rope_scaling) == (5e5, LinearRope(2.0))
        assert (config.dtype, config.num_kv_heads, config.head_dim) == (torch.float16, 4, 8)

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "default"},
            {"rope_type": "dynamic", "factor": 4.0},
            {"rope_type": "linear", "factor": 3.0},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16,
                "truncate": False,
            },
            {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5, "beta_slow": 2.0},
            {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.1},
        ],
    )
    @pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 64), (5e5, 128)])
    def test_the_rotary_frequencies_are_those_of_transformers(
        self, rope: dict[str, Any], theta: float, head_dim: int
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        values = {**SIZES, "head_dim": head_dim, "max_position_embeddings": 131_072}
        theirs = transformers.LlamaConfig(**values, rope_parameters={**rope, "rope_theta": theta})
        config = ModelConfig.from_hf({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
        embedding = LlamaRotaryEmbedding(theirs)
        assert torch.equal(config.inv_freq(), embedding.inv_freq)
        assert config.rope_attention_factor == embedding.attention_scaling

    @pytest.mark.parametrize(
        ("name", "num_parameters"),
        [
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-0.6b", 596_049_920),
            ("llama3-8b", 8_030_261_248),
            ("smollm2-135m", 134_515_008),
        ],
    )
    def test_the_named_shapes_have_the_published_sizes(self, name: str, num_parameters: int) -> None:
        assert sum(map(math.prod, expected_shapes(SHAPES[name]).values())) == num_parameters

    def test_llama3_frequencies_survive_as_factors(self) -> None:
        """llama.cpp's converter stores plain / stretched for each frequency."""
        rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
        config = ModelConfig.from_hf({**SIZES, "architectures": ["LlamaForCausalLM"], "rope_parameters": rope})
        factors = replace(config, rope_scaling=None).inv_freq() / config.inv_freq()
        stored = replace(config, rope_scaling=FactorsRope(tuple(factors.tolist())))
        torch.testing.assert_close(stored.inv_freq(), config.inv_freq())
