"""Hugging Face families: tiny random models, made without a download, and what becomes of each when it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from packaging.version import Version

VOCAB, WINDOW = 64, 6
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NARROW = {
    **_IDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}
_GROUPED = {**_NARROW, "num_key_value_heads": 1}
_HEADS = {**_GROUPED, "head_dim": 8}
_SLIDING = {**_HEADS, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, "n_positions": 128}
_ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 8, "partial_rotary_factor": 1.0}
_LONG = {**_ROPE, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}

LONGROPE = "Phi3RotaryEmbedding.inv_freq" if Version(hf.__version__) < Version("5.23") else ""
"""From that version on, the table of long positions is chosen on the device, and written in place."""
WINDOWED = "StaticSlidingWindowLayer.cumulative_length_int"
"""A sliding window counts its tokens in Python, and branches on the count."""


@dataclass(frozen=True)
class Family:
    """A kind of model."""

    config: Callable[[], Any]
    refusal: str = ""
    """What the refusal says, where a recording is not possible."""


DECODERS = {
    "llama": Family(lambda: hf.LlamaConfig(**_HEADS)),
    "mistral": Family(lambda: hf.MistralConfig(**_HEADS, sliding_window=None)),
    "qwen2": Family(lambda: hf.Qwen2Config(**_GROUPED)),
    "qwen3": Family(lambda: hf.Qwen3Config(**_HEADS)),
    "gemma": Family(lambda: hf.GemmaConfig(**_HEADS)),
    "phi": Family(lambda: hf.PhiConfig(**_NARROW)),
    "phi3": Family(lambda: hf.Phi3Config(**_GROUPED)),
    "gpt2": Family(lambda: hf.GPT2Config(**_GPT, bos_token_id=1, eos_token_id=2)),
    "gpt_neox": Family(lambda: hf.GPTNeoXConfig(**_NARROW)),
    "stablelm": Family(lambda: hf.StableLmConfig(**_GROUPED)),
    "olmo2": Family(lambda: hf.Olmo2Config(**_GROUPED)),
    "granite": Family(lambda: hf.GraniteConfig(**_GROUPED)),
    "cohere": Family(lambda: hf.CohereConfig(**_GROUPED)),
    "starcoder2": Family(lambda: hf.Starcoder2Config(**_GROUPED)),
    "mixtral": Family(lambda: hf.MixtralConfig(**_HEADS, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": Family(
        lambda: hf.Qwen3MoeConfig(**_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "bloom": Family(lambda: hf.BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=VOCAB)),
    "smollm3": Family(lambda: hf.SmolLM3Config(**_GROUPED)),
    "glm4": Family(lambda: hf.Glm4Config(**_HEADS)),
    "gptj": Family(lambda: hf.GPTJConfig(**_GPT, rotary_dim=4)),
    "mistral, windowed": Family(lambda: hf.MistralConfig(**_HEADS, sliding_window=WINDOW), WINDOWED),
    "qwen2, windowed": Family(
        lambda: hf.Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
        WINDOWED,
    ),
    "gemma2": Family(lambda: hf.Gemma2Config(**_SLIDING, query_pre_attn_scalar=8), WINDOWED),
    "gemma3": Family(lambda: hf.Gemma3TextConfig(**_SLIDING, query_pre_attn_scalar=8), WINDOWED),
    "cohere2": Family(lambda: hf.Cohere2Config(**_SLIDING), WINDOWED),
    "gpt_oss": Family(lambda: hf.GptOssConfig(**_SLIDING, num_local_experts=2, num_experts_per_tok=1), WINDOWED),
    "phi3, longrope": Family(
        lambda: hf.Phi3Config(**_GROUPED, original_max_position_embeddings=8, rope_parameters=_LONG),
        LONGROPE,
    ),
    "llama, dynamic rope": Family(
        lambda: hf.LlamaConfig(
            **{**_HEADS, "max_position_embeddings": 8},
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        ),
        "dynamic_frequency_update",
    ),
    "opt, no mask": Family(
        lambda: hf.OPTConfig(
            hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB,
            max_position_embeddings=128, word_embed_proj_dim=16,
        ),
        "reads the device from the host (modeling_opt.py",
    ),
    "falcon": Family(
        lambda: hf.FalconConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB),
        "would freeze a host constant (modeling_falcon.py",
    ),
    "mpt": Family(
        lambda: hf.MptConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=VOCAB, max_seq_len=128),
        "reads the device from the host (modeling_mpt.py",
    ),
}  # fmt: skip

_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCAB}
ENCODERS = {
    "bert": Family(lambda: hf.BertConfig(**_NARROW)),
    "roberta": Family(lambda: hf.RobertaConfig(**{**_NARROW, "pad_token_id": 1})),
    "distilbert": Family(lambda: hf.DistilBertConfig(dim=16, hidden_dim=32, n_layers=2, n_heads=2, vocab_size=VOCAB)),
    "electra": Family(lambda: hf.ElectraConfig(**_NARROW, embedding_size=16)),
    "modernbert": Family(lambda: hf.ModernBertConfig(**_NARROW, cls_token_id=1, sep_token_id=2)),
    "mpnet": Family(lambda: hf.MPNetConfig(**_NARROW)),
    "deberta-v2": Family(lambda: hf.DebertaV2Config(**_NARROW)),
    "t5 encoder": Family(lambda: hf.T5Config(**_T5)),
}


@torch.no_grad()
def made(family: Family, seed: int = 0) -> Any:
    """A model of a family, with weights so large that a wrong position or mask shows."""
    torch.manual_seed(seed)
    config = family.config()
    if isinstance(config, hf.T5Config):
        model = hf.T5EncoderModel(config)
    else:
        kind = hf.AutoModel if any(family is one for one in ENCODERS.values()) else hf.AutoModelForCausalLM
        model = kind.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
    return model.eval()


def prompt(num_seqs: int, length: int, seed: int = 0) -> torch.Tensor:
    """Tokens of some prompts: [num_seqs, length]."""
    return torch.randint(3, VOCAB, (num_seqs, length), generator=torch.Generator().manual_seed(seed))


def layers_of(model: Any) -> Any:
    """The list of a decoder's or encoder's layers."""
    return next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == 2)


def linear_of(model: Any) -> Any:
    """The first matrix of the first layer."""
    kinds = (torch.nn.Linear, hf.pytorch_utils.Conv1D)
    return next(one for one in layers_of(model).modules() if isinstance(one, kinds))
