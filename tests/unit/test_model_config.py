"""The model's configuration: what a config.json means, as transformers means it."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phonograph.engine.checkpoints import expected_shapes
from phonograph.engine.models.config import SHAPES
from phonograph.engine.models.registry import config_from_hf
from phonograph.engine.models.rope_scaling import FactorsRope, LinearRope
from phonograph.errors import CheckpointError

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
        config = config_from_hf(hf("Qwen2"))
        assert [config.window(layer) for layer in range(3)] == [None, 16, 16]
        assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)

    def test_qwen2_without_the_switch_has_no_window(self) -> None:
        config = config_from_hf({**hf("Qwen2"), "use_sliding_window": False})
        assert (config.sliding_window, config.sliding_layers) == (None, frozenset())

    def test_layer_types_say_which_layers_have_a_window(self) -> None:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = config_from_hf({**hf("Qwen2"), "layer_types": kinds})
        assert [config.window(layer) for layer in range(3)] == [16, None, 16]

    def test_mistral_windows_every_layer(self) -> None:
        values = hf("Mistral")
        assert [config_from_hf(values).window(layer) for layer in range(3)] == [24] * 3
        assert config_from_hf({**values, "sliding_window": None}).window(0) is None
        del values["sliding_window"]
        assert config_from_hf(values).window(0) == 4096

    def test_qwen3_norms_queries_and_keys(self) -> None:
        config = config_from_hf(hf("Qwen3"))
        assert (config.qk_norm, config.qkv_bias, config.head_dim, config.tied_embeddings) == (True, False, 16, True)

    def test_an_old_config_json(self) -> None:
        """As of Llama 2, before transformers 5 renamed things."""
        old = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"}
        old |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "num_key_value_heads": None}
        config = config_from_hf(old)
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
        config = config_from_hf({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
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
        config = config_from_hf({**SIZES, "architectures": ["LlamaForCausalLM"], "rope_parameters": rope})
        factors = replace(config, rope_scaling=None).inv_freq() / config.inv_freq()
        stored = replace(config, rope_scaling=FactorsRope(tuple(factors.tolist())))
        torch.testing.assert_close(stored.inv_freq(), config.inv_freq())


LINEAR, YARN = {"type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}
BASE = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


class TestBothSpellings:
    """`rope_scaling` is the older name of `rope_parameters`; files that were edited have both."""

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": LINEAR},
            {"rope_parameters": YARN, "rope_scaling": LINEAR, "rope_theta": 2e4},
            {"rope_parameters": LINEAR, "rope_scaling": {**YARN, "rope_theta": 3e4}, "rope_theta": 2e4},
            {"rope_parameters": LINEAR, "rope_scaling": {}},
            {"rope_parameters": LINEAR, "rope_scaling": None, "rope_theta": 7e4},
            {"rope_parameters": None, "rope_scaling": YARN, "original_max_position_embeddings": 32},
            {"rope_parameters": {**YARN, "type": "linear"}},
            {"rope_parameters": {"type": "linear", "rope_type": "default", "factor": 3.0}},
        ],
    )
    def test_the_section_that_counts_is_that_of_transformers(self, changes: dict[str, Any], tmp_path: Path) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
        embedding = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
        config = config_from_hf({**BASE, **changes})
        assert torch.equal(config.inv_freq(), embedding.inv_freq)
        assert config.rope_attention_factor == embedding.attention_scaling

    def test_what_does_not_count_is_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "phonograph"):
            config_from_hf({**BASE, "rope_parameters": YARN, "rope_scaling": {**LINEAR, "beta_fast": 8}})
        assert "rope_scaling and rope_parameters, and they differ" in caplog.text
        assert "beta_fast has no effect with rope_type 'linear'" in caplog.text


class TestWhatIsNotComputed:
    @pytest.mark.parametrize(
        ("name", "value", "neutral"),
        [
            ("logit_scale", 0.0625, 1.0),
            ("logits_scaling", 8.0, 1),
            ("embedding_multiplier", 12.0, 1.0),
            ("residual_multiplier", 0.22, 1.0),
            ("attention_multiplier", 1.0, 8**-0.5),
            ("query_pre_attn_scalar", 256, 8),
            ("final_logit_softcapping", 30.0, None),
            ("attn_logit_softcapping", 1.0, None),
            ("partial_rotary_factor", 0.5, 1.0),
            ("some_new_multiplier", 2, None),
            ("per_layer_config", {"0": {}}, {}),
            ("compression_config", {"quant_method": "new"}, None),
        ],
    )
    def test_a_number_that_changes_the_arithmetic_is_refused(self, name: str, value: object, neutral: object) -> None:
        with pytest.raises(CheckpointError, match=name):
            config_from_hf({**BASE, name: value})
        assert config_from_hf({**BASE, name: neutral}) == config_from_hf(BASE)

    @pytest.mark.parametrize(
        ("name", "value", "neutral"),
        [
            ("sliding_window", 32, 128),
            ("attention_chunk_size", 32, 128),
            ("layer_types", ["full_attention", "sliding_attention", "full_attention"], ["full_attention"] * 3),
        ],
    )
    def test_a_window_that_no_layer_has_is_refused(self, name: str, value: object, neutral: object) -> None:
        """transformers' layers of a Llama compute none, but its cache cuts at any that a configuration has."""
        with pytest.raises(CheckpointError, match=f"{name} .*, which the layers of a LlamaForCausalLM do not compute"):
            config_from_hf({**BASE, name: value})
        for other in (None, neutral):
            assert config_from_hf({**BASE, name: other}) == config_from_hf(BASE)

    @pytest.mark.parametrize("kind", ["Mistral", "Qwen2", "Qwen3"])
    @pytest.mark.parametrize("changes", [{"attention_chunk_size": 32}, {"layer_types": ["chunked_attention"] * 3}])
    def test_chunks_are_refused(self, kind: str, changes: dict[str, object]) -> None:
        base = {**BASE, "model_type": kind.lower(), "architectures": [f"{kind}ForCausalLM"], "sliding_window": None}
        assert config_from_hf(base).sliding_window is None
        with pytest.raises(CheckpointError, match=f"which the layers of a {kind}ForCausalLM do not compute"):
            config_from_hf({**base, **changes})

    def test_a_window_that_is_switched_off_is_none(self) -> None:
        """As configurations that were converted from a Qwen have it."""
        converted = {"sliding_window": 32, "use_sliding_window": False}
        assert config_from_hf({**BASE, **converted}) == config_from_hf(BASE)

    def test_unknown_fields_are_reported_by_name(self, caplog: pytest.LogCaptureFixture) -> None:
        known = {"use_cache": True, "initializer_range": 0.02, "temperature": 0.6, "_name_or_path": "x"}
        with caplog.at_level(logging.WARNING, "phonograph"):
            config_from_hf({**BASE, **known, "absent": None, "use_mrope": False})
            assert not caplog.text
            config_from_hf({**BASE, "no_rope_layers": [1, 0, 1]})
        assert "no_rope_layers" in caplog.text

    @pytest.mark.parametrize("value", [False, 0, [], {}, ""])
    def test_a_field_whose_default_nobody_knows_is_not_taken_for_off(
        self, value: object, caplog: pytest.LogCaptureFixture
    ) -> None:
        config_from_hf({**BASE, "turns_heads": value})
        assert "not known here and have no effect: turns_heads" in caplog.text

    @pytest.mark.parametrize("value", [False, 0, None, "no"])
    def test_attention_that_is_not_causal_is_refused(self, value: object) -> None:
        with pytest.raises(CheckpointError, match=f"is_causal is {value}; only decoders"):
            config_from_hf({**BASE, "is_causal": value})
        assert config_from_hf({**BASE, "is_causal": True}) == config_from_hf(BASE)

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 10**400])
    @pytest.mark.parametrize("name", ["rope_theta", "rms_norm_eps"])
    def test_a_number_that_is_not_finite_is_refused(self, name: str, number: float) -> None:
        with pytest.raises(CheckpointError, match=f"{name} is .*; expected a finite number"):
            config_from_hf({**BASE, name: number})

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "factor": 0},
            {"rope_type": "linear", "factor": -2.0},
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.0},
            {"rope_type": "llama3", "factor": 0, "low_freq_factor": 1, "high_freq_factor": 4},
            {"rope_type": "dynamic"},
        ],
    )
    def test_frequencies_that_can_not_be_are_refused(self, rope: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match=r"frequencies|attention_factor|factor is missing"):
            config_from_hf({**BASE, "rope_parameters": rope})

    @pytest.mark.parametrize(
        "name", ["num_hidden_layers", "hidden_size", "vocab_size", "head_dim", "max_position_embeddings"]
    )
    def test_sizes_beyond_all_models_are_refused_at_once(self, name: str) -> None:
        window = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
        with pytest.raises(CheckpointError, match=r"at most|64 bits"):
            config_from_hf({**BASE, **window, name: 2**31})
        with pytest.raises(CheckpointError, match=name):
            config_from_hf({**BASE, name: 10**30})

    def test_names_that_contradict_each_other_are_refused(self) -> None:
        with pytest.raises(CheckpointError, match=r"LlamaForCausalLM, but model_type is 'mistral'"):
            config_from_hf({**BASE, "model_type": "mistral"})
        mixed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
        with pytest.raises(CheckpointError, match="layer_types gives a window to 1 of 3"):
            config_from_hf({**BASE, **mixed, "layer_types": ["sliding_attention", *["full_attention"] * 2]})
