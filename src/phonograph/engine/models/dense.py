"""Dense family: Llama, Mistral, Qwen2, Qwen3 and their kin. Its tensors, and the `Decoder` made of them."""

from __future__ import annotations

from collections.abc import Collection

from phonograph.engine.json_fields import Fields
from phonograph.engine.models.config import ModelConfig
from phonograph.engine.models.decoder import Decoder, LayerWeights, Weights
from phonograph.engine.models.interface import ModelParts
from phonograph.engine.models.rope import rope_table
from phonograph.engine.models.tensors import ModelTensor, ModelWeights
from phonograph.engine.ops.kernels import Heads, Norm

EMBEDDING = "model.embed_tokens.weight"


def config_from_hf(fields: Fields, architecture: str) -> ModelConfig:
    return ModelConfig.from_hf(fields, architecture)


def config_from_gguf(fields: Fields, architecture: str, tensor_names: Collection[str]) -> ModelConfig:
    return ModelConfig.from_gguf(fields, architecture, tensor_names)


def tensors(config: ModelConfig) -> tuple[ModelTensor, ...]:
    """In the order in which random weights are drawn."""
    layer, width = _layer(config), (config.vocab, config.hidden)
    tied = EMBEDDING if config.tied_embeddings else None
    return (
        ModelTensor(EMBEDDING, "embedding", width, gguf="token_embd.weight"),
        *(tensor.in_layer(index) for index in range(config.num_layers) for tensor in layer),
        ModelTensor("model.norm.weight", "norm", (config.hidden,), gguf="output_norm.weight", init="ones"),
        ModelTensor("lm_head.weight", "head", width, "matrix", "output.weight", same_as=tied),
    )


def _layer(config: ModelConfig) -> list[ModelTensor]:
    """The tensors of any layer; projections that read the same input have one place."""
    hidden, inner, heads, kv_heads = config.hidden, config.intermediate, config.num_heads, config.num_kv_heads
    q, kv = heads * config.head_dim, kv_heads * config.head_dim
    qkv = config.qkv_bias
    projections = [  # (name, in GGUF, place, rows, columns, whether it has a bias, heads that are rotated)
        ("self_attn.q_proj", "attn_q", "qkv", q, hidden, qkv, heads),
        ("self_attn.k_proj", "attn_k", "qkv", kv, hidden, qkv, kv_heads),
        ("self_attn.v_proj", "attn_v", "qkv", kv, hidden, qkv, 0),
        ("self_attn.o_proj", "attn_output", "out", hidden, q, config.o_bias, 0),
        ("mlp.gate_proj", "ffn_gate", "gate_up", inner, hidden, config.mlp_bias, 0),
        ("mlp.up_proj", "ffn_up", "gate_up", inner, hidden, config.mlp_bias, 0),
        ("mlp.down_proj", "ffn_down", "down", hidden, inner, config.mlp_bias, 0),
    ]
    table = [_norm("input_layernorm", "attn_norm", "input_norm", hidden)]
    for name, gguf, place, rows, columns, has_bias, rotated in projections:
        table.append(ModelTensor(f"{name}.weight", place, (rows, columns), "matrix", f"{gguf}.weight", heads=rotated))
        if has_bias:
            table.append(ModelTensor(f"{name}.bias", place, (rows,), "bias", f"{gguf}.bias", heads=rotated))
    if config.qk_norm:
        table.append(_norm("self_attn.q_norm", "attn_q_norm", "q_norm", config.head_dim))
        table.append(_norm("self_attn.k_norm", "attn_k_norm", "k_norm", config.head_dim))
    return [*table, _norm("post_attention_layernorm", "ffn_norm", "mlp_norm", hidden)]


def _norm(name: str, gguf: str, place: str, size: int) -> ModelTensor:
    return ModelTensor(f"{name}.weight", place, (size,), gguf=f"{gguf}.weight", init="ones")


def build(config: ModelConfig, weights: ModelWeights, parts: ModelParts) -> Decoder:
    made = weights_of(config, weights)
    residual = made.embedding.dtype if parts.residual is None else parts.residual
    rope = rope_table(config, parts.max_len, made.embedding.device)
    return Decoder(config, made, parts.attention, parts.kernels, rope, residual)


def weights_of(config: ModelConfig, weights: ModelWeights) -> Weights:
    """The weights as the decoder has them."""

    def norm(place: str) -> Norm:
        return Norm(weights.tensors[place], config.rms_eps)

    def layer(index: int) -> LayerWeights:
        at = f"layers.{index}"
        q_norm, k_norm = (norm(f"{at}.{name}_norm") if config.qk_norm else None for name in ("q", "k"))
        return LayerWeights(
            input_norm=norm(f"{at}.input_norm"),
            qkv=weights.matrices[f"{at}.qkv"],
            heads=Heads(config.num_heads, config.num_kv_heads, config.head_dim, q_norm, k_norm),
            out=weights.matrices[f"{at}.out"],
            mlp_norm=norm(f"{at}.mlp_norm"),
            gate_up=weights.matrices[f"{at}.gate_up"],
            down=weights.matrices[f"{at}.down"],
            window=config.window(index),
        )

    layers = tuple(layer(index) for index in range(config.num_layers))
    return Weights(weights.tensors["embedding"], layers, norm("norm"), weights.matrices["head"])
