"""HF_SHAPES: models that we have no layers for, as transformers makes them. For benchmarks."""

from __future__ import annotations

from typing import Any

_NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

HF_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            **_NO_ENDS,
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "gpt-oss-20b": ("gpt_oss", {**_NO_ENDS, "num_hidden_layers": 24, "num_local_experts": 32}),
    "tiny-moe": (
        "mixtral",
        {
            **_NO_ENDS,
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 512,
        },
    ),
}
"""By name: the model type, and the values of its configuration that are not transformers' own defaults."""
