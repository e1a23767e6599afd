"""The `transformers` model of a Llama checkpoint, with the very same weights, in float32."""

from __future__ import annotations

from typing import Any

import transformers

from phonograph.engine.checkpoints.base import Checkpoint
from phonograph.engine.models.config import ModelConfig


def reference_config(config: ModelConfig) -> Any:
    """The LlamaConfig of the same shape."""
    return transformers.LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.rms_eps,
        max_position_embeddings=config.max_len,
        tie_word_embeddings=config.tied_embeddings,
        attention_bias=config.o_bias,
        mlp_bias=config.mlp_bias,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )


def reference_model(checkpoint: Checkpoint) -> Any:
    """A LlamaForCausalLM in evaluation mode."""
    model = transformers.LlamaForCausalLM(reference_config(checkpoint.config))
    missing, unexpected = model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    tied = ["lm_head.weight"] if checkpoint.config.tied_embeddings else []
    assert missing == tied, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.float().eval()
